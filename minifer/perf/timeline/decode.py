"""What a decode step would take on a chip: timelines of the same step run in seven ways. A MODEL.

    un-fused            a launch an operation, in a CUDA graph
    fused               our fused kernels, a launch each, in a CUDA graph
    fused, PDL          the same with programmatic dependent launch: half the gap, and each kernel's
                        first weights arrive while it waits for the kernel before it
    megakernel, grid    one launch; a barrier of all SMs between two operations
    megakernel          one launch; counters
    … prefetch          the first weights of an instruction arrive while it waits
    … loads ahead       they arrive as soon as those of the instruction before it are there: a warp
                        of its own for loads, as HazyResearch's megakernel has; Triton gives none

`model.py` is the model; `Assumptions` is everything it is told that no data sheet says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from minifer.kernels.mega.isa import DecodeShape
from minifer.kernels.mega.schedule import Schedule, assign, build
from minifer.perf.devices import Device
from minifer.perf.timeline.gantt import Panel
from minifer.perf.timeline.launches import launches
from minifer.perf.timeline.model import (
    IN_FLIGHT,
    LATENCY,
    Machine,
    Task,
    machine,
    simulate,
    tasks,
)

UNFUSED, FUSED, FUSED_PDL = "un-fused", "fused", "fused, PDL"
GRID, COUNTERS = "megakernel, grid barriers", "megakernel"
PREFETCH, AHEAD = "megakernel, prefetch", "megakernel, loads ahead"
ARMS = (UNFUSED, FUSED, FUSED_PDL, GRID, COUNTERS, PREFETCH, AHEAD)
DRAWN = (UNFUSED, FUSED, COUNTERS, PREFETCH, AHEAD)  # in a picture: three would not show why


@dataclass(frozen=True)
class Assumptions:
    """Seconds and bytes.

    overhead: of an instruction, or of a block of a kernel: it starts, fills its pipeline, reduces,
    stores, signals. gap: from the end of a kernel to the start of the next in a CUDA graph;
    HazyResearch report 1.3 µs for an H100 ("Look Ma, No Bubbles!", 2025). pdl_gap: with
    programmatic dependent launch; half of it, a guess. prefetch: weights that may arrive early.
    in_flight, latency: of one SM's loads (guesses, see `model.py`). achievable: the part
    of the data sheet's bandwidth that can be had.
    """

    overhead: float = 1.2e-6
    gap: float = 1.3e-6
    pdl_gap: float = 0.65e-6
    prefetch: float = 64 * 1024
    in_flight: float = IN_FLIGHT
    latency: float = LATENCY
    achievable: float = 1.0

    def machine(self, device: Device, **options: Any) -> Machine:
        """`device`, with this overhead and what one SM can draw."""
        common = {"overhead": self.overhead, "in_flight": self.in_flight, "latency": self.latency}
        return machine(device, achievable=self.achievable, **common, **options)


@lru_cache(maxsize=8)
def megakernel(
    shape: DecodeShape, num_sms: int, policy: str, sync: str = "counters", pieces: int = 1
) -> Schedule:
    """A schedule for `num_sms` programs. pieces: instructions an operation is cut into, an SM."""
    return assign(build(shape, pieces * num_sms), num_sms, policy, sync)


def panel(
    arm: str,
    shape: DecodeShape,
    device: Device,
    context: int,
    assumptions: Assumptions | None = None,
    *,
    policy: str = "list",
    pieces: int = 1,
) -> Panel:
    """One way to run a step, modelled.

    context: S, tokens attended to, in each request. policy, pieces: of the megakernels. Raises
    `ValueError` for an unknown arm, a chip without SMs, and numbers out of range.
    """
    if arm not in ARMS:
        raise ValueError(f"arm must be one of {', '.join(ARMS)}, got {arm!r}")
    for name, value in (("context", context), ("pieces", pieces)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    a = assumptions if assumptions is not None else Assumptions()
    options: dict[str, Any] = {
        UNFUSED: {"gap": a.gap},
        FUSED: {"gap": a.gap},
        FUSED_PDL: {"gap": a.pdl_gap, "prefetch": a.prefetch},
        PREFETCH: {"prefetch": a.prefetch},
        AHEAD: {"prefetch": a.prefetch, "lookahead": True},
    }.get(arm, {})
    chip = a.machine(device, **options)
    queues: Sequence[Sequence[Task]]
    if arm in (UNFUSED, FUSED, FUSED_PDL):
        queues = launches(shape, chip.programs, context, fused=arm != UNFUSED)
        count = 1 + max(task.signal for queue in queues for task in queue)
        note = f"{count} launches"
    else:
        sync = "grid" if arm == GRID else "counters"
        schedule = megakernel(shape, chip.programs, policy, sync, pieces)
        queues = tasks(schedule, context)
        note = f"1 launch of {schedule.num_instructions:,} instructions"
    return Panel(simulate(queues, chip, arm), chip, note, device.memory_bandwidth)


def useful_bytes(shape: DecodeShape, context: int) -> float:
    """What any way has to read: the weights of the products once, and the KV cache. 16-bit."""
    D, C = shape.hidden, shape.head_dim
    layer = D * (shape.qkv_rows + shape.heads * C + 3 * shape.intermediate)
    kv = shape.batch * context * 2 * shape.kv_heads * C
    return 2.0 * (shape.layers * (layer + kv) + D * shape.vocab)
