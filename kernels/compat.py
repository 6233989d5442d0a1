"""The one place that knows Triton versions (3.6 … 3.9) and what its interpreter cannot do.

Measured on 3.6.0, 3.7.1, 3.8.0 and 3.9.0:

- A spin on a plain `tl.load` is deleted by the compiler; a spin on a volatile load stays, but has
  no acquire. So the poll is an atomic add of 0 with acquire, which becomes `ld.acquire`.
- Up to 3.8 no barrier stands before a release atomic: one thread executes it while other warps may
  still be storing. So `signal` puts one there, on every version.
- `tl.atomic_poll` exists from 3.9 on: one thread polls, without a barrier a poll. It compares for
  equality only, so it would need other counters, and what it saves nobody here has measured: it
  is not used.
- For gfx942 a wave does not wait for its own stores before the barrier of `signal`, on any
  version. So kernels that signal compile for AMD, and we do not claim that they run there.
- The interpreter knows no inline assembly and no clock. It truncates float32 to bfloat16 where
  hardware rounds to nearest even, its bfloat16 arithmetic is garbage, and its cast loses
  subnormal numbers: compute in float32, and store through `to_dtype`.

The interpreter is chosen when triton is first imported, see `mode.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

TRITON_VERSION: tuple[int, int] = tuple(map(int, triton.__version__.split(".")[:2]))  # type: ignore[assignment]

# Constants that kernels read: `tl.constexpr`, because a kernel may use no other global.
INTERPRETED = tl.constexpr(isinstance(tl.cdiv, InterpretedFunction))


def _quicken_interpreter() -> None:
    """Triton 3.9's interpreter exchanges all of `triton.language` anew in every call of a device
    function, a millisecond each time. Where it is exchanged already, there is nothing to do."""
    if not (INTERPRETED.value and hasattr(interpreter, "_LangPatchScope")):
        return
    exchange = interpreter._patch_lang

    def once(fn: Any) -> Any:
        seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if seen and not any(tl.core.is_builtin(module.load) for module in seen):
            return interpreter._LangPatchScope()  # nothing to undo
        return exchange(fn)

    interpreter._patch_lang = once


_quicken_interpreter()

# Options that every compilation of ours gives, so that the next version's defaults change nothing.
COMPILE_OPTIONS = {"enable_fp_fusion": True}


def launch_options(num_warps: int, num_stages: int, pdl: bool = False) -> dict[str, object]:
    """Keyword arguments of a kernel's launch; none in the interpreter.

    pdl: programmatic dependent launch, see `launch_dependents`. Raises `ValueError` where the GPU
    has none.
    """
    if INTERPRETED.value:
        return {}
    options: dict[str, object] = {"num_warps": num_warps, "num_stages": num_stages}
    if pdl:
        if torch.version.hip or torch.cuda.get_device_capability() < (9, 0):
            raise ValueError(
                "pdl needs an NVIDIA GPU of compute capability 9.0 or newer, "
                f"this is {torch.cuda.get_device_name()!r}: launch with pdl=False"
            )
        options["launch_pdl"] = True
    return options | COMPILE_OPTIONS


def num_programs_at_once(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of a GPU; 1 in the interpreter."""
    if INTERPRETED.value:
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def to_dtype(x, dtype: tl.constexpr):
    """float32 x → dtype, rounded to nearest even on every machine, the interpreter included."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        kept = tl.where(x == x, rounded, bits | 0x400000) >> 16  # a NaN stays one
        return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)  # its cast loses subnormals
    return x.to(dtype)


@triton.jit
def wait_ge(counter, target, patience):
    """Spin until *counter >= target, then see all that was stored before the signals.

    Counter and target may wrap around at 2³¹, as long as they are less than 2³¹ apart.
    patience: how many polls may still fail; returns what is left of it. 0 means that this wait, or
    one before it, gave up: a program without patience does not wait any more, so a broken
    schedule ends in an error and not in a hang.
    """
    seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while (seen - target < 0) & (patience > 0):
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        patience -= 1
    return patience


@triton.jit
def signal(counter, amount):
    """Publish what this program has stored, and add `amount` to the counter."""
    tl.debug_barrier()  # the release is one thread's: all warps must have stored
    tl.atomic_add(counter, amount, sem="release", scope="gpu")


@triton.jit
def prefetch_l2(pointers):
    """Ask for the cache lines of a tensor of addresses, 128 bytes apart, and do not wait.

    NVIDIA only: gate it with a constexpr. Nothing happens in the interpreter.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def nanoseconds():
    """The GPU's global clock, int64; NVIDIA only. 0 in the interpreter."""
    if INTERPRETED:
        return tl.full([], 0, tl.int64)
    else:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )


@triton.jit
def launch_dependents():
    """Programmatic dependent launch: the next kernel may start. NVIDIA sm_90 and newer."""
    if not INTERPRETED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_launcher():
    """Programmatic dependent launch: wait until the kernel before has finished its stores."""
    if not INTERPRETED:
        tl.extra.cuda.gdc_wait()
