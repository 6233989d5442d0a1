"""Ahead-of-time compilation for GPUs that are not there, and what came out of it.

The triton wheel brings all it takes: ptxas and LLVM's AMD back end to compile, cuobjdump to look
inside. A process that compiles must have imported triton without TRITON_INTERPRET, see `mode.py`;
`aot_report.py` starts such processes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

NVIDIA = ("sm_80", "sm_90", "sm_100")
TARGETS = (*NVIDIA, "gfx942")

# Bytes of shared memory that a block can have. NVIDIA: "Maximum amount of shared memory per thread
# block" in the table of technical specifications by compute capability, CUDA C++ Programming Guide
# (163 KiB and 227 KiB). gfx942: 64 KiB of LDS a work-group, AMD CDNA 3 ISA reference guide. The
# compiler does not compare: a kernel beyond the limit fails when it is launched.
SHARED_LIMIT: Mapping[str, int] = {
    "sm_80": 166_912,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "gfx942": 65_536,
}
_TENSOR_MEMORY_COLUMNS = 512  # of an SM, sm_100


@dataclass(frozen=True)
class AotCase:
    """One kernel with one configuration, as it would be launched on a GPU.

    signature: argument → "*bf16", "*fp32", "*i32", "i32", "fp32", … in the kernel's order; its
    constexpr arguments stand in `constants` instead. Pointers and the integers in `aligned` are
    promised to be multiples of 16, as the JIT finds out by itself. wide: loads of weights must be
    128 bits wide.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    wide: bool = True
    targets: tuple[str, ...] = TARGETS
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CompiledKernel:
    """What the compiler made of one case for one target; None is not known.

    registers: of a thread (gfx942: VGPRs). spills: instructions that move registers to memory and
    back (gfx942: VGPRs spilled); scalar_*: gfx942's SGPRs. stack_bytes: of a thread.
    instructions: how often each occurs in the code; loads and stores with their width in bits.
    error: why this cannot run; "" where nothing speaks against it. missing: what could not be
    looked at, and why.
    """

    kernel: str
    case: str
    target: str
    num_warps: int = 0
    num_stages: int = 0
    wide: bool = False
    registers: int | None = None
    spills: int | None = None
    stack_bytes: int | None = None
    scalar_registers: int | None = None
    scalar_spills: int | None = None
    shared_bytes: int | None = None
    shared_limit: int | None = None
    code_bytes: int | None = None
    instructions: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    missing: str = ""
    asm: Mapping[str, str] = field(default_factory=dict)

    def loads(self, bits: int = 1) -> int:
        """Instructions that load from global memory, at least so many bits a thread."""
        return sum(n for name, n in self.instructions.items() if _load_bits(name) >= bits)

    @property
    def matrix_instructions(self) -> int:
        """Instructions for tensor cores (gfx942: matrix cores)."""
        return sum(n for name, n in self.instructions.items() if re.search("MMA|mfma", name))


def compile_case(
    case: AotCase, target: str, kernel: str = "", keep: Sequence[str] = ()
) -> CompiledKernel:
    """Compile one case for one target; what fails is told in `error`, never raised.

    keep: texts wanted in `asm`: "ttgir", "llir", "ptx" and "sass", or "amdgcn".
    """
    row = CompiledKernel(
        kernel=kernel or getattr(case.kernel, "__name__", ""),
        case=case.name,
        target=target,
        num_warps=case.num_warps,
        num_stages=case.num_stages,
        wide=case.wide,
        shared_limit=SHARED_LIMIT[target],
    )
    start = time.perf_counter()
    try:
        compiled = _compile(case, target)
    except Exception as error:  # triton's compilers raise what they like
        return replace(row, error=_one_line(error), seconds=time.perf_counter() - start)
    row = replace(row, shared_bytes=compiled.metadata.shared, seconds=time.perf_counter() - start)
    found, texts = _look_inside(compiled, target)
    asm = {kind: text for kind, text in texts.items() if kind in keep}
    return replace(row, error=_over_a_limit(compiled.metadata, target), asm=asm, **found)


def _compile(case: AotCase, target: str) -> Any:
    import triton
    from minifer.kernels.compat import COMPILE_OPTIONS, INTERPRETED
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if INTERPRETED.value:
        raise RuntimeError("triton was imported with TRITON_INTERPRET=1 and compiles nothing")
    names = case.kernel.arg_names
    twice = [name for name in names if (name in case.signature) == (name in case.constants)]
    unknown = [name for name in (*case.signature, *case.constants) if name not in names]
    if twice or unknown:
        raise ValueError(
            f"each argument must be in signature or in constants, got it wrong for {twice}, and "
            f"the kernel does not have {unknown}"
        )
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    pointers = [name for name, kind in signature.items() if kind.startswith("*")]
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, *case.aligned)
    }
    if target in NVIDIA:
        gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    else:
        gpu = GPUTarget("hip", target, 64)
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        **COMPILE_OPTIONS,
        **case.options,
    }
    source = ASTSource(case.kernel, signature, dict(case.constants), attributes)
    return triton.compile(source, target=gpu, options=options)


