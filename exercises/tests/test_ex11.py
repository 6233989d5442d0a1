"""Tests of exercises 11. The truths: float64, and the record of what every program touched.

Each answer runs in the record (`minifer.course.block_program`), which knows the bounds of every
tensor, and then in Triton, interpreted between guard bands of NaN; on a GPU, compiled.
"""

from __future__ import annotations

import dis
import math

import pytest
import torch

from minifer.course.block_program import (
    ENGINE,
    AccessError,
    is_kernel,
    simulate,
    tl,
    triton,
)
from minifer.course.grading import compare, points, probe
from minifer.course.guard_bands import GuardBands

ALLOWED_IMPORTS = ("minifer.course.block_program",)
# Said beside the result, in the grader and in a notebook.
NOTE = "there is no Triton here: run in the record alone" if ENGINE == "record" else ""
WHERE = ("record",) if ENGINE == "record" else ("record", "Triton")

HALF = {"rtol": 6e-4, "atol": 1e-6}  # one rounding to float16, and float32 on the way
SINGLE = {"rtol": 2e-5, "atol": 2e-6}


def attempts(target, name, given, tried, out=("out",)):
    """Run target.name(*given) in the record and in Triton → (where, outputs, trace) of each.

    out: names of the outputs, which begin as NaN; one that is an input, too, is written in place.
    """
    function = getattr(target, name)
    for where in WHERE:
        bands = GuardBands(
            "cuda" if where == "Triton" and ENGINE == "compiled" else "cpu"
        )
        placed = {
            key: bands.place(key, value) if isinstance(value, torch.Tensor) else value
            for key, value in given.items()
        }
        trace = None
        if where == "record":
            host = Host(placed, tried)
            ran = simulate(function, *placed.values(), watch=host)
            host.same_as("after", "what the kernel stored must stay as it is")
            compare(len(ran.launches), 1, f"{tried}: launches of a kernel")
            trace = ran.trace
            check_record(trace, tried, out, placed)
        else:
            launch(function, placed.values())
        same = {key for key in given for name in out if given[key] is given[name]}
        for key, places in bands.written_outside((*same, *out)).items():
            what = "input" if key not in out else "memory beside"
            raise AssertionError(
                f"tried     {tried}, in {where}\n{what} {key} must not be changed, elements "
                f"{places} were"
            )
        yield f"{tried}, in {where}", [placed[key].cpu() for key in out], trace


class Host:
    """Sees to it that the kernel computes, and nobody beside it."""

    def __init__(self, placed, tried):
        self.tensors = {k: v for k, v in placed.items() if isinstance(v, torch.Tensor)}
        self.tried, self.seen = tried, {}
        self("given")

    def __call__(self, moment, trace=None, kernel=None):
        if moment == "before":
            self.same_as("given", "a kernel gets its tensors as they come")
            self.only_arguments(trace)
            no_globals(kernel, self.tried)
        self.seen[moment] = {
            k: v.clone(memory_format=torch.contiguous_format).view(torch.uint8)
            for k, v in self.tensors.items()
        }

    def same_as(self, moment, wanted):
        for key, was in self.seen.get(moment, {}).items():
            now = self.tensors[key].clone(memory_format=torch.contiguous_format)
            if not torch.equal(now.view(torch.uint8), was):
                raise AssertionError(
                    f"tried     {self.tried}\n{wanted}: {key} was changed outside of the kernel"
                )

    def only_arguments(self, trace):
        places = {(t.data_ptr(), t.dtype) for t in self.tensors.values()}
        for name, memory in trace.memories.items():
            if (memory.tensor.data_ptr(), memory.tensor.dtype) not in places:
                raise AssertionError(
                    f"tried     {self.tried}\na kernel gets its tensors as they come: {name} is "
                    "another one, that was made outside of the kernel"
                )


