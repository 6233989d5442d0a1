"""How long `minifer generate` takes to its first token, stage by stage, and what memory it takes.

Every measurement is a fresh process, and the arms take turns (`perf/bench.py`). An arm is a back
end in one state of the caches: warm, with the files out of the page cache, or, for a back end that
compiles, with its compiled step still to be made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minifer.perf.bench import BenchmarkResult, run_benchmark

STAGES = (
    ("interpreter", "Python starts"),
    ("imports", "torch and minifer are imported"),
    ("tokenizer", "configuration and tokenizer are read"),
    ("weights", "weights are read"),
    ("engine", "engine and KV cache are made"),
    ("prefill", "the prompt is computed"),
    ("first_token", "chat template, sampling, text"),
    ("seconds", "to the first text"),
)
_UNITS = {
    **{name: "s" for name, _ in STAGES},
    "cpu_seconds": "s",
    "first_byte": "s",
    "exit": "s",
    "weight_bytes": "B",
    "kv_bytes": "B",
    "kv_pool_bytes": "B",
    "peak_bytes": "B",
    "memory_ratio": "",
}
_TIMEOUT = 600.0


def measure_startup(
    model: Path,
    *,
    prompt: str,
    backends: Sequence[str] = ("torch",),
    cold: bool = False,
    runs: int = 5,
    options: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> BenchmarkResult:
    """Arms "BACKEND", "BACKEND, empty compile cache" (of one that compiles), "BACKEND, files out
    of the page cache" and "BACKEND, command": what a user of `minifer generate` waits.

    model: a folder or .gguf file. options: fields of `EngineConfig`. Raises `RuntimeError` when a
    process fails, with what it said.
    """
    with tempfile.TemporaryDirectory() as scratch:
        arms: dict[str, Callable[[], dict[str, float]]] = {}
        for backend in backends:
            chosen = {**(options or {}), "backend": backend}
            arms[backend] = _arm(model, prompt, chosen)
            if backend == "compiled":
                arms[f"{backend}, empty compile cache"] = _arm(
                    model, prompt, chosen, lambda: {"MINIFER_HOME": tempfile.mkdtemp(dir=scratch)}
                )
            if cold:
                arms[f"{backend}, files out of the page cache"] = _arm(
                    model, prompt, chosen, lambda: drop_from_page_cache(files_of(model))
                )
            arms[f"{backend}, command"] = _command(model, prompt, chosen)
        return run_benchmark("startup", arms, runs=runs, warmup=1, units=_UNITS, settings=settings)


def _arm(
    model: Path,
    prompt: str,
    options: Mapping[str, Any],
    before: Callable[[], Mapping[str, str]] = dict,
) -> Callable[[], dict[str, float]]:
    """before: done before each start; returns environment variables for it."""

    def start() -> dict[str, float]:
        environment = os.environ | dict(before())
        job = {"spawned": time.monotonic(), "model": str(model), "prompt": prompt}
        command = [sys.executable, "-m", "minifer.perf.startup_child"]
        job["options"] = dict(options)
        done = subprocess.run(
            [*command, json.dumps(job)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
        )
        if done.returncode:
            raise RuntimeError(_failure(done.stderr, done.returncode))
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found

    return start


def _command(
    model: Path, prompt: str, options: Mapping[str, Any]
) -> Callable[[], dict[str, float]]:
    """The command itself: seconds to the first byte of its answer, and to its end."""
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "minifer", "generate", prompt, "--model", str(model)]

    def start() -> dict[str, float]:
        started = time.monotonic()
        with subprocess.Popen(
            [*command, "--max-tokens", "1", *given],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            try:
                process.stdout.read(1)
                first = time.monotonic() - started
                process.stdout.read()
                errors = process.stderr.read()
            except BaseException:
                process.kill()  # the block would wait for it
                raise
        if process.returncode:
            raise RuntimeError(_failure(errors, process.returncode))
        return {"first_byte": first, "exit": time.monotonic() - started}

    return start


def _failure(errors: str, code: int) -> str:
    said = errors.strip().splitlines() or ["nothing on standard error"]
    return f"a start of minifer generate failed with status {code}: {said[-1]}"


def files_of(model: Path) -> list[Path]:
    """What a start reads most of: the model's files and torch's libraries."""
    files = [f for f in model.iterdir() if f.is_file()] if model.is_dir() else [model]
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:
        files += [f for f in (Path(torch.origin).parent / "lib").glob("*.so*") if f.is_file()]
    return files


def drop_from_page_cache(files: Sequence[Path]) -> dict[str, str]:
    """Ask the system to forget what it holds of these files. Pages that another process maps
    stay. Raises `RuntimeError` where a system has no such call."""
    if not hasattr(os, "posix_fadvise"):
        raise RuntimeError("the page cache cannot be dropped on this system: leave --cold out")
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return {}


def table(result: BenchmarkResult) -> str:
    """For people: a line a stage, a column an arm, medians with the spread of the total."""
    lines = []
    for arm, metrics in result.arms.items():
        lines.append(arm)
        if "first_byte" in metrics:
            first, end = metrics["first_byte"], metrics["exit"]
            lines.append(f"  {first.median:7.3f} s ± {first.iqr / 2:.3f}  first byte of the answer")
            lines.append(f"  {end.median:7.3f} s ± {end.iqr / 2:.3f}  the process has ended")
            lines.append("")
            continue
        for stage, what in STAGES:
            found = metrics[stage]
            lines.append(f"  {found.median:7.3f} s ± {found.iqr / 2:.3f}  {what}")
        computed = metrics["cpu_seconds"]
        lines.append(f"  {computed.median:7.3f} s ± {computed.iqr / 2:.3f}  computed, on all cores")
        megabytes = {name: metrics[name].median / 1e6 for name in metrics if name.endswith("bytes")}
        held = f"{megabytes['weight_bytes']:.0f} MB weights, {megabytes['kv_bytes']:.0f} MB KV"
        lines.append(f"  {megabytes['kv_pool_bytes']:.0f} MB asked for as KV pool")
        if "memory_ratio" in metrics:
            lines.append(
                f"  {megabytes['peak_bytes']:.0f} MB at most above the imports, "
                f"{metrics['memory_ratio'].median:.2f} × ({held} written)"
            )
        lines.append("")
    return "\n".join([*lines, *result.header()])
