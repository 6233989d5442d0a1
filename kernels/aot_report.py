"""Every kernel compiled for every chip, in processes that do nothing else, and a table of it.

The process that asks may run triton's interpreter, which compiles nothing; so compilers are
processes of their own, without TRITON_INTERPRET. A compiler that dies takes one kernel with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from minifer.kernels.aot import TARGETS, CompiledKernel, build, disassembled, nvidia_tool
from minifer.kernels.registry import KERNELS, cases

Progress = Callable[[CompiledKernel], object]


@dataclass(frozen=True)
class AotReport:
    """kernels: in the order of the registry, the cases, the targets."""

    triton: str
    kernels: tuple[CompiledKernel, ...]

    @property
    def errors(self) -> list[CompiledKernel]:
        return [row for row in self.kernels if row.error]

    def to_dict(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.kernels]
        for row in rows:
            row.pop("asm")
        return {"triton": self.triton, "kernels": rows}


def compile_kernels(
    targets: Sequence[str],
    names: Sequence[str] = (),
    *,
    modules: Mapping[str, str] = KERNELS,
    keep: Sequence[str] = (),
    jobs: int = 1,
    cache_dir: str | None = None,
    progress: Progress = lambda row: None,
) -> AotReport:
    """Compile all cases that have one of the names, for all targets, `jobs` at a time.

    names: names of kernels, or patterns of kernel and case such as "gemv bf16*"; empty: all.
    modules: name → module with `aot_cases()`. keep: see `compile_case`. cache_dir: triton's; None:
    a new one, so that seconds are what compiling takes. progress: called with each row, from any
    thread.
    Raises `ValueError` for an unknown target, or where nothing has one of the names.
    """
    for target in targets:
        if target not in TARGETS:
            raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}")
    job = {"targets": list(targets), "names": list(names), "modules": dict(modules)}
    with tempfile.TemporaryDirectory(prefix="minifer-aot-") as folder:
        job |= {"keep": list(keep), "folder": folder}
        shares = [
            _Share(job | {"part": [part, jobs]}, cache_dir or folder, progress)
            for part in range(jobs)
        ]
        with ThreadPoolExecutor(jobs) as pool:
            rows = [row for part in pool.map(_Share.run, shares) for row in part]
        rows.sort(key=lambda numbered: numbered[0])
        built = [(row, _cubin(folder, number)) for number, row in rows]
    if not rows:
        wanted = f"called {' or '.join(names)}" if names else "at all"
        raise ValueError(
            f"no kernel or case {wanted} is made for {', '.join(targets)}; "
            f"kernels: {', '.join(modules)}"
        )
    kernels = disassembled(built, shares[0].tools["nvdisasm"], keep)
    return AotReport(shares[0].tools["triton"], tuple(kernels))


def _cubin(folder: str, number: int) -> bytes:
    file = Path(folder, f"{number}.cubin")
    return file.read_bytes() if file.exists() else b""


class _Share:
    """What one compiler after the other does, until all of it is done."""

    def __init__(self, job: dict[str, Any], cache_dir: str, progress: Progress) -> None:
        self.job, self.progress = job, progress
        self.tools: dict[str, str] = {}
        # The compiler finds what this process finds, and makes machine code.
        self.environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self.environment |= {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TRITON_CACHE_DIR": cache_dir,
        }

    def run(self) -> list[tuple[int, CompiledKernel]]:
        rows: list[tuple[int, CompiledKernel]] = []
        while not self._run_compiler(rows):
            pass
        return rows

    def _run_compiler(self, rows: list[tuple[int, CompiledKernel]]) -> bool:
        """One process. False: it died in the middle of something, which is now an error."""
        done, begun = len(rows), None
        with tempfile.TemporaryFile("w+") as complaints:
            process = subprocess.Popen(
                [sys.executable, "-m", "minifer.kernels.aot_report"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                env=self.environment,
            )
            try:
                assert process.stdin and process.stdout
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(json.dumps(self.job | {"done": done}))
                    process.stdin.close()
                for message in map(json.loads, process.stdout):
                    if "triton" in message:
                        self.tools = message
                    elif "begin" in message:
                        begun = message["begin"]
                    elif "row" in message and begun is not None:
                        self._finished(rows, begun[0], CompiledKernel(**message["row"]))
                        begun = None
                status = process.wait()
            finally:
                process.kill()
                process.wait()
                if process.stdout:
                    process.stdout.close()
            complaints.seek(0)
            last = "".join(complaints.read().strip().splitlines()[-1:])
        if status == 0:
            return True
        if begun is None:
            raise RuntimeError(f"the compiling process failed: {last or _status(status)}")
        number, kernel, case, target = begun
        error = f"the compiler died ({_status(status)}): {last}"
        self._finished(rows, number, CompiledKernel(kernel, case, target, error=error))
        return False

    def _finished(self, rows: list[tuple[int, CompiledKernel]], number: int, row: CompiledKernel):
        rows.append((number, row))
        self.progress(row)


def _status(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


# -- in the process that compiles


def _compiler(job: Mapping[str, Any], out: IO[str]) -> None:
    """Does part i of n: every n-th piece of work, and of these not the first `done`."""

    def say(**message: Any) -> None:
        print(json.dumps(message), file=out, flush=True)

    import triton

    say(triton=triton.__version__, nvdisasm=nvidia_tool("nvdisasm"))
    part, parts = job["part"]
    for number, work in list(enumerate(_work(job)))[part::parts][job["done"] :]:
        kernel, case, target = work
        name = case if isinstance(case, str) else case.name
        say(begin=[number, kernel, name, target])
        if isinstance(case, str):  # a module that cannot be imported
            row = CompiledKernel(kernel, "", target, error=case)
        else:
            row, cubin = build(case, target, kernel, job["keep"])
            Path(job["folder"], f"{number}.cubin").write_bytes(cubin)
        say(row=asdict(row))


def _work(job: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    names = job["names"]
    for kernel, module in job["modules"].items():
        try:
            found = cases(module)
        except Exception as error:
            if not names or kernel in names:
                yield kernel, f"{module} has no cases: {type(error).__name__}: {error}", ""
            continue
        for case in found:
            if _matches(kernel, case.name, names):
                for target in job["targets"]:
                    if target in case.targets:
                        yield kernel, case, target


def _matches(kernel: str, case: str, names: Sequence[str]) -> bool:
    return not names or any(name == kernel or fnmatch(f"{kernel} {case}", name) for name in names)


if __name__ == "__main__":
    # Compilers print programs when they fail: to the other stream with all that is not ours.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        _compiler(json.load(sys.stdin), answers)