def no_globals(kernel, tried):
    """Of a kernel, and of the kernels that it calls."""
    for step in dis.get_instructions(kernel):
        if step.opname not in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            continue
        value = kernel.__globals__.get(step.argval)
        fine = any(value is good for good in (None, tl, triton, tl.constexpr))
        if not (fine or is_kernel(value)) or step.opname == "LOAD_DEREF":
            raise AssertionError(
                f"tried     {tried}\na kernel may use no global but tl, triton and kernels: "
                f"{step.argval}"
            )
        if is_kernel(value) and value.fn is not kernel:
            no_globals(value.fn, tried)


def launch(function, arguments):
    """In Triton; what its interpreter wraps is raised as it was."""
    try:
        function(*arguments)
    except Exception as error:
        cause = error
        while (
            type(cause).__name__ == "InterpreterError" and cause.__cause__ is not None
        ):
            cause = cause.__cause__
        raise cause  # noqa: B904


def check_record(trace, tried, out, placed):
    """Every output is written once, and nobody is in anybody's way."""
    for conflict in trace.conflicts()[:1]:
        raise AssertionError(f"tried     {tried}\n{conflict}")
    for key in out:
        counts = sum(
            trace.counts(name, "store")
            for name, memory in trace.memories.items()
            if memory.tensor.data_ptr() == placed[key].data_ptr()
        )
        compare(counts, torch.ones_like(placed[key], dtype=torch.int64),
                f"{tried}: how often each element of {key} is written")  # fmt: skip


def nan(*shape, dtype=torch.float32):
    return torch.full(shape, torch.nan, dtype=dtype)


def normal(generator, *shape, scale=1.0, dtype=torch.float32):
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(
        dtype
    )


# -- 11.1


def strided(x, gap):
    """The same numbers, rows `gap` elements further apart."""
    rows, D = x.shape
    memory = torch.zeros(rows, D + gap, dtype=x.dtype)
    memory[:, :D] = x
    return memory[:, :D]


def norm_truth(x, weight, eps):
    x = x.double()
    return weight.double() * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def norm_case(target, x, weight, eps, tolerance):
    out = torch.full(x.shape, torch.nan, dtype=x.dtype)
    gap = x.stride(0) - x.shape[1]
    tried = f"rms_norm(x {list(x.shape)}, rows {gap} elements apart, eps={eps:g}, {x.dtype})"
    given = {"x": x, "weight": weight, "eps": eps, "out": out}
    trace = None
    for where, (got,), record in attempts(target, "rms_norm", given, tried):
        compare(got, norm_truth(x, weight, eps), where, **tolerance)
        trace = trace or record
    return trace, tried


@points("11.1", 1)
@pytest.mark.parametrize(
    ("rows", "D"), [(1, 1), (1, 31), (33, 33), (3, 100), (5, 64), (2, 77)]
)
def test_ex11_1_rows_of_any_width(target, generator, rows, D):
    for gap in (0, 3):
        x, weight = strided(normal(generator, rows, D), gap), normal(generator, D)
        norm_case(target, x, weight, 1e-5, SINGLE)


@points("11.1", 1)
def test_ex11_1_squares_of_float16_do_not_overflow(target, generator):
    for scale in (1.0, 900.0):
        x = normal(generator, 4, 77, scale=scale, dtype=torch.float16)
        norm_case(target, x, normal(generator, 77, dtype=torch.float16), 1e-5, HALF)


@points("11.1", 1)
def test_ex11_1_eps_stands_under_the_root(target, generator):
    weight = normal(generator, 20)
    for scale, eps in ((1e-3, 1e-2), (1e-3, 1e-6), (1.0, 0.5), (1.0, 0.0)):
        norm_case(target, normal(generator, 3, 20, scale=scale), weight, eps, SINGLE)
    norm_case(target, torch.zeros(2, 20), weight, 1e-5, SINGLE)


