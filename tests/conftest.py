"""Fixtures shared by the tests."""

import ast
import dataclasses
import gc
import re
import traceback
from pathlib import Path

import pytest
import runtimes as runtimes  # first: it says what Taichi is
import suite_report

if needed := suite_report.missing_packages():
    raise SystemExit(needed)  # one line; pytest shows where any other exception of this module was raised

# isort: split
import devices
import sweeps
import taichi as ti
import taichi_program
from field_pool import pool
from taichi_program import end_program, initialise, share_program, started

from taichi_ext import backend, engine, registry
from taichi_ext.api.runs.replay import Prepared
from taichi_ext.differentiate.plan.storage_facts import STRATEGIES
from taichi_ext.runtime.reverse import calls

NOT_RUN_AGAIN = "computed in several runs .* draws random numbers"
shared: dict = {}  # fixtures that several tests share, in the order of their setup, and what asked for them
is_unusable = pytest.StashKey[bool]()


# what one runtime alone has
collect_ignore = ["backend/test_quadrants.py"]
if runtimes.RUNTIME == "quadrants":
    collect_ignore = ["backend/test_layering.py", "backend/test_taichi_contract.py", "backend/test_taichi_faults.py"]
    collect_ignore += ["language/test_argument_packs.py"]  # Quadrants has dataclasses in their place: test_quadrants.py


def pytest_addoption(parser):
    """All tests with another storage or layout of tangents, or in more runs, than the engine would choose."""
    parser.addoption(
        "--tangents", choices=STRATEGIES, default="auto", help="tangents= of every Jacobian that is not told"
    )
    parser.addoption("--arch", choices=("cpu", "cuda", "vulkan", "metal"), default="cpu", help="default: cpu")
    parser.addoption("--record", metavar="FILE", help="used by --arch: write down what comparisons expect")
    parser.addoption("--by-column", action="store_true", help="tangents in memory column by column, as on a GPU")
    parser.addoption("--sweeps", type=int, default=1, metavar="N", help="one of N sweeps, drawn by the package's text")
    parser.addoption(
        "--setting", action="append", default=[], metavar="NAME=VALUE", help="of ti.init, as fast_math=False"
    )
    parser.addoption("--move-starts", type=float, metavar="PART", help="of each value that fields of tests start with")
    parser.addoption("--chunk-size", type=int, metavar="N", help="chunk_size= of every Jacobian that is not told")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config):
    """Run whole folders on all processors, each module in one process; single modules and tests run in this one.

    ``-n`` decides otherwise. This is no ``addopts``, so that benchmarks and ``-p no:xdist`` need no other options.
    """
    option = config.option
    option.reportchars = option.reportchars.replace("a", "fExX")  # skips are counted by reason
    if hasattr(config, "workerinput"):  # this is one of those processes
        return
    is_undecided = getattr(option, "numprocesses", 0) is None and option.dist == "no"
    is_watched = option.usepdb or option.trace or option.collectonly
    if is_undecided and not is_watched and runs_folders(config):
        option.numprocesses, option.dist = "logical", "loadfile"


def runs_folders(config) -> bool:
    return any(Path(config.invocation_params.dir, path).is_dir() for path in config.args)


def pytest_configure(config):
    """Let the engine choose what the command line says, and leave sweeps out of whole folders unless ``-m`` is given."""
    if runs_folders(config) and not config.option.markexpr:  # in each process: they do not share these options
        config.option.markexpr = "not sweep"
    config.addinivalue_line("markers", "chosen_only(reason, *options): a test of what is chosen without these options")
    STRATEGIES["auto"] = STRATEGIES[config.getoption("--tangents")]
    if config.getoption("--by-column"):
        backend.stores_by_column = lambda: True
    if config.getoption("--chunk-size"):
        split_columns(config.getoption("--chunk-size"))
    config.addinivalue_line(
        "markers", "sweep: more programs of a kind that other tests have, and dear ones, left out of whole folders"
    )
    config.addinivalue_line("markers", "mostly_sweep(*ids, every=n): of the cases of a test, all but these are sweeps")
    config.addinivalue_line("markers", "taichi_only(reason): a test of what another runtime does not have")
    config.addinivalue_line("markers", "cpu_only(reason): a test of what only the CPU has")
    config.addinivalue_line("markers", "double_only(reason): a test that needs a device with float64")
    config.pluginmanager.register(suite_report.Clock())
    if not hasattr(config, "workerinput"):
        shows_progress = runs_folders(config) and config.option.verbose <= 0
        config.pluginmanager.register(suite_report.SuiteReport(config, shows_progress))
    devices.start(config.getoption("--arch"), config.getoption("--record"))
    taichi_program.arch = getattr(ti, config.getoption("--arch"))
    if config.getoption("--move-starts"):
        import differences  # after devices.start, which replaces what it imports

        differences.move_starts(config.getoption("--move-starts"))
    for name, value in (setting.split("=") for setting in config.getoption("--setting")):
        taichi_program.settings[name] = ast.literal_eval(value)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    """Skip on other devices what the CPU alone has, and tests of choices that the command line takes away."""
    if config.option.markexpr and not any("::" in path for path in config.args):  # a test that is named is meant
        sweeps.mark_most(items)
    if (count := config.getoption("--sweeps")) > 1:
        kept = sweeps.drawn(items, count)
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    told = {"--tangents": config.getoption("--tangents") != "auto"}
    told |= {option: bool(config.getoption(option)) for option in ("--by-column", "--chunk-size", "--move-starts")}
    for item in items:
        for mark in item.iter_markers("taichi_only"):
            if runtimes.RUNTIME != "taichi":
                item.add_marker(pytest.mark.skip(reason=f"Taichi only: {mark.args[0]}"))
        for mark in item.iter_markers("cpu_only"):
            if taichi_program.arch != ti.cpu:
                item.add_marker(pytest.mark.skip(reason=f"CPU only: {mark.args[0]}"))
        for mark in item.iter_markers("double_only"):
            if devices.is_single():
                item.add_marker(pytest.mark.skip(reason=f"float64 only: {mark.args[0]}"))
        for mark in item.iter_markers("chosen_only"):
            reason, *options = mark.args
            for option in filter(told.get, options):
                item.add_marker(pytest.mark.skip(reason=f"not with {option}: {reason}"))


