"""Ahead-of-time compilation for GPUs that are not there, and what came out of it.

The triton wheel brings all it takes: ptxas and LLVM's AMD back end to compile, cuobjdump and
nvdisasm to look inside (`machine_code.py`). A process that compiles must have imported triton
without TRITON_INTERPRET, see `mode.py`; `aot_report.py` starts such processes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minifer.kernels import machine_code
from minifer.kernels.machine_code import load_bits

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
        return sum(n for name, n in self.instructions.items() if load_bits(name) >= bits)

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
    row, cubin = build(case, target, kernel, keep)
    return disassembled([(row, cubin)], nvidia_tool("nvdisasm"), keep)[0]


def build(
    case: AotCase, target: str, kernel: str = "", keep: Sequence[str] = ()
) -> tuple[CompiledKernel, bytes]:
    """`compile_case` up to the machine code: the cubin's instructions are not counted yet.

    The cubin is empty where there is none: for AMD, or after an error.
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
        seconds = time.perf_counter() - start
        return replace(row, error=_one_line(error), seconds=seconds), b""
    row = replace(
        row,
        shared_bytes=compiled.metadata.shared,
        seconds=time.perf_counter() - start,
        error=_over_a_limit(compiled.metadata, target),
        asm={kind: compiled.asm[kind] for kind in keep if kind in compiled.asm},
    )
    if target not in NVIDIA:
        return replace(row, **machine_code.amdgcn_facts(compiled.asm["amdgcn"])), b""
    cubin: bytes = compiled.asm["cubin"]
    tool = nvidia_tool("cuobjdump")
    if not tool:
        return replace(row, missing=_MISSING.format("cuobjdump")), cubin
    return replace(row, **machine_code.cubin_resources(tool, cubin)), cubin


def disassembled(
    built: Sequence[tuple[CompiledKernel, bytes]], nvdisasm: str, keep: Sequence[str] = ()
) -> list[CompiledKernel]:
    """The rows with the instructions of their cubins. nvdisasm: the program's path, or ""."""
    rows = [row for row, _ in built]
    for target in NVIDIA:
        places = [i for i, (row, cubin) in enumerate(built) if cubin and row.target == target]
        if not nvdisasm:
            for i in places:
                missing = "; ".join(filter(None, (rows[i].missing, _MISSING.format("nvdisasm"))))
                rows[i] = replace(rows[i], missing=missing)
            continue
        texts = machine_code.disassemble(nvdisasm, target, [built[i][1] for i in places])
        for i, sass in zip(places, texts, strict=True):
            asm = {**rows[i].asm, "sass": sass} if "sass" in keep else rows[i].asm
            rows[i] = replace(rows[i], asm=asm, **machine_code.sass_facts(sass))
    return rows


_MISSING = "{} is not in this triton, so not all could be looked at"


def nvidia_tool(name: str) -> str:
    """The path of a program that the triton wheel brings; "" where it does not."""
    from triton import knobs

    try:
        path: str = getattr(knobs.nvidia, name).path
    except RuntimeError:  # "Cannot find …"
        return ""
    return path


def _compile(case: AotCase, target: str) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from minifer.kernels.compat import COMPILE_OPTIONS, INTERPRETED

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
