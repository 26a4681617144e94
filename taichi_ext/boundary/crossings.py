"""Places where edges cross the sides of a square, found from the levels and the outcomes of conditions.

Along a side, the levels of all conditions and their slopes say where the next one may change.  Two calls, before and
behind that place, confirm it; where they do not, the interval is halved.  So edges between two corners that see the
same are found, too.  Places are rows of a table in their order around the square.
"""

# Taichi reads the annotations of functions as objects, such as ti.template(), so they must not be strings.
# pyright: reportInvalidTypeForm=false, reportIndexIssue=false, reportOptionalCall=false
# Those of the variables of a function that Taichi compiles are known when it is compiled.
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from typing import Any

from taichi_ext.backend import ti
from taichi_ext.boundary.gradients import stop_gradient
from taichi_ext.boundary.kernel_scope import leave_to_engine, recorded

VALUE, COUNT, SEEN, LEVEL, SLOPE, NEAR, FOUND, BEHIND, BITS = range(9)  # results of a probe

# The columns of the table: the number of the side plus how far along it, place and normal in the square (of size 1
# around 0), slope, number of the condition, row of the other end, place and weight of the boundary term, and half the
# area beside its arc.
ALONG, BX, BY, NX, NY, SLOPE_NORM, WHICH, MATE, PX, PY, WEIGHT, BESIDE, COLUMNS = range(13)
MOST = 12  # rows

# The columns of what a call at a place on a side tells: where it is, and where the next edge and the last one are, by
# levels and slopes; the slope of the next one.  The facts are the hash of the outcomes, the number of conditions, that
# of the next one, and bits of the outcomes.
AT, AHEAD, BACK, SLOPE_X, SLOPE_Y = range(5)
OUTCOMES, CONDITIONS, NEXT, FLAGS = range(4)
FORWARDS, BACKWARDS, BETWEEN = range(3)

ALL = 2**30  # conditions
_TRIES, _MANY = 64, 32  # calls on one side: at most, and with every change of an outcome followed
OVER = 1000  # changes: not all of them were followed
_MOST_CONDITIONS = 24  # in one call: 2 to the power of this
FLAGGED = 30  # conditions whose bits have places of their own
_EQUAL = 1e-4  # relative: values that differ by less do not jump
_SMALL = 0.02  # of a jump: outcomes that change less than this are passed over beside it
_HIDDEN = 16  # conditions that are looked at where an edge lies on others
_HIDING = 0.25  # of a jump: a value that is no farther from that of the other side is reached by one condition alone
_LAYER = 1e-4  # of the square: how wide an edge is, such as that of a march which diverges next to a surface
_NARROW = 0.02  # of that: over which a root is not yet a jump


@recorded
def probe(
    shade: object,
    x: object,
    y: object,
    which: object,
    mode: str,
    dx: object = 0.0,
    dy: object = 0.0,
    reach: object = 0.0,
    after: object = 0,
) -> Any:
    """A call of the function that also returns facts about its conditions; traced by the engine.

    Modes: the "value" alone; what is "seen" by conditions after ``after`` up to ``which``; those that may change "near"
    or "far"; edges "ahead"; the "level" of one; the same where it has the other outcome, "flipped".
    """
    leave_to_engine("probe", x)


@ti.func
def corner_of(c):
    """Corner c of a square of size 1 around 0, at which side c starts; sides go round to the left."""
    return ti.Vector([((c ^ c >> 1) & 1) - 0.5, (c >> 1 & 1) - 0.5])


