"""Tests of exercises 13. The truths: float64, each row alone, exact sums, the engine's KV slots."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch

from minifer.course.grading import compare, points, probe, unchanged
from minifer.loops import LoopConfig

LARGEST = 1 - 2**-24
TINY = torch.finfo(torch.float32).tiny


def refused(call):
    """Is it refused with ValueError? Any other exception goes on."""
    try:
        call()
    except ValueError:
        return True
    return False


# -- 13.1


def true_decay(A_log, dt_bias):
    """In Python's floats, entry by entry; float32 [D]."""
    kept = []
    for a, d in zip(A_log.tolist(), dt_bias.tolist(), strict=True):
        delta = d if d > 50 else math.log1p(math.exp(d))
        kept.append(min(max(math.exp(-delta * math.exp(a)), TINY), LARGEST))
    return torch.tensor(kept, dtype=torch.float64).float()


def check_decay(target, A_log, dt_bias):
    tried = f"decay({A_log.tolist()}, {dt_bias.tolist()})  # {A_log.dtype}"
    with unchanged(tried, A_log=A_log, dt_bias=dt_bias):
        got = target.decay(A_log, dt_bias)
    compare(got, true_decay(A_log, dt_bias), tried, atol=2e-6)
    compare(str(got.dtype), "torch.float32", tried + ".dtype")
    inside = bool(((got > 0) & (got < 1)).all())
    compare(inside, True, f"{tried} is above 0 and below 1")
    return got


@points("13.1", 1)
def test_ex13_1_the_decay_is_its_formula(target, generator):
    check_decay(target, torch.zeros(1), torch.zeros(1))
    for D in (1, 2, 16):
        A_log, dt_bias = torch.randn(2, D, generator=generator) * 2
        check_decay(target, A_log, dt_bias)
        check_decay(target, A_log.double(), dt_bias.double())


@points("13.1", 1)
def test_ex13_1_extreme_parameters_and_half_precision(target, generator):
    ends = [-80.0, -20.0, 0.0, 12.0, 80.0]
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for a in ends:
            for d in ends:
                A_log, dt_bias = (torch.tensor([x], dtype=dtype) for x in (a, d))
                check_decay(target, A_log, dt_bias)
    flat = torch.tensor([-10.0, 5.0]), torch.tensor([-8.0, 5.0])
    got = check_decay(target, *flat)
    tried = "decay([-10, 5], [-8, 5]), where float32 rounds to 1 and to 0"
    compare(got.tolist(), [LARGEST, float(TINY)], tried)
    spread = (torch.rand(2, 64, generator=generator) - 0.5) * 20
    check_decay(target, *spread.half())


@points("13.1", 1)
def test_ex13_1_gradients_go_through_the_decay(target, generator):
    A_log, dt_bias = torch.randn(2, 5, generator=generator)
    A_log, dt_bias = A_log.requires_grad_(), dt_bias.requires_grad_()
    tried = f"gradients of decay({A_log.tolist()}, {dt_bias.tolist()}).sum()"
    kept = target.decay(A_log, dt_bias)
    compare(
        isinstance(kept, torch.Tensor) and kept.requires_grad, True, f"{tried} exist"
    )
    kept.sum().backward()
    with torch.no_grad():
        delta, rate = torch.nn.functional.softplus(dt_bias), A_log.exp()
        truth = torch.exp(-delta * rate)
        compare(A_log.grad, -delta * rate * truth, f"{tried} by A_log", atol=1e-5)
        slope = torch.sigmoid(dt_bias)
        compare(dt_bias.grad, -slope * rate * truth, f"{tried} by dt_bias", atol=1e-5)


def true_term(dt_bias, B, e):
    dt_bias, B, e = dt_bias.double(), B.double(), e.double()
    rows = []
    for row in e:
        unit = row / math.sqrt(float(row.square().mean()) + 1e-5)
        rows.append(torch.log1p(dt_bias.exp()) * (B @ unit))
    return torch.stack(rows)


