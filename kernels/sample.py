"""From logits to one token a row: temperature, top-k, top-p and the draw, in one launch.

    x = (logits − max) / temperature       top-k: the k largest       top-p: the likeliest of them
    token = argmax(x − log q),  q ~ Exp(1) of (seed, output index, token id)

The draw is a race that the likely win more often: the first of exponential times with rates exp(x)
(the Gumbel-max trick in other words: Maddison, Tarlow, Minka, https://arxiv.org/abs/1411.0030). The
noise is Philox, a function of its counter, so that the draw is the same in every back end and
batch.

A vocabulary does not fit into a program's registers, so nothing is sorted. Floats are ordered like
integers once the negative ones' bits are flipped; a threshold on these 32-bit keys that keeps
exactly k, or just the mass p, is found by bisection: 31 passes that only count, or sum. Ties at
the threshold are settled by id. Masses are float64: in a float32 sum over 128,000 tokens the rare
ones would get lost.

Price: one program reads a row once for a greedy token, twice for a plain draw, 35 times with top-k
or top-p and 67 times with both, out of L2. Many rows run side by side; for one row of a large
vocabulary a sort may well be faster. Not measured on a GPU yet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifer.kernels.aot import AotCase
from minifer.kernels.checks import check_range, check_tensor
from minifer.kernels.compat import INTERPRETED, launch_options
from minifer.perf.costs import OpCost

INTEGERS = (torch.int64, torch.int32)
# Relative to top-p's limit this much counts as equal: more than what logits in float32 round.
TOLERANCE = tl.constexpr(1e-6)
LOWEST = tl.constexpr(-2139095041)  # the key of −inf
PASSES = tl.constexpr(31)  # halvings from LOWEST … 0 to one key


def sample_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    noise: Tensor,
) -> Tensor:
    """`sample` of R rows, one after the other in float64, by sorting: logits [R, V] → int64 [R].

    noise [R, V]: Exp(1) of every token, in place of the seeds."""
    tokens = []
    for row, t, k, p, q in zip(logits.double(), temperature, top_k, top_p, noise, strict=True):
        V = len(row)
        if not torch.isfinite(row.max()):
            tokens.append(-1)
            continue
        if t == 0:
            tokens.append(int(torch.nonzero(row == row.max())[0]))
            continue
        values, ids = ((row - row.max()) / t).sort(descending=True, stable=True)
        kept = torch.arange(V) < (min(int(k), V) if k > 0 else V)
        mass = values.exp() * kept
        if p < 1:
            before = mass.cumsum(0) - mass
            kept &= before < p * (1 - TOLERANCE.value) * mass.sum()
        scores = (values - q.double()[ids].log()).masked_fill(~kept, -torch.inf)
        tokens.append(int(ids[scores.argmax()]))
    return torch.tensor(tokens, dtype=torch.int64)


@triton.jit
def scores_and_keys(LOGITS, token, V, best, temperature):
    """token [BLOCK] → log(p / largest p), float32 ≤ 0, and int32 keys in the same order; what is
    beyond V has the key below all others."""
    inside = token < V
    logit = tl.load(LOGITS + token, mask=inside, other=-float("inf")).to(tl.float32)
    x = tl.div_rn(logit - best, temperature)
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(x == 0.0, 0, bits ^ 0x7FFFFFFF)  # −0 is no less than 0
    return x, tl.where(inside, key, LOWEST - 1)


@triton.jit
def mass_of_key(key):
    """exp of the score that has this key, float64."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return tl.exp(bits.to(tl.float32, bitcast=True).to(tl.float64))


