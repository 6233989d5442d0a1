"""What a run on a GPU must say: where it ran, what it found, and which questions stay open.

`.ci/gpu` calls this file: `python -m minifer.perf.gpu.report environment|summary FOLDER`.
The list of questions is here and nowhere else; each names the file and the entry that answer it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from minifer.perf.bench import git_state, machine, versions

ENVIRONMENT, TESTS, KERNELS, LADDER, TRACE, SUMMARY = (
    "environment.json",
    "correctness.xml",
    "kernels.json",
    "ladder.json",
    "timeline.json",
    "summary.md",
)
_ASKED = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"


def environment() -> dict[str, Any]:
    """Date, commit, versions and device of this run."""
    import torch

    gpu: dict[str, Any] | None = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = {
            "name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "capability": list(torch.cuda.get_device_capability(0)),
            "cuda": torch.version.cuda,
            "nvidia_smi": _nvidia_smi(),
        }
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_state(),
        "versions": versions(),
        "machine": machine(),
        "gpu": gpu,
    }


def _nvidia_smi() -> dict[str, str] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    values = done.stdout.strip().splitlines()[:1]
    if done.returncode != 0 or not values:
        return None
    return dict(zip(_ASKED.split(","), map(str.strip, values[0].split(",")), strict=False))


@dataclass(frozen=True)
class Question:
    """Something only a GPU can answer. entry: where in `file` the answer stands. answer: reads it
    from the file's content; None if it is not there, which a run without a GPU never has."""

    text: str
    file: str
    entry: str
    answer: Callable[[Any], str | None]


Content = Mapping[str, Any]


def _row(ladder: Content, rung: str) -> Content | None:
    """A timed row of the first cell of the ladder."""
    for cell in ladder["cells"][:1]:
        for row in cell["rows"]:
            if row["rung"] == rung and row["seconds"]:
                return dict(row)
    return None


def _speed(rung: str) -> Callable[[Content], str | None]:
    def answer(ladder: Content) -> str | None:
        row = _row(ladder, rung)
        if row is None or ladder["machine"]["accelerator"] is None:
            return None
        of_copy = f"{row['of_copy']:.1%} of measured copy bandwidth"
        return f"{row['seconds']['median'] * 1e6:.1f} µs a step, {of_copy}"

    return answer


def _ratio(rung: str, other: str) -> Callable[[Content], str | None]:
    def answer(ladder: Content) -> str | None:
        a, b = _row(ladder, rung), _row(ladder, other)
        if a is None or b is None or ladder["machine"]["accelerator"] is None:
            return None
        ratio = a["seconds"]["median"] / b["seconds"]["median"]
        return f"{rung} takes {ratio:.3f} times {other}'s time"

    return answer


def _fidelity(ladder: Content) -> str | None:
    if ladder["machine"]["accelerator"] is None:
        return None
    rows = [row for cell in ladder["cells"] for row in cell["rows"] if row["error"]]
    judged = [row for row in rows if row["error"]["fidelity"] is not None]
    passed = sum(row["error"]["fidelity"] for row in judged)
    return f"{passed} of {len(judged)} rungs pass" if judged else None


def _kernel(name: str) -> Callable[[Content], str | None]:
    def answer(kernels: Content) -> str | None:
        for row in kernels["rows"]:
            if row["name"] == name and row["of_copy"] is not None:
                verdict = "reached" if row["of_copy"] >= 0.85 else "missed"
                return f"{row['of_copy']:.1%} of measured copy bandwidth, 85 % {verdict}"
        return None

    return answer


def _test(name: str) -> Callable[[Content], str | None]:
    """Of the tests whose name holds `name` and "cuda": how many passed."""

    def answer(tests: Content) -> str | None:
        found = [outcome for test, outcome in tests.items() if name in test and "cuda" in test]
        ran = [outcome for outcome in found if outcome != "skipped"]
        if not ran:
            return None
        return f"{ran.count('passed')} of {len(ran)} passed"

    return answer


def _trace(trace: Content) -> str | None:
    measured = trace.get("otherData", {}).get("measured")
    return f"{len(trace['traceEvents'])} events" if measured else None