@points("13.1", 1)
def test_ex13_1_the_input_term_does_not_know_how_long_e_is(target, generator):
    def rand(*shape):
        return torch.randn(*shape, generator=generator)

    for N, D, scale, dtype in (
        (1, 1, 1.0, torch.float32),
        (3, 4, 1.0, torch.float32),
        (2, 5, 1000.0, torch.float32),
        (4, 3, 2e-3, torch.float32),
        (3, 8, 5000.0, torch.float16),
        (5, 4, 1.0, torch.bfloat16),
    ):
        inputs = [
            x.to(dtype) for x in (rand(D), rand(D, D), rand(N, D).clamp(-3, 3) * scale)
        ]
        tried = (
            f"input_term(dt_bias, B, e) with N={N}, D={D}, e about {scale:g}, {dtype}"
        )
        with unchanged(tried, dt_bias=inputs[0], B=inputs[1], e=inputs[2]):
            got = target.input_term(*inputs)
        compare(got, true_term(*inputs), tried, atol=1e-4, rtol=1e-4)
        compare(str(got.dtype), "torch.float32", tried + ".dtype")
    zeros = target.input_term(torch.zeros(2), torch.eye(2), torch.zeros(1, 2))
    compare(zeros, torch.zeros(1, 2), "input_term of an e of zeros")


# -- 13.2


class Core:
    """Blocks that treat each row for itself, and note the rows of every call."""

    def __init__(self, D, generator, kind="blocks"):
        self.W = torch.randn(2, D, D, generator=generator, dtype=torch.float64) / D**0.5
        self.kind, self.rows, self.seen = kind, [], []

    def __call__(self, x):
        self.rows.append(len(x))
        self.seen.append(x.detach().clone())
        return self.one(x)

    def one(self, x):
        if self.kind == "identity":
            return x
        unit = x / x.square().mean(dim=-1, keepdim=True).add(1e-5).sqrt()
        up = (unit @ self.W[0].to(x.dtype)).relu()
        return x + up @ self.W[1].to(x.dtype)


def alone(h, term, decay, core, depths):
    """Each row by itself, its loops written out."""
    rows = []
    for state, add, depth in zip(h, term, depths.tolist(), strict=True):
        for _ in range(depth):
            state = core.one(decay * state + add)
        rows.append(state)
    return torch.stack(rows)


def a_loop(generator, depths, D=4, dtype=torch.float64):
    h, term = torch.randn(2, len(depths), D, generator=generator, dtype=dtype)
    decay = torch.rand(D, generator=generator, dtype=dtype)
    return h, term, decay, torch.tensor(depths)


def call(depths, D):
    return f"run_loops(h, term, decay, core, depths={depths}) with D={D}"


@points("13.2", 2)
@pytest.mark.parametrize("depths", [[1], [2], [8], [3, 3], [1, 3], [5, 1, 4, 1]])
def test_ex13_2_each_row_is_unrolled_to_its_own_depth(target, generator, depths):
    for D in (1, 4):
        for kind in ("identity", "blocks"):
            core = Core(D, generator, kind)
            h, term, decay, wanted = a_loop(generator, depths, D)
            truth = alone(h, term, decay, core, wanted)
            got = target.run_loops(h, term, decay, core, wanted)
            tried = call(depths, D) + f", core {kind}"
            compare(got, truth, tried, atol=1e-10)


@points("13.2", 1)
@pytest.mark.parametrize("depths", [[4], [1, 3], [2, 7, 2, 1], [0, 2], [3] * 5])
def test_ex13_2_the_core_is_applied_as_often_as_the_deepest_loops(
    target, generator, depths
):
    core = Core(4, generator)
    h, term, decay, wanted = a_loop(generator, depths)
    target.run_loops(h, term, decay, core, wanted)
    rows = [sum(depth > t for depth in depths) for t in range(max(depths))]
    compare(core.rows, rows, f"rows of each call of core in {call(depths, 4)}")
    # Which rows, and in which order.
    for t, got in enumerate(core.seen):
        deep = [n for n, depth in enumerate(depths) if depth > t]
        before = alone(h, term, decay, core, wanted.clamp(max=t))
        x = torch.stack([decay * before[n] + term[n] for n in deep])
        tried = f"what core gets in call {t}, rows {deep}, in {call(depths, 4)}"
        compare(got, x, tried, atol=1e-10)


