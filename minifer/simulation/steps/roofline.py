"""Step times from a data sheet: the roofline's floor, and how near a program comes to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minifer.config import ModelConfig
from minifer.perf.costs import ElementBytes, attended_pairs, step_cost
from minifer.perf.devices import Device
from minifer.simulation.steps.times import Chunk


@dataclass(frozen=True)
class RooflineSteps:
    """fixed + max(FLOPs ÷ (peak · compute_efficiency), bytes ÷ (bandwidth · memory_efficiency)).

    The FLOPs are those of `perf.costs`; the bytes those of weights and KV, which no kernel saves.
    num_devices: share both evenly, and what they say to each other costs nothing: a floor. fixed:
    seconds a step takes whatever it does. element: bytes of a weight, a key or value.

    Raises `ValueError` for an efficiency outside (0, 1], num_devices < 1, fixed < 0, a loop model
    or one with sliding windows.
    """

    config: ModelConfig
    device: Device
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    num_devices: int = 1
    fixed: float = 0.0
    element: ElementBytes = field(default_factory=ElementBytes)
    _prices: _Prices = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("compute_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        if self.num_devices < 1 or not self.fixed >= 0:
            raise ValueError(
                "num_devices must be at least 1 and fixed at least 0, got "
                f"{self.num_devices} and {self.fixed}"
            )
        if any(window is not None for window in self.config.sliding_windows):
            raise ValueError(
                "config must attend to all of its context, got sliding_windows: price its steps "
                "with perf.costs.step_cost"
            )
        object.__setattr__(self, "_prices", _prices(self.config, self.element))

    def seconds(self, chunks: Sequence[Chunk]) -> float:
        tokens = pairs = context = 0
        for query, end in chunks:
            tokens += query
            pairs += attended_pairs(query, end)
            context += end
        p, device = self._prices, self.device
        flops = p.token_flops * tokens + p.row_flops * len(chunks) + p.pair_flops * pairs
        moved = p.weight_bytes + p.token_bytes * tokens + p.context_bytes * context
        compute = flops / (device.peak_flops * self.compute_efficiency)
        memory = moved / (device.memory_bandwidth * self.memory_efficiency)
        return self.fixed + max(compute, memory) / self.num_devices


@dataclass(frozen=True)
class _Prices:
    """A step's cost is linear in tokens, rows of the head, (query, key) pairs and contexts."""

    token_flops: float
    row_flops: float
    pair_flops: float
    weight_bytes: float
    token_bytes: float  # its embedding, and its keys and values written
    context_bytes: float


def _prices(config: ModelConfig, element: ElementBytes) -> _Prices:
    """Solved from four steps, so that `perf.costs` stays the only place that counts."""

    def cost(query: int, context: int, logits: int) -> tuple[float, float]:
        total = step_cost(config, [(query, context)], num_logits=logits, element=element).total()
        return total.flops, total.weight_bytes + total.kv_bytes

    one, longer = cost(1, 1, 1), cost(1, 2, 1)  # one pair and one token of context more
    two, more_logits = cost(2, 2, 1), cost(1, 1, 2)  # against (1, 2): one token, one pair more
    pair_flops, context_bytes = longer[0] - one[0], longer[1] - one[1]
    row_flops = more_logits[0] - one[0]
    token_flops = two[0] - longer[0] - pair_flops
    token_bytes = two[1] - longer[1]
    weight_bytes = one[1] - token_bytes - context_bytes
    return _Prices(token_flops, row_flops, pair_flops, weight_bytes, token_bytes, context_bytes)
