"""Stores that Python makes to the containers of a random pipeline between two launches."""

import random

from program_containers import ELEMENTS, Container


def store_from_python(rng: random.Random, containers: list[Container], real: str) -> str | None:
    """Something that Python does to a container between two launches."""
    c = rng.choice(containers)
    number = f"{rng.randint(1, 9) / 10 + 0.013:.3f}"
    index = ", ".join(str(rng.randrange(n)) for n in c.shape) if c.shape else "None"
    size = len(ELEMENTS.get(c.element, ()))
    options: list[str] = []
    if c.kind in ("numpy", "torch"):
        options = [f"{c.name}[{index.split(', ')[0]}] = {number}", f"{c.name}[...] = {number}"]
        options += [f"{c.name}[{index}] = {number}", f"{c.name}[0:2] = {number}"]
        options += [f"{c.name} += {number}"] if c.is_argument else [f"{c.name}[1] += {number}"]
        options += [f"{c.name}.fill({number})"] if c.kind == "numpy" else [f"{c.name}.fill_({number})"]
    elif c.kind == "struct":
        leaf, element = rng.choice(c.leaves())
        member = leaf.removeprefix(f"{c.name}.")
        if "." not in member and element == "f":
            options = [f"{c.name}[{index}].{member} = {number}", f"{leaf}[{index}] = {number}"]
        options += [f"{leaf}.fill({number})"]
    elif size == 0:
        options = [f"{c.name}[{index}] = {number}", f"{c.name}[{index}] += {number}", f"{c.name}.fill({number})"]
        options += [f"{c.name}.from_numpy(np.full({c.shape}, {number}, np.float{real[1:]}))"]
    elif size == 1:
        count = ELEMENTS[c.element][0]
        values = [f"{number[:-1]}{k}" for k in range(count)]
        options = [
            f"{c.name}[{index}] = [{', '.join(values)}]",
            f"{c.name}[{index}][{rng.randrange(count)}] = {number}",
        ]
        options += [f"{c.name}.fill({number})"]
        if c.kind == "field":
            options += [f"{c.name}.get_scalar_field({rng.randrange(count)})[{index}] = {number}"] * 2
    else:
        options = [f"{c.name}.fill({number})"]
    twins = [d for d in containers if (d.kind, d.shape, d.element) == (c.kind, c.shape, c.element) and d is not c]
    if twins and not c.is_array:
        options += [f"{c.name}.copy_from({rng.choice(twins).name})"] * 3
    return rng.choice(options) if options else None
