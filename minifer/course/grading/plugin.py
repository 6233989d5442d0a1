"""pytest inside the grader: picks the tests of an exercise, hands them the answer, reports each."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minifer.course.grading.blame import EndedError, Status, judge
from minifer.course.grading.marks import points_of, probe_of
from minifer.course.grading.trust import Trust

_OFF = (
    "cacheprovider faulthandler junitxml pastebin doctest stepwise logging terminal nbval randomly"
)
_OFF += " xdist threadexception unraisableexception"


@dataclass(frozen=True)
class TestResult:
    """One test function, or one case of it. message: what a learner reads; "" when it passed."""

    __test__ = False
    exercise: str
    name: str
    points: float
    hidden: bool
    status: Status
    message: str
    case: str = ""


class GradingPlugin:
    """load: makes the answer's namespace, called once a test function. report: gets each result.

    begin: told the test that starts. intact: says what the answer tampered with, "" for nothing;
    asked after each test. collected: told which tests there are, before the first. interactive:
    Ctrl-C is the reader's, not the answer's. After a case that failed, the other cases of that
    test are left out.
    """

    def __init__(
        self,
        exercise: str,
        load: Callable[[], ModuleType],
        report: Callable[[TestResult], None],
        seed: int,
        trust: Trust,
        *,
        hidden: bool = True,
        begin: Callable[[Any], None] = lambda item: None,
        intact: Callable[[], str] = lambda: "",
        interactive: bool = False,
        collect_only: bool = False,
        collected: Callable[[list[dict[str, Any]]], None] = lambda tests: None,
    ) -> None:
        self.exercise, self.load, self.report, self.trust = exercise, load, report, trust
        self.seed, self.hidden, self.begin, self.intact = seed, hidden, begin, intact
        self.interactive, self.collect_only, self.collected = interactive, collect_only, collected
        self.stop = False
        self.tampered = ""
        self._loaded: tuple[str, ModuleType] | None = None
        self._failed: set[str] = set()

    @pytest.fixture
    def target(self, request: pytest.FixtureRequest) -> ModuleType:
        name = request.node.originalname
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = name, self.load()
        return self._loaded[1]

    @pytest.fixture
    def rng(self, request: pytest.FixtureRequest) -> random.Random:
        return random.Random(f"{self.seed} {request.node.name}")

    @pytest.fixture
    def generator(self, request: pytest.FixtureRequest) -> Any:
        import torch

        number = random.Random(f"{self.seed} {request.node.name}").getrandbits(40)
        return torch.Generator().manual_seed(number)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        wanted = [item for item in items if self._wanted(item)]
        tests = {item.originalname: points_of(item.function) for item in wanted}
        self.collected(
            [
                {"name": name, "points": mark.points, "hidden": mark.hidden}
                for name, mark in tests.items()
                if mark is not None
            ]
        )
        items[:] = [] if self.collect_only else wanted

    def _wanted(self, item: Any) -> bool:
        mark = points_of(item.function)
        return (
            mark is not None and mark.exercise == self.exercise and (self.hidden or not mark.hidden)
        )

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.report(
                TestResult(self.exercise, report.nodeid, 0.0, False, "error", str(report.longrepr))
            )

    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        """True, "done already", for further cases of a test that failed."""
        if item.originalname in self._failed or self.tampered or self.stop:
            return True
        self.begin(item)
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> Any:
        """An answer that exits, or presses Ctrl-C itself, fails its test and no other."""
        try:
            return (yield)
        except (SystemExit, KeyboardInterrupt, pytest.exit.Exception) as error:
            if self.interactive and isinstance(error, KeyboardInterrupt):
                raise  # somebody pressed Ctrl-C
            raise EndedError(type(error).__name__).with_traceback(error.__traceback__) from None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        outcome = yield
        if call.when == "teardown" or (call.when == "setup" and call.excinfo is None):
            return outcome
        mark = points_of(item.function)
        assert mark is not None
        status: Status = "passed"
        message = ""
        if call.excinfo is not None:
            status, message = judge(call.excinfo.value, self.trust, self.exercise)
            self._failed.add(item.originalname)
        self.tampered = self.tampered or self.intact()
        case = item.callspec.id if hasattr(item, "callspec") else ""
        self.report(
            TestResult(
                mark.exercise, item.originalname, mark.points, mark.hidden, status, message, case
            )
        )
        return outcome


def run_pytest(tests: Path, plugin: object) -> int:
    """Run a test file under a plugin and nothing else: no output, no cache, no other plugins.

    Returns pytest's exit status. `sys.path` and the test's module are left as they were.
    """
    arguments = [str(tests), "--assert=plain", "-c", os.devnull, "--rootdir", str(tests.parent)]
    arguments += ["--noconftest", "--capture=no"]
    arguments += [part for name in _OFF.split() for part in ("-p", f"no:{name}")]
    path, before = list(sys.path), os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.modules.pop(tests.stem, None)
    try:
        return int(pytest.main(arguments, plugins=[plugin]))
    finally:
        sys.path[:] = path
        os.environ.pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
        if before is not None:
            os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = before


def probes_in(module: ModuleType, exercise: str) -> dict[str, Callable[[Any], Any]]:
    """Name → probe of an exercise, in the order of the file."""
    return {n: f for n, f in vars(module).items() if callable(f) and probe_of(f) == exercise}