@points("13.2", 1)
def test_ex13_2_depth_0_stays_and_nothing_is_shared(target, generator):
    for depths in ([0, 2, 1], [0], [0, 0]):
        core = Core(4, generator)
        h, term, decay, wanted = a_loop(generator, depths)
        truth = alone(h, term, decay, core, wanted)
        tried = call(depths, 4)
        with unchanged(tried, h=h, term=term, decay=decay, depths=wanted):
            got = target.run_loops(h, term, decay, core, wanted)
            compare(got, truth, tried, atol=1e-10)
            got.zero_()
        compare(bool(h.any()), True, f"writing to the result of {tried} leaves h alone")


@points("13.2", 1)
def test_ex13_2_many_rows_and_float32(target, generator):
    depths = torch.randint(0, 13, (40,), generator=generator).tolist()
    core = Core(6, generator)
    h, term, decay, wanted = a_loop(generator, depths, 6)
    truth = alone(h, term, decay, core, wanted)
    got = target.run_loops(h.float(), term.float(), decay.float(), core, wanted)
    tried = f"run_loops of {len(depths)} float32 rows of depths 0 to 12"
    compare(got, truth.float(), tried, atol=1e-4, rtol=1e-4)
    compare(str(got.dtype), "torch.float32", tried + ".dtype")


# -- 13.3


def true_bound(rho, start, drive, loops):
    """Exact up to the last rounding, for what is not too long; else a compensated sum."""
    if loops <= 40:
        exact = Fraction(start)
        for _ in range(loops):
            exact = Fraction(rho) * exact + Fraction(drive)
        return float(exact)
    return math.fsum([rho**loops * start, *(drive * rho**k for k in range(loops))])


@points("13.3", 2)
def test_ex13_3_the_bound_is_the_line_put_into_itself(target, rng):
    cases = [
        (0.5, 0.0, 3.0, 3),
        (1.0, 0.0, 3.0, 3),
        (0.5, 8.0, 3.0, 0),
        (0.0, 7.0, 2.0, 1),
    ]
    cases += [(0.0, 7.0, 2.0, 4), (2.0, 1.0, 0.0, 16), (1.2, 0.5, 1.0, 60)]
    cases += [
        (1 - 1e-9, 0.25, 1.0, 1000),
        (1 + 1e-9, 0.0, 1.0, 2000),
        (1.0, 3.0, 0.5, 2000),
    ]
    cases += [(1 - rng.uniform(1e-10, 1e-8), 0.5, 1.0, 2000) for _ in range(8)]
    for _ in range(12):
        cases.append(
            (
                rng.uniform(0, 1.3),
                rng.uniform(0, 9),
                rng.uniform(0, 9),
                rng.randrange(200),
            )
        )
    for case in cases:
        got = target.state_bound(*case)
        compare(float(got), true_bound(*case), f"state_bound{case}", rtol=1e-12)


class Bounded:
    """A core that adds at most M: a direction times a length, which the state decides."""

    def __init__(self, D, M, generator, along=None):
        self.W = torch.randn(D, D, generator=generator, dtype=torch.float64)
        self.M, self.along, self.calls, self.largest = M, along, 0, 0.0

    def __call__(self, x):
        self.calls += 1
        if self.along is not None:  # always M, in one direction
            added = self.M * self.along.expand_as(x)
        else:
            direction = torch.tanh(x @ self.W) + 1e-3
            length = self.M * torch.rand(
                len(x),
                1,
                generator=torch.Generator().manual_seed(self.calls),
                dtype=x.dtype,
            )
            added = length * direction / direction.norm(dim=1, keepdim=True)
        self.largest = max(self.largest, float(added.norm(dim=1).max()))
        return x + added


def ratio(decay, term, core, h, loops, M):
    rho, worst = max(abs(x) for x in decay.tolist()), 0.0
    starts, drives = h.norm(dim=1).tolist(), (term.norm(dim=1) + M).tolist()
    bounds = list(starts)
    for _ in range(loops):
        h = core(decay * h + term)
        bounds = [rho * b + d for b, d in zip(bounds, drives, strict=True)]
        norms = h.norm(dim=1).tolist()
        worst = max(worst, *(n / b for n, b in zip(norms, bounds, strict=True)))
    return worst


def random_loop(generator, N, D, low=0.0, high=1.0):
    term, h = torch.randn(2, N, D, generator=generator, dtype=torch.float64)
    h = h * torch.rand(N, 1, generator=generator, dtype=torch.float64) * 10
    decay = low + (high - low) * torch.rand(D, generator=generator, dtype=torch.float64)
    return decay, term, h


