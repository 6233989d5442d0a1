"""Compile `step.cpp` for this CPU once, and keep the result.

The library is plain C++ without torch's or Python's headers, so one compiler call of a few seconds
makes it. The file it is kept in is named after what it depends on (sources, compiler, CPU, and the
two sizes that are fixed when it is compiled: head_dim and query heads a KV head) and after its own
content, so that a torn file is found out. A process that finds its file runs no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from minifer.weights.atomic import scratch_folder
from minifer.weights.pull import cache_dir

_SOURCES = (
    "step.cpp", "abi.h", "attention.h", "blocks.h", "lanes.h", "panels.h", "read.h", "rows.h",
    "team.h",
)  # fmt: skip
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w")
_SECONDS = 10  # about how long it takes, for the notice
_KEPT = 32  # libraries: enough for every size of model in use, and 10 MB

Compiler = tuple[str, ...]  # a path, and the flags that $CXX may bring along


class CompilerError(RuntimeError):
    """The step could not be compiled here. The text says why in one sentence."""


def find_compiler() -> Compiler:
    """The C++ compiler: $CXX, else g++, clang++ or c++. Raises `CompilerError`."""
    if sys.platform == "win32":
        raise CompilerError("the step is not compiled on Windows (it is under WSL)")
    asked = os.environ.get("CXX", "").strip()
    for name in (asked,) if asked else _COMPILERS:
        try:
            program, *flags = shlex.split(name)
        except ValueError as error:
            raise CompilerError(f"CXX cannot be read, got {asked!r}: {error}") from error
        if (found := shutil.which(program)) is not None:
            return (found, *flags)
    what = f"CXX names {asked!r}, which is not there" if asked else "no g++, clang++ or c++ is here"
    raise CompilerError(f"{what}: install a C++ compiler (such as `apt install g++`)")


def load(head_dim: int, query_group: int, defines: Sequence[str] = ()) -> ctypes.CDLL:
    """The library for these sizes, compiled if it was not yet.

    defines: further macros, such as MINIFER_PORTABLE (no intrinsics). Says on standard error when
    the compiler runs. Raises `CompilerError`; a compiler that failed is not run again.
    """
    macros = (f"MINIFER_HEAD_DIM={head_dim}", f"MINIFER_QUERY_GROUP={query_group}", *defines)
    made = _once(find_compiler(), macros, cache_dir() / "compiled")
    if isinstance(made, CompilerError):
        raise CompilerError(str(made))
    return made


@functools.cache
def _once(compiler: Compiler, macros: tuple[str, ...], folder: Path) -> ctypes.CDLL | CompilerError:
    try:
        library = _library(compiler, macros, folder)
    except CompilerError as error:
        return error
    library.minifer_step.restype = ctypes.c_int
    return library


def _library(compiler: Compiler, macros: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    sources = {name: Path(__file__).with_name(name).read_bytes() for name in _SOURCES}
    name = f"step-{_key(sources, compiler, macros)}"
    for kept in sorted(folder.glob(f"{name}-*.so")):
        with suppress(OSError):
            if kept.stem == f"{name}-{_digest(kept.read_bytes())}":
                library = ctypes.CDLL(str(kept))
                with suppress(OSError):
                    os.utime(kept)  # when it was used last
                return library
        with suppress(OSError):
            kept.unlink()  # torn, or without the libraries it needs
    with ExitStack() as stack:
        try:
            scratch = stack.enter_context(scratch_folder(folder / "step"))
        except OSError as error:
            _say(f"{folder} cannot be written, so every start compiles: {error.strerror}")
            folder = scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for source, text in sources.items():  # what the key is of, whatever happens to the files
            (scratch / source).write_bytes(text)
        made = scratch / "step.so"
        _compile(compiler, macros, made)
        target = folder / f"{name}-{_digest(made.read_bytes())}.so"
        try:
            os.replace(made, target)  # whole, or not at all
            _tidy(folder)
            return ctypes.CDLL(str(target))
        except OSError as error:
            raise CompilerError(f"the compiled step cannot be loaded: {error}") from error


def _tidy(folder: Path) -> None:
    """Keep the `_KEPT` libraries that were used last. A process whose library is removed keeps it
    until it ends, and a later one that wants it compiles it again."""
    used = []
    for library in folder.glob("step-*.so"):
        with suppress(OSError):  # another process was faster
            used.append((library.stat().st_mtime, library))
    for _, library in sorted(used, reverse=True)[_KEPT:]:
        with suppress(OSError):
            library.unlink()


def _compile(compiler: Compiler, macros: Sequence[str], made: Path) -> None:
    _say(f"compiling the step for this CPU, about {_SECONDS} s, once")
    started = time.perf_counter()
    flags = [*_FLAGS, *_native(compiler), *_openmp(compiler), *(f"-D{macro}" for macro in macros)]
    done = _run([*compiler, *flags, str(made.with_name("step.cpp")), "-o", str(made)])
    if done.returncode or not made.is_file():
        lines = (done.stderr or done.stdout).splitlines() or [f"exit status {done.returncode}"]
        said = next((line for line in lines if "error" in line), lines[-1])
        raise CompilerError(f"{compiler[0]} cannot compile the step: {said.strip()[:300]}")
    _say(f"compiled in {time.perf_counter() - started:.1f} s")


def _native(compiler: Compiler) -> list[str]:
    """What lets it use all instructions of this CPU."""
    for flag in ("-march=native", "-mcpu=native"):
        if _compiles(compiler, [flag], ""):
            return [flag]
    return []


def _openmp(compiler: Compiler) -> list[str]:
    """Apple's clang has no OpenMP, another one perhaps no header: then one thread does it all."""
    return ["-fopenmp"] if _compiles(compiler, ["-fopenmp"], "#include <omp.h>\n") else []


def _compiles(compiler: Compiler, flags: Sequence[str], source: str) -> bool:
    command = [*compiler, *_FLAGS, *flags, "-x", "c++", "-", "-o", os.devnull]
    return _run(command, source).returncode == 0


def _run(command: Sequence[str], source: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, input=source, capture_output=True, text=True, errors="replace", timeout=600
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerError(f"the C++ compiler {command[0]} cannot be run: {error}") from error


def _key(sources: Mapping[str, bytes], compiler: Compiler, macros: Sequence[str]) -> str:
    """Of all that decides what the compiler makes. The compiler itself is not asked: it counts as
    another one when its file is another."""
    program = os.stat(compiler[0])
    parts = [*sources.values(), Path(__file__).read_bytes()]
    parts += [flag.encode() for flag in (*compiler, *_FLAGS, *macros, _cpu())]
    parts += [f"{program.st_size} {program.st_mtime_ns}".encode()]
    return _digest(b"".join(len(part).to_bytes(8, "little") + part for part in parts))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def has_matrix_units() -> bool:
    """Does this CPU multiply whole tiles of bfloat16 (Intel's AMX)?"""
    return "amx_bf16" in _cpu().split()


def _cpu() -> str:
    """What -march=native looks at: a cache folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *sorted({x for x in lines if x.startswith(wanted)})])


def _say(what: str) -> None:
    print(f"minifer: {what}", file=sys.stderr, flush=True)
