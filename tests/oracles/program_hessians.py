"""Random programs with an energy of their outputs: Hessians against central differences of gradients."""

import ast
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import program_check
import program_grammar
from program_check import Loaded, MismatchError, check_plain_run, crashes_told, judge, require_close
from program_model import SHAPES, Field, Program
from program_reference import RejectedError
from program_verdict import Workshop, fate

from taichi_ext import Hessian, hessian, hvp, value_and_gradient

STEPS = (1e-6, 2e-6)  # of differences, which agree where there is no kink
LARGEST = 1e5  # entry of H, beyond which differences cannot tell
ENERGY = Field("energy", "f", ())


def generate(seed: int) -> Program:
    """The program of a seed."""
    return program_grammar.generate(seed)


def with_energy(program: Program) -> Program:
    """The program, which at its end adds an energy of its outputs to a field: in its kernel, or in one more."""
    lines: list[str] = []
    for name in program.outputs:
        output = next(f for f in program.fields if f.name == name)
        indices = [f"e{n}" for n in range(len(output.shape))]
        domain = f"ti.ndrange({', '.join(map(str, output.shape))})" if indices else "range(1)"
        lines.append(f"    for {', '.join(indices) or '_'} in {domain}:")
        for component in itertools.product(*map(range, SHAPES[output.type])):
            entry = f"{name}[{', '.join(indices) or None}]" + (
                f"[{', '.join(map(str, component))}]" if component else ""
            )
            weight = " + ".join(["1.3", *(f"{2 * n + 3} * {i}" for n, i in enumerate(indices)), *map(str, component)])
            lines.append(f"        energy[None] += ti.sin({weight}) * {entry} + 0.2 * {entry} ** 2")
    text = program.text.rstrip()
    if program.entry == "run":
        signature = ", ".join(f"{a.name}: {a.annotation}" for a in program.args)
        lines = ["@ti.kernel", f"def add_energy({signature}):", *lines]
        call = f"    add_energy({', '.join(a.name for a in program.args)})"
        kernels, run = text.split("def run(")
        text = "\n".join([kernels.rstrip(), *lines, f"def run({run}", call, ""])
    else:
        text = "\n".join([text, *lines, ""])
    return replace(program, text=text, fields=(*program.fields, ENERGY))


def with_number(program: Program) -> Program:
    """The program, which returns a number where it returns a vector."""
    text = program.text.rstrip()
    before, header, body = text.rpartition(") -> tm.vec3:\n")
    if header and body.count("return") == 1 and f"def {program.entry}(" in before.rsplit("\n", 1)[-1]:
        kernel, value = body.rsplit("    return ", 1)
        text = f"{before}) -> ti.f64:\n{kernel}    return ({value}).dot(ti.Vector([0.4, -0.7, 1.1]))\n"
    return replace(program, text=text)


def with_terms(program: Program) -> Program | None:
    """The program, whose kernel adds what it stores to scalar outputs to an energy, too; None where it stores none."""
    numbers = {f.name for f in program.fields if f.type == "f" and f.name in program.outputs}
    lines, added = program.text.splitlines(), False
    nodes = (n for n in ast.walk(ast.parse(program.text)) if isinstance(n, (ast.Assign, ast.AugAssign)))
    for node in sorted(nodes, key=lambda n: -n.lineno):
        target = node.target if isinstance(node, ast.AugAssign) else None
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            (target,) = node.targets
        is_output = isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name)
        is_in_python = "def run(" in "\n".join(lines[: node.lineno])
        if not is_output or target.value.id not in numbers or "random" in ast.unparse(node) or is_in_python:
            continue
        added = True
        lines.insert(node.lineno - 1, f"{' ' * node.col_offset}energy[None] += 0.7 * ({ast.unparse(node.value)})")
    text = "\n".join([*lines, ""])
    return replace(program, text=text, fields=(*program.fields, ENERGY)) if added else None