def check_ratio(target, generator, N, D, loops, M, low=0.0, high=1.0):
    decay, term, h = random_loop(generator, N, D, low, high)
    twin = torch.Generator()
    twin.set_state(generator.get_state())
    truth = ratio(decay, term, Bounded(D, M, twin), h, loops, M)
    core = Bounded(D, M, generator)
    tried = f"check_loop of {N} rows of {D}, {loops} loops, decay from {low} to {high}, M = {M}"
    with unchanged(tried, decay=decay, term=term, h=h):
        got = target.check_loop(decay, term, core, h, loops, M)
    compare(got, truth, tried, rtol=1e-9)
    compare(core.calls, loops, f"calls of core in {tried}")
    compare(got <= 1 + 1e-12, True, f"{tried} is at most 1: a proved bound holds")


@points("13.3", 1)
def test_ex13_3_states_stay_below_for_a_thousand_loops(target, generator):
    for loops in (1, 2, 30, 1000):
        check_ratio(target, generator, 3, 4, loops, 0.5)
    check_ratio(target, generator, 4, 6, 1000, 2.0, low=0.9, high=0.9999)
    check_ratio(target, generator, 1, 5, 20, 1.0, low=-0.99, high=0.2)
    check_ratio(target, generator, 2, 3, 60, 1.0, low=0.5, high=1.2)


@points("13.3", 1)
def test_ex13_3_a_state_that_reaches_its_bound(target, generator):
    for rho, start, add, M in (
        (0.5, 0.0, 2.0, 1.0),
        (0.9, 4.0, 1.0, 3.0),
        (1.0, 1.0, 0.5, 0.25),
        (1.1, 2.0, 0.0, 1.0),
    ):
        along = torch.tensor([0.6, 0.8], dtype=torch.float64)
        decay = torch.full((2,), rho, dtype=torch.float64)
        core = Bounded(2, M, generator, along)
        # The second row adds against its own start: it stays below.
        h = torch.stack([start * along, -start * along])
        got = target.check_loop(decay, add * along.expand(2, 2), core, h, 50, M)
        tried = f"check_loop of a state along its input, ρ = {rho}, M = {M}"
        compare(got, 1.0, tried, atol=1e-9)
    # −8, −2, 1, 2.5 against 8, 6, 5, 4.5
    core, half = Bounded(2, 1.0, generator, along), torch.tensor([0.5, 0.5]).double()
    got = target.check_loop(half, along[None], core, -8 * along[None], 3, 1.0)
    tried = "check_loop of a state against its input, ρ = 0.5, M = 1, 3 loops"
    compare(got, 2.5 / 4.5, tried, atol=1e-9)


@points("13.3", 1)
def test_ex13_3_a_premise_that_fails_is_noticed(target, generator):
    decay, term, h = random_loop(generator, 3, 4)
    tried = "check_loop(…, M = 1.0)"
    quiet = Bounded(4, 1.0, generator, torch.tensor([1.0, 0, 0, 0]).double())
    got = target.check_loop(decay, term, quiet, h, 5, 1.0)
    compare(0 < got <= 1, True, f"{tried} of a core that adds exactly 1.0")

    def late(x):
        """Adds 1, but in its fifth call 1.001 to the last row."""
        late.calls += 1
        added = torch.zeros_like(x)
        added[:, 0] = 1.0
        if late.calls == 5:
            added[-1, 0] = 1.001
        return x + added

    late.calls = 0
    compare(
        refused(lambda: target.check_loop(decay, term, late, h, 8, 1.0)),
        True,
        f"{tried} of a core that once adds 1.001 to one row: refused",
    )
    slant = torch.tensor([0.6, 0.8], dtype=torch.float64)
    for row, length in ((0, 1.2), (1, 1.2), (2, 1.2), (0, math.nan)):

        def first(x, row=row, length=length):
            """One row's 1.2 in a direction in which no entry is above 1; or NaN."""
            added = torch.zeros_like(x)
            added[row, :2] = length * slant
            return x + added

        compare(
            refused(lambda core=first: target.check_loop(decay, term, core, h, 3, 1.0)),
            True,
            f"{tried} of a core that adds [0.6, 0.8, 0, 0] · {length} to row {row} of 3: refused",
        )
    along = slant.expand(1, 2)
    doubled = Bounded(2, 1.0, generator, along[0])
    half = torch.full((2,), 0.5, dtype=torch.float64)
    compare(
        refused(lambda: target.check_loop(half, 2 * along, doubled, 0 * along, 9, 0.5)),
        True,
        "check_loop(…, M = 0.5) of a core that adds 1.0: refused",
    )


