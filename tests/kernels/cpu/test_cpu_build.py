"""Who compiles the CPU step, when, and what happens where that fails.

Each test has a cache folder of its own. Where it matters only whether a compiler ran, the compiler
is a script that counts its calls and makes an empty library at once.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cpu_steps import SIZES, num_threads, product_rows, product_step, signs

from minifer.kernels.cpu import build
from minifer.kernels.cpu.build import CompilerError, find_compiler, load
from minifer.weights.quantized import QuantizedWeight, quantize

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="shell scripts as compilers")

MATRIX = torch.randn(40, 128, generator=torch.Generator().manual_seed(0))
EMPTY = 'extern "C" int minifer_step(const void*, const void*) { return 0; }'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries go. As in a new process, nothing is loaded yet."""
    monkeypatch.setenv("MINIFER_HOME", str(tmp_path / "home"))
    build._once.cache_clear()
    yield tmp_path / "home" / "compiled"
    build._once.cache_clear()


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Fake:
    """A compiler that writes down its calls; of what it is given it makes an empty library."""

    def __init__(self, folder: Path, name: str = "fake-c++") -> None:
        self.log = folder / f"{name}.log"
        real = find_compiler()[0]
        ready = folder / f"{name}.so"
        command = [real, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(ready)]
        subprocess.run(command, input=EMPTY, text=True, check=True)
        self.path = script(
            folder / name,
            f'echo "$@" >> {self.log}\n'
            'while [ $# -gt 0 ]; do [ "$1" = -o ] && out="$2"; shift; done\n'
            f'[ "$out" = /dev/null ] || cp {ready} "$out"',
        )

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def num_compiled(self) -> int:
        """Calls but those that try whether a flag exists."""
        return sum("step.cpp" in call for call in self.calls)


@pytest.fixture
def fake(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake(tmp_path)
    monkeypatch.setenv("CXX", str(made.path))
    return made


def start_anew() -> None:
    build._once.cache_clear()


def test_the_second_start_runs_no_compiler_at_all(home, fake, capfd) -> None:
    load(*SIZES)
    said = capfd.readouterr().err
    assert "compiling the step for this CPU, about" in said and "compiled in" in said
    calls = len(fake.calls)
    start_anew()
    load(*SIZES)
    assert fake.num_compiled == 1 and len(fake.calls) == calls
    assert capfd.readouterr().err == ""
    assert len(list(home.iterdir())) == 1, "one library, and no scratch"


def test_sizes_macros_and_compilers_have_libraries_of_their_own(home, fake, monkeypatch, tmp_path):
    for sizes in (SIZES, (16, 3), (32, 2)):
        load(*sizes)
    load(*SIZES, ("MINIFER_PORTABLE",))
    monkeypatch.setenv("CXX", f"{fake.path} -O1")
    load(*SIZES)
    assert fake.num_compiled == 5
    assert fake.calls[-1].startswith("-O1 ") and "-DMINIFER_HEAD_DIM=16" in fake.calls[-1]
    monkeypatch.setenv("CXX", str(Fake(tmp_path, "other-c++").path))
    load(*SIZES)
    assert len(list(home.iterdir())) == 6


def test_another_source_or_cpu_is_compiled_anew(home, fake, monkeypatch, tmp_path) -> None:
    load(*SIZES)
    monkeypatch.setattr(build, "_cpu", lambda: "another CPU")
    start_anew()
    load(*SIZES)
    for name in (*build._SOURCES, "build.py"):
        (tmp_path / name).write_bytes(Path(build.__file__).with_name(name).read_bytes())
    monkeypatch.setattr(build, "__file__", str(tmp_path / "build.py"))
    start_anew()
    load(*SIZES)
    assert fake.num_compiled == 2, "the same text elsewhere is the same"
    with (tmp_path / "lanes.h").open("a") as file:
        file.write("\n")
    start_anew()
    load(*SIZES)
    assert fake.num_compiled == 3


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied"])
def test_a_damaged_library_is_made_again(home, fake, damage) -> None:
    load(*SIZES)
    (kept,) = home.iterdir()
    whole = kept.read_bytes()
    kept.unlink()  # the file that is loaded stays as it is
    broken = {"cut": whole[: len(whole) // 2], "changed": whole[:-1] + b"?", "emptied": b""}
    kept.write_bytes(broken[damage])
    start_anew()
    load(*SIZES)
    assert fake.num_compiled == 2
    assert [file.read_bytes() for file in home.iterdir()] == [whole]


def test_two_processes_at_once_both_get_theirs(home, fake) -> None:
    program = "from minifer.kernels.cpu.build import load; load(16, 2); print('loaded')"
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=120)[0] for process in running] == ["loaded\n"] * 3
    assert len(list(home.iterdir())) == 1


def test_a_cache_that_cannot_be_written(home, fake, capfd) -> None:
    """A file stands where the folder should be; a folder without permission raises the same."""
    home.parent.mkdir(parents=True)
    home.write_text("in the way")
    load(*SIZES)
    said = capfd.readouterr().err
    assert f"{home} cannot be written, so every start compiles" in said
    start_anew()
    load(*SIZES)
    assert fake.num_compiled == 2
    assert home.read_text() == "in the way"


def test_libraries_that_were_not_used_for_long_go(home, fake) -> None:
    """Of 40 old ones those stay that were used last; to be loaded is to be used."""
    load(*SIZES)
    (mine,) = home.iterdir()
    old = [home / f"step-{number:020}-{number:020}.so" for number in range(40)]
    for age, library in enumerate([*old, mine, home / "notes.txt"]):
        library.touch()
        os.utime(library, (1e9 - age, 1e9 - age))
    start_anew()
    load(*SIZES)  # found, not made: nothing goes
    assert len(list(home.iterdir())) == 42
    load(16, 3)
    kept = set(home.iterdir())
    assert {mine, home / "notes.txt", *old[:30]} < kept
    assert len(kept) == 33, "32 libraries, the new one among them"


def test_what_a_killed_compiler_left_goes_with_a_later_one(home, fake) -> None:
    """Whatever sources it was for."""
    load(*SIZES)
    left = home / ".step.killed.tmp"
    left.mkdir()
    os.utime(left, (1e9, 1e9))
    load(16, 3)
    assert not left.exists()


# -- no compiler, or one that does not work


def test_no_compiler_is_here(home, monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        CompilerError, match=r"no g\+\+, clang\+\+ or c\+\+ is here: install a C\+\+"
    ):
        load(*SIZES)


def test_cxx_names_nothing(home, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++ -m64")
    with pytest.raises(CompilerError, match=r"CXX names '/nowhere/c\+\+ -m64', which is not there"):
        load(*SIZES)


def test_cxx_is_no_command(home, monkeypatch) -> None:
    monkeypatch.setenv("CXX", 'g++ "-O1')
    with pytest.raises(CompilerError, match="CXX cannot be read, got 'g\\+\\+ \"-O1': No closing"):
        load(*SIZES)


def test_windows_is_told_in_a_sentence(monkeypatch) -> None:
    monkeypatch.setattr(build.sys, "platform", "win32")
    with pytest.raises(CompilerError, match="not compiled on Windows"):
        find_compiler()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "echo 'step.cpp:3: note: x'; echo 'step.cpp:9:1: error: too hard' >&2; exit 1",
            "too hard",
        ),
        ("exit 3", "exit status 3"),
        ("exit 0", "exit status 0"),  # and no library
        ("kill -9 $$", "exit status -9"),
    ],
)
def test_a_broken_compiler_says_why_once(home, monkeypatch, tmp_path, body, message) -> None:
    broken = script(tmp_path / "broken-c++", f"echo x >> {tmp_path}/calls\n{body}")
    monkeypatch.setenv("CXX", str(broken))
    for _ in range(2):
        with pytest.raises(CompilerError, match=f"broken-c.. cannot compile the step: .*{message}"):
            load(*SIZES)
        calls = (tmp_path / "calls").read_text()
    assert calls == (tmp_path / "calls").read_text(), "the second engine does not try again"
    assert list(home.iterdir()) == []


