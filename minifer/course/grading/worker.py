"""One exercise in a process of its own: limits, no way to the answers, results as they come."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from minifer.course.grading.integrity import Seal
from minifer.course.grading.mistakes import fingerprint
from minifer.course.grading.plugin import GradingPlugin, TestResult, probes_in, run_pytest
from minifer.course.grading.sandbox import Sandbox, guard_modules, limit
from minifer.course.grading.target import OPEN, Answer, cells_of, load_answer
from minifer.course.grading.trust import Trust

_KEPT = 4_000  # characters of what an answer prints

# Called with a kind and its fields; the last kind is "end".
Send = Callable[..., None]


@dataclass(frozen=True)
class Job:
    """What a worker does. exercise: "4.3". answer: the learner's file. tests: its test file.

    protected: folders the answer may not read. seconds, cpu_seconds, memory_bytes: limits; memory
    counts from what the grader itself needs. hidden: run hidden tests too. probe: "failed" runs
    the probes when a test failed, "only" runs nothing else, "never" none. first: stop at the
    first test that fails.
    """

    exercise: str
    answer: Path
    tests: Path
    seed: int
    seconds: float = 60.0
    cpu_seconds: float = 20.0
    memory_bytes: int = 4 << 30
    hidden: bool = True
    protected: tuple[Path, ...] = ()
    probe: str = "failed"
    first: bool = False

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return fields | {
            "answer": str(self.answer.resolve()),
            "tests": str(self.tests.resolve()),
            "protected": [str(folder.resolve()) for folder in self.protected],
        }

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Job:
        paths = {name: Path(fields[name]) for name in ("answer", "tests")}
        return Job(**{**fields, **paths, "protected": tuple(map(Path, fields["protected"]))})


class _Kept(io.TextIOBase):
    """A stream that keeps the beginning of what is written and drops the rest.

    muted: drops everything.
    """

    def __init__(self) -> None:
        self.text, self.muted = "", False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if len(self.text) < _KEPT and not self.muted:
            self.text += text[: _KEPT - len(self.text)]
        return len(text)


def work(job: Job, send: Send) -> None:
    """Run the job's tests in the current folder; send what happens.

    Kinds: "begin" (a test starts), "result" (a `TestResult`), "tampered" (why nothing counts),
    "fingerprint" (of the probes), "notes" (printed text, what was refused), and "end".
    """
    import torch

    torch.set_num_threads(1)
    os.environ["MINIFER_GRADING"] = "1"  # `check()` in the answer does nothing
    for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = os.getcwd()
    tempfile.tempdir = os.getcwd()
    sys.dont_write_bytecode = True
    sys.stdout = sys.stderr = kept = _Kept()
    limit(job.cpu_seconds, job.memory_bytes)
    trust, cells = Trust(job.tests, job.answer), cells_of(job.answer)
    closed: list[tuple[Sandbox, Seal]] = []

    def load() -> Answer:
        """The tests are imported by now, so what they rely on can be noted."""
        tests = sys.modules[job.tests.stem]
        opened = getattr(tests, "ALLOWED_IMPORTS", ())  # to all, or exercise → modules
        allowed = tuple(opened.get(job.exercise, ()) if isinstance(opened, dict) else opened)
        if not closed:
            sandbox = Sandbox(trust, (*job.protected, job.tests.parent), (*OPEN, *allowed))
            guard_modules(trust, (*OPEN, *allowed))
            sandbox.close()
            closed.append((sandbox, Seal(tests)))
        kept.muted = True  # what the file's own cells print says nothing about a test
        try:
            return load_answer(job.answer, allowed, cells)
        finally:
            kept.muted = False

    def intact() -> str:
        return closed[0][1].broken() if closed else ""

    failed: list[TestResult] = []

    def report(result: TestResult) -> None:
        send("result", **asdict(result))
        if result.status == "failed":
            failed.append(result)
            plugin.stop = job.first

    plugin = GradingPlugin(
        job.exercise,
        load if job.probe != "only" else _nothing,
        report,
        job.seed,
        trust,
        hidden=job.hidden,
        begin=lambda item: send("begin", name=item.originalname),
        intact=intact,
        collect_only=job.probe == "only",
        collected=lambda names: send("collected", tests=names),
    )
    try:
        status = run_pytest(job.tests, plugin)
    except BaseException:
        plugin.tampered = plugin.tampered or intact()
        if not plugin.tampered:
            raise
        status = 1
    if status > 2 and not plugin.tampered:  # neither passed, nor failed, nor interrupted
        send("crash", reason=f"pytest ended with status {status} on {job.tests.name}")
    if plugin.tampered:
        send("tampered", reason=plugin.tampered)
    elif job.probe == "only" or (job.probe == "failed" and failed and not job.first):
        _probe(job, load, send)
    notes = {"printed": kept.text, "blocked": closed[0][0].blocked if closed else []}
    said = getattr(sys.modules.get(job.tests.stem), "NOTE", "")  # what was left out here, and why
    send("notes", **notes, said=said)
    send("end")


def _probe(job: Job, load: Callable[[], Answer], send: Send) -> None:
    probes = probes_in(sys.modules[job.tests.stem], job.exercise)
    if probes:
        send("begin", name="")
        send("fingerprint", value=fingerprint(probes, load))


def _nothing() -> ModuleType:
    raise RuntimeError("no test runs here")
