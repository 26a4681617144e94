"""What a run of whole folders prints: how far it is, failures as they come, and a table of tests and CPU time by folder."""

import os
import re
import time
from collections import Counter, defaultdict
from importlib.util import find_spec

import pytest

NEEDED = ("hypothesis", "scipy", "taichi", "numpy")
EXTRAS = {"torch": "torch", "matplotlib": "plot", "dask": "dask", "distributed": "dask", "cvxopt": "cholmod"}
EXTRAS |= {"scipy": "scipy", "rich": "test"}


def missing_packages() -> str:
    """What to install, where the tests cannot run at all."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    return f"the tests need {', '.join(missing)}: python -m pip install '.[test]'" if missing else ""


def cpu_seconds() -> float:
    """Of this process and of those that it has started and that have ended."""
    return sum(os.times()[:4])


def folder_of(nodeid: str) -> str:
    return "/".join(nodeid.split("::")[0].split("/")[:-1][:2])


def skip_reason(report: pytest.TestReport) -> str:
    """Why a test is skipped: one reason for all tests that need the same extra."""
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    for name, extra in EXTRAS.items():
        if find_spec(name) is None and re.search(rf"\b{name}\b", reason, re.IGNORECASE):
            return f"{name} is not installed: python -m pip install '.[{extra}]'"
    return reason


class Clock:
    """The CPU time of each test, in the report of its teardown, from the process that runs it."""

    def __init__(self) -> None:
        self.last = cpu_seconds()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self):
        self.last = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call):
        report = yield
        if call.when == "teardown":
            now = cpu_seconds()
            report.cpu, self.last = now - self.last, now
        return report


class SuiteReport:
    """The output of the process that the user looks at."""

    def __init__(self, config: pytest.Config, shows_progress: bool) -> None:
        self.config, self.shows_progress = config, shows_progress
        self.total, self.printed, self.started = 0, 0, time.monotonic()
        self.done: Counter[str] = Counter()
        self.cpu: defaultdict[str, float] = defaultdict(float)
        self.skips: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    @property
    def terminal(self):
        return self.config.pluginmanager.getplugin("terminalreporter")

    def pytest_collection_finish(self, session):
        self.total = self.total or len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.total = len(ids)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self, report):
        """No dots."""
        category, letter, word = yield
        return category, "" if self.shows_progress else letter, word

    def pytest_collectreport(self, report):
        if report.skipped:
            self.skips[skip_reason(report)] += 1

    def pytest_runtest_logreport(self, report):
        folder = folder_of(report.nodeid)
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skips[skip_reason(report)] += 1
        if report.failed:
            self.failed[folder] += 1
            if self.shows_progress:
                self.print(f"FAILED {report.nodeid} ({report.when})", ends_line=True)
        if report.when == "teardown":
            self.done[folder] += 1
            self.cpu[folder] += getattr(report, "cpu", 0.0)
            if self.shows_progress:
                self.show_progress(folder)

    def show_progress(self, folder: str) -> None:
        done = sum(self.done.values())
        steps = 200 if self.terminal.isatty else 20
        if self.total and done * steps // self.total == self.printed:
            return
        self.printed = done * steps // max(self.total, 1)
        share = done / max(self.total, 1)
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        bar = "#" * int(30 * share)
        self.print(f"[{bar:30}] {share:4.0%}  {done} of {self.total}  {minutes}:{seconds:02}  {folder}", share == 1)

    def print(self, line: str, ends_line: bool = False) -> None:
        """On a terminal, a line that does not end is written over by the next one."""
        terminal = self.terminal
        if terminal is not None and terminal.isatty:
            terminal.write(f"\r\033[K{line}" + "\n" * ends_line, flush=True)
        elif terminal is not None:
            terminal.write(f"{line}\n", flush=True)

    def pytest_terminal_summary(self, terminalreporter):
        for reason, count in sorted(self.skips.items()):
            terminalreporter.write_line(f"skipped {count}: {reason}")
        if not self.shows_progress or not self.done:
            return
        terminalreporter.write_line(f"{'':24}{'tests':>7}{'failed':>8}{'CPU s':>8}")
        rows = [(f, self.done[f], self.failed[f], self.cpu[f]) for f in sorted(self.done)]
        rows.append(("all", self.done.total(), self.failed.total(), sum(self.cpu.values())))
        for folder, tests, failed, cpu in rows:
            terminalreporter.write_line(f"{folder:24}{tests:7}{failed or '-':>8}{cpu:8.0f}")
