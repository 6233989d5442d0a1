"""`minifer kernels report`: what the compiler makes of every kernel, without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifer.cli.parser import add_command
from minifer.kernels.aot import TARGETS

if TYPE_CHECKING:
    from minifer.kernels.aot import CompiledKernel
    from minifer.kernels.aot_report import AotReport


def add(questions: Any) -> None:
    parser = add_command(
        questions,
        "report",
        run,
        summary="registers, spills, shared memory and instructions of every kernel",
        about="Compile every kernel in every configuration, ahead of time and without a GPU, and "
        "say what came out: registers and spills of a thread, shared memory of a block, the "
        "instructions that matter. A kernel that does not compile, or that asks for more shared "
        "memory than the chip gives a block (no compiler says so), is an error, and the exit "
        "status is 1.",
        examples=[
            ("kernels report", "every kernel for sm_90 (H100, H200)"),
            ("kernels report --target sm_80 gfx942", "for A100 and MI300X"),
            ("kernels report --kernel gemv --json gemv.json", "one kernel, and all numbers"),
        ],
        code=[
            ("kernels/aot.py", "one kernel: compile it and read what came out"),
            ("kernels/aot_report.py", "all of them, in processes that compile"),
            ("kernels/registry.py", "which kernels there are"),
        ],
        prog="minifer kernels",
    )
    parser.add_argument(
        "--target",
        nargs="+",
        choices=TARGETS,
        default=["sm_90"],
        metavar="CHIP",
        help=f"{', '.join(TARGETS)} (default: sm_90)",
    )
    parser.add_argument(
        "--kernel",
        nargs="+",
        default=[],
        metavar="NAME",
        help="a kernel such as gemv, or a pattern of kernel and case such as 'gemv bf16*' "
        "(default: all)",
    )
    parser.add_argument("--json", metavar="FILE", help="write every number; -: to standard output")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="compilers at a time (default: 1)"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {arguments.jobs}")
    if arguments.json not in (None, "-") and not Path(arguments.json).absolute().parent.is_dir():
        raise ValueError(f"--json: there is no folder {Path(arguments.json).parent}, make it first")
    from tqdm import tqdm

    from minifer.kernels.aot_report import compile_kernels

    with tqdm(unit="kernel", disable=not sys.stderr.isatty(), leave=False) as bar:
        report = compile_kernels(
            arguments.target,
            arguments.kernel,
            jobs=arguments.jobs,
            progress=lambda row: bar.update(),
        )
    text = json.dumps(report.to_dict(), indent=1, ensure_ascii=False)
    if arguments.json == "-":
        print(text)
    else:
        print(table(report))
        if arguments.json:
            Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    return 1 if report.errors else 0


def table(report: AotReport) -> str:
    """One line a kernel, case and chip; below it what the columns do not say."""
    lines = [_HEADINGS, *(_cells(row) for row in report.kernels)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = _HEADINGS.index("warps")
    text = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    text += ["", f"compiled by triton {report.triton}; registers and spills of a thread (gfx942:"]
    text += ["VGPRs, +: SGPRs), loads: from global memory, those of 128 bits and more / all"]
    for row in report.errors:
        text.append(f"error: {' '.join((row.kernel, row.case, row.target))}: {row.error}")
    text += sorted({f"missing: {row.missing}" for row in report.kernels if row.missing})
    return "\n".join(text)


_HEADINGS = ("kernel", "case", "chip", "warps", "regs", "spills", "shared B", "loads", "mma",
             "code B", "s")  # fmt: skip


def _cells(row: CompiledKernel) -> tuple[str, ...]:
    def number(value: int | None) -> str:
        return "-" if value is None else f"{value:,}"

    spills = number(row.spills) + (f"+{row.scalar_spills}" if row.scalar_spills else "")
    return (
        row.kernel,
        row.case,
        row.target,
        str(row.num_warps),
        number(row.registers),
        spills,
        number(row.shared_bytes) + ("!" if row.error and row.shared_bytes is not None else ""),
        f"{row.loads(128)}/{row.loads()}" if row.instructions else "-",
        number(row.matrix_instructions) if row.instructions else "-",
        number(row.code_bytes),
        f"{row.seconds:.1f}",
    )