def _one_line(error: Exception) -> str:
    """What a compiler complains about, without the program it prints around it."""
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip(" ^")] or [""]
    complaint = re.search(r"\berror\s*:\s*(.+)", text)
    where = re.match(r"at (\d+):\d+:$", lines[0])  # of the kernel's source
    return (
        f"{type(error).__name__}: "
        + (f"line {where[1]} of the kernel: " if where else "")
        + (complaint[1] if complaint else lines[-1])
    )


def _over_a_limit(metadata: Any, target: str) -> str:
    if metadata.shared > SHARED_LIMIT[target]:
        return (
            f"asks for {metadata.shared:,} bytes of shared memory a block, {target} has "
            f"{SHARED_LIMIT[target]:,}"
        )
    columns = getattr(metadata, "tmem_size", None) or 0
    if columns > _TENSOR_MEMORY_COLUMNS:
        return f"asks for {columns} columns of tensor memory, an SM has {_TENSOR_MEMORY_COLUMNS}"
    return ""


def _look_inside(compiled: Any, target: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields of `CompiledKernel` that the machine code tells, and all texts."""
    texts = {kind: text for kind, text in compiled.asm.items() if isinstance(text, str)}
    if target not in NVIDIA:
        return read_amdgcn(texts["amdgcn"]), texts
    try:
        dump = _cuobjdump(compiled.asm["cubin"])
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return {"missing": f"cuobjdump, which triton brings: {_one_line(error)}"}, texts
    return read_cuobjdump(dump), {**texts, "sass": dump}


def _cuobjdump(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_cuobjdump(dump: str) -> dict[str, Any]:
    """Registers, stack and instructions from what `cuobjdump -res-usage -sass` prints."""
    usage = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", dump)
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", dump)
    instructions = Counter(map(_sass_name, names))
    return {
        "registers": max(int(registers) for registers, _, _ in usage),
        "stack_bytes": max(int(stack) + int(local) for _, stack, local in usage),
        "spills": instructions["STL"] + instructions["LDL"],
        "code_bytes": 16 * len(names),  # every instruction since sm_70 has 16 bytes
        "instructions": dict(instructions.most_common()),
    }


def _sass_name(name: str) -> str:
    """LDG.E.128.CONSTANT → LDG.128, HGMMA.64x16x16.F32 → HGMMA, LDG.E.U16 → LDG.16."""
    base, *modifiers = name.split(".")
    if base not in ("LDG", "LDGSTS", "STG", "LDS", "STS"):
        return base
    width = next((m for m in modifiers if re.fullmatch(r"[US]?(8|16|64|128|256)", m)), "32")
    return f"{base}.{width.lstrip('US')}"


def read_amdgcn(text: str) -> dict[str, Any]:
    """Registers, spills and instructions from the AMD back end's assembly."""
    numbers = {
        key: int(value)
        for key, value in re.findall(r"^\s+\.(\w+_count|private_\w+_size):\s+(\d+)", text, re.M)
    }
    names = re.findall(r"^\t([a-z]+_\w+)", text, re.M)
    code = re.search(r"codeLenInByte = (\d+)", text)
    return {
        "registers": numbers["vgpr_count"],
        "spills": numbers["vgpr_spill_count"],
        "scalar_registers": numbers["sgpr_count"],
        "scalar_spills": numbers["sgpr_spill_count"],
        "stack_bytes": numbers["private_segment_fixed_size"],
        "code_bytes": int(code[1]) if code else None,
        "instructions": dict(Counter(re.sub(r"_e(32|64)$", "", n) for n in names).most_common()),
    }


def _load_bits(name: str) -> int:
    """Width of a load from global memory; 0 for any other instruction."""
    if match := re.fullmatch(r"(?:LDG|LDGSTS)\.(\d+)", name):
        return int(match[1])
    if match := re.match(
        r"(?:global|buffer)_load_(?:lds_)?([us]?)(byte|short|dword)(?:x(\d))?", name
    ):
        return {"byte": 8, "short": 16, "dword": 32}[match[2]] * int(match[3] or 1)
    return 0
