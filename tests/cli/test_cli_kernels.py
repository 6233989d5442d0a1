"""`minifer kernels report` between the command line and the compilers, which have tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minifer.cli import main
from minifer.kernels import aot_report
from minifer.kernels.aot import CompiledKernel
from minifer.kernels.aot_report import AotReport

Capture = pytest.CaptureFixture[str]
GOOD = CompiledKernel(
    "gemv", "bf16 16x512", "sm_90", 8, 4, True, registers=86, spills=0, stack_bytes=0,
    shared_bytes=52_224, shared_limit=232_448, code_bytes=8_064,
    instructions={"LDGSTS.128": 20, "LDG.32": 5, "HGMMA": 3}, seconds=0.51,
)  # fmt: skip
ON_AMD = CompiledKernel(
    "gemv", "bf16", "gfx942", 8, registers=60, spills=0, scalar_registers=106, scalar_spills=21,
    shared_bytes=70_000, shared_limit=65_536, error="asks for 70,000 bytes",
    instructions={"global_load_dwordx4": 6},
)  # fmt: skip
UNKNOWN = CompiledKernel("mega", "x", "sm_90", 8, shared_bytes=4, missing="nvdisasm is not there")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command asks for; the answer is in "answer"."""
    seen: dict[str, Any] = {"answer": (GOOD,)}

    def compile_kernels(targets: list[str], names: list[str], **rest: Any) -> AotReport:
        for row in seen["answer"]:
            rest.pop("progress", lambda row: None)(row)
        seen.update(targets=targets, names=names, **rest)
        return AotReport("3.9.0", seen["answer"])

    monkeypatch.setattr(aot_report, "compile_kernels", compile_kernels)
    return seen


def test_by_default_all_kernels_are_compiled_for_an_h100(asked: dict[str, Any]) -> None:
    assert main(["kernels", "report"]) == 0
    assert (asked["targets"], asked["names"], asked["jobs"]) == (["sm_90"], [], 1)


def test_options_are_passed_on(asked: dict[str, Any]) -> None:
    words = "kernels report --target sm_80 gfx942 --kernel gemv mega --jobs 2"
    assert main(words.split()) == 0
    assert asked["targets"] == ["sm_80", "gfx942"]
    assert asked["names"] == ["gemv", "mega"] and asked["jobs"] == 2


def test_the_table_has_a_line_for_each_and_the_errors_below(
    asked: dict[str, Any], capsys: Capture
) -> None:
    asked["answer"] = (GOOD, ON_AMD, UNKNOWN)
    assert main(["kernels", "report"]) == 1
    heading, good, on_amd, unknown, _, *notes = capsys.readouterr().out.splitlines()
    assert heading.split()[:6] == ["kernel", "case", "chip", "warps", "regs", "spills"]
    assert " ".join(good.split()) == "gemv bf16 16x512 sm_90 8 86 0 52,224 20/25 3 8,064 0.5"
    assert " ".join(on_amd.split()) == "gemv bf16 gfx942 8 60 0+21 70,000! 6/6 0 - 0.0"
    assert " ".join(unknown.split()) == "mega x sm_90 8 - - 4 - - - 0.0"
    assert "triton 3.9.0" in notes[0]
    assert notes[-2:] == [
        "error: gemv bf16 gfx942: asks for 70,000 bytes",
        "missing: nvdisasm is not there",
    ]


def test_json_holds_every_number(asked: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "report.json"
    assert main(["kernels", "report", "--json", str(file)]) == 0
    assert "gemv" in capsys.readouterr().out  # the table too
    assert main(["kernels", "report", "--json", "-"]) == 0
    report = json.loads(file.read_text())
    assert report == json.loads(capsys.readouterr().out)
    (row,) = report["kernels"]
    assert report["triton"] == "3.9.0" and "asm" not in row
    assert row["registers"] == 86 and row["instructions"]["LDGSTS.128"] == 20


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--target h100", "invalid choice: 'h100'"),
        ("--jobs 0", "--jobs must be at least 1, got 0"),
        ("--json no/such/folder/x.json", "there is no folder no/such/folder"),
    ],
)
def test_bad_usage_is_refused_before_anything_is_compiled(
    options: str, complaint: str, asked: dict[str, Any], capsys: Capture
) -> None:
    assert main(["kernels", "report", *options.split()]) == 2
    assert complaint in capsys.readouterr().err
    assert "targets" not in asked


def test_a_real_kernel_is_compiled_from_an_interpreters_process(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["kernels", "report", "--kernel", "rms_norm*D=576", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["kernels"]
    assert rows and all(row["registers"] > 0 and row["spills"] == 0 for row in rows)


def test_an_unknown_kernel_is_refused_with_those_there_are(capsys: Capture) -> None:
    assert main(["kernels", "report", "--kernel", "gemw"]) == 2
    assert "called gemw is made for sm_90; kernels: rms_norm, " in capsys.readouterr().err