# -- 13.4

POLICIES = ["full", "terminal", "cyclic-1", "cyclic-2", "cyclic-3", "cyclic-12"]
POLICIES += ["first-1", "first-2", "first-3", "first-12"]
SHAPES = [(1, 2, 1, 3), (0, 1, 0, 8), (2, 1, 0, 1), (0, 3, 2, 5), (8, 8, 8, 8)]


def loop_of(prelude, core, coda, loops, policy):
    return LoopConfig(prelude, core, coda, max_num_loops=loops, kv_policy=policy)


@points("13.4", 1)
def test_ex13_4_how_many_slots(target, rng):
    shapes = [*SHAPES, *((rng.randrange(9), rng.randrange(1, 9), rng.randrange(9), rng.randrange(1, 17)) for _ in range(5))]  # fmt: skip
    for shape in shapes:
        for policy in POLICIES:
            expected = loop_of(*shape, policy).num_kv_slots
            tried = f"num_slots{(*shape, policy)}"
            compare(target.num_slots(*shape, policy), expected, tried)


@points("13.4", 2)
@pytest.mark.parametrize("shape", SHAPES)
def test_ex13_4_which_slot(target, shape):
    prelude, core, coda, loops = shape
    for policy in POLICIES:
        loop = loop_of(*shape, policy)
        for layer in range(prelude + core + coda):
            for t in range(loops):
                if layer < prelude:
                    expected = layer
                elif layer < prelude + core:
                    expected = loop.core_slot(t) + layer - prelude
                else:
                    expected = loop.coda_slot + layer - prelude - core
                case = (*shape, policy, layer, t)
                compare(target.kv_slot(*case), expected, f"kv_slot{case}")


def true_contexts(memory, tokens, block_size, slots, kv_heads, head_dim, element_bytes):
    """Hand out blocks, one by one, until memory is gone."""
    block = sum(
        kv_heads * head_dim * element_bytes
        for _kv in ("key", "value")
        for _slot in range(slots)
        for _token in range(block_size)
    )
    free, served = memory, 0
    while True:
        left = tokens
        while left > 0:
            if free < block:
                return served
            free, left = free - block, left - block_size
        served += 1


@points("13.4", 1)
def test_ex13_4_how_many_contexts(target, rng):
    cases = [(1000, 5, 4, 3, 1, 2, 2), (95, 1, 4, 3, 1, 2, 2), (96, 4, 4, 3, 1, 2, 2), (191, 5, 4, 3, 1, 2, 2)]  # fmt: skip
    for _ in range(20):
        cases.append((rng.randrange(200_000), rng.randrange(1, 40), rng.choice([1, 3, 8, 16]),
                      rng.randrange(1, 30), rng.choice([1, 2, 5]), rng.choice([4, 16]), rng.choice([1, 2, 4])))  # fmt: skip
    for case in cases:
        compare(target.contexts(*case), true_contexts(*case), f"contexts{case}")
    many = 10**18 // 192  # memory beyond the whole numbers of a float: one byte too few
    for memory, fit in ((192 * many, many), (192 * many - 1, many - 1)):
        case = (memory, 5, 4, 3, 1, 2, 2)
        compare(target.contexts(*case), fit, f"contexts{case}")


# -- probes


@probe("13.1")
def probe_decay(target):
    return target.decay(torch.tensor([0.0, 1.0, -1.0]), torch.tensor([0.0, -1.0, 2.0]))


@probe("13.1")
def probe_extremes(target):
    ends = (
        torch.tensor([-80.0, -80.0, 80.0, 80.0]),
        torch.tensor([80.0, -80.0, -80.0, 80.0]),
    )
    kept = target.decay(*ends)
    return [kept, kept > 0, kept < 1]