@ti.func
def search_side(
    shade: ti.template(),
    c,
    x,
    y,
    size,
    fine,
    first,
    has_rims: ti.template(),
    table: ti.template(),
    jumps: ti.template(),
    inner: ti.template(),
):
    """Put the places where side c is crossed into the tables, from row ``first`` on.

    Everything before the place ``low`` has been searched.  From there the search goes ``FORWARDS`` to the next edge by
    its level and slope.  At the end of the side it goes ``BACKWARDS`` likewise.  A place with other outcomes is the
    place ``high``, and ``BETWEEN`` the two is the change, around which they are brought together.

    ``fine`` is the distance, in squares, that positions can tell apart.  Returns the next row, ``MOST + 1`` if there
    are too many, the number of changes of outcomes, from ``OVER`` on if some may be missing, and the bits of the
    conditions that change.  ``has_rims``: whether places count at which a value ends as a root.
    """
    square = ti.Vector([x, y, size])
    row = first
    changes = 0
    crossed = 0
    q = 0.0 * size  # the place that is tried
    low = ti.Vector([0.0] * 5)
    low_facts = ti.Vector([0] * 4)
    low_value = jumps_row(0, jumps)
    high, high_facts, high_value = low, low_facts, low_value
    mode = FORWARDS
    shown = low_value  # the jump where it first looks like one
    is_shown = False
    turn = 0
    for k in range(_TRIES):
        if q >= 0:
            here, facts, value = look(shade, c, q, x, y, size)
            is_low = (k == 0) | (facts[OUTCOMES] == low_facts[OUTCOMES])
            if (mode == BETWEEN) & (not is_low) & (facts[OUTCOMES] != high_facts[OUTCOMES]):
                least = ti.select(k > _MANY, 1.0, _SMALL)  # among many that change nothing the largest jump
                is_low = not is_larger(value - low_value, high_value - value, abs(low_value) + abs(high_value), least)
            goes_back = ((mode == BACKWARDS) | (q >= 1.0)) & (mode != BETWEEN) & (0 < k) & (k < _MANY)
            goes_back &= low[AT] + 0.01 * (q - low[AT]) + _LAYER < here[BACK]
            goes_back &= here[BACK] < q - _LAYER
            if not is_low:
                if mode != BETWEEN:
                    is_shown, turn = False, 0
                    changes += 1
                high, high_facts, high_value = here, facts, value
                mode = BETWEEN
            elif goes_back:
                mode = BACKWARDS
            else:
                low, low_facts, low_value = here, facts, value
                if mode == BACKWARDS:
                    low[AT] = 1.0
                    mode = FORWARDS
            if mode == BETWEEN:
                width = high[AT] - low[AT]
                jump = high_value - low_value
                scale = abs(low_value) + abs(high_value)
                is_different = has_jump(jump, scale)
                if is_different & (width <= _LAYER) & (not is_shown):
                    shown = jump
                    is_shown = True
                is_crossed = (k <= _MANY) & (is_between(high[BACK], low, high) | (low[AHEAD] < high[AT] - _LAYER))
                if (width <= ti.max(_NARROW * _LAYER, fine)) | (not (is_different | is_crossed)):
                    jump = lasting_jump(ti.select(is_shown, shown, jump), jump)
                    if (is_shown | is_different) and (has_rims or has_jump(jump, scale)):
                        row = put_place(
                            shade,
                            c,
                            square,
                            row,
                            low,
                            low_facts,
                            high,
                            high_facts,
                            high_value,
                            jump,
                            table,
                            jumps,
                            inner,
                        )
                    crossed |= crossed_between(low_facts, high_facts)
                    low, low_facts, low_value = high, high_facts, high_value
                    mode = FORWARDS
            if mode == BACKWARDS:
                q = here[BACK] - 0.4 * _LAYER
            elif mode == BETWEEN:
                q = next_between(low, high, ti.select(is_shown, ti.max(_NARROW * _LAYER, fine), _LAYER), turn)
                turn += 1
            elif (low[AT] >= 1.0) | (row > MOST):
                q = -1.0
            elif k > _MANY:  # outcomes that change at many places
                q = 1.0
                changes += ti.select(row > first, OVER, 0)
            else:
                q = ti.min(1.0, low[AHEAD] + 0.4 * _LAYER)
    return row, changes, crossed


@ti.func
def bit_of(which):
    """The bit of a condition by its number, as in the results of a probe."""
    return 1 << (which & 31)


@ti.func
def has_flags(low_facts, high_facts):
    """Whether the bits of two places tell which conditions differ."""
    differ = low_facts[FLAGS] != high_facts[FLAGS]
    return differ & (ti.max(low_facts[CONDITIONS], high_facts[CONDITIONS]) <= FLAGGED)


