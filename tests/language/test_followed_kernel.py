"""The kernel that docs/architecture/kernel.md follows through all stages: what stands there is what the engine prints."""

import importlib.util
import sys
from os.path import commonprefix
from pathlib import Path
from textwrap import dedent, indent

import numpy as np
import pytest
from printed_programs import text as text_of

from taichi_ext import Jacobian, engine
from taichi_ext.simplify import simplify

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture" / "kernel.md").read_text(encoding="utf-8")
START = "import taichi as ti\nfrom taichi.math import vec3\n\n"

pytestmark = [pytest.mark.usefixtures("ti32"), pytest.mark.cpu_only("loops run in lanes there alone")]


def loaded(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stages(tmp_path, monkeypatch):
    """The record, the program with tangents, and the prepared Jacobian after a call."""
    found = []
    differentiate = engine.differentiate

    def noted(program, seeds):
        made = differentiate(program, seeds)
        found.append((program, simplify(engine.with_arguments(made))))
        return made

    monkeypatch.setattr(engine, "differentiate", noted)
    section = PAGE
    block = dedent(section.split("\n\n    ", 1)[1].split("\n\nIts record")[0].join(("    ", "\n")))
    (tmp_path / "sphere.py").write_text(START + block)
    sphere = loaded(tmp_path / "sphere.py", "followed_sphere")
    sphere.scene_params.from_numpy(np.array([10.1, 10.1, 10.1, 100.1], np.float32))
    plan = Jacobian(sphere.trace, sphere.scene_params, sphere.depth)
    plan()
    yield (*found[0], plan, block)
    del sys.modules["followed_sphere"]


@pytest.mark.sweep
@pytest.mark.chosen_only("the page shows what is chosen", "--tangents", "--by-column", "--chunk-size")
def test_the_page_shows_what_the_engine_prints(stages):
    recorded, with_tangents, plan, block = stages
    assert block in (ROOT / "README.md").read_text(encoding="utf-8")
    decisions = "\n".join(line.strip() for line in plan.explain().splitlines()[1:])
    kernel = dedent(plan.source.split("):\n", 1)[1].split("\n    return ")[0])
    primal, differentiated = text_of(recorded), text_of(with_tangents)
    same = len(commonprefix([primal.splitlines()[1:], differentiated.splitlines()[1:]]))
    first, *rest = differentiated.splitlines()
    shown = [first, rest[0], " " * 8 + "...", *rest[same - 1 :]]  # from the line before the first that differs
    for text in (primal, decisions, "\n".join(shown), kernel):
        assert indent(text.strip(), "    ") in PAGE
