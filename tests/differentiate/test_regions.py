"""Views of memory and the regions that they make up, with plain NumPy."""

import numpy as np
import pytest

from taichi_ext.runtime.memory.regions import Regions, View
from taichi_ext.runtime.memory.shadows import view_of

BUFFER = np.arange(24.0)
SHAPED = BUFFER.reshape(4, 6)
FORTRAN = np.asfortranarray(np.arange(24.0).reshape(4, 6))
VIEWS = {
    "whole": BUFFER,
    "slice": BUFFER[5:11],
    "slice of a slice": BUFFER[3:20][2:7],
    "shaped": SHAPED,
    "row": SHAPED[2],
    "rows": SHAPED[1:3],
    "transposed": SHAPED.T,
    "transposed rows": SHAPED[1:3].T,
    "three axes": BUFFER.reshape(2, 3, 4),
    "three axes, transposed": BUFFER.reshape(2, 3, 4).T,
    "one number": BUFFER[7:8],
}


@pytest.mark.parametrize("name", VIEWS)
def test_positions_are_those_of_the_numbers_in_memory(name):
    array = VIEWS[name]
    positions = view_of(array).positions(view_of(BUFFER).start)
    np.testing.assert_array_equal(BUFFER[positions], array.reshape(-1))


def test_column_of_an_array_in_fortran_order():
    view = view_of(FORTRAN[:, 2])
    assert not view.is_fortran
    in_memory = FORTRAN.T.reshape(-1)
    np.testing.assert_array_equal(in_memory[view.positions(view_of(FORTRAN).start)], FORTRAN[:, 2])


def test_the_same_array_in_a_new_object_is_the_same_view():
    assert view_of(SHAPED[1]) == view_of(BUFFER[6:12])
    assert view_of(SHAPED) != view_of(BUFFER)
    assert view_of(SHAPED) != view_of(SHAPED.T)
    assert view_of(BUFFER[:4]) != view_of(BUFFER[:4].view(np.int64))


def test_empty_arrays_share_nothing():
    a, b = np.zeros((0, 3)), np.zeros(0)
    assert view_of(a) == view_of(a)
    assert not view_of(a).overlaps(view_of(b))
    assert not view_of(BUFFER[:0]).overlaps(view_of(BUFFER))


def test_overlaps():
    assert view_of(BUFFER[:5]).overlaps(view_of(BUFFER[4:]))
    assert not view_of(BUFFER[:5]).overlaps(view_of(BUFFER[5:]))
    assert view_of(BUFFER[4:8]).entries_in(view_of(BUFFER[:5])).tolist() == [True, False, False, False]
    assert view_of(BUFFER[4:8]).entries_in(view_of(BUFFER[:4])).tolist() == [False] * 4
    assert view_of(BUFFER[4:8]).entries_in(view_of(BUFFER[7:])).tolist() == [False, False, False, True]
    assert view_of(SHAPED.T).overlaps(view_of(SHAPED[3]))
    assert not view_of(BUFFER).overlaps(view_of(FORTRAN))


def included(regions, *arrays):
    return [regions.include(view_of(array), "a", array) for array in arrays]


def test_regions_of_what_does_not_overlap_are_two():
    regions = Regions()
    (first, _), (second, _) = included(regions, SHAPED[0], SHAPED[1])
    assert first is not second
    assert len(regions) == 2
    assert regions.overlapping(view_of(SHAPED[0])) == [first]
    assert regions.overlapping(view_of(SHAPED)) == [first, second]
    assert regions.overlapping(view_of(SHAPED[2])) == []


def test_a_larger_array_takes_the_place_of_its_parts():
    regions = Regions()
    (first, _), (second, _), (whole, parts) = included(regions, SHAPED[3], SHAPED[1], SHAPED)
    assert parts == [second, first]
    assert list(regions) == [whole]
    assert regions.overlapping(view_of(SHAPED[1])) == [whole]
    assert whole.rows(view_of(SHAPED[1])) == slice(6, 12)
    for again, parts in included(regions, SHAPED[1], SHAPED[0], SHAPED[2:]):
        assert again is whole
        assert parts == []


def test_arrays_that_overlap_partly_make_up_a_larger_region():
    regions = Regions()
    (_, _), (region, parts) = included(regions, BUFFER[2:6], BUFFER[5:9])
    assert len(parts) == 1
    assert region.layout.size == 7
    assert region.rows(view_of(BUFFER[5:9])) == slice(3, 7)


def test_an_array_in_fortran_order_has_its_rows_in_its_own_order_until_another_view_comes():
    regions = Regions()
    ((region, _),) = included(regions, FORTRAN)
    assert region.is_whole(view_of(FORTRAN))
    assert region.rows(view_of(FORTRAN)) == slice(0, 24)
    ((other, parts),) = included(regions, FORTRAN[:, 1])
    assert parts == [region]
    assert not other.is_whole(view_of(FORTRAN))
    np.testing.assert_array_equal(FORTRAN.T.reshape(-1)[other.rows(view_of(FORTRAN))], FORTRAN.reshape(-1))


def test_changed_rows_are_in_the_order_of_the_layout():
    regions, array = Regions(), FORTRAN.copy("F")
    array[3, 4] = np.nan
    ((region, _),) = included(regions, array)
    regions.remember(lambda region: True)
    assert not regions.changes()
    array[1, 2] += 1
    ((changed, rows),) = regions.changes()
    assert changed is region
    np.testing.assert_array_equal(rows, [1 * 6 + 2])


def test_seeds_in_a_row():
    regions = Regions()
    ((region, _),) = included(regions, SHAPED)
    region.seeds[view_of(SHAPED)] = 3
    assert region.first_seed(view_of(SHAPED)) == 3
    assert region.first_seed(view_of(BUFFER)) == 3
    assert region.first_seed(view_of(SHAPED.T)) is None
    assert region.first_seed(view_of(SHAPED[1])) is None


def test_memory_of_another_type_does_not_fit():
    whole = View("host", 0, (4,), "f64", 8)
    assert whole.fits(View("host", 16, (1,), "f64", 8))
    assert not whole.fits(View("host", 16, (2,), "f32", 4))
    assert not whole.fits(View("host", 4, (2,), "f64", 8))
    assert View("host", 3, (4,), "f64", 8).fits(View("host", 11, (1,), "f64", 8))  # wherever the memory begins