@points("11.1", 1)
def test_ex11_1_every_element_is_read_once(target, generator):
    for gap in (0, 5):
        x, weight = strided(normal(generator, 6, 37), gap), normal(generator, 37)
        trace, tried = norm_case(target, x, weight, 1e-5, SINGLE)
        compare(trace.counts("X", "load"), torch.ones(6, 37, dtype=torch.int64),
                f"{tried}: how often each element of X is read")  # fmt: skip
        compare(trace.counts("WEIGHT", "load"), torch.full((37,), 6),
                f"{tried}: how often each element of WEIGHT is read")  # fmt: skip


# -- 11.2


def gemv_case(target, x, weight, BN, BK, tolerance):
    N, K = weight.shape
    tried = f"gemv(x [{K}], weight [{N}, {K}], BN={BN}, BK={BK}, {x.dtype})"
    given = {"x": x, "weight": weight, "out": nan(N, dtype=x.dtype), "BN": BN, "BK": BK}
    trace = None
    for where, (got,), record in attempts(target, "gemv", given, tried):
        compare(got, weight.double() @ x.double(), where, **tolerance)
        trace = trace or record
    return trace, tried


@points("11.2", 2)
@pytest.mark.parametrize(
    ("N", "K"), [(1, 1), (1, 31), (31, 1), (31, 33), (33, 100), (100, 77), (32, 64)]
)
def test_ex11_2_any_n_and_k(target, generator, N, K):
    x, weight = normal(generator, K), normal(generator, N, K)
    gemv_case(target, x, weight, 16, 32, {"rtol": 2e-5, "atol": 5e-6})


@points("11.2", 1)
def test_ex11_2_tiles_of_any_size(target, generator):
    x, weight = normal(generator, 45), normal(generator, 21, 45)
    for BN, BK in ((1, 64), (4, 8), (32, 16), (2, 1), (8, 128)):
        gemv_case(target, x, weight, BN, BK, {"rtol": 2e-5, "atol": 5e-6})


# With weights of 300 both results are 0. The largest float16 is 65,504: it is less than the sum of
# a tile of 16 here, and than each product there.
CANCELLING = (
    torch.tensor([200.0] * 16 + [-200.0] * 16).half(),
    torch.tensor([250.0, -250.0] * 16).half(),
)


@points("11.2", 1)
def test_ex11_2_sums_are_float32(target, generator):
    x = torch.ones(4000, dtype=torch.float16)
    gemv_case(target, x, torch.full((3, 4000), 0.3, dtype=torch.float16), 2, 16, HALF)
    x = normal(generator, 600, dtype=torch.float16) + 1
    weight = (normal(generator, 5, 600).abs() + 0.5).to(torch.float16)
    gemv_case(target, x, weight, 4, 16, HALF)
    for x in CANCELLING:
        weight = torch.full((3, 32), 300.0, dtype=torch.float16)
        gemv_case(target, x, weight, 2, 16, HALF)