QUESTIONS: tuple[Question, ...] = (
    Question(
        "Do the compiled kernels compute what their references compute?",
        TESTS,
        "test_kernel_equals_its_reference[cuda-…]",
        _test("test_kernel_equals_its_reference"),
    ),
    Question(
        "Does the engine give torch's greedy text on backend=triton and megakernel?",
        TESTS,
        "test_greedy_text_equals_torch[cuda-…]",
        _test("test_greedy_text_equals_torch"),
    ),
    Question(
        "Does the megakernel survive many steps on all multiprocessors, with every kind of wait?",
        TESTS,
        "test_many_steps_on_a_full_grid[cuda-…]",
        _test("test_many_steps_on_a_full_grid"),
    ),
    Question(
        "Can a cooperative launch be captured in a CUDA graph?",
        TESTS,
        "test_a_cooperative_launch_is_captured[cuda]",
        _test("test_a_cooperative_launch_is_captured"),
    ),
    Question(
        "Does a broken schedule raise instead of hanging?",
        TESTS,
        "test_a_broken_schedule_raises[cuda]",
        _test("test_a_broken_schedule_raises"),
    ),
    Question(
        "Does GEMV reach 85 % of the measured copy bandwidth on the LM head?",
        KERNELS,
        'rows[name="gemv head"].of_copy',
        _kernel("gemv head"),
    ),
    Question("What does eager PyTorch take?", LADDER, "eager.seconds", _speed("eager")),
    Question(
        "What does a launch cost: eager against CUDA graphs?",
        LADDER,
        "reduce-overhead ÷ eager",
        _ratio("reduce-overhead", "eager"),
    ),
    Question(
        "What do our kernels in a CUDA graph reach?",
        LADDER,
        "triton-graph.of_copy",
        _speed("triton-graph"),
    ),
    Question(
        "What does programmatic dependent launch save?",
        LADDER,
        "triton-pdl ÷ triton-graph",
        _ratio("triton-pdl", "triton-graph"),
    ),
    Question(
        "What do counters save over a barrier of the whole grid?",
        LADDER,
        "mega ÷ mega-grid",
        _ratio("mega", "mega-grid"),
    ),
    Question(
        "What does a prefetch into L2 save?",
        LADDER,
        "mega-l2 ÷ mega",
        _ratio("mega-l2", "mega"),
    ),
    Question(
        "What does a first tile in registers save?",
        LADDER,
        "mega-registers ÷ mega-l2",
        _ratio("mega-registers", "mega-l2"),
    ),
    Question(
        "What do counters without a memset save?",
        LADDER,
        "mega-epoch ÷ mega-registers",
        _ratio("mega-epoch", "mega-registers"),
    ),
    Question(
        "Is the megakernel within 10 % of the same kernels in a graph with dependent launch?",
        LADDER,
        "mega-epoch ÷ triton-pdl ≤ 1.1",
        _ratio("mega-epoch", "triton-pdl"),
    ),
    Question(
        "Is every rung's error against float32 no worse than eager bfloat16's?",
        LADDER,
        "cells[].rows[].error.fidelity",
        _fidelity,
    ),
    Question(
        "Where does the time inside the megakernel go?",
        TRACE,
        "traceEvents",
        _trace,
    ),
)


def read(folder: Path, file: str) -> Any:
    """A result's content, None where the run left none: a JSON file, or test name → outcome."""
    path = folder / file
    if not path.exists():
        return None
    if path.suffix != ".xml":
        return json.loads(path.read_text(encoding="utf-8"))
    outcomes = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        bad = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
        outcomes[str(case.get("name"))] = bad[0] if bad else "passed"
    return outcomes


def answers(folder: Path) -> list[tuple[Question, str | None]]:
    """Every question, with its answer or None while it is open."""
    contents = {q.file: read(folder, q.file) for q in QUESTIONS}
    return [
        (q, None if contents[q.file] is None else q.answer(contents[q.file])) for q in QUESTIONS
    ]


def summary(folder: Path) -> str:
    """Markdown: where, the tests, the answers, the open questions, and the tables."""
    where = read(folder, ENVIRONMENT) or environment()
    names = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    device = where["gpu"]["name"] if where["gpu"] else f"no GPU ({where['machine']['cpu']})"
    commit = (where["git"] or {}).get("commit") or "unknown"
    lines = [f"# {device}, {where['started']}", "", f"Commit {commit}; {names}.", ""]
    tests = read(folder, TESTS)
    if tests is not None:
        counts = {outcome: list(tests.values()).count(outcome) for outcome in tests.values()}
        lines += ["Tests: " + ", ".join(f"{n} {o}" for o, n in sorted(counts.items())) + "."]
        lines += [f"- {kind}: {t}" for t, kind in tests.items() if kind in ("failure", "error")]
    judged = answers(folder)
    told = [f"- {q.text} **{a}** (`{q.file}`: {q.entry})" for q, a in judged if a is not None]
    if told:
        lines += ["", "## What this run shows", "", *told]
    still = [f"- {q.text} (`{q.file}`: {q.entry})" for q, a in judged if a is None]
    if still:
        lines += ["", "## What a GPU would still have to show", "", *still]
    return "\n".join([*lines, *_tables(folder), ""])


def _tables(folder: Path) -> list[str]:
    from minifer.perf.gpu.bandwidth import Bandwidth
    from minifer.perf.gpu.ladder import Ladder, table

    content, lines = read(folder, LADDER), []
    if content is not None:
        speeds = {key: content["bandwidth"][key] for key in ("copy", "read")}
        ladder = Ladder(content["settings"], Bandwidth(**speeds), cells=content["cells"])
        lines += ["", "## The ladder", "", "```", table(ladder), "```"]
    kernels = read(folder, KERNELS)
    if kernels is not None:
        from minifer.perf.gpu.kernels import table as kernel_table

        lines += ["", "## Kernels", "", "```", kernel_table(kernels), "```"]
    return lines


def main(arguments: Sequence[str]) -> int:
    what, folder = arguments[0], Path(arguments[1])
    if what == "environment":
        text = json.dumps(environment(), indent=2, ensure_ascii=False)
        (folder / ENVIRONMENT).write_text(text + "\n", encoding="utf-8")
        print(text)
    elif what == "summary":
        text = summary(folder)
        (folder / SUMMARY).write_text(text, encoding="utf-8")
        print(text)
    else:
        raise SystemExit(f"environment or summary, got {what!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
