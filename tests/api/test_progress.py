"""Long work shows itself: the stages of a slow first call in the log, a progress bar where a kernel runs many times."""

import io
import itertools
import logging
import re
import sys
import types

import numpy as np
import pytest
from differences import outputs, scalars
from kernel_texts import kernel_of
from numpy.testing import assert_allclose

from taichi_ext import InvalidArgumentError, Jacobian, check_jacobian, jacobian, stages, value_and_jacobian, vjp
from taichi_ext.api.inputs import progress

pytestmark = pytest.mark.usefixtures("ti64")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def watched(monkeypatch):
    """Called in a test, lets stderr be a terminal from there on, which keeps what is written."""

    def start():
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        return terminal

    return start


@pytest.fixture
def program():
    x, y = scalars(np.linspace(0.1, 1.0, 30)), outputs(30)
    step = kernel_of("step: for i in x: y[i] += x[i] ** 2", x=x, y=y)
    return step, x, y


# --- the log ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_stages_of_a_slow_first_call(program, monkeypatch, caplog):
    monkeypatch.setattr(stages, "SLOW", -1.0)
    plan = Jacobian(*program)
    with caplog.at_level(logging.INFO, logger="taichi_ext"):
        plan()
    messages = [r.getMessage() for r in caplog.records]
    assert all(r.name == "taichi_ext" and r.levelno == logging.INFO for r in caplog.records)
    name = "Jacobian of step"
    assert messages[0].startswith(f"{name}: step analysed in ")
    assert re.search(r"analysed in \d+ rounds, ", messages[0])
    assert messages[1].startswith(f"{name}: step compiled, ")
    assert messages[2].startswith(f"{name}: ")
    assert messages[2].endswith(" s in total")
    assert len(messages) == 3
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="taichi_ext"):
        plan()
    assert not caplog.records, "nothing was built"


def test_stages_of_the_kernels_of_a_pipeline(program, monkeypatch, caplog):
    monkeypatch.setattr(stages, "SLOW", -1.0)
    step, x, y = program
    scale = kernel_of("scale: for i in y: y[i] *= 2.0", y=y)
    run = lambda: (step(), scale())
    with caplog.at_level(logging.INFO, logger="taichi_ext"):
        jacobian(run, x, y)
    text = caplog.text
    for stage in ("step analysed in", "step compiled", "scale analysed in", "scale compiled", "s in total"):
        assert stage in text
    assert text.count("in total") == 1


def test_a_quick_call_logs_nothing(program, caplog):
    with caplog.at_level(logging.DEBUG, logger="taichi_ext"):
        jacobian(*program)
    assert not [r for r in caplog.records if r.name == "taichi_ext"]


def test_stages_wait_until_the_call_is_slow(monkeypatch, caplog):
    now = iter([0.0, 1.0, 1.0, 2.5, 2.5, 4.0, 4.0])
    monkeypatch.setattr(stages.time, "perf_counter", lambda: next(now))
    with caplog.at_level(logging.INFO, logger="taichi_ext"), stages.Stages("J") as own:
        own.note("first", 1.0)
        assert not caplog.records
        monkeypatch.setattr(stages.time, "perf_counter", lambda: 2.5)
        own.note("second", 1.5)
        assert [r.getMessage() for r in caplog.records] == ["J: first, 1.0 s", "J: second, 1.5 s"]
        monkeypatch.setattr(stages.time, "perf_counter", lambda: 4.0)
    assert caplog.records[-1].getMessage() == "J: 4.0 s in total"


def test_nothing_is_printed_unless_the_user_asks(program, monkeypatch, capsys):
    monkeypatch.setattr(stages, "SLOW", -1.0)
    assert any(isinstance(h, logging.NullHandler) for h in stages.LOG.handlers)
    assert stages.LOG.level == logging.NOTSET
    jacobian(*program, chunk_size=7)
    assert capsys.readouterr() == ("", "")


# --- the line ---------------------------------------------------------------------------------------------------------


def test_a_long_first_call_says_what_it_does(program, monkeypatch, watched):
    monkeypatch.setattr(stages, "SLOW", 0.0)
    compiling = stages.begin

    def slow(stage):
        start = compiling(stage)
        stages.time.sleep(0.1)
        return start

    monkeypatch.setattr(stages, "begin", slow)
    terminal = watched()
    plan = Jacobian(*program)
    plan()
    lines = terminal.getvalue().replace("\x1b[K", "").split("\r")
    assert lines == [
        "",
        "Jacobian of step: differentiating step ...",
        "Jacobian of step: compiling step with tangents ...",
        "",
    ]
    plan()
    assert terminal.getvalue().count("\r") == 3, "a call that builds nothing is quiet"


@pytest.mark.parametrize("shown", [False, None])
def test_the_line_is_for_terminals_and_can_be_turned_off(program, monkeypatch, watched, capsys, shown):
    monkeypatch.setattr(stages, "SLOW", 0.0)
    terminal = watched() if shown is False else None
    jacobian(*program, progress=shown)
    assert (capsys.readouterr().err if terminal is None else terminal.getvalue()) == ""