@points("11.2", 1)
@pytest.mark.parametrize(
    ("N", "K", "BN", "BK"), [(5, 70, 4, 32), (16, 64, 8, 16), (3, 5, 2, 4)]
)
def test_ex11_2_every_weight_is_read_once(target, generator, N, K, BN, BK):
    x, weight = normal(generator, K), normal(generator, N, K)
    trace, tried = gemv_case(target, x, weight, BN, BK, {"rtol": 2e-5, "atol": 5e-6})
    programs = -(-N // BN)
    compare(list(trace.grid), [programs, 1, 1], f"{tried}: the grid, as (x, y, z)")
    compare(trace.counts("W", "load"), torch.ones(N, K, dtype=torch.int64),
            f"{tried}: how often each weight is read")  # fmt: skip
    compare(trace.counts("X", "load"), torch.full((K,), programs),
            f"{tried}: how often each element of x is read")  # fmt: skip


@points("11.2", 1)
def test_ex11_2_rows_belong_to_their_program(target):
    """Whole numbers, so the result is exact."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    weight = torch.arange(15.0).reshape(3, 5)
    trace, tried = gemv_case(target, x, weight, 2, 4, {"rtol": 0.0, "atol": 0.0})
    owners = trace.owners("W", "load")[:, 0].tolist()
    compare(owners, [0, 0, 1], f"{tried}: the program that reads each row")


# -- 11.3


def turned(x, cos, sin):
    a, b = x.double().chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def rope_case(
    target, generator, T, H, C, *, in_place, dtype=torch.float32, tolerance=None
):
    x = normal(generator, T, H, C, dtype=dtype)
    angle = torch.rand(T, C // 2, generator=generator) * 6.3
    cos, sin = angle.cos(), angle.sin()
    truth = turned(x, cos, sin)
    out = x if in_place else nan(T, H, C, dtype=dtype)
    tried = f"rope(x [{T}, {H}, {C}], {'out=x, ' if in_place else ''}{dtype})"
    given = {"x": x, "cos": cos, "sin": sin, "out": out}
    for where, (got,), _ in attempts(target, "rope", given, tried):
        compare(got, truth, where, **(tolerance or SINGLE))


SHAPES = [(1, 1, 2), (3, 2, 10), (4, 3, 16), (2, 5, 34)]


@points("11.3", 1)
@pytest.mark.parametrize(("T", "H", "C"), SHAPES)
def test_ex11_3_turns_every_head(target, generator, T, H, C):
    rope_case(target, generator, T, H, C, in_place=False)


@points("11.3", 1)
@pytest.mark.parametrize(("T", "H", "C"), SHAPES)
def test_ex11_3_in_place(target, generator, T, H, C):
    rope_case(target, generator, T, H, C, in_place=True)


@points("11.3", 1)
def test_ex11_3_programs_in_any_order(target, generator):
    x = normal(generator, 5, 3, 12)
    angle = torch.rand(5, 6, generator=generator) * 6.3
    truth = turned(x, angle.cos(), angle.sin())
    for order in ("forward", "backward", 3):
        own = x.clone()
        tried = f"rope(x [5, 3, 12], out=x), programs in the order {order!r}"
        given = {"x": own, "cos": angle.cos(), "sin": angle.sin(), "out": own}
        watch = Host(given, tried)
        trace = simulate(target.rope, *given.values(), order=order, watch=watch).trace
        watch.same_as("after", "what the kernel stored must stay as it is")
        check_record(trace, tried, ("x",), {"x": own})
        compare(own, truth, tried, **SINGLE)


@points("11.3", 1)
def test_ex11_3_float16_is_rounded_once(target, generator):
    for in_place in (False, True):
        rope_case(target, generator, 3, 2, 20, in_place=in_place, dtype=torch.float16,
                  tolerance={"rtol": 6e-4, "atol": 2e-6})  # fmt: skip


# -- 11.4


def attention(q, k, v, causal):
    """float64: out [H, T, C] and lse [H, T]."""
    q, k, v = q.double(), k.double(), v.double()
    T, S = q.shape[1], k.shape[1]
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.arange(S)[None, :] > S - T + torch.arange(T)[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def flash_case(target, qkv, causal, BM, BN, tolerance, lse_tolerance=None):
    q, k, v = qkv
    (H, T, C), S = q.shape, k.shape[1]
    tried = f"flash(q {[H, T, C]}, k {[H, S, C]}, causal={causal}, BM={BM}, BN={BN}, {q.dtype})"
    given = {"q": q, "k": k, "v": v, "out": nan(H, T, C, dtype=q.dtype), "lse": nan(H, T),
             "causal": causal, "BM": BM, "BN": BN}  # fmt: skip
    truth, lse = attention(q, k, v, causal)
    trace = None
    for where, got, record in attempts(target, "flash", given, tried, ("out", "lse")):
        compare(got[0], truth, where + " → out", **tolerance)
        compare(got[1], lse, where + " → lse", **(lse_tolerance or tolerance))
        trace = trace or record
    return trace, tried


def qkv(generator, H, T, S, C, *, scale=1.0, dtype=torch.float32):
    q = normal(generator, H, T, C, scale=scale, dtype=dtype)
    return q, *(normal(generator, H, S, C, dtype=dtype) for _ in range(2))


CLOSE = {"rtol": 2e-5, "atol": 5e-6}


@points("11.4", 2)
@pytest.mark.parametrize(
    ("H", "T", "S", "C"),
    [(1, 1, 1, 1), (1, 1, 31, 4), (2, 31, 33, 20), (1, 33, 65, 16)],
)
def test_ex11_4_every_query_sees_every_key(target, generator, H, T, S, C):
    flash_case(target, qkv(generator, H, T, S, C), False, 16, 16, CLOSE)


@points("11.4", 3)
@pytest.mark.parametrize(
    ("H", "T", "S", "C"),
    [(1, 1, 1, 3), (1, 16, 16, 16), (2, 33, 33, 20), (1, 31, 70, 7)],
)
def test_ex11_4_causal_queries_are_the_last(target, generator, H, T, S, C):
    flash_case(target, qkv(generator, H, T, S, C), True, 16, 16, CLOSE)


@points("11.4", 1)
@pytest.mark.parametrize(("BM", "BN"), [(16, 32), (32, 16), (32, 32)])
def test_ex11_4_tiles_of_other_sizes(target, generator, BM, BN):
    for causal in (False, True):
        flash_case(target, qkv(generator, 1, 37, 77, 33), causal, BM, BN, CLOSE)


@points("11.4", 1)
def test_ex11_4_large_scores(target, generator):
    """Of both signs, in the hundreds; and all of them far below 0."""
    loose = {"rtol": 2e-4, "atol": 2e-4}
    for causal in (False, True):
        q, k, v = qkv(generator, 1, 20, 40, 16, scale=60.0)
        flash_case(
            target, (q, k, v), causal, 16, 16, loose, {"rtol": 1e-5, "atol": 1e-3}
        )
    q = torch.full((1, 3, 4), -20.0)
    k = normal(generator, 1, 20, 4) * 0.1 + 10.0
    v = normal(generator, 1, 20, 4)
    flash_case(target, (q, k, v), False, 16, 16, loose, {"rtol": 1e-5, "atol": 1e-3})


def reads_of(trace, name, program, shape):
    """How often one program loads each element of a dense tensor."""
    memory = trace.memories[name]
    counts = torch.zeros(memory.owned.numel(), dtype=torch.int64)
    for access in trace.select(name, "load", program):
        counts.index_add_(0, access.touched, torch.ones_like(access.touched))
    start = memory.tensor.storage_offset()
    return counts[start : start + memory.tensor.numel()].view(shape)


@points("11.4", 2)
@pytest.mark.parametrize(("T", "S"), [(32, 32), (40, 70)])
def test_ex11_4_reads_only_what_it_needs(target, generator, T, S):
    for causal in (True, False):
        C = 18
        trace, tried = flash_case(
            target, qkv(generator, 2, T, S, C), causal, 16, 16, CLOSE
        )
        tiles = -(-T // 16)
        compare(list(trace.grid), [tiles, 2, 1], f"{tried}: the grid, as (x, y, z)")
        for name in ("K", "V"):
            for tile in range(tiles):
                last = min(S, S - T + 16 * (tile + 1)) if causal else S
                rows = min(S, -(-last // 16) * 16)
                read = reads_of(trace, name, (tile, 1), (2, S, C))
                wanted = torch.zeros_like(read)
                wanted[1, :last] = 1
                wanted[1, last:rows] = read[1, last:rows].clamp(max=1)  # once, or not
                compare(read, wanted, f"{tried}: how often program ({tile}, 1) reads each "
                        f"element of {name}, of which it needs those of positions 0 to "
                        f"{last - 1} of head 1")  # fmt: skip
        compare(trace.counts("Q", "load"), torch.ones(2, T, C, dtype=torch.int64),
                f"{tried}: how often each element of q is read")  # fmt: skip


@points("11.4", 1)
def test_ex11_4_float16_is_rounded_once(target, generator):
    inputs = qkv(generator, 1, 20, 37, 24, dtype=torch.float16)
    for causal in (False, True):
        flash_case(target, inputs, causal, 16, 16, {"rtol": 6e-4, "atol": 2e-6}, CLOSE)


# -- 11.5


def paged(generator, lengths, H, K, C, P, *, scale=1.0, dtype=torch.float32, spare=-1):
    """A decode step: NaN in every slot that no request owns; table entries behind the last block
    are `spare`."""
    counts = [-(-n // P) for n in lengths]
    N, width = sum(counts) + 3, max(counts) + 2
    order = torch.randperm(N, generator=generator).tolist()
    keys, values = (torch.full((N, P, K, C), torch.nan, dtype=dtype) for _ in range(2))
    tables = torch.full((len(lengths), width), spare, dtype=torch.int32)
    for b, n in enumerate(lengths):
        mine = [order.pop() for _ in range(counts[b])]
        tables[b, : counts[b]] = torch.tensor(mine, dtype=torch.int32)
        for s in range(n):
            for cache in (keys, values):
                cache[mine[s // P], s % P] = normal(generator, K, C, dtype=dtype)
    q = normal(generator, len(lengths), H, C, scale=scale, dtype=dtype)
    return q, keys, values, tables, torch.tensor(lengths, dtype=torch.int32)


def paged_truth(q, keys, values, tables, lengths, scale):
    (B, H, C), (_, P, K, _) = q.shape, keys.shape
    out = torch.empty(B, H, C, dtype=torch.float64)
    for b, n in enumerate(lengths.tolist()):
        slots = [(int(tables[b, s // P]), s % P) for s in range(n)]
        for h in range(H):
            k, v = (torch.stack([cache[i, j, h * K // H] for i, j in slots]).double()
                    for cache in (keys, values))  # fmt: skip
            out[b, h] = ((k @ q[b, h].double()) * scale).softmax(0) @ v
    return out


def paged_case(target, step, BN, tolerance, note=""):
    q, keys, values, tables, lengths = step
    (B, H, C), (_, P, K, _) = q.shape, keys.shape
    scale = C**-0.5
    tried = (f"paged_decode({H} heads on {K} of {C}, blocks of {P}, lengths={lengths.tolist()}, "
             f"BN={BN}, {q.dtype}{note})")  # fmt: skip
    given = {"q": q, "keys": keys, "values": values, "tables": tables, "lengths": lengths,
             "scale": scale, "out": nan(B, H, C, dtype=q.dtype), "BN": BN}  # fmt: skip
    trace = None
    for where, (got,), record in attempts(target, "paged_decode", given, tried):
        compare(got, paged_truth(*step, scale), where, **tolerance)
        trace = trace or record
    return trace, tried


@points("11.5", 2)
@pytest.mark.parametrize("lengths", [[1], [16], [17], [3, 40, 16]])
def test_ex11_5_contexts_of_any_length(target, generator, lengths):
    paged_case(target, paged(generator, lengths, 2, 1, 8, 4), 16, CLOSE)


@points("11.5", 2)
@pytest.mark.parametrize(
    ("P", "BN", "C"), [(1, 4, 5), (3, 8, 16), (16, 4, 20), (5, 64, 3)]
)
def test_ex11_5_blocks_and_tiles_of_any_size(target, generator, P, BN, C):
    paged_case(target, paged(generator, [7, 21], 2, 2, C, P), BN, CLOSE)


@points("11.5", 1)
def test_ex11_5_heads_share_their_kv_head(target, generator):
    for H, K in ((6, 3), (4, 1), (3, 3)):
        paged_case(target, paged(generator, [9, 2], H, K, 8, 4), 8, CLOSE)


@points("11.5", 1)
def test_ex11_5_reads_its_own_context_once(target, generator):
    """Whatever stands in the table behind the last block: no block at all, or somebody's."""
    for spare in (-1, 0, 10**6):
        step = paged(generator, [5, 11], 4, 2, 8, 4, spare=spare)
        note = f", {spare} behind the table's last block"
        trace, tried = paged_case(target, step, 8, CLOSE, note)
        keys, tables, lengths = step[1], step[3], step[4].tolist()
        wanted = torch.zeros(keys.shape, dtype=torch.int64)
        for b, n in enumerate(lengths):
            for s in range(n):
                wanted[int(tables[b, s // 4]), s % 4] = (
                    2  # two query heads share a KV head
                )
        for name in ("KEYS", "VALUES"):
            compare(trace.counts(name, "load"), wanted,
                    f"{tried}: how often each element of {name} is read")  # fmt: skip


@points("11.5", 1)
def test_ex11_5_large_scores(target, generator):
    step = paged(generator, [33, 6], 2, 1, 8, 4, scale=90.0)
    paged_case(
        target, step, 8, {"rtol": 2e-4, "atol": 2e-4}, ", scores in the hundreds"
    )


@points("11.5", 1)
def test_ex11_5_float16_is_rounded_once(target, generator):
    step = paged(generator, [19, 4], 4, 2, 12, 3, dtype=torch.float16)
    paged_case(target, step, 16, {"rtol": 6e-4, "atol": 2e-6})


# -- what tells mistakes apart


def recorded(function, *arguments):
    """What the record says of a call: an access outside of a tensor, or the outputs, which are the
    last one or two tensors."""
    try:
        simulate(function, *arguments)
    except AccessError as error:
        return [error.kind, error.tensor, error.element]
    return [x for x in arguments if isinstance(x, torch.Tensor)][-2:]


@probe("11.1")
def probe_norm(target):
    g = torch.Generator().manual_seed(1)
    out = nan(3, 5)
    return recorded(target.rms_norm, normal(g, 3, 5), normal(g, 5), 0.5, out)


@probe("11.1")
def probe_norm_strided(target):
    g = torch.Generator().manual_seed(2)
    out = nan(2, 8)
    return recorded(
        target.rms_norm, strided(normal(g, 2, 8), 2), normal(g, 8), 1e-5, out
    )


@probe("11.1")
def probe_norm_half(target):
    g = torch.Generator().manual_seed(3)
    x = normal(g, 1, 4, scale=900.0, dtype=torch.float16)
    out = nan(1, 4, dtype=torch.float16)
    return recorded(target.rms_norm, x, torch.ones(4, dtype=torch.float16), 1e-5, out)


def probe_product(target, N, K, BN, BK, dtype=torch.float32):
    g = torch.Generator().manual_seed(4)
    out = nan(N, dtype=dtype)
    arguments = normal(g, K, dtype=dtype), normal(g, N, K, dtype=dtype), out
    return recorded(target.gemv, *arguments, BN, BK)


@probe("11.2")
def probe_gemv_whole(target):
    return probe_product(target, 8, 16, 4, 8)


@probe("11.2")
def probe_gemv_ragged_rows(target):
    return probe_product(target, 5, 16, 4, 8)


@probe("11.2")
def probe_gemv_ragged_columns(target):
    return probe_product(target, 4, 13, 4, 8)


@probe("11.2")
def probe_gemv_half(target):
    out = nan(2, dtype=torch.float16)
    weight = torch.full((2, 4000), 0.3, dtype=torch.float16)
    return recorded(target.gemv, torch.ones_like(weight[0]), weight, out, 2, 16)


@probe("11.2")
def probe_gemv_large_half(target):
    weight = torch.full((2, 32), 300.0, dtype=torch.float16)
    return [
        recorded(target.gemv, x, weight, nan(2, dtype=torch.float16), 2, 16)
        for x in CANCELLING
    ]


def probe_turn(target, in_place, C=6, dtype=torch.float32):
    g = torch.Generator().manual_seed(5)
    x, angle = normal(g, 3, 2, C, dtype=dtype), torch.rand(3, C // 2, generator=g) * 6
    out = x if in_place else nan(3, 2, C, dtype=dtype)
    return recorded(target.rope, x, angle.cos(), angle.sin(), out)


@probe("11.2")
def probe_gemv_grid(target):
    out = nan(8)
    return list(
        simulate(target.gemv, torch.ones(4), torch.ones(8, 4), out, 4, 4).trace.grid
    )


@probe("11.3")
def probe_rope(target):
    return probe_turn(target, False)


@probe("11.3")
def probe_rope_in_place(target):
    return probe_turn(target, True)


@probe("11.3")
def probe_rope_power(target):
    return probe_turn(target, False, C=8)


@probe("11.3")
def probe_rope_half(target):
    return probe_turn(target, False, C=8, dtype=torch.float16)


def probe_attention(target, T, S, causal, scale=1.0):
    g = torch.Generator().manual_seed(6)
    q, k, v = qkv(g, 1, T, S, 5, scale=scale)
    out, lse = nan(1, T, 5), nan(1, T)
    return recorded(target.flash, q, k, v, out, lse, causal, 16, 16)


@probe("11.4")
def probe_flash_whole(target):
    return probe_attention(target, 16, 32, False)


@probe("11.4")
def probe_flash_ragged(target):
    return probe_attention(target, 3, 21, False)


@probe("11.4")
def probe_flash_causal(target):
    return probe_attention(target, 16, 32, True)


@probe("11.4")
def probe_flash_large(target):
    return probe_attention(target, 16, 16, False, scale=200.0)


@probe("11.4")
def probe_flash_causal_large(target):
    return probe_attention(target, 16, 16, True, scale=60.0)


@probe("11.4")
def probe_flash_low(target):
    g = torch.Generator().manual_seed(9)
    q, k, v = (
        torch.full((1, 16, 2), -40.0),
        normal(g, 1, 16, 2) * 0.01 + 1,
        normal(g, 1, 16, 2),
    )
    return recorded(target.flash, q, k, v, nan(1, 16, 2), nan(1, 16), True, 16, 16)


@probe("11.4")
def probe_flash_bytes(target):
    q, k, v = qkv(torch.Generator().manual_seed(8), 1, 32, 32, 2)
    out, lse = nan(1, 32, 2), nan(1, 32)
    return simulate(target.flash, q, k, v, out, lse, True, 16, 16).trace.bytes("K")


def probe_step(target, lengths, H, K, BN, **more):
    step = paged(torch.Generator().manual_seed(7), lengths, H, K, 4, 2, **more)
    out = nan(len(lengths), H, 4)
    return recorded(target.paged_decode, *step, 0.5, out, BN)


@probe("11.5")
def probe_paged_one_tile(target):
    return probe_step(target, [4], 1, 1, 4)


@probe("11.5")
def probe_paged_ragged(target):
    return probe_step(target, [3, 7], 1, 1, 4)


@probe("11.5")
def probe_paged_table(target):
    return probe_step(target, [3], 1, 1, 16)


@probe("11.5")
def probe_paged_bytes(target):
    step = paged(torch.Generator().manual_seed(8), [3], 1, 1, 2, 4)
    record = simulate(target.paged_decode, *step, 0.5, nan(1, 1, 2), 4).trace
    return [record.bytes(name) for name in ("KEYS", "VALUES")]


@probe("11.5")
def probe_paged_heads(target):
    return probe_step(target, [8], 4, 2, 4)


@probe("11.5")
def probe_paged_large(target):
    return probe_step(target, [8], 1, 1, 4, scale=math.exp(5))
