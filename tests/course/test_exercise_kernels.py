"""The solutions of exercises 11 compile for a GPU, which the interpreter cannot promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minifer.course.block_program import ENGINE

SOLUTIONS = Path(__file__).parents[2] / "solutions"
PROGRAM = """
import ex11_triton_kernels as ex
from minifer.kernels.aot import AotCase, compile_case

half, single, whole = "*fp16", "*fp32", "i32"
cases = [
    AotCase("", ex.rms_norm_kernel, {"X": half, "WEIGHT": half, "OUT": half, "row_stride": whole,
            "D": whole, "eps": "fp32"}, {"WIDTH": 1024}),
    AotCase("", ex.gemv_kernel, {"X": half, "W": half, "OUT": half, "N": whole, "K": whole},
            {"BN": 16, "BK": 64}),
    AotCase("", ex.rope_kernel, {"X": half, "COS": single, "SIN": single, "OUT": half,
            "H": whole, "HALF": whole}, {"PAIRS": 32}),
    AotCase("", ex.flash_kernel, {**dict.fromkeys(("Q", "K", "V", "OUT", "LSE"), single),
            **dict.fromkeys("TSC", whole), "scale": "fp32"},
            {"BM": 16, "BN": 16, "WIDTH": 32, "CAUSAL": True}),
    AotCase("", ex.paged_decode_kernel, {**dict.fromkeys(("Q", "KEYS", "VALUES", "OUT"), half),
            "TABLES": "*i32", "LENGTHS": "*i32", "scale": "fp32",
            **dict.fromkeys(("table_stride", "H", "K", "C", "P"), whole)},
            {"BN": 16, "WIDTH": 64}),
]
for case in cases:
    row = compile_case(case, "sm_90")
    print(row.kernel, row.error or "compiles")
"""


@pytest.mark.skipif(ENGINE == "record", reason="there is no Triton here")
def test_the_solutions_of_exercises_11_compile(tmp_path: Path) -> None:
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(SOLUTIONS), os.environ.get("PYTHONPATH", "")]),
        "MINIFER_GRADING": "1",  # check() in the file does nothing
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 5, done.stderr
    assert all(line.endswith(" compiles") for line in lines), lines