def test_a_compiler_that_cannot_be_started(home, monkeypatch, tmp_path) -> None:
    (tmp_path / "c++").write_bytes(b"\x7fELF, but not really")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    with pytest.raises(CompilerError, match="cannot be run"):
        load(*SIZES)


def test_a_library_that_cannot_be_loaded(home, monkeypatch, tmp_path) -> None:
    text = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && out="$2"; shift; done\n'
    bad = script(tmp_path / "bad-c++", text + '[ "$out" = /dev/null ] || echo no library > "$out"')
    monkeypatch.setenv("CXX", str(bad))
    with pytest.raises(CompilerError, match="the compiled step cannot be loaded"):
        load(*SIZES)


# -- what other compilers and machines make of the sources


def without_openmp(tmp_path: Path) -> str:
    """Like Apple's clang: an error for -fopenmp. In a hurry."""
    real = find_compiler()[0]
    refuse = (
        'for x in "$@"; do [ "$x" = -fopenmp ] && { echo "error: unsupported" >&2; exit 1; }; done'
    )
    return str(script(tmp_path / "no-openmp-c++", f'{refuse}\nexec {real} "$@" -O1'))


def test_without_openmp_one_thread_does_it_all(home, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", without_openmp(tmp_path))
    library = load(*SIZES)
    x = signs(9, 128)
    with num_threads(2):
        got = product_step(MATRIX, torch.ones(128), torch.float32, library).logits(product_rows(x))
    torch.testing.assert_close(got, x @ MATRIX.T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_intrinsics_the_numbers_are_the_same(dtype) -> None:
    """Vectors of ±1 are exact in both, so only the order of sums differs: 128 terms, 2⁻²⁴ each."""
    portable = load(*SIZES, ("MINIFER_PORTABLE",))
    weights = [MATRIX.to(dtype), quantize(MATRIX, 4), quantize(MATRIX, 8)]
    for weight in weights:
        steps = [
            product_step(weight, torch.ones(128), dtype, library)
            for library in (portable, load(*SIZES))
        ]
        # More rows would meet codes as weights that are rounded in one build and not in the other.
        for rows in (1, 2, 4) if isinstance(weight, QuantizedWeight) else (1, 2, 4, 9, 30):
            got, expected = (step.logits(product_rows(signs(rows, 128))) for step in steps)
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)


def test_fewer_threads_than_asked_for_do_not_wait_for_the_others() -> None:
    """OMP_THREAD_LIMIT grants one thread where torch believes in four."""
    program = """
import torch
from cpu_steps import product_rows, product_step, signs
torch.set_num_threads(4)
step = product_step(torch.ones(40, 128), torch.ones(128), torch.float32)
print(step.logits(product_rows(torch.ones(6, 128))).sum().item())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ
        | {
            "OMP_THREAD_LIMIT": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == f"{6 * 40 * 128.0}\n", done.stderr
