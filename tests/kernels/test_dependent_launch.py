"""A product that is launched while the kernel before it still runs loads weights before it waits.

What only the compiler's output shows: compiled for sm_90 in a process without the interpreter.
"""

import json
import os
import re
import subprocess
import sys

import pytest

_COMPILE = """
import importlib, json, sys
from minifer.kernels.aot import compile_case
found = {}
for name in sys.argv[1:]:
    cases = importlib.import_module("minifer.kernels." + name).aot_cases()
    case = next(case for case in cases if "pdl" in case.name)
    compiled = compile_case(case, "sm_90", keep=("ptx",))
    found[name] = [compiled.error, compiled.asm.get("ptx", "")]
print(json.dumps(found))
"""
STEP = re.compile(r"griddepcontrol\.\w+|ld\.global[\w.:]*|cp\.async\.c\w\.[\w.:]+|st\.global")


def steps_of(*kernels):
    """Memory accesses and grid dependencies of each kernel, in program order."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, *kernels], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for name, (error, ptx) in json.loads(done.stdout).items():
        assert error == ""
        yield name, STEP.findall(ptx)


def check(*kernels):
    for name, steps in steps_of(*kernels):
        wait = steps.index("griddepcontrol.wait")
        assert steps[0] == "griddepcontrol.launch_dependents", name
        assert steps.count("griddepcontrol.wait") == 1, name
        before = steps[1:wait]
        assert before and all(s.startswith("ld.global") and ".v4" in s for s in before), name
        assert any(s.startswith(("ld.global", "cp.async")) for s in steps[wait:]), name


def test_gemv_and_small_gemm_load_weights_before_they_wait():
    check("gemv", "gemm_small")


@pytest.mark.slow
def test_fused_products_load_weights_before_they_wait():
    check("norm_gemv", "gate_up", "quantized_gemv")


@pytest.mark.slow
def test_a_tiled_product_waits_before_it_reads():
    (_, steps), *_ = steps_of("gemm")
    assert steps[:2] == ["griddepcontrol.launch_dependents", "griddepcontrol.wait"]


@pytest.mark.slow
def test_an_injection_waits_before_it_reads_even_the_decay():
    """Which is no weight: a kernel before it has just computed it."""
    (_, steps), *_ = steps_of("inject")
    assert steps[:2] == ["griddepcontrol.launch_dependents", "griddepcontrol.wait"]
    assert steps[2].startswith("ld.global")
