"""pytest inside the grader: picks the tests of an exercise, hands them the answer, reports each."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import pytest

from minifer.course.grading.marks import points_of

Status = Literal["passed", "failed", "not attempted"]
_STUB = re.compile(r"ex\d+\.\d+")


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


class GradingPlugin:
    """load: makes the answer's namespace, called once a test. report: receives each result."""

    def __init__(
        self,
        exercise: str,
        load: Callable[[], ModuleType],
        report: Callable[[TestResult], None],
        seed: int,
        hidden: bool = True,
    ) -> None:
        self.exercise, self.load, self.report = exercise, load, report
        self.seed, self.hidden = seed, hidden

    @pytest.fixture
    def target(self) -> ModuleType:
        return self.load()

    @pytest.fixture
    def rng(self, request: pytest.FixtureRequest) -> random.Random:
        return random.Random(f"{self.seed} {request.node.name}")

    @pytest.fixture
    def generator(self, request: pytest.FixtureRequest) -> Any:
        import torch

        number = random.Random(f"{self.seed} {request.node.name}").getrandbits(40)
        return torch.Generator().manual_seed(number)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if self._wanted(item)]

    def _wanted(self, item: Any) -> bool:
        mark = points_of(item.function)
        return (
            mark is not None and mark.exercise == self.exercise and (self.hidden or not mark.hidden)
        )

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
            error = call.excinfo.value
            stub = isinstance(error, NotImplementedError) and _STUB.fullmatch(str(error))
            status = "not attempted" if stub else "failed"
            message = "" if stub else _message(error)
        self.report(
            TestResult(mark.exercise, item.originalname, mark.points, mark.hidden, status, message)
        )
        return outcome


def _message(error: BaseException) -> str:
    if isinstance(error, AssertionError):
        return str(error)
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    line = f" (line {where.tb_lineno} of {where.tb_frame.f_code.co_filename})" if where else ""
    return f"{type(error).__name__}: {error}{line}"