@ti.func
def crossed_between(low_facts, high_facts):
    """The bit of the first condition that differs between two places, or of the next one where there are many."""
    changed = low_facts[FLAGS] ^ high_facts[FLAGS]
    return ti.select(has_flags(low_facts, high_facts), changed & -changed, bit_of(low_facts[NEXT]))


@ti.func
def place_on(c, q):
    """The place at part q of side c."""
    start = corner_of(c)
    return start + q * (corner_of(c + 1) - start)


@ti.func
def look(shade: ti.template(), c, q, x, y, size):
    """What a call at part q of side c tells: the columns from ``AT`` on, the facts, and the value."""
    start = corner_of(c)
    way = corner_of(c + 1) - start
    at = start + q * way
    here = probe(shade, x + size * at[0], y + size * at[1], ALL, "ahead", way[0], way[1])
    slope = stop_gradient(here[SLOPE])
    ahead = q + stop_gradient(here[NEAR]) / size
    back = q + ti.max(-9.0, stop_gradient(here[BEHIND]) / size)
    facts = ti.Vector([here[SEEN], here[COUNT], here[FOUND], here[BITS]])
    return ti.Vector([q, ahead, back, slope[0], slope[1]]), facts, stop_gradient(here[VALUE])


@ti.func
def is_between(place, low, high):
    return (low[AT] + _LAYER < place) & (place < high[AT] - _LAYER)


@ti.func
def next_between(low, high, reach, turn):
    """The next place between two: just beyond where the nearer one expects the edge, or the middle."""
    q = 0.5 * (low[AT] + high[AT])
    is_low = low[AHEAD] - low[AT] < high[AT] - high[BACK]
    expected = ti.select(is_low, low[AHEAD] + 0.4 * reach, high[BACK] - 0.4 * reach)
    if (turn < 7) & (turn != 3) & (low[AT] < expected) & (expected < high[AT]):
        q = expected
    return q


@ti.func
def lasting_jump(wide, narrow):
    """The entries of a jump that do not become smaller as its sides are brought together, as roots do.

    They become larger where there were two edges between the sides.
    """
    jump = wide
    for e in ti.static(range(jump.n)):
        if abs(narrow[e]) < 0.5 * abs(wide[e]):
            jump[e] = 0.0
        elif abs(narrow[e]) > 1.5 * abs(wide[e]):
            jump[e] = narrow[e]
    return jump


@ti.func
def put_place(
    shade: ti.template(),
    c,
    square,
    row,
    low,
    low_facts,
    high,
    high_facts,
    high_value,
    jump,
    table: ti.template(),
    jumps: ti.template(),
    inner: ti.template(),
):
    """Put the place of a jump between two others on side c into row ``row`` of the tables, and return the next row."""
    next_row = row
    if row >= MOST:
        next_row = MOST + 1
    else:
        size = square[2]
        p = square.xy + size * place_on(c, low[AT])
        q = square.xy + size * place_on(c, high[AT])
        ends = ti.Matrix([[p[0], p[1]], [q[0], q[1]]])
        way = size * (high[AT] - low[AT] + _LAYER) * (place_on(c, 1.0) - place_on(c, 0.0))
        which, slope = deciding_condition(shade, ends, low, low_facts, high_facts, high_value, jump, way)
        t = ti.max(low[AT], ti.min(high[AT], low[AHEAD]))
        if which != low_facts[NEXT]:
            t = 0.5 * (low[AT] + high[AT])
        g = slope.norm()
        if g > 0:
            at = place_on(c, t)
            table[row, ALONG] = c + t
            table[row, BX] = at[0]
            table[row, BY] = at[1]
            table[row, NX] = slope[0] / g
            table[row, NY] = slope[1] / g
            table[row, SLOPE_NORM] = g
            table[row, WHICH] = which
            sign = ti.select(slope.dot(corner_of(c + 1) - corner_of(c)) > 0, 1.0, -1.0)
            for e in ti.static(range(jumps.m)):
                jumps[row, e] = sign * jump[e]
            inner[row] = high_facts[OUTCOMES]
            next_row = row + 1
    return next_row