def hessian_verdict(program: Program, seed: int, workshop: Workshop, *, runs_alone: bool = False) -> tuple[str, str]:
    """How a program fares, in a word, with a message; see ``program_verdict.verdict``."""
    name = f"<random energy {seed}, {workshop.count}>"
    if program.returns:
        whole = with_number(program)
    else:  # of parameters alone, as far as the program stores such terms
        whole = (with_terms(program) if seed % 2 else None) or with_energy(program)

    def compare() -> None:
        loaded = Loaded(whole, workshop.ready(), name)
        try:
            for point, expected in judge(program, seed)[:1]:
                values = {**point, "energy": np.zeros(())}
                if runs_alone:
                    check_plain_run(loaded, [(values, expected)])
                if not program_check.IS_PLAIN:
                    _check(loaded, values, expected, np.random.default_rng(seed))
        finally:
            loaded.close()

    return fate(compare)


def _check(loaded: Loaded, values: dict[str, Any], expected: Any, rng: np.random.Generator) -> None:
    names, energy = loaded.program.params, loaded.fields.get("energy")
    sizes = [np.size(values[name]) for name in names]

    def targets(args: Any) -> dict[str, Any]:
        given = zip(loaded.program.args, args, strict=True)
        return {**loaded.fields, **{a.name: v if isinstance(a, Field) else a.name for a, v in given}}

    def gradient(direction: np.ndarray | None = None, step: float = 0.0) -> np.ndarray:
        moved = dict(values)
        if direction is not None:
            for name, part in zip(names, np.split(direction, np.cumsum(sizes)[:-1]), strict=True):
                moved[name] = np.asarray(values[name], np.float64) + step * part.reshape(np.shape(values[name]))
        args = loaded.prepare(moved)
        found = value_and_gradient(loaded.entry, {n: targets(args)[n] for n in names}, energy, args=args)
        return np.concatenate([np.ravel(found[1][n]) for n in names])

    with crashes_told():
        args = loaded.prepare(values)
        params = {n: targets(args)[n] for n in names}
        options = {"chunk_size": program_check.OPTIONS.get("chunk_size")}  # a Hessian takes no tangents=
        plan = Hessian(loaded.entry, params, energy, args=args, **options)
        _, g, H = plan.value_gradient_and_hessian()
        after = loaded.state(args)
        others = _other_ways(loaded, values, targets)
        first = gradient()
        directions = rng.normal(size=(2, len(first)))
        differences = [[(gradient(v, h) - gradient(v, -h)) / (2 * h) for v in directions] for h in STEPS]
    for name, value in expected.state.items():
        require_close("state", name, after[name], value, 1e-9)
    require_close("gradient", "gradient", np.concatenate([np.ravel(g[n]) for n in names]), first, 1e-9)
    whole = np.block(
        [[H[a][b].reshape(m, n) for b, n in zip(names, sizes, strict=True)] for a, m in zip(names, sizes, strict=True)]
    )
    if not np.array_equal(whole, whole.T, equal_nan=True):
        raise MismatchError("derivative", "H is not symmetric")
    for kind, found in others.items():
        require_close("derivative", kind, found / (1 + np.abs(whole).max()), whole / (1 + np.abs(whole).max()), 1e-9)
    products = directions @ whole
    scale = 1 + np.abs(first).max() + np.abs(differences[0]).max()
    if np.abs(differences[0]).max() > LARGEST or np.abs(np.subtract(*differences)).max() > 1e-5 * scale:
        raise RejectedError("the gradient has kinks near the point")
    require_close("derivative", "products of H", products / scale, differences[0] / scale, 3e-6)


def _other_ways(loaded: Loaded, values: dict[str, Any], targets: Any) -> dict[str, np.ndarray]:
    """H from its sparse form, and from products with all unit vectors."""
    names, energy = loaded.program.params, loaded.fields.get("energy")
    sizes = [np.size(values[name]) for name in names]
    args = loaded.prepare(values)
    params = {n: targets(args)[n] for n in names}
    H = hessian(loaded.entry, params, energy, args=args, format="csr")
    found = np.block([[H[a][b].toarray() for b in names] for a in names])
    if not np.array_equal(found, found.T, equal_nan=True):
        raise MismatchError("derivative", "sparse H is not symmetric")
    args = loaded.prepare(values)
    params = {n: targets(args)[n] for n in names}
    parts = np.split(np.eye(sum(sizes)), np.cumsum(sizes)[:-1], axis=1)
    units = {n: part.reshape(-1, *np.shape(values[n])) for n, part in zip(names, parts, strict=True)}
    products = hvp(loaded.entry, params, units, energy, args=args)
    return {"sparse H": found, "hvp": np.concatenate([products[n].reshape(sum(sizes), -1) for n in names], axis=1)}
