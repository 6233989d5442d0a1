"""The two ceilings of a machine, measured in turns with the work that is held against them.

A turn of reading tries several numbers of threads, because the one that multiplies best is not
always the one that reads fastest, and two buffers: one that no cache holds, and one as large as
what the work reads a step, of which a cache may keep a part. The best of all turns is the limit:
whoever reads less fast than that has no excuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minifer.perf import limit
from minifer.perf.devices import Device

TURN_SECONDS = 0.3
READ, PRODUCT = "memory read", "matrix product"


class Ceilings:
    """dtype: of matrix products. step_bytes: what the work reads a step, 0 if not known yet.

    passes: ways to read a buffer besides torch's own, such as the one of the engine that is
    measured: nobody may be faster than the limit.
    """

    def __init__(
        self,
        dtype: str,
        device: str,
        step_bytes: int = 0,
        passes: Sequence[Callable[[Tensor], object]] = (),
    ) -> None:
        threads = torch.get_num_threads()
        self.dtype, self._device, self._passes = dtype, device, passes
        self._here = limit.described(dtype, device, threads)
        self._counts = (threads,) if self._here.num_sms is not None else (1, threads, 2 * threads)
        self._memory = limit.buffer_bytes(self._here)
        self._readers = {"bytes_per_second": limit.reader(self._memory, device, passes)}
        self.expect(step_bytes)

    def expect(self, step_bytes: int) -> None:
        """Read as many bytes as a step does, too, if they are fewer than the large buffer's."""
        name = "same_size_bytes_per_second"
        if name not in self._readers and 4096 <= step_bytes < self._memory:
            self._readers[name] = limit.reader(step_bytes, self._device, self._passes)

    def read(self) -> dict[str, float]:
        """A turn: bytes/s of the large buffer, and of the small one ("same_size_…")."""
        own, share = torch.get_num_threads(), TURN_SECONDS / len(self._counts) / len(self._readers)
        best: dict[str, float] = {}
        try:
            for count in sorted(set(self._counts)):
                if len(self._counts) > 1:
                    torch.set_num_threads(count)
                for name, read in self._readers.items():
                    best[name] = max(best.get(name, 0.0), read(share))
        finally:
            torch.set_num_threads(own)
        best.setdefault("same_size_bytes_per_second", best["bytes_per_second"])
        return best

    def product(self) -> dict[str, float]:
        """A turn: FLOP/s of a matrix product."""
        rate = limit.product_rate(
            self._here, dtype=self.dtype, seconds=TURN_SECONDS, device=self._device
        )
        return {"flops_per_second": rate}

    def device(self, bandwidth: float, flops: float) -> Device:
        """This machine with these rates."""
        return replace(self._here, memory_bandwidth=bandwidth, peak_flops=flops)