@ti.func
def deciding_condition(shade: ti.template(), ends, low, low_facts, high_facts, high_value, jump, way):
    """The number of the condition at which a value jumps between two places, and the slope of its level.

    It is the first comparison that differs and whose other outcome alone, on one of the two sides, makes the value that
    of the other side: others may be those of hidden edges, which lie on the one that is seen.  If there is none, it is
    the first condition that differs.
    """
    changed = low_facts[FLAGS] ^ high_facts[FLAGS]
    scale = abs(high_value - jump) + abs(high_value)
    decided = 0
    decided_slope = 0.0 * way
    which = 0
    is_done = False
    for k in range(_HIDDEN):
        if not is_done:
            if has_flags(low_facts, high_facts):
                which = next_bit(changed, which)
            else:  # with the same outcomes in these calls, none may be found
                which = next_difference(shade, ends, which, low_facts[CONDITIONS], low_facts[NEXT])
            slope = ti.select(which == low_facts[NEXT], 1.0, 0.0) * ti.Vector([low[SLOPE_X], low[SLOPE_Y]])
            is_alone = changed == bit_of(which) and has_flags(low_facts, high_facts)
            is_seen = is_alone
            is_known = True  # on both sides, and so is what its other outcome does
            for n in range(2):  # a level may be flat on one side of its edge
                if not is_alone or slope.norm() == 0:
                    there = probe(shade, ends[n, 0], ends[n, 1], which, "flipped")
                    own = stop_gradient(there[SLOPE])
                    beside = stop_gradient(there[VALUE]) - high_value + n * jump
                    is_seen |= not is_larger(beside, jump, scale, _HIDING)
                    is_known &= there[FOUND] == 1
                    is_known &= k == 0 or abs(stop_gradient(there[LEVEL])) <= abs(own.dot(way))
                    if n == 0 or slope.norm() == 0:
                        slope = own
            if k == 0 or (is_seen and is_known):
                decided = which
                decided_slope = slope
            is_done = which >= low_facts[CONDITIONS] or ti.select(k == 0, is_seen or not is_known, is_seen and is_known)
    return decided, decided_slope


@ti.func
def next_bit(bits, after):
    """The number of the first bit of a condition after another one; ``ALL`` if there is none."""
    which = ALL
    for k in range(FLAGGED):
        if which == ALL and k + 1 > after and bits >> k + 1 & 1 == 1:
            which = k + 1
    return which


@ti.func
def jumps_row(row, jumps: ti.template()):
    values = ti.Vector([0.0] * jumps.m)
    for e in ti.static(range(jumps.m)):
        values[e] = jumps[row, e]
    return values


@ti.func
def next_difference(shade: ti.template(), ends, after, last, expected):
    """The number of the first condition after one that differs between two places; ``expected`` is tried first."""
    before = after
    end = last
    for k in range(_MOST_CONDITIONS):
        if end - before > 1:
            which = (before + end) // 2
            if k < 2 and before < expected - 1 + k < end:
                which = expected - 1 + k
            both = ti.Vector([0, 0])
            for m in range(2):
                both[m] = probe(shade, ends[m, 0], ends[m, 1], which, "seen", after=after)[SEEN]
            if both[0] == both[1]:
                before = which
            else:
                end = which
    return end


@ti.func
def has_jump(jump, scale):
    """Whether an entry of a value jumps; each has a scale of its own, since they may have different units."""
    found = False
    for e in ti.static(range(jump.n)):
        found |= abs(jump[e]) > _EQUAL * scale[e]
    return found


@ti.func
def is_larger(first, second, scale, least):
    """Whether the first of two differences counts beside the second one, its entries measured by their scales."""
    own = 0.0 * scale[0]
    other = 0.0 * scale[0]
    for e in ti.static(range(scale.n)):
        if scale[e] > 0:
            own = ti.max(own, abs(first[e]) / scale[e])
            other = ti.max(other, abs(second[e]) / scale[e])
    return own > _EQUAL + least * other
