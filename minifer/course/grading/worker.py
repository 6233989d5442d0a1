"""One exercise in a process of its own: limits, no way to the answers, results as they come."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from minifer.course.grading.plugin import GradingPlugin
from minifer.course.grading.target import load_answer


@dataclass(frozen=True)
class Job:
    """What a worker does. exercise: "4.3". answer: the learner's file. tests: its test file.

    seconds, memory_bytes: limits. hidden: run hidden tests too.
    """

    exercise: str
    answer: Path
    tests: Path
    seed: int
    seconds: float = 20.0
    memory_bytes: int = 8 << 30
    hidden: bool = True


def work(job: Job, results: Connection) -> None:
    """Run the job's tests, send a `TestResult` for each and None at the end."""
    _limit(job)
    import torch

    torch.set_num_threads(1)
    os.environ["MINIFER_GRADING"] = "1"  # `check()` in the answer does nothing
    plugin = GradingPlugin(
        job.exercise,
        lambda: load_answer(job.answer, _allowed(job.tests)),
        results.send,
        job.seed,
        job.hidden,
    )
    arguments = [str(job.tests), "-q", "--assert=plain", "-c", os.devnull, "--rootdir", "/"]
    for name in ("cacheprovider", "nbval", "randomly", "xdist"):
        arguments += ["-p", f"no:{name}"]
    pytest.main(arguments, plugins=[plugin])
    results.send(None)


def _allowed(tests: Path) -> Any:
    """`ALLOWED_IMPORTS` of a test file: modules of minifer its answers may import."""
    module = sys.modules.get(tests.stem)
    return getattr(module, "ALLOWED_IMPORTS", ())


def _limit(job: Job) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        import resource
    except ImportError:  # Windows has none; the parent's clock still counts
        return
    resource.setrlimit(resource.RLIMIT_AS, (job.memory_bytes, job.memory_bytes))
