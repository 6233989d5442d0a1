"""`.ci/gpu` and its report: the plan, the questions, and the whole of a dry run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minifer.perf.bench import Summary, git_state
from minifer.perf.gpu.bandwidth import Bandwidth
from minifer.perf.gpu.cell import Cell
from minifer.perf.gpu.ladder import Ladder, Row, judge
from minifer.perf.gpu.report import (
    ENVIRONMENT,
    KERNELS,
    LADDER,
    QUESTIONS,
    SUMMARY,
    TESTS,
    TRACE,
    answers,
    environment,
    main,
    read,
    summary,
)
from minifer.perf.gpu.rungs import RUNGS

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / ".ci" / "gpu"
MOST_SECONDS = 8 * 60  # what the whole run may take


def bash(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
    )


def test_the_script_is_bash_and_executable() -> None:
    done = bash("-n", str(SCRIPT))
    assert done.returncode == 0, done.stderr
    assert os.access(SCRIPT, os.X_OK)


def test_the_limits_of_the_parts_add_up_to_less_than_8_minutes() -> None:
    done = bash(str(SCRIPT), "--plan")
    assert done.returncode == 0
    listed = done.stdout.partition("limits in seconds:")[2].split()
    limits = dict(zip(listed[1::2], map(int, listed[::2]), strict=True))
    assert list(limits) == [
        "environment", "correctness", "kernels", "ladder", "more-cells", "lectures", "summary",
    ]  # fmt: skip
    grace = 5 * len(limits)  # between the signal to end and the one that ends
    assert sum(limits.values()) + grace < MOST_SECONDS


def test_help_names_the_options_and_an_unknown_one_is_refused() -> None:
    assert {"--dry-run", "--plan", "$OUT"} <= set(bash(str(SCRIPT), "--help").stdout.split())
    done = bash(str(SCRIPT), "--fast")
    assert done.returncode == 2 and "--fast" in done.stderr


def test_paths_begin_where_the_script_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "with spaces"
    folder.mkdir()
    script = os.path.relpath(SCRIPT, folder)
    assert "more-cells" in bash(script, "--plan", cwd=folder).stdout
    (folder / "file").touch()
    done = bash(script, "--dry-run", cwd=folder, OUT="file/results", PYTHON="no/python")
    assert done.returncode == 2
    expected = f"OUT must be a folder that can be written, got {folder}/file/results"
    assert expected in done.stderr
    assert not done.stdout, "nothing ran"


# -- questions


def test_without_a_gpu_every_question_is_open(tmp_path: Path) -> None:
    left_by_a_dry_run(tmp_path)
    assert [answer for _, answer in answers(tmp_path)] == [None] * len(QUESTIONS)
    text = summary(tmp_path)
    assert "## What a GPU would still have to show" in text and "## What this run shows" not in text
    for question in QUESTIONS:
        assert f"- {question.text} (`{question.file}`: {question.entry})" in text


def test_every_question_names_something_that_exists() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    for question in QUESTIONS:
        assert question.file in (TESTS, KERNELS, LADDER, TRACE)
        if question.file == TESTS:
            assert f"def {question.entry.partition('[')[0]}(" in tests
        if question.file == LADDER and "[]" not in question.entry:
            named = [word.split(".")[0] for word in question.entry.split(" ")]
            assert any(name in RUNGS for name in named), question.entry


def test_a_run_on_a_gpu_answers_them(tmp_path: Path) -> None:
    left_by_a_gpu(tmp_path)
    told = {question.text: answer for question, answer in answers(tmp_path)}
    assert None not in told.values(), [text for text, answer in told.items() if answer is None]
    assert told["What does eager PyTorch take?"].startswith("1000.0 µs a step, 62.2%")
    assert "mega-l2 takes 0.500 times mega's" in told["What does a prefetch into L2 save?"]
    head = next(answer for text, answer in told.items() if "LM head" in text)
    assert head == "86.0% of measured copy bandwidth, 85 % reached"
    captured = next(answer for text, answer in told.items() if "cooperative" in text)
    assert captured == "0 of 1 passed"
    text = summary(tmp_path)
    assert "What a GPU would still have to show" not in text
    assert (
        "NVIDIA H200" in text and "- failure: test_a_cooperative_launch_is_captured[cuda]" in text
    )


def test_a_skipped_test_answers_nothing(tmp_path: Path) -> None:
    left_by_a_gpu(tmp_path, outcome="<skipped/>")
    question = next(q for q in QUESTIONS if "cooperative" in q.text)
    assert {q.text: a for q, a in answers(tmp_path)}[question.text] is None


def test_the_commit_of_a_tree_without_a_repository(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert git_state() is None
    monkeypatch.setenv("MINIFER_COMMIT", "abc123")
    assert git_state() == {"commit": "abc123", "modified": None}
    assert git_state(tmp_path) is None  # of another tree it says nothing
    assert main(["environment", str(tmp_path)]) == 0
    assert read(tmp_path, ENVIRONMENT)["git"]["commit"] == "abc123"
    assert main(["summary", str(tmp_path)]) == 0
    assert "Commit abc123" in (tmp_path / SUMMARY).read_text()


def left_by_a_dry_run(folder: Path) -> None:
    """What a CPU leaves: no speed of ours, tests of cuda skipped."""
    Ladder({}, Bandwidth(1e9, 1e9), folder / LADDER, cells=ladder_cells(None)).flush()
    write(folder / KERNELS, {"rows": [kernel_row(None)], "bandwidth": {"copy": 1e9}})
    names = [f"{q.entry.partition('[')[0]}[cpu]" for q in QUESTIONS if q.file == TESTS]
    junit(folder, dict.fromkeys(names, ""))


def left_by_a_gpu(folder: Path, outcome: str = "<failure/>") -> None:
    """All there; the test of the cooperative launch has the given outcome."""
    write(
        folder / ENVIRONMENT,
        environment() | {"gpu": {"name": "NVIDIA H200"}, "git": {"commit": "abc"}},
    )
    ladder = Ladder({}, Bandwidth(4e12, 4e12), folder / LADDER, cells=ladder_cells(1e-3))
    ladder.machine = {**ladder.machine, "accelerator": "NVIDIA H200"}
    ladder.flush()
    write(folder / KERNELS, {"rows": [kernel_row(0.86)], "bandwidth": {"copy": 4e12}})
    write(folder / TRACE, {"traceEvents": [{}] * 3, "otherData": {"measured": True}})
    names = [f"{q.entry.partition('[')[0]}[cuda-x]" for q in QUESTIONS if q.file == TESTS]
    tests = {name: "" for name in names if "cooperative" not in name}
    junit(folder, tests | {"test_a_cooperative_launch_is_captured[cuda]": outcome})


def ladder_cells(seconds: float | None) -> list[dict]:
    """A cell in which every rung takes half the time of the one before it."""
    ladder, cell = Ladder({}, Bandwidth(4e12, 4e12)), Cell("llama-1b", 1, 512)
    entry = ladder.entry(cell)
    moved = entry["weight_bytes"] + entry["kv_bytes"]
    for name, rung in RUNGS.items():
        row = Row(name, rung.change)
        judge(row, 0.1, 0.01, 1.0, None if name == "eager" else 0.01)
        if seconds is not None:
            ladder.time(row, Summary.of([seconds]), "in turns", moved)
            seconds /= 2
        entry["rows"].append(vars(row))
    return ladder.cells


def kernel_row(of_copy: float | None) -> dict:
    from minifer.perf.gpu.kernels import KernelRow

    return vars(KernelRow("gemv head", "ok", bytes=525e6, error=1e-3, of_copy=of_copy))


def junit(folder: Path, outcomes: dict[str, str]) -> None:
    cases = "".join(f'<testcase name="{n}">{o}</testcase>' for n, o in outcomes.items())
    (folder / TESTS).write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")


def write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content))


# -- the whole of it


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there is the run itself")
def test_a_dry_run_exercises_every_part(tmp_path: Path) -> None:
    (tmp_path / LADDER).write_text("left by an older run")
    done = bash(str(SCRIPT), "--dry-run", OUT=str(tmp_path), PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout[-3000:]
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {ENVIRONMENT, TESTS, KERNELS, LADDER, SUMMARY, "log.txt"}
    tests = read(tmp_path, TESTS)
    assert set(tests.values()) <= {"passed", "skipped"} and "passed" in tests.values()
    kernels = read(tmp_path, KERNELS)
    assert {row["status"] for row in kernels["rows"]} == {"ok"}
    ladder = read(tmp_path, LADDER)
    assert [cell["batch"] for cell in ladder["cells"]] == [1, 2]
    first = {row["rung"]: row["status"] for row in ladder["cells"][0]["rows"]}
    assert list(first) == list(RUNGS)
    assert {name for name, status in first.items() if status == "ok"} == {
        name for name, rung in RUNGS.items() if not rung.graph and name != "compile"
    }
    assert all(answer is None for _, answer in answers(tmp_path))
    assert "What a GPU would still have to show" in done.stdout
