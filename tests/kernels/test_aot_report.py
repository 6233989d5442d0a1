"""How ahead-of-time compilation tells what came out, good or bad."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from minifer.kernels import aot, registry
from minifer.kernels.aot import SHARED_LIMIT, CompiledKernel, compile_case
from minifer.kernels.aot_report import compile_kernels
from minifer.kernels.machine_code import amdgcn_facts, disassemble, load_bits, sass_facts

KERNELS_FOLDER = Path(aot.__file__).parent
EXAMPLES = {"examples": "aot_examples", "nowhere": "no_such_module"}
SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R4.64] ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR4][R4.64] ;
        /*0030*/             @!UP1 LDG.E.U16 R2, desc[UR4][R4.64] ;
        /*0040*/                   LDG.E R2, desc[UR4][R4.64] ;
        /*0050*/                   STL.64 [R1], R2 ;
        /*0060*/                   LDL R2, [R1] ;
        /*0070*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0080*/               @P0 BRA 0x80;
"""
AMDGCN = """
	global_load_dwordx4 v[2:5], v10, s[10:11]
	buffer_load_ushort v11, v11, s[0:3], 0 offen
	v_mfma_f32_16x16x16_bf16 a[0:3], v[2:3], v[4:5], 0
	v_add_f32_e32 v1, v2, v3
; codeLenInByte = 420
    .private_segment_fixed_size: 24
    .sgpr_count:     106
    .sgpr_spill_count: 21
    .vgpr_count:     161
    .vgpr_spill_count: 3
"""


@pytest.fixture(scope="module")
def examples() -> dict[tuple[str, str], CompiledKernel]:
    seen: list[CompiledKernel] = []
    report = compile_kernels(["sm_90", "gfx942"], modules=EXAMPLES, keep=["sass", "amdgcn"],
                             progress=seen.append)  # fmt: skip
    assert sorted(row.case for row in seen) == sorted(row.case for row in report.kernels)
    assert len(report.kernels) == 2 * 5 + 3
    json.dumps(report.to_dict())
    return {(row.case, row.target): row for row in report.kernels}


def test_what_compiles_is_described(examples) -> None:
    well = examples["well", "sm_90"]
    assert (well.error, well.missing, well.kernel) == ("", "", "examples")
    assert 8 <= well.registers <= 32 and well.spills == well.stack_bytes == 0
    assert well.instructions["LDG.128"] == well.instructions["STG.128"] == 1
    assert well.loads() == well.loads(128) == 1 and well.matrix_instructions == 0
    assert well.code_bytes % 128 == 0 and well.shared_bytes == 0
    assert "LDG.E.128" in well.asm["sass"] and "EXIT" in well.asm["sass"]
    on_amd = examples["well", "gfx942"]
    assert on_amd.error == "" and on_amd.registers >= 2 and on_amd.scalar_spills == 0
    assert on_amd.loads() == on_amd.loads(64) == 1  # 8 bf16 for 128 threads, 4 for 256
    narrow = examples["narrow", "sm_90"]
    assert narrow.loads() == 1 and narrow.loads(16) == 0


def test_shared_memory_beyond_the_chip_is_an_error_though_it_compiles(examples) -> None:
    """A stage keeps 2 · 128 · 128 bf16 = 64 KiB."""
    fits, not_fits = examples["tiles", "sm_90"], examples["too many tiles", "sm_90"]
    assert fits.error == "" and fits.matrix_instructions > 0
    assert fits.shared_bytes <= SHARED_LIMIT["sm_90"] < not_fits.shared_bytes
    assert not_fits.error == (
        f"asks for {not_fits.shared_bytes:,} bytes of shared memory a block, sm_90 has 232,448"
    )
    assert not_fits.registers and not_fits.instructions  # all the rest is told too
    assert "shared memory a block, gfx942 has 65,536" in examples["tiles", "gfx942"].error


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_what_does_not_compile_says_why(examples, target: str) -> None:
    broken = examples["no such statement", target]
    assert "Break" in broken.error and "line 3 of the kernel" in broken.error
    assert broken.registers is None and not broken.instructions
    assert "['OUT']" in examples["an argument too few", target].error


def test_a_compiler_that_dies_takes_one_kernel_with_it(examples) -> None:
    assert "the compiler died (SIGABRT)" in examples["kills its compiler", "sm_90"].error
    assert examples["narrow", "sm_90"].error == ""  # comes after it


def test_a_module_that_does_not_import_is_an_error_of_its_own(examples) -> None:
    (row,) = (row for (case, _), row in examples.items() if case == "")
    assert row.kernel == "nowhere" and "No module named 'no_such_module'" in row.error


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sm_90, sm_100, gfx942, got 'sm_1'"):
        compile_kernels(["sm_1"])
    with pytest.raises(ValueError, match=r"called nothing is made for sm_90; kernels: examples"):
        compile_kernels(["sm_90"], ["nothing"], modules={"examples": "aot_examples"})


def test_the_interpreters_process_compiles_nothing_and_says_so() -> None:
    case = importlib.import_module("aot_examples").aot_cases()[0]
    assert "TRITON_INTERPRET=1" in compile_case(case, "sm_90").error


def test_instructions_are_counted_with_the_width_of_loads() -> None:
    facts = sass_facts(SASS)
    assert facts["code_bytes"] == 9 * 16 and facts["spills"] == 2
    assert facts["instructions"] == {
        "LDC": 1, "LDG.128": 1, "LDGSTS.128": 1, "LDG.16": 1, "LDG.32": 1, "STL": 1, "LDL": 1,
        "HGMMA": 1, "BRA": 1,
    }  # fmt: skip
    row = CompiledKernel("k", "c", "sm_90", instructions=facts["instructions"])
    assert (row.loads(), row.loads(128), row.matrix_instructions) == (4, 2, 1)


def test_amds_assembly_is_read() -> None:
    facts = amdgcn_facts(AMDGCN)
    instructions = facts.pop("instructions")
    assert facts == {"registers": 161, "spills": 3, "scalar_registers": 106, "scalar_spills": 21,
                     "stack_bytes": 24, "code_bytes": 420}  # fmt: skip
    assert instructions["v_add_f32"] == 1
    row = CompiledKernel("k", "c", "gfx942", instructions=instructions)
    assert (row.loads(), row.loads(128), row.matrix_instructions) == (2, 1, 1)
    assert [load_bits(name) for name in ("global_load_lds_dword", "ds_read_b128")] == [32, 0]


def test_without_kernels_the_disassembler_is_not_started() -> None:
    assert disassemble("/no/such/program", "sm_90", []) == []


def test_a_triton_without_the_tools_says_what_is_missing() -> None:
    built = [(CompiledKernel("k", "c", "sm_90", registers=9), b"code")]
    (row,) = aot.disassembled(built, nvdisasm="")
    assert "nvdisasm is not in this triton" in row.missing
    assert row.registers == 9 and row.spills is None


def test_every_module_with_cases_is_in_the_registry() -> None:
    found = {
        "minifer.kernels." + ".".join(file.relative_to(KERNELS_FOLDER).with_suffix("").parts)
        for file in KERNELS_FOLDER.rglob("*.py")
        if "\ndef aot_cases(" in file.read_text(encoding="utf-8")
    }
    assert found == set(registry.KERNELS.values())
