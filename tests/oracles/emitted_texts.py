"""Write the texts that the engine emits for many kernels to a folder, to compare two versions of the package.

    python tests/oracles/emitted_texts.py FOLDER                       # benchmarks and 300 random programs
    python tests/oracles/emitted_texts.py FOLDER --programs 1000       # more of them
    python -m pytest -p emitted_texts --emitted-texts FOLDER tests/custom/test_edges.py   # the kernels of tests
    diff -r BEFORE AFTER

There is one file for each program or test: the text of its kernels with tangents and of adjoints, and the lines of
``explain()``. A single kernel is not compiled: its text is written and its launch given up. The seeds are fixed.
"""

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import taichi as ti

from taichi_ext import Jacobian, engine
from taichi_ext.runtime.reverse import kernels

HERE = Path(__file__).resolve().parent
PER_START = 50  # programs in one Taichi program
FORMATS = {"dense": {}, "slots": {"tangents": "sparse"}, "rows": {"tangents": "dense"}, "csr": {"format": "csr"}}
FORMATS["blocks"] = {"chunk_size": 3}


class StoppedError(BaseException):
    """The text is known; nothing else is wanted."""


class Texts:
    """The texts emitted since the last file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: list[str] = []
        self.stops = False  # at the first text
        folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record the kernels that the engine differentiates and emits within the context."""
        differentiate, build = engine.differentiate, engine.build

        def noted(program: Any, seeds: Any) -> Any:
            found = differentiate(program, seeds)
            lines = found.report.lines(seeds.columns, lambda c: getattr(c, "name", str(c)))
            sites = () if found.sparse is None else found.sparse.sites
            self.parts += [f"# {line}\n" for line in (*lines, *map(_of_site, sites))]
            self.parts.append(f"# relied {sorted(c.name for c in found.relied)}, {found.first_columns}\n")
            self.parts.append(f"# covered {sorted(c.name for c in found.covered)}, {found.scratch_sizes}\n")
            return found

        def written(program: Any) -> Any:
            emitted = build(program)
            self.parts.append(emitted.text)
            if self.stops:
                raise StoppedError
            return emitted

        engine.differentiate, engine.build, kernels.build = noted, written, written
        try:
            yield
        finally:
            engine.differentiate, engine.build, kernels.build = differentiate, build, build

    def write(self, name: str) -> None:
        """A file of what came since the last one."""
        text = "".join(self.parts).replace(str(HERE.parents[1]), ".")
        numbers: dict[str, str] = {}  # of Python's objects, in the order in which they occur
        text = re.sub(
            r"\b(0x[0-9a-f]{8,}|\d{12,})\b", lambda m: numbers.setdefault(m[0], f"object {len(numbers)}"), text
        )
        if text:
            file = re.sub(r"[^\w.=,-]+", "_", name)[:200]
            (self.folder / f"{file}.txt").write_text(text)
        self.parts.clear()

    def take(self, name: str, run: Callable[[], object], *, stops: bool = True) -> None:
        """A file of the kernels that a call makes; of the error, if it ends in one."""
        self.stops = stops
        try:
            with self.watching():
                run()
        except StoppedError:
            pass
        except Exception as error:
            self.parts.append(f"{type(error).__name__}: {error}\n")
        self.write(name)


def _of_site(site: Any) -> str:
    axes = [(str(axis.variable), axis.first, axis.end) for axis in site.around.axes]
    groups = [(str(g.owner), [(e.part, str(e.column)) for e in g.entries]) for g in site.groups]
    flags = site.is_sum, site.is_conditional, site.is_injective, site.has_rows, site.around.opened, site.around.counter
    return f"site {site.number} {site.stage} {list(map(str, site.rows))} {axes} {groups} {flags}"


def start() -> None:
    """A new Taichi program."""
    ti.init(arch=ti.cpu, default_fp=ti.f64, offline_cache=False, log_level=ti.ERROR, cpu_max_num_threads=1)


# --- texts ------------------------------------------------------------------------------------------------------------


def benchmarks(texts: Texts) -> None:
    """The programs that are timed, of their full size."""
    sys.path.insert(0, str(HERE.parents[1] / "bench"))
    from programs import CASES
    from sparse_programs import make_bundle_adjustment, make_fluid, make_springs

    sparse = {"ba": partial(make_bundle_adjustment, sizes=(5, 40, 90)), "lattice": make_springs, "fluid": make_fluid}
    for name, make in {**CASES, **sparse}.items():
        start()
        made = make()
        for how, options in FORMATS.items() if name in CASES else [("csr", FORMATS["csr"])]:
            texts.take(f"bench {name} {how}", Jacobian(made.kernel, made.params, made.outputs, **options))


def random_programs(texts: Texts, count: int) -> None:
    """The programs that ``program_grammar`` and ``program_lists`` write, each with options drawn in turn."""
    import program_grammar
    import program_lists
    from program_check import Fields, Loaded, values_of
    from program_model import Field

    for seed in range(count):
        if seed % PER_START == 0:
            start()
            fields = Fields()
        generator = program_lists if seed % 3 == 2 else program_grammar
        program = generator.generate(seed)
        loaded = Loaded(program, fields, f"<program {seed}>")
        args = loaded.prepare(values_of(program, seed))
        given = {a.name: v if isinstance(a, Field) else a.name for a, v in zip(program.args, args, strict=True)}
        targets = {**loaded.fields, **given}
        outputs = None if program.returns else {n: targets[n] for n in program.outputs}
        params = {n: targets[n] for n in program.params}
        how = [*FORMATS][seed // 2 % len(FORMATS)]

        def run(loaded=loaded, params=params, outputs=outputs, args=args, how=how) -> None:
            Jacobian(loaded.entry, params, outputs, args=args, **FORMATS[how])()

        texts.take(f"program {seed} {how}", run)
        loaded.close()


# --- kernels of tests -------------------------------------------------------------------------------------------------


def pytest_addoption(parser: Any) -> None:
    """Where the texts of each test go."""
    parser.addoption("--emitted-texts", metavar="FOLDER", type=Path, required=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """A file for each test."""
    texts = Texts(item.config.getoption("--emitted-texts"))
    with texts.watching():
        result = yield
    texts.write(item.nodeid.rpartition("/")[2])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--programs", type=int, default=300, metavar="N", help="random programs, default 300")
    options = parser.parse_args()
    texts = Texts(options.folder)
    benchmarks(texts)
    random_programs(texts, options.programs)


if __name__ == "__main__":
    main()
