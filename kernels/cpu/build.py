"""Compile `step.cpp` for this CPU once, and keep the result.

The library is plain C++ without torch's or Python's headers, so one compiler call of a few seconds
makes it. What it depends on names the file it is kept in: sources, flags, compiler, CPU, and the
two sizes that are fixed when it is compiled (head_dim and query heads a KV head).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from minifer.weights.atomic import scratch_folder
from minifer.weights.pull import cache_dir

_SOURCES = ("step.cpp", "attention.h", "panels.h", "lanes.h", "team.h")
_COMPILERS = ("g++", "clang++", "c++")
_SECONDS = 10  # about how long it takes, for the notice


class CompilerError(RuntimeError):
    """The step could not be compiled here. The text says why in one sentence."""


def find_compiler() -> str:
    """Path of the C++ compiler: $CXX, else g++, clang++ or c++. Raises `CompilerError`."""
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else _COMPILERS:
        if (found := shutil.which(name)) is not None:
            return found
    what = f"CXX names {asked!r}, which is not there" if asked else "no g++, clang++ or c++ is here"
    raise CompilerError(f"{what}: install a C++ compiler (such as `apt install g++`)")


@functools.cache
def load(head_dim: int, query_group: int, defines: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library for these sizes, compiled if it was not yet.

    defines: further macros, such as MINIFER_PORTABLE (no intrinsics). Says on standard error when
    the compiler runs. Raises `CompilerError`.
    """
    macros = (f"MINIFER_HEAD_DIM={head_dim}", f"MINIFER_QUERY_GROUP={query_group}", *defines)
    compiler = find_compiler()
    flags = [*_flags(compiler), *(f"-D{macro}" for macro in macros)]
    target = cache_dir() / "compiled" / f"step-{_digest(compiler, flags)}.so"
    if not target.is_file():
        _compile(compiler, flags, target)
    try:
        library = ctypes.CDLL(str(target))
    except OSError as error:
        target.unlink(missing_ok=True)  # whatever it is, the next process makes it anew
        raise CompilerError(f"the compiled step cannot be loaded: {error}") from error
    library.minifer_step.restype = None
    return library


def _flags(compiler: str) -> list[str]:
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    flags = ["-std=c++17", "-O3", native, "-fPIC", "-shared", "-w"]
    return [*flags, "-fopenmp"] if _compiles(compiler, (*flags, "-fopenmp")) else flags


@functools.cache
def _compiles(compiler: str, flags: Sequence[str]) -> bool:
    """Does an empty library compile and link? Apple's clang has no OpenMP."""
    command = [compiler, *flags, "-x", "c++", "-", "-o", os.devnull]
    try:
        done = subprocess.run(command, input="", text=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerError(f"the C++ compiler {compiler} cannot be run: {error}") from error
    return done.returncode == 0


def _digest(compiler: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=60).stdout
    for part in (version, " ".join(flags).encode(), _cpu().encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:20]


def _cpu() -> str:
    """What -march=native looks at: a cache folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, flags: Sequence[str], target: Path) -> None:
    print(
        f"minifer: compiling the step for this CPU, about {_SECONDS} s, once",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    started = time.perf_counter()
    with scratch_folder(target) as folder:
        made = folder / target.name
        source = Path(__file__).with_name("step.cpp")
        command = [compiler, *flags, str(source), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.SubprocessError) as error:
            raise CompilerError(f"the C++ compiler {compiler} cannot be run: {error}") from error
        if done.returncode:
            said = next((x for x in done.stderr.splitlines() if "error" in x), done.stderr[:200])
            raise CompilerError(f"{compiler} cannot compile the step: {said.strip()}")
        os.replace(made, target)  # whole, or not at all
    print(
        f"minifer: compiled in {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True
    )
