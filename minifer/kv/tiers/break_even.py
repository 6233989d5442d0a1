"""Load or recompute? Loading wins when it is over before the tokens would be computed.

A token's KV is kv_bytes long and takes 1 / speed seconds to compute, so a tier pays off above the
bandwidth ``B_min = kv_bytes · speed``. The faster the machine computes, the faster its disks have
to be. Modelled with the equation below: 4 GB/s for Llama 3 8B at half of an H200's peak (8,000
tokens), 0.02 GB/s for SmolLM2 in float32 on a CPU of 100 GFLOP/s (1,000 tokens).
"""

from __future__ import annotations

# Bytes a second assumed of a tier nobody has measured yet: a modest memory, a slow disk.
PRIOR_BANDWIDTH = {"dram": 1e9, "disk": 1e8}
_DECAY = 0.9  # weight of the past, an observation


def break_even_bandwidth(kv_bytes: float, seconds: float) -> float:
    """Bytes a second above which loading `kv_bytes` beats computing them in `seconds`."""
    return kv_bytes / seconds


def mooncake_break_even(
    flops: float,
    hidden_size: int,
    query_group: int,
    prefix: int,
    *,
    element_bytes: int = 2,
    a: int = 4,
    b: int = 22,
) -> float:
    """The same from a model's shape: Mooncake's equation 2 (FAST 2025, arXiv 2407.00079).

    flops: a second, of all chips. hidden_size: D. query_group: query heads a KV head, H / K.
    prefix: tokens that are loaded. a·prefix·D + b·D² are the FLOPs of a token in a layer, attention
    and matrices; 2·D·element_bytes / query_group its bytes. Returns bytes a second.
    """
    work = a * prefix * hidden_size + b * hidden_size**2
    return 2 * hidden_size * element_bytes * flops / (query_group * work)


class Rate:
    """Something a second, from what was seen: a ratio of two sums that forget slowly.

    Weighted by duration, so that a hundred short observations do not outvote one long one.
    """

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        if amount > 0 and seconds > 0:
            self._amount = _DECAY * self._amount + amount
            self._seconds = _DECAY * self._seconds + seconds

    @property
    def value(self) -> float | None:
        """None before the first observation."""
        return self._amount / self._seconds if self._seconds else None


class BreakEven:
    """Decides with measured numbers; what is not measured yet is assumed.

    kv_bytes_per_token: of one token in all layers. Until a prefill has been timed, loading is
    assumed to win. A tier that keeps losing is tried again every `RETRY` refusals: its numbers may
    be those of a bad moment.
    """

    RETRY = 32

    def __init__(self, kv_bytes_per_token: float) -> None:
        self._bytes_per_token = kv_bytes_per_token
        self.prefill = Rate()  # tokens a second
        self.bandwidth = {tier: Rate() for tier in PRIOR_BANDWIDTH}  # bytes a second
        self.refusals = dict.fromkeys(PRIOR_BANDWIDTH, 0)  # at admissions, one after the other

    @property
    def min_bandwidth(self) -> float | None:
        """B_min in bytes a second, None before a prefill was timed."""
        speed = self.prefill.value
        return None if speed is None else break_even_bandwidth(self._bytes_per_token, 1 / speed)

    def wins(self, tier: str, num_tokens: int, backlog_bytes: float = 0.0) -> bool:
        """Is loading `num_tokens` tokens faster, with `backlog_bytes` to be read before them?"""
        speed = self.prefill.value
        if speed is None or self.refusals[tier] >= self.RETRY:
            return True
        bandwidth = self.bandwidth[tier].value or PRIOR_BANDWIDTH[tier]
        to_read = num_tokens * self._bytes_per_token + backlog_bytes
        return to_read / bandwidth < num_tokens / speed

    def admitted(self, tier: str, loaded: bool) -> None:
        """A request was admitted for which this tier had tokens: were they loaded?"""
        self.refusals[tier] = 0 if loaded else self.refusals[tier] + 1