@probe("13.1")
def probe_gradient(target):
    A_log = torch.zeros(2, requires_grad=True)
    return bool(target.decay(A_log, torch.zeros(2)).requires_grad)


@probe("13.1")
def probe_half(target):
    return target.decay(
        torch.tensor([12.0, 0.3]).half(), torch.tensor([-20.0, 0.7]).half()
    )


@probe("13.1")
def probe_term(target):
    generator = torch.Generator().manual_seed(1)
    dt, B, e = (torch.randn(*s, generator=generator) for s in ((3,), (3, 3), (2, 3)))
    return [target.input_term(dt, B, e), target.input_term(dt, B, 100 * e)]


@probe("13.2")
def probe_loops(target):
    generator = torch.Generator().manual_seed(2)
    core = Core(3, generator)
    h, term, decay, depths = a_loop(generator, [3, 1, 2], 3)
    result = target.run_loops(h, term, decay, core, depths)
    return [result, core.rows, h, core.seen]


@probe("13.2")
def probe_zero(target):
    generator = torch.Generator().manual_seed(3)
    core = Core(2, generator, "identity")
    h, term, decay, depths = a_loop(generator, [0, 2], 2)
    result = target.run_loops(h, term, decay, core, depths)
    return [result, core.rows, h]


@probe("13.3")
def probe_bound(target):
    cases = [
        (0.5, 8.0, 3.0, 3),
        (1.0, 1.0, 3.0, 5),
        (1.2, 0.5, 1.0, 9),
        (0.3, 2.0, 1.0, 0),
    ]
    near = (1 - 1e-9, 0.0, 1.0, 2000)
    off = float(target.state_bound(*near)) / true_bound(*near) - 1
    return [*(float(target.state_bound(*case)) for case in cases), abs(off) < 1e-12]


@probe("13.3")
def probe_check(target):
    generator = torch.Generator().manual_seed(4)
    found = []
    for loops, low, high in ((1, 0.0, 1.0), (7, -0.9, 0.3), (9, 0.5, 1.1)):
        decay, term, h = random_loop(generator, 2, 3, low, high)
        core = Bounded(3, 0.7, generator)
        found.append(target.check_loop(decay, term, core, h, loops, 0.7))
    return found


@probe("13.3")
def probe_premise(target):
    decay, term, h = random_loop(torch.Generator().manual_seed(5), 2, 2)
    along = torch.tensor([1.0, 0.0]).double()
    core = Bounded(2, 1.0, torch.Generator().manual_seed(6), along)
    return target.check_loop(decay, term, core, h, 3, 0.9)


@probe("13.3")
def probe_premise_of_one_row(target):
    added = torch.tensor([[0.5, 0.0], [2.0, 0.0]]).double()
    half, zeros = torch.tensor([0.5, 0.5]).double(), torch.zeros(2, 2).double()
    return target.check_loop(half, added, lambda x: x + added, zeros, 3, 1.0)


@probe("13.3")
def probe_premise_row_by_row(target):
    half, zeros = torch.tensor([0.5, 0.5]).double(), torch.zeros(3, 2).double()
    found = []
    for row in range(3):
        for added in (0.9, 1.2, math.nan):

            def core(x, row=row, added=added):
                more = torch.zeros_like(x)
                more[row] = added * torch.tensor([0.6, 0.8]).double()
                return x + more

            found.append(
                refused(
                    lambda core=core: target.check_loop(
                        half, zeros, core, zeros, 2, 1.0
                    )
                )
            )
    return found


@probe("13.4")
def probe_slots(target):
    return [target.num_slots(*s, p) for s in SHAPES[:3] for p in POLICIES]


@probe("13.4")
def probe_slot(target):
    shape = (1, 2, 1, 5)
    return [
        target.kv_slot(*shape, p, layer, t)
        for p in ("full", "terminal", "cyclic-2", "first-2", "first-9")
        for layer in range(4)
        for t in range(5)
    ]


@probe("13.4")
def probe_contexts(target):
    rng = random.Random(7)
    cases = [
        (rng.randrange(9000), rng.randrange(1, 20), 4, 3, 1, 2, 2) for _ in range(8)
    ]
    cases.append((10**18 // 192 * 192 - 1, 5, 4, 3, 1, 2, 2))
    return [target.contexts(*case) for case in cases]
