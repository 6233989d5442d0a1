"""One instruction of the megakernel at a time, on random numbers; NaN wherever nobody wrote."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from fakes import tiny_config
from torch import Tensor

from minifer.kernels.compat import wait_ge
from minifer.kernels.mega.isa import Instruction
from minifer.kernels.mega.launch import Megakernel, MegakernelOptions, Tiles, Weights
from minifer.kernels.mega.schedule import Schedule, build
from minifer.kernels.mega.shapes import decode_shape

# No width is a power of two but for the head's, which the cache's rows are made of.
CONFIG = tiny_config(
    vocab_size=80, hidden_size=48, intermediate_size=112, num_heads=6, num_kv_heads=2, head_dim=16
)
D, F, H, K, C, V, L = 48, 112, 6, 2, 16, 80, 2
P, N = 4, 24  # positions of a block, blocks
POSITIONS = {1: [13], 4: [13, 0, 30]}  # by batch; the fourth row is padding


@triton.jit
def wait_alone(counter, out, target, patience):
    tl.store(out, wait_ge(counter, target, patience))


def random_tensor(
    *shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    """Normal numbers · scale."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def weights(dtype: torch.dtype) -> Weights:
    """Norms around 1, matrices that keep the size of what they multiply."""

    def matrix(rows: int, columns: int, seed: int) -> Tensor:
        return random_tensor(rows, columns, seed=seed, dtype=dtype, scale=columns**-0.5)

    def norm(seed: int) -> Tensor:
        return (1 + random_tensor(D, seed=seed, scale=0.1)).to(dtype)

    layers = [
        (
            norm(10 * i),
            matrix((H + 2 * K) * C, D, 10 * i + 1),
            matrix(D, H * C, 10 * i + 2),
            norm(10 * i + 3),
            matrix(2 * F, D, 10 * i + 4),
            matrix(D, F, 10 * i + 5),
        )
        for i in range(L)
    ]
    return Weights(layers, matrix(V, D, 91), norm(92), matrix(V, D, 93))


def rope_table() -> Tensor:
    """[64, C], NaN before and behind it."""
    angles = torch.arange(64)[:, None] * 100.0 ** -(torch.arange(C // 2) / (C // 2))
    table = torch.full((66, C), torch.nan)
    table[1:65] = torch.cat((angles.cos(), angles.sin()), 1)
    return table[1:65]


class Lone:
    """A megakernel that runs `items` only, in one program.

    keys, values: what the caches hold before: numbers where a position lies, NaN elsewhere.
    """

    def __init__(
        self,
        items: Sequence[Instruction],
        batch: int = 1,
        splits: int = 1,
        dtype: torch.dtype = torch.float32,
        options: MegakernelOptions | None = None,
        tiles: Tiles | None = None,
    ) -> None:
        shape = decode_shape(CONFIG, batch, splits)
        self.weights, self.rope, self.positions = weights(dtype), rope_table(), POSITIONS[batch]
        order = torch.randperm(N, generator=torch.Generator().manual_seed(batch)).tolist()
        self.tables = [[order.pop() for _ in range(p // P + 1)] for p in self.positions]
        caches = [torch.full((N, P, K, C), torch.nan, dtype=dtype) for _ in range(2 * L)]
        for i, cache in enumerate(caches):
            for table, position in zip(self.tables, self.positions, strict=True):
                for t in range(position):
                    cache[table[t // P], t % P] = random_tensor(
                        K, C, seed=1000 * i + 100 * table[0] + t, dtype=dtype
                    )
        self.keys, self.values = caches[:L], caches[L:]
        self.machine = Megakernel(
            CONFIG, self.weights, self.keys, self.values, self.rope,
            batch=batch, splits=splits, max_blocks=9, options=options, tiles=tiles, capacity=3,
            schedule=Schedule(shape, (tuple(items),), ("one", "two"), build(shape, 3).head_slots),
        )  # fmt: skip
        self.buffers = self.machine.buffers_by_name()
        for name, buffer in self.buffers.items():
            if buffer.is_floating_point() and not name[1:].isdigit():
                buffer.fill_(torch.nan)
        self.tokens = [17, 4, 79][: len(self.positions)]
        self.machine.set_step(self.tokens, self.positions, self.tables)

    def fill(self, name: str, seed: int) -> Tensor:
        """Random numbers in a buffer; 0 in the row of padding. Returns them as float64."""
        buffer = self.buffers[name]
        buffer.copy_(random_tensor(*buffer.shape, seed=seed))
        buffer[len(self.positions) :] = 0
        return buffer.double()

    def run(self) -> dict[str, Tensor]:
        self.machine.launch()
        self.machine.check()
        return self.buffers

    def context(self, row: int, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [S, K, C] of a request, float64, this step's included."""
        table, S = self.tables[row], self.positions[row] + 1
        at = [(table[t // P], t % P) for t in range(S)]
        blocks, offsets = (torch.tensor(list(x)) for x in zip(*at, strict=True))
        return tuple(c[layer][blocks, offsets].double() for c in (self.keys, self.values))

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG.rms_norm_eps)
        return x * scale * gain.double()


def assert_sum(out: Tensor, exact: Tensor, terms: Tensor) -> None:
    """`out` is the sum `exact` (float64) of numbers whose absolute values add up to `terms`.

    They are at most 112, and each addition is wrong by at most 2⁻²⁴ of what is there so far; then
    comes one rounding to the dtype of `out`.
    """
    assert out.shape == exact.shape
    assert torch.isfinite(out).all()
    allowed = 2.0**-17 * terms + torch.finfo(out.dtype).eps / 2 * exact.abs()
    assert ((out.double() - exact).abs() <= allowed).all()