def pytest_collection_finish():
    """Leave the modules, Taichi's and torch's too, out of all garbage collections: each takes 0.3 s otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def truth(request):
    """On another device: what the tests of a module expect, from the CPU."""
    if devices.is_single():
        items = [i for i in request.session.items if i.path == request.node.path]
        items = [i for i in items if i.get_closest_marker("skip") is None]
        if items:
            devices.learn(items, request.config.rootpath)


@pytest.fixture(scope="module", autouse=True)
def fresh_program(request):
    """End the program after each module. In a run without sweeps, modules that want the same options share programs.

    They do not after a failure, which may leave Taichi in any state, nor with ``--chunk-size``, since Taichi keeps all
    kernels, one for each column.
    """
    failed = request.session.testsfailed
    yield
    is_shared = request.config.option.markexpr == "not sweep" and not request.config.getoption("--chunk-size")
    if not is_shared or request.session.testsfailed != failed:
        end_program()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip on other devices what Taichi cannot run there, without this package; and what cannot be run again."""
    if devices.current is not None:
        devices.current.begin(item.nodeid)
    try:
        yield
        return
    except (Exception, pytest.fail.Exception) as error:
        is_judged = devices.is_single() and isinstance(error, Exception)
        reason = devices.excuse(error) if is_judged else ""
        if item.config.getoption("--chunk-size") and re.search(NOT_RUN_AGAIN, str(error)):
            reason = f"not with --chunk-size, as README and guide say: {error}"
        if not reason:
            raise
        traceback.clear_frames(error.__traceback__)
    item.stash[is_unusable] = True  # fields that are not placed, say, are in the way of all other kernels
    pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """After an error of Taichi, and after what the test itself has set up: start Taichi afresh.

    What several tests share may hold fields of the ended program. So it ends before, and the next test sets it up again.
    """
    yield
    if item.stash.get(is_unusable, False):
        for fixture, request in reversed(list(shared.items())):
            fixture.finish(request)
        initialise(**started["options"])


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """Note what several tests share."""
    value = yield
    if fixturedef.scope in ("module", "class") and fixturedef.argname != "truth":
        shared[fixturedef] = request
    return value


def pytest_fixture_post_finalizer(fixturedef):
    """It is no longer there."""
    shared.pop(fixturedef, None)


def pytest_sessionfinish():
    """Write what comparisons expect."""
    if devices.current is not None:
        devices.current.end()


def split_columns(chunk_size: int) -> None:
    """Let Jacobians without ``chunk_size=`` compute so many columns in one run."""
    given = Prepared.__init__

    def prepare(self, *args, **options):
        given(self, *args, **options)
        options = self.question.options
        options = options._replace(chunk_size=options.chunk_size or chunk_size)
        self.question = dataclasses.replace(self.question, options=options)

    Prepared.__init__ = prepare


@pytest.fixture(autouse=True)
def reuse_fields():
    """Fields that one test took from the pool are free for the next, and its rules are gone."""
    yield
    pool.give_back()
    registry.clear()


@pytest.fixture(scope="module")
def ti64():
    """A Taichi program whose literals and default type are float64."""
    share_program(default_fp=ti.f64)
    return ti


@pytest.fixture(scope="module")
def ti32():
    """A Taichi program with Taichi's own defaults (float32)."""
    share_program()
    return ti


@pytest.fixture
def traces(monkeypatch):
    """The names of the kernels that are built, in order."""
    built = []
    fuse, staged = engine.fuse, calls.staged_kernel

    def counted(launch, watch=None):
        built.append(launch.kernel.func.__name__)
        return fuse(launch, watch)

    def counted_in_reverse(launch, *columns):
        built.append(launch.kernel.func.__name__)
        return staged(launch, *columns)

    monkeypatch.setattr(engine, "fuse", counted)
    monkeypatch.setattr(calls, "staged_kernel", counted_in_reverse)
    return built
