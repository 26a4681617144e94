"""The verdict on a random program, and a smaller program with the same verdict."""

from collections.abc import Callable
from typing import Any

import taichi as ti
from program_check import Fields, MismatchError, check
from program_model import Program
from program_reducer import reduce_program
from program_reference import RejectedError
from taichi_program import initialise

from taichi_ext import UnsupportedError

PER_START = 50  # programs in one Taichi program, whose fields and compiled kernels are never freed before its end
RIGHT, REJECTED, REFUSED = "right", "rejected", "refused"
BY_ITSELF = ("plain run", "plain crash")  # faults of Taichi without taichi_ext


class Workshop:
    """A Taichi program that is replaced by a new one now and then."""

    def __init__(self) -> None:
        self.count = 0
        self.fields = Fields()

    def ready(self) -> Fields:
        if self.count % PER_START == 0:
            initialise(default_fp=ti.f64)
            self.fields = Fields()
        self.count += 1
        return self.fields


def verdict(program: Program, seed: int, workshop: Workshop, *, runs_alone: bool = False) -> tuple[str, str]:
    """How a program fares, in a word, with a message; see ``fate``."""
    name = f"<random program {seed}, {workshop.count}>"
    return fate(lambda: check(program, seed, workshop.ready(), name, runs_alone=runs_alone))


def fate(call: Callable[[], None]) -> tuple[str, str]:
    """How a program fares where this checks it, in a word, with a message.

    ``right``; ``rejected`` where the reference cannot judge it; ``refused`` with ``UnsupportedError``; one of
    ``BY_ITSELF`` where Taichi alone differs from the reference, which says nothing about taichi_ext; else what is
    wrong: ``state``, ``derivative`` or ``crash``.
    """
    try:
        call()
    except RejectedError as error:
        return REJECTED, str(error)
    except UnsupportedError as error:
        return REFUSED, str(error)
    except MismatchError as error:
        return error.kind, str(error)
    return RIGHT, ""


def reduced(program: Any, seed: int, workshop: Any, tries: int = 120, judge: Any = verdict) -> Any:
    """A smaller program that fails in the same way; ``judge`` gives the verdict of a program."""

    def failure(found: tuple[str, str]) -> tuple[str, ...]:
        """The kind; of a crash, also the type of the error."""
        return (found[0], *found[1].split(":")[1:2] * ("crash" in found[0]))

    wanted = failure(judge(program, seed, workshop))

    def is_alike(smaller: Any) -> bool:
        try:
            return failure(judge(smaller, seed, workshop)) == wanted
        except Exception:  # a cut that left no program, for the reference or for Taichi
            return False

    return reduce_program(program, is_alike, tries)


def describe(program: Program) -> str:
    """The program with data that its text lacks."""
    fields = ", ".join(f"{f.name}: {f.type}{list(f.shape)}" for f in program.fields if f"{f.name}[" in program.text)
    return f"params {program.params}, outputs {program.outputs}, {fields}\n\n{program.text}"