@triton.jit
def count_from(LOGITS, V, best, temperature, bound, BLOCK: tl.constexpr):
    """How many tokens have a key of at least `bound`."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, V, BLOCK):
        _, key = scores_and_keys(LOGITS, start + tl.arange(0, BLOCK), V, best, temperature)
        count += tl.sum((key >= bound).to(tl.int32), 0)
    return count


@triton.jit
def mass_above(LOGITS, V, best, temperature, bound, BLOCK: tl.constexpr):
    """The sum of exp(x) over tokens with a key above `bound`, float64."""
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, V, BLOCK):
        x, key = scores_and_keys(LOGITS, start + tl.arange(0, BLOCK), V, best, temperature)
        mass += tl.sum(tl.where(key > bound, tl.exp(x.to(tl.float64)), 0.0), 0)
    return mass


@triton.jit
def exponential_noise(seed, output_index, start, BLOCK: tl.constexpr):
    """log q of tokens start … start + BLOCK − 1, q ~ Exp(1), float32. Token t takes word t mod 4
    of the Philox counter (t // 4, output index, 0, 0)."""
    counter = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = tl.zeros([BLOCK // 4], tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + output_index.to(tl.uint32), zero, zero)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])
    uniform = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2⁻³²
    uniform = tl.minimum(uniform, 0.999999940395355224609375)  # 1 − 2⁻²⁴
    # 1 − uniform is exact in float64, as small as 2⁻³³ may be; Triton has no log1p
    q = -tl.log(1.0 - uniform.to(tl.float64))
    return tl.log(q).to(tl.float32)


@triton.jit
def sample_kernel(
    LOGITS, TEMPERATURE, TOP_K, TOP_P, SEEDS, OUTPUT_INDICES, TOKENS, V, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    row = tl.program_id(0)
    LOGITS += row.to(tl.int64) * stride
    best = tl.full([], -float("inf"), tl.float32)
    token = tl.full([], -1, tl.int32)
    broken = tl.full([], 0, tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(LOGITS + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
        broken += tl.sum((x != x).to(tl.int32), 0)
        highest = tl.max(x, 0)
        lowest_id = tl.min(tl.where(x == highest, ids, V), 0)
        token = tl.where(highest > best, lowest_id, token)
        best = tl.maximum(best, highest)
    drawable = (broken == 0) & (best > -float("inf")) & (best < float("inf"))
    temperature = tl.load(TEMPERATURE + row)
    if drawable & (temperature > 0):
        k = tl.minimum(tl.maximum(tl.load(TOP_K + row), 0), V).to(tl.int32)
        token = draw(
            LOGITS, V, best, temperature, k, tl.load(TOP_P + row),
            tl.load(SEEDS + row), tl.load(OUTPUT_INDICES + row), BLOCK,
        )  # fmt: skip
    tl.store(TOKENS + row, tl.where(drawable, token, -1).to(tl.int64))


@triton.jit
def draw(LOGITS, V, best, temperature, k, p, seed, output_index, BLOCK: tl.constexpr):
    """Keeps keys above `bound` and the first `ties` tokens that have it, and draws."""
    bound = tl.full([], LOWEST - 1, tl.int32)
    ties = tl.full([], 0, tl.int32)
    total = tl.full([], 0.0, tl.float64)
    if (k > 0) & (k < V):
        high = tl.full([], 1, tl.int32)  # fewer than k keys reach it; bound: at least k do
        bound += 1
        for _ in range(PASSES):
            middle = bound + ((high - bound) >> 1)
            enough = count_from(LOGITS, V, best, temperature, middle, BLOCK) >= k
            high = tl.where(enough, high, middle)
            bound = tl.where(enough, middle, bound)
        ties = k - count_from(LOGITS, V, best, temperature, bound + 1, BLOCK)
    if p < 1:
        total = mass_above(LOGITS, V, best, temperature, bound, BLOCK)
        total += ties * mass_of_key(tl.where(ties > 0, bound, 0))  # below all keys lies NaN
        enough_mass = p.to(tl.float64) * (1.0 - TOLERANCE) * total
        low = bound - 1  # the mass above it is enough; above `high` it is not
        high = tl.full([], 0, tl.int32)
        for _ in range(PASSES):
            middle = high - ((high - low) >> 1)
            short = mass_above(LOGITS, V, best, temperature, middle, BLOCK) < enough_mass
            high = tl.where(short, middle, high)
            low = tl.where(short, low, middle)
        missing = enough_mass - mass_above(LOGITS, V, best, temperature, high, BLOCK)
        needed = tl.minimum(tl.ceil(missing / mass_of_key(high)), V * 1.0).to(tl.int32)
        needed = tl.maximum(needed, 1)
        ties = tl.where(high == bound, tl.minimum(needed, ties), needed)
        bound = high

    winner = tl.full([], -1, tl.int32)
    best_score = tl.full([], -float("inf"), tl.float32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x, key = scores_and_keys(LOGITS, ids, V, best, temperature)
        tied = (key == bound).to(tl.int32)
        kept = (key > bound) | ((tied > 0) & (tl.cumsum(tied, 0) <= ties))
        ties -= tl.sum(tied, 0)
        score = x - exponential_noise(seed, output_index, start, BLOCK)
        score = tl.where(kept, score, -float("inf"))
        highest = tl.max(score, 0)
        lowest_id = tl.min(tl.where(score == highest, ids, V), 0)
        winner = tl.where(highest > best_score, lowest_id, winner)
        best_score = tl.maximum(best_score, highest)
    return winner


class Tiles(NamedTuple):
    """What the kernel is compiled for."""

    tokens: int  # BLOCK, a multiple of 4
    num_warps: int


GPU_TILES = Tiles(2048, 4)  # not measured on a GPU yet


def interpreter_tiles(V: int) -> Tiles:
    """All of a row at once, up to 131,072 tokens."""
    return Tiles(min(max(triton.next_power_of_2(V), 4), 2**17), 1)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    output_indices: Tensor,
    *,
    tiles: Tiles | None = None,
) -> Tensor:
    """One token a row of logits [R, V] → int64 [R], −1 where a row's maximum is not finite.

    temperature float32 [R]: 0 is greedy, the lowest id among equals. top_k integer [R]: 0 or less,
    or V or more, is off; keeps exactly k, the lowest ids among equals. top_p float32 or float64
    [R]: 1 is off; keeps a token while the mass before it is below p. seeds int64 [R],
    output_indices integer [R]: of the noise, see `minifer.execution.noise`. The draws are those of
    `minifer.execution.sampler.Sampler`, but for logarithms that differ in the last bit.

    All parameters are read on the device: their values are the caller's to check. Raises
    `ValueError` for shapes, dtypes, devices or strides that do not fit.
    """
    check_tensor("logits", logits, [None, None], contiguous=False)
    R, V = logits.shape
    check_range("vocabulary of logits", V, 1, 2**30)
    for name, tensor, dtypes in (
        ("temperature", temperature, (torch.float32,)),
        ("top_k", top_k, INTEGERS),
        ("top_p", top_p, (torch.float32, torch.float64)),
        ("seeds", seeds, (torch.int64,)),
        ("output_indices", output_indices, INTEGERS),
    ):
        check_tensor(name, tensor, [R], dtypes, like=logits)
    tokens = torch.empty(R, dtype=torch.int64, device=logits.device)
    if tiles is None:
        tiles = interpreter_tiles(V) if INTERPRETED.value else GPU_TILES
    if R:
        sample_kernel[(R,)](
            logits, temperature, top_k, top_p, seeds, output_indices, tokens, V, logits.stride(0),
            BLOCK=tiles.tokens, **launch_options(tiles.num_warps, 1),
        )  # fmt: skip
    return tokens


def sample_cost(rows: int, V: int, *, top_k: bool = False, top_p: bool = False) -> OpCost:
    """Of drawn rows. Bytes: float32 logits, read once; the passes after the first find them in L2.
    A comparison or a sum counts one, an exponential too; the ten rounds of Philox are integers and
    count nothing."""
    per_logit = 4 + 2 * 32 * top_k + 4 * 33 * top_p
    return OpCost("sample", per_logit * rows * V, activation_bytes=4 * rows * V + 8 * rows)


def aot_cases() -> list[AotCase]:
    """The vocabularies of Llama-1B and SmolLM2."""
    names = ("TEMPERATURE", "TOP_K", "TOP_P", "SEEDS", "OUTPUT_INDICES", "TOKENS")
    kinds = ("*fp32", "*i32", "*fp32", "*i64", "*i32", "*i64")
    signature = dict(zip(names, kinds, strict=True)) | {"V": "i32", "stride": "i32"}
    return [
        AotCase(
            f"{dtype} V={V}",
            sample_kernel,
            {"LOGITS": f"*{dtype}"} | signature,
            {"BLOCK": GPU_TILES.tokens},
            num_warps=GPU_TILES.num_warps,
            num_stages=1,
            aligned=("V", "stride"),
        )
        for V, dtype in ((128256, "fp32"), (128256, "bf16"), (288, "fp32"))
    ]
