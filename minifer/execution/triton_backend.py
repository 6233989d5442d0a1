"""The back end of our own kernels: compiled on a GPU, in Triton's interpreter on a CPU."""

from __future__ import annotations

from minifer.execution.backend import TorchBackend
from minifer.kernels.mode import prepare


class TritonBackend(TorchBackend):
    """Every operation of `Backend` as a kernel of `minifer.kernels`."""

    name = "triton"

    def __init__(self, device: str) -> None:
        prepare(device)
