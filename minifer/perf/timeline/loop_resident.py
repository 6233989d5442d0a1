"""A loop model's decode step whose core stays on the chip between iterations. A MODEL.

A core of R layers runs T times a token with the same weights. From memory it need come once, if the
L2 cache holds it until the next iteration:

    iteration          0        1        2        …     T − 1
    core, re-read      memory   memory   memory         memory
    core, resident     memory   L2       L2             L2
    prelude, B, readout, coda, head: memory, once, and marked to be evicted first

Whole layers are kept, as many as fit: a cache that is read in a circle larger than itself has
evicted every line before its turn, unless a part is pinned. What is pinned may fill
`RESIDENT_SHARE` of the cache: so much of it can be set aside for persisting accesses (CUDA C++
programming guide, "L2 cache control").

    launches                        our kernels in a CUDA graph, a launch each; the core re-read
    launches, PDL                   with programmatic dependent launch
    launches, PDL, core in L2       the cache outlives a launch: residency needs no megakernel
    megakernel                      one launch, counters, prefetch while waiting; the core re-read
    megakernel, core in L2          … and its instructions find the rows they had before

All are cut alike: an operation into at most one piece an SM, piece i on SM i, which waits for the
whole operation before it. In the megakernel the injection, the norms and RoPE are parts of the
instructions around them. There is no such kernel yet: `backend="megakernel"` refuses loop models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from minifer.config import ModelConfig
from minifer.kernels.mega.schedule import chunks
from minifer.kernels.mega.shapes import kv_splits
from minifer.loops import LoopConfig
from minifer.perf.devices import Device
from minifer.perf.timeline.decode import Assumptions
from minifer.perf.timeline.gantt import Panel
from minifer.perf.timeline.launches import ELEMENTS, Kernel, one_after_another
from minifer.perf.timeline.model import Timeline, simulate

LAUNCHES, LAUNCHES_PDL = "launches", "launches, PDL"
LAUNCHES_RESIDENT = "launches, PDL, core in L2"
MEGAKERNEL, RESIDENT = "megakernel", "megakernel, core in L2"
ARMS = (LAUNCHES, LAUNCHES_PDL, LAUNCHES_RESIDENT, MEGAKERNEL, RESIDENT)
DRAWN = (LAUNCHES_PDL, MEGAKERNEL, RESIDENT)
MODELS = ("parcae-140m", "parcae-370m", "parcae-770m", "parcae-1.3b")  # of `parcae.presets`

# Bytes a second of reads that hit L2: an ASSUMPTION. NVIDIA's white paper on the A100 (2020) gives
# 5,120 bytes a clock, which is 7.2 TB/s at 1.41 GHz, and its users get two thirds of it: 4.83 TB/s
# (forums.developer.nvidia.com/t/198560, unverified). No data sheet has the other chips': these are
# two thirds of as many bytes a clock at the clock in which their peak FLOP/s are reached (1.83,
# 1.83 and 1.86 GHz), the B200 with those of two dies.
L2_BANDWIDTH: Mapping[str, float] = MappingProxyType(
    {"A100-80GB-SXM": 4.8e12, "H100-SXM": 6.2e12, "H200-SXM": 6.2e12, "B200": 12.7e12}
)
RESIDENT_SHARE = 0.75
_ELEMENT = 2  # bytes, bfloat16


@dataclass(frozen=True)
class Cache:
    """What is assumed of the L2 cache. share: the part that may be pinned. bandwidth: bytes/s, None
    for `L2_BANDWIDTH`. latency: of a hit under load, against `Assumptions.latency` of memory; half
    of that, a guess. Raises `ValueError` for numbers out of range."""

    share: float = RESIDENT_SHARE
    bandwidth: float | None = None
    latency: float = 0.35e-6

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be in [0, 1], got {self.share}")
        for name in ("bandwidth", "latency"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")

    def bandwidth_of(self, device: Device) -> float:
        if self.bandwidth is not None:
            return self.bandwidth
        if device.name not in L2_BANDWIDTH:
            raise ValueError(
                f"device must be one of {', '.join(L2_BANDWIDTH)}, whose L2 bandwidth is assumed, "
                f"got {device.name}"
            )
        return L2_BANDWIDTH[device.name]


@dataclass(frozen=True)
class LoopStep:
    """One decode step: every request gets a token of `num_loops` iterations.

    context: S, tokens attended to, in each request. KV policy: full, so every iteration reads keys
    and values of its own. tile: rows of a weight tile. Raises `ValueError` for a model without a
    loop, and for numbers out of range.
    """

    config: ModelConfig
    num_loops: int
    batch: int = 1
    context: int = 512
    tile: int = 16

    def __post_init__(self) -> None:
        for name, most in (("num_loops", None), ("batch", 16), ("context", None), ("tile", None)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
            if most is not None and value > most:
                raise ValueError(f"{name} must be at most {most} for a megakernel, got {value}")
        for name, rows, _ in (*self.products, ("HEAD", self.config.vocab_size, 0)):
            if rows % self.tile:
                raise ValueError(f"tile must divide the {rows} rows of {name}, got {self.tile}")
        if self.config.loop is None:
            raise ValueError("loop must say how many layers each stack has, got None")

    @property
    def loop(self) -> LoopConfig:
        assert self.config.loop is not None  # looked at above
        return self.config.loop

    @property
    def layer_bytes(self) -> float:
        """Of the products of one layer: q, k, v, output, up, down."""
        return float(_ELEMENT * sum(rows * width for _, rows, width in self.products))

    @property
    def core_bytes(self) -> float:
        return self.loop.core * self.layer_bytes

    @property
    def products(self) -> tuple[tuple[str, int, int], ...]:
        """Name, rows and width of each product of a layer, in order."""
        c = self.config
        D, F, heads = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim
        qkv = heads + 2 * c.num_kv_heads * c.head_dim
        return (("QKV", qkv, D), ("OUTPUT", D, heads), ("up", F, D), ("DOWN", D, F))


def resident_layers(step: LoopStep, device: Device, cache: Cache | None = None) -> int:
    """Layers of the core that L2 keeps."""
    share = (cache or Cache()).share
    return min(step.loop.core, int(share * device.on_chip_bytes // step.layer_bytes))


def loop_panel(
    arm: str,
    step: LoopStep,
    device: Device,
    assumptions: Assumptions | None = None,
    cache: Cache | None = None,
) -> Panel:
    """One way to run a step, modelled. Raises `ValueError` for an unknown arm, and for a chip
    without SMs or whose L2 nothing is known of."""
    if arm not in ARMS:
        raise ValueError(f"arm must be one of {', '.join(ARMS)}, got {arm!r}")
    a, cache = assumptions or Assumptions(), cache or Cache()
    options: dict[str, Any] = {"prefetch": a.prefetch}
    if arm == LAUNCHES:
        options = {"gap": a.gap}
    elif arm in (LAUNCHES_PDL, LAUNCHES_RESIDENT):
        options |= {"gap": a.pdl_gap}
    chip = a.machine(
        device,
        cache_bandwidth=cache.bandwidth_of(device),
        cache_program_bandwidth=a.in_flight / cache.latency,
        **options,
    )
    kept = resident_layers(step, device, cache) if arm in (LAUNCHES_RESIDENT, RESIDENT) else 0
    launched = arm in (LAUNCHES, LAUNCHES_PDL, LAUNCHES_RESIDENT)
    kernels = list(operations(step, chip.programs, launched, kept))
    queues = one_after_another(kernels, chip.programs)
    note = f"{len(kernels)} launches"
    if not launched:
        note = f"1 launch of {sum(map(len, queues)):,} instructions"
    if arm in (LAUNCHES_RESIDENT, RESIDENT):
        note += f", {kept} of {step.loop.core} core layers kept"
    return Panel(simulate(queues, chip, arm), chip, note, device.memory_bandwidth)


def weight_bytes(step: LoopStep, kept: int = 0) -> float:
    """Weights that a step reads from memory when the cache keeps so many layers of the core."""
    kernels = operations(step, 1, False, kept)
    return sum(weights for k in kernels if not k.cached for weights, _ in k.blocks)


@dataclass(frozen=True)
class Times:
    """Seconds of a step of 1 and of 2 iterations, and of every further iteration."""

    one: float
    two: float
    more: float

    def seconds(self, num_loops: int) -> float:
        return self.one if num_loops == 1 else self.two + (num_loops - 2) * self.more


@lru_cache(maxsize=1024)
def loop_times(
    arm: str,
    step: LoopStep,
    device: Device,
    assumptions: Assumptions | None = None,
    cache: Cache | None = None,
) -> Times:
    """The steps of all depths from simulations of one iteration and of four: an operation waits
    for the whole one before it, so the third is the second again, and so is every one between the
    first, which finds nothing in the cache, and the last, beside which later weights may come."""
    base = _RE_READ.get(arm)
    if base is not None and resident_layers(step, device, cache) == 0:
        return loop_times(base, step, device, assumptions, cache)
    four = loop_panel(arm, replace(step, num_loops=4), device, assumptions, cache).timeline
    if base is not None:
        one = loop_times(base, step, device, assumptions, cache).one
    else:
        single = replace(step, num_loops=1)
        one = loop_panel(arm, single, device, assumptions, cache).timeline.seconds
    ends = [_end_of_iteration(four, step.loop, i) for i in (1, 2)]
    more = ends[1] - ends[0]
    return Times(one, four.seconds - 2 * more, more)


def _end_of_iteration(timeline: Timeline, loop: LoopConfig, iteration: int) -> float:
    layer = loop.prelude + (iteration + 1) * loop.core - 1
    return max(span.end for span in timeline.spans if span.task[:2] == ("DOWN", layer))


_RE_READ = {LAUNCHES_RESIDENT: LAUNCHES_PDL, RESIDENT: MEGAKERNEL}


def drawn_layers(step: LoopStep, count: int | None = None) -> range:
    """Layers for a picture, from the first of the core on; None: three iterations, 8 at most."""
    first, last = step.loop.prelude, step.loop.prelude + step.num_loops * step.loop.core
    wanted = min(3 * step.loop.core, 8) if count is None else count
    return range(first, min(first + wanted, last))


def operations(step: LoopStep, num_sms: int, launched: bool, kept: int) -> Iterator[Kernel]:
    """The whole step in order. Layers are numbered as they run, core layers T times.

    launched: with kernels of their own for what a megakernel joins to its products. kept: core
    layers that are read from the cache from the second iteration on.
    """
    c, loop, B = step.config, step.loop, step.batch
    D = c.hidden_size
    layer = 0

    def product(name: str, rows: int, width: int, cached: bool = False) -> Kernel:
        pieces = chunks(rows // step.tile, num_sms)
        sizes = [(end - begin) * step.tile * width * float(_ELEMENT) for begin, end in pieces]
        return Kernel(name, layer, [(size, 0.0) for size in sizes], cached)

    def elementwise(name: str, elements: int, moved: float) -> Kernel:
        """moved: bytes read and written, for one of `elements`."""
        count = min(num_sms, -(-B * elements // ELEMENTS))
        return Kernel(name, layer, [(0.0, B * elements * moved / count)] * count)

    def block(cached: bool = False) -> Iterator[Kernel]:
        qkv, output, up, down = (product(*p, cached) for p in step.products)
        yield qkv
        if launched:
            yield elementwise("RoPE", qkv_rows, 2 * _ELEMENT)
        yield from _attention(step, num_sms, layer)
        yield from (output, up, down)

    qkv_rows = step.products[0][1]
    yield Kernel("EMBED", 0, [(float(_ELEMENT * B * D), 0.0)])
    for _ in range(loop.prelude):
        yield from block()
        layer += 1
    yield product("B e", D, D)
    for iteration in range(step.num_loops):
        if launched:  # h, the float32 term, x
            yield elementwise("inject", D, _ELEMENT + 4 + _ELEMENT)
        for i in range(loop.core):
            yield from block(cached=iteration > 0 and i < kept)
            layer += 1
    yield product("readout", D, D)
    for _ in range(loop.coda):
        yield from block()
        layer += 1
    yield product("HEAD", c.vocab_size, D)
    yield Kernel("PICK", 0, [(0.0, 0.0)])


def _attention(step: LoopStep, num_sms: int, layer: int) -> Iterator[Kernel]:
    """Every (request, KV head, split) a piece, and the merge where there are splits."""
    c = step.config
    K, C, G = c.num_kv_heads, c.head_dim, c.num_heads // c.num_kv_heads
    splits = kv_splits(step.context, step.batch, K, num_sms)
    partial = 4.0 * G * (C + 1) if splits > 1 else 0.0  # float32 output and log-sum-exp
    read = step.context / splits * 2 * C * _ELEMENT + partial
    yield Kernel("ATTENTION", layer, [(0.0, read)] * (step.batch * K * splits))
    if splits > 1:
        yield Kernel("MERGE", layer, [(0.0, partial * splits)] * (step.batch * K))
