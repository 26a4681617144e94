"""Random pipelines: values, derivatives and state of each against an interpreter of the same text.

``program_pipelines`` writes a pipeline for every seed, ``program_long_loops`` those with long loops;
``program_pipeline_reference`` runs their text, the Python around the kernels included, on complex numbers;
``program_pipeline_check`` compares.

A fixed set of seeds runs here; ``python tests/oracles/program_batches.py 2000 --generator pipelines`` runs as many as one likes.
"""

import devices
import program_pipeline_check
import pytest
from program_containers import Container, at_step, views
from program_pipeline_check import TOLERANCE, PipelineWorkshop, describe_pipeline, pipeline_verdict
from program_pipelines import Pipeline, generate
from program_verdict import BY_ITSELF, REJECTED, RIGHT, reduced
from taichi_program import end_program

SEEDS = (16, 37, 58, 28)  # the last two have float32, the very last long loops
REAL = "f32" if devices.is_single() else "f64"


@pytest.fixture(scope="module")
def workshop():
    yield PipelineWorkshop()
    end_program()


@pytest.mark.parametrize("seed", SEEDS)
def test_random_pipelines(workshop, seed):
    program = generate(seed, "f32" if devices.is_single() else None)
    if "torch" in program.text:
        pytest.importorskip("torch")
    kind, message = pipeline_verdict(program, seed, workshop, runs_alone=True)
    if kind in (REJECTED, *BY_ITSELF):
        pytest.skip(f"it cannot be judged: {message}")
    if kind != RIGHT:
        smaller = describe_pipeline(reduced(program, seed, workshop, judge=pipeline_verdict))
        pytest.fail(f"seed {seed}: {kind}: {message}\n\nA smaller program that fails: {smaller}", pytrace=False)


# --- the reference itself ---------------------------------------------------------------------------------------------

TEXT = f"""
x = ti.field(ti.{REAL}, shape=(3,))
B = np.zeros((2, 3), np.float{REAL[1:]})

@ti.kernel
def k(a: ti.types.ndarray(dtype=ti.{REAL}, ndim=1), b: ti.types.ndarray(dtype=ti.{REAL}, ndim=1)):
    for i in a:
        b[i] += a[i] * x[2 - i]

def run(B):
    k(B[0], B[1])
    B[0, 1] = 0.5
    k(B[1], B[0])
"""
ROWS = Pipeline(
    TEXT,
    (Container("x", "field", (3,), "f"), Container("B", "numpy", (2, 3), "f", is_argument=True)),
    "run",
    ("B",),
    ("x", "B"),
    ("B",),
    real=REAL,
)


def test_rows_of_an_array(workshop):
    kind, message = pipeline_verdict(ROWS, 1, workshop, runs_alone=True)
    assert kind == RIGHT, message


@pytest.mark.parametrize("changed", ["derivative", "state"])
def test_a_wrong_result_is_found(workshop, monkeypatch, changed):
    """The comparison sees an error in one entry."""
    error = 100 * TOLERANCE[REAL]

    class Wrong(program_pipeline_check.Jacobian):
        def __call__(self, *, args, **options):
            found = super().__call__(args=args, **options)
            if changed == "derivative":
                found[0][0][1, 2, 2] += error
            else:
                args[0][0, 2] += error
            return found

    monkeypatch.setattr(program_pipeline_check, "Jacobian", Wrong)
    assert pipeline_verdict(ROWS, 1, workshop)[0] == changed


def test_views_have_the_entries_of_the_whole():
    c = Container("B", "numpy", (3, 2), "f")
    found = {v.text: v for v in views(c, steps=2)}
    assert found["B.T"].entries == (0, 2, 4, 1, 3, 5)
    assert found["B[1:3]"].meets(found["B[-1]"]) and not found["B[0:2]"].meets(found["B[2]"])
    assert at_step(c, found["B[t + 1]"], 1).entries == (4, 5)