def test_the_line_in_a_notebook_is_replaced_and_removed(program, monkeypatch):
    shown = []
    handle = types.SimpleNamespace(update=lambda data, raw: shown.append(data))
    display = types.SimpleNamespace(display=lambda data, **_: shown.append(data) or handle)
    python = types.SimpleNamespace(display=display)
    for name, module in {"ipykernel": display, "IPython": python, "IPython.display": display}.items():
        monkeypatch.setitem(sys.modules, name, module)
    show = progress.stage_line()
    for text in ("one", "two", None):
        show(text)
    assert shown == [{"text/plain": "one"}, {"text/plain": "two"}, {}]


# --- the bar ----------------------------------------------------------------------------------------------------------


def run_with(program, call, **options):
    if call == "jacobian":
        return jacobian(*program, **options)
    if call == "value_and_jacobian":
        return value_and_jacobian(*program, **options)[1]
    return Jacobian(*program, **options)()


@pytest.mark.mostly_sweep("value_and_jacobian", "Jacobian")
@pytest.mark.parametrize("call", ["jacobian", "value_and_jacobian", "Jacobian"])
def test_bar_of_chunks_on_a_terminal(program, watched, call):
    pytest.importorskip("rich")
    stderr = watched()
    J = run_with(program, call, chunk_size=7)
    assert "Columns of J, step" in stderr.getvalue()
    assert "30/30" in stderr.getvalue()
    assert_allclose(J, np.diag(2 * np.linspace(0.1, 1.0, 30)))


@pytest.mark.chosen_only("one run has no bar", "--chunk-size")
@pytest.mark.parametrize("options", [{"chunk_size": 7, "progress": False}, {}, {"progress": True}, {"chunk_size": 30}])
def test_no_bar_where_it_is_off_or_there_is_one_run(program, watched, options):
    pytest.importorskip("rich")
    stderr = watched()
    jacobian(*program, **options)
    assert stderr.getvalue() == ""


def test_no_bar_where_nobody_watches(program, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "_rich", lambda: pytest.fail("rich was loaded"))
    jacobian(*program, chunk_size=7)
    check_jacobian(*program)
    assert sys.stderr.getvalue() == ""


def test_bar_of_the_way_back(monkeypatch):
    pytest.importorskip("rich")
    x, loss = scalars([1.0, 1.0, 1.0]), scalars(0.0)
    step = kernel_of("step: for i in x: x[i] *= 1.5", x=x)
    total = kernel_of("for i in x: loss[None] += x[i]", x=x, loss=loss)

    def run():
        for _ in range(4):
            step()
        total()

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    found = vjp(run, x, loss, np.ones(9), progress=True)  # in two ways back
    assert_allclose(found, np.full((9, 3), 1.5**4))
    assert "Way back, run" in sys.stderr.getvalue()
    assert "10/10" in sys.stderr.getvalue()


def test_bar_of_check_jacobian(program, watched):
    pytest.importorskip("rich")
    stderr = watched()
    assert check_jacobian(*program)
    assert "Differences, step" in stderr.getvalue()
    assert "30/30" in stderr.getvalue()
    stderr.truncate(0)
    assert check_jacobian(*program, most_entries=20)
    assert check_jacobian(*program, progress=False)
    assert stderr.getvalue().strip("\x00") == ""


def test_without_rich(program, watched, monkeypatch):
    stderr = watched()
    for name in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    jacobian(*program, chunk_size=7)
    assert stderr.getvalue() == ""
    for call in ("jacobian", "value_and_jacobian", "Jacobian"):
        with pytest.raises(InvalidArgumentError, match=r"progress=True needs rich, .*pip install rich"):
            run_with(program, call, progress=True)
    with pytest.raises(InvalidArgumentError, match="progress=True needs rich"):
        check_jacobian(*program, progress=True)


@pytest.mark.parametrize("value", [1, 0, "yes", [True], np.True_])
def test_values_that_are_neither_true_nor_false(program, value):
    for call in ("jacobian", "value_and_jacobian", "Jacobian"):
        with pytest.raises(InvalidArgumentError, match="progress is .*; expected True, False or None"):
            run_with(program, call, progress=value)
    with pytest.raises(InvalidArgumentError, match="progress is .*; expected True, False or None"):
        check_jacobian(*program, progress=value)


def test_an_error_ends_the_bar(watched):
    pytest.importorskip("rich")
    watched()
    x, y = scalars([0.1, 0.2, 0.3]), outputs(3)
    runs = itertools.count()
    step = kernel_of("step: for i in x: y[i] += x[i] ** 2", x=x, y=y)

    def run():
        step()
        if next(runs) == 1:
            raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        jacobian(run, x, y, chunk_size=1)
    assert_allclose(jacobian(run, x, y, chunk_size=1), np.diag([0.2, 0.4, 0.6]))


@pytest.mark.sweep
def test_the_bar_of_a_notebook_leaves_nothing_behind(program, monkeypatch):
    shown = []

    class Handle:
        def update(self, data, raw):
            shown.append(data)

    def display(data, raw, display_id):
        shown.append(data)
        return Handle()

    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    monkeypatch.setattr(sys.modules["IPython"], "display", sys.modules["IPython.display"], raising=False)
    jacobian(*program, chunk_size=10, progress=False)
    assert not shown
    jacobian(*program, chunk_size=10)
    texts = [data.get("text/plain") for data in shown]
    assert texts[-1] is None and all(re.search(r"━* +\d+/30$", text) for text in texts[1:-1])
    assert len(texts) > 2
