"""What a compiler's output says about itself: registers, spills, and every instruction.

NVIDIA's disassembler needs half a second to start and nothing to work, so the code of many kernels
goes through it at once.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

_INSTRUCTION_BYTES = 16  # of NVIDIA's, since sm_70
_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_AMD_LOAD = re.compile(r"(?:global|buffer)_load_(?:lds_)?[us]?(byte|short|dword)(?:x(\d))?")


# -- NVIDIA


def cubin_resources(cuobjdump: str, cubin: bytes) -> dict[str, Any]:
    """Registers and stack bytes of a thread. cuobjdump: NVIDIA's program, triton brings it."""
    text = _run(cuobjdump, "-res-usage", data=cubin)
    usage = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    return {
        "registers": max(int(registers) for registers, _, _ in usage),
        "stack_bytes": max(int(stack) + int(local) for _, stack, local in usage),
    }


def disassemble(nvdisasm: str, target: str, cubins: Sequence[bytes]) -> list[str]:
    """The instructions of each cubin, one a line; all are for one target, such as "sm_90"."""
    codes = [_cubin_code(cubin) for cubin in cubins]
    if not codes:
        return []
    processor = target.replace("sm_", "SM") + ("" if target == "sm_80" else "a")
    text = _run(nvdisasm, "--binary", processor, data=b"".join(codes))
    lines = [line for line in text.splitlines() if _SASS.search(line)]
    ends = [0]
    for code in codes:
        ends.append(ends[-1] + len(code) // _INSTRUCTION_BYTES)
    if ends[-1] != len(lines):
        raise RuntimeError(f"nvdisasm told {len(lines)} instructions, the code has {ends[-1]}")
    return ["\n".join(lines[start:end]) for start, end in pairwise(ends)]


def _cubin_code(cubin: bytes) -> bytes:
    """All functions of a cubin, which is a 64-bit ELF file: its sections called .text.…"""
    (headers_at,) = struct.unpack_from("<Q", cubin, 0x28)
    header_size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQ", cubin, headers_at + i * header_size) for i in range(count)
    ]
    names_at = headers[names][4]
    return b"".join(
        cubin[offset : offset + size]
        for name, _, _, _, offset, size in headers
        if cubin[names_at + name :].startswith(b".text.")
    )


def sass_facts(sass: str) -> dict[str, Any]:
    """Spills, code bytes and how often each instruction occurs, from what `disassemble` gives."""
    names = _SASS.findall(sass)
    instructions = Counter(map(_sass_name, names))
    return {
        "spills": instructions["STL"] + instructions["LDL"],
        "code_bytes": _INSTRUCTION_BYTES * len(names),
        "instructions": dict(instructions.most_common()),
    }


def _sass_name(name: str) -> str:
    """LDG.E.128.CONSTANT → LDG.128, HGMMA.64x16x16.F32 → HGMMA, LDG.E.U16 → LDG.16."""
    base, *modifiers = name.split(".")
    if base not in ("LDG", "LDGSTS", "STG", "LDS", "STS"):
        return base
    width = next((m for m in modifiers if re.fullmatch(r"[US]?(8|16|64|128|256)", m)), "32")
    return f"{base}.{width.lstrip('US')}"


def _run(program: str, *options: str, data: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(data)
        file.flush()
        done = subprocess.run([program, *options, file.name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{program}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


# -- AMD


def amdgcn_facts(text: str) -> dict[str, Any]:
    """Registers, spills and how often each instruction occurs, from the assembly."""
    numbers = {
        key: int(value)
        for key, value in re.findall(r"^\s+\.(\w+_count|private_\w+_size):\s+(\d+)", text, re.M)
    }
    code = re.search(r"codeLenInByte = (\d+)", text)
    names = re.findall(r"^\t([a-z]+_\w+)", text, re.M)
    instructions = Counter(re.sub(r"_e(32|64)$", "", name) for name in names)
    return {
        "registers": numbers["vgpr_count"],
        "spills": numbers["vgpr_spill_count"],
        "scalar_registers": numbers["sgpr_count"],
        "scalar_spills": numbers["sgpr_spill_count"],
        "stack_bytes": numbers["private_segment_fixed_size"],
        "code_bytes": int(code[1]) if code else None,
        "instructions": dict(instructions.most_common()),
    }


# -- both


def load_bits(name: str) -> int:
    """Width of a load from global memory; 0 for any other instruction."""
    if match := re.fullmatch(r"(?:LDG|LDGSTS)\.(\d+)", name):
        return int(match[1])
    if match := _AMD_LOAD.match(name):
        return {"byte": 8, "short": 16, "dword": 32}[match[1]] * int(match[2] or 1)
    return 0
