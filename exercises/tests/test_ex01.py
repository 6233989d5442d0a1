"""Tests of exercises 01: costs against tensors, the engine's cost model, and exact search."""

from __future__ import annotations

import copy
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from minifer import ModelConfig
from minifer.course.grading import compare, points, probe, unchanged
from minifer.perf.costs import ElementBytes, step_cost


def refused(call):
    """Is it refused with ValueError? Any other exception goes on."""
    try:
        call()
    except ValueError:
        return True
    return False


# -- 1.1 cost of a matrix product

TORCH = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def bytes_of(rows, columns, dtype):
    """What a tensor of this shape weighs; two int4 share a byte."""
    if dtype == "int4":
        return len(range(0, rows * columns, 2))
    return torch.empty(rows, columns, dtype=TORCH[dtype]).nbytes


def operations(M, N, K):
    """Multiplications and additions, counted while Y is computed the slow way."""
    count = 0
    for _row in range(M):
        for _column in range(N):
            total = 0
            for _k in range(K):
                total, count = total + 1 * 1, count + 2
    return count


def check_product(target, M, N, K, dtype, weight_dtype=None, flops=None):
    named = f", weight_dtype={weight_dtype!r}" if weight_dtype is not None else ""
    tried = f"matmul_cost({M}, {N}, {K}, {dtype!r}{named})"
    if weight_dtype is None:
        got = target.matmul_cost(M, N, K, dtype)
    else:
        got = target.matmul_cost(M, N, K, dtype, weight_dtype=weight_dtype)
    moved = bytes_of(M, K, dtype) + bytes_of(K, N, weight_dtype or dtype)
    moved += bytes_of(M, N, dtype)
    compare(got, (operations(M, N, K) if flops is None else flops, moved), tried)


@points("1.1", 1)
def test_ex01_1_flops_and_bytes_of_two_byte_numbers(target, rng):
    check_product(target, 1, 1, 1, "bfloat16")
    check_product(target, 1, 3, 4, "bfloat16")
    for _ in range(10):
        M, N, K = (rng.randint(1, 9) for _ in range(3))
        check_product(target, M, N, K, rng.choice(["bfloat16", "float16"]))


@points("1.1", 1)
def test_ex01_1_numbers_of_other_sizes(target, rng):
    for dtype in ("float32", "float8", "int8"):
        check_product(target, 1, 1, 2, dtype)
        check_product(target, *(rng.randint(1, 9) for _ in range(3)), dtype)
    for weight_dtype in ("int8", "float32", "float8"):
        check_product(target, 2, 3, 5, "bfloat16", weight_dtype)
        check_product(
            target, *(rng.randint(1, 9) for _ in range(3)), "float32", weight_dtype
        )


@points("1.1", 0.5)
def test_ex01_1_two_int4_share_a_byte(target, rng):
    check_product(target, 2, 2, 2, "int4")
    check_product(target, 1, 3, 4, "bfloat16", "int4")
    check_product(target, 1, 1, 1, "int4")  # three matrices of half a byte: 3 bytes
    check_product(target, 1, 3, 5, "bfloat16", "int4")
    for _ in range(5):
        M, N, K = (rng.randint(1, 9) for _ in range(3))
        check_product(target, M, N, K, "int4")
        check_product(target, M, N, K, "float16", "int4")


@points("1.1", 0.5)
@pytest.mark.parametrize(
    "arguments",
    [
        (2, 3, 4, "double"),
        (2, 3, 4, "bfloat16", "int3"),
        (2, 3, 4, "", "int8"),
        (0, 3, 4, "bfloat16"),
        (2, 0, 4, "bfloat16"),
        (2, 3, -1, "bfloat16"),
    ],
)
def test_ex01_1_refuses_what_is_no_product(target, arguments):
    check_product(target, 1, 3, 4, "bfloat16")
    with pytest.raises(ValueError):
        target.matmul_cost(*arguments)


@probe("1.1")
def probe_products(target):
    sizes = [(1, 3, 4), (3, 1, 4), (2, 5, 3), (1, 1, 1)]
    plain = [
        target.matmul_cost(*size, dtype)
        for size in sizes
        for dtype in ("float32", "float16")
    ]
    mixed = [target.matmul_cost(*size, "bfloat16", "int4") for size in sizes]
    return plain + mixed + [target.matmul_cost(*size, "int4") for size in sizes]


@probe("1.1")
def probe_refusals(target):
    cases = [(2, 3, 4, "double"), (2, 3, 4, "bfloat16", "int3"), (0, 3, 4, "int8")]
    return [refused(lambda case=case: target.matmul_cost(*case)) for case in cases]


# -- 1.2 bytes of a decode step

SMALL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=10,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    max_position_embeddings=100_000,
)


def shapes(rng, **fixed):
    """A configuration in which no two sizes agree by chance more than they must."""
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([2, 3, 4])
    return replace(
        SMALL,
        vocab_size=rng.randint(50, 99),
        hidden_size=rng.randint(5, 40),
        intermediate_size=rng.randint(5, 60),
        num_layers=rng.randint(2, 6),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=2 * rng.randint(1, 9),
        tie_word_embeddings=rng.random() < 0.5,
        **fixed,
    )


def engine_bytes(config, contexts, weight_bytes, kv_bytes):
    """What the engine's cost model says, which is checked against a watched run."""
    cost = step_cost(
        config,
        [(1, context) for context in contexts],
        element=ElementBytes(weight=weight_bytes, kv=kv_bytes),
    )
    written = cost["kv_write"].kv_bytes
    total = cost.total()
    return {
        "weights": float(total.weight_bytes),
        "kv_read": float(total.kv_bytes - written),
        "kv_written": float(written),
    }


def check_step(target, config, contexts, weight_bytes=2, kv_bytes=2, only=None):
    fields = "hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim vocab_size"
    told = ", ".join(f"{name}={getattr(config, name)}" for name in fields.split())
    tied = ", tie_word_embeddings=True" if config.tie_word_embeddings else ""
    tried = f"decode_step_bytes(config, {contexts}, {weight_bytes}, {kv_bytes}) with {told}{tied}"
    with unchanged(tried, contexts=contexts):
        got = target.decode_step_bytes(config, contexts, weight_bytes, kv_bytes)
    expected = engine_bytes(config, contexts, weight_bytes, kv_bytes)
    if only is not None:
        assert isinstance(got, dict), (
            f"tried     {tried}\nexpected a dictionary, got {got!r}"
        )
        got, expected = {k: got.get(k) for k in only}, {k: expected[k] for k in only}
    compare(got, expected, tried, rtol=1e-12)


@points("1.2", 1)
def test_ex01_2_weights_of_one_request(target, rng):
    check_step(target, SMALL, [1], only=["weights"])
    for _ in range(10):
        check_step(
            target,
            replace(shapes(rng), tie_word_embeddings=False),
            [3],
            only=["weights"],
        )


@points("1.2", 1)
def test_ex01_2_weights_are_shared_and_tied_ones_read_once(target, rng):
    check_step(target, replace(SMALL, tie_word_embeddings=True), [1], only=["weights"])
    for requests in (2, 3, 17):
        contexts = [rng.randint(1, 50) for _ in range(requests)]
        check_step(target, shapes(rng), contexts, only=["weights"])


@points("1.2", 1)
def test_ex01_2_kv_of_one_request(target, rng):
    kv = ["kv_read", "kv_written"]
    check_step(target, SMALL, [1], only=kv)
    check_step(target, SMALL, [5], only=kv)
    for _ in range(10):
        check_step(target, shapes(rng), [rng.randint(2, 99)], only=kv)


@points("1.2", 1)
def test_ex01_2_many_requests_of_unequal_contexts(target, rng):
    check_step(target, SMALL, [5, 1])
    for requests in (2, 3, 8):
        check_step(target, shapes(rng), [rng.randint(1, 99) for _ in range(requests)])


@points("1.2", 0.5)
def test_ex01_2_other_numbers_and_nobody(target, rng):
    config = shapes(rng)
    for weight_bytes, kv_bytes in ((4, 4), (1, 2), (2, 1), (0.5, 2), (0.625, 0.5)):
        check_step(target, config, [rng.randint(2, 50), 7], weight_bytes, kv_bytes)
    got = target.decode_step_bytes(config, [])
    compare(got, {"weights": 0.0, "kv_read": 0.0, "kv_written": 0.0}, "no requests")
    for contexts in ([0], [3, 0], [-1]):
        with pytest.raises(ValueError):
            target.decode_step_bytes(config, contexts)


@points("1.2", 0.5, hidden=True)
def test_ex01_2_a_real_models_step(target, rng):
    llama = replace(
        SMALL,
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    )
    check_step(target, llama, [rng.randint(1, 8000) for _ in range(64)])


@probe("1.2")
def probe_steps(target):
    tied = replace(SMALL, tie_word_embeddings=True)
    cases = [(SMALL, [1]), (tied, [1]), (SMALL, [5, 1]), (tied, [9, 2, 2])]
    got = [target.decode_step_bytes(config, contexts) for config, contexts in cases]
    return [
        *got,
        target.decode_step_bytes(SMALL, [4], 1, 2),
        target.decode_step_bytes(SMALL, []),
    ]


# -- 1.3 critical batch


def bisected(weight_bytes, request_bytes, request_flops, peak_flops, bandwidth):
    """The same by exact comparisons and halving: slow, and without any algebra."""

    def arithmetic_takes_as_long(batch):
        moved = Fraction(weight_bytes + batch * request_bytes, bandwidth)
        return Fraction(batch * request_flops, peak_flops) >= moved

    low, high = 0, 1
    while not arithmetic_takes_as_long(high):
        low, high = high, 2 * high
        if high > 10**45:  # far beyond what inputs of 10**15 can need
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if arithmetic_takes_as_long(middle) else (middle, high)
        )
    return high


def check_critical(target, *arguments):
    tried = f"critical_batch{arguments}"
    compare(target.critical_batch(*arguments), bisected(*arguments), tried)


@points("1.3", 1)
def test_ex01_3_weights_alone(target, rng):
    check_critical(target, 1, 0, 1, 1, 1)
    check_critical(target, 200, 0, 4, 100, 10)
    for _ in range(20):
        weight, flops, peak, bandwidth = (rng.randint(1, 60) for _ in range(4))
        check_critical(target, weight, 0, flops, peak, bandwidth)


@points("1.3", 1)
def test_ex01_3_requests_with_bytes_of_their_own(target, rng):
    check_critical(target, 200, 1, 19, 100, 10)
    found = 0
    while found < 20:
        arguments = tuple(rng.randint(1, 60) for _ in range(5))
        if bisected(*arguments) is not None:
            check_critical(target, *arguments)
            found += 1


@points("1.3", 1)
def test_ex01_3_there_may_be_none(target, rng):
    check_critical(target, 200, 0, 4, 100, 10)  # here there is one
    check_critical(target, 200, 1, 4, 100, 10)
    check_critical(
        target, 1, 1, 1, 1, 1
    )  # traffic stays ahead by the weights, for ever
    check_critical(target, 7, 10, 100, 20, 2)
    missing = 0
    while missing < 10:
        arguments = tuple(rng.randint(1, 60) for _ in range(5))
        if bisected(*arguments) is None:
            check_critical(target, *arguments)
            missing += 1


@points("1.3", 1)
def test_ex01_3_large_numbers_are_exact(target, rng):
    # Equal at B exactly; one byte more, and it is B + 1.
    for _ in range(5):
        batch, flops = rng.randint(10**5, 10**6), rng.randint(10**9, 10**10)
        for extra in (0, 1):
            check_critical(target, batch * flops + extra, 0, flops, 10**15, 10**15)
    check_critical(target, 10**15, 10**14 - 1, 10**14, 10**15, 10**15)
    check_critical(target, 10**15, 0, 3, 10**15, 7)
    check_critical(
        target, 16_060_522_496, 131_072, 16 * 10**9, 989 * 10**12, 3_350 * 10**9
    )


@probe("1.3")
def probe_batches(target):
    cases = [(200, 0, 4, 100, 10), (200, 1, 4, 100, 10), (200, 1, 19, 100, 10)]
    cases += [(201, 0, 4, 100, 10), (1, 0, 9, 1, 1), (7, 10, 100, 20, 2)]
    cases += [(10**15, 0, 3, 10**15, 7)]
    return [target.critical_batch(*case) for case in cases]


# -- 1.4 joules a token

TICK = Fraction(1, 128)


def metered(steps, idle_watts, max_watts):
    """A power meter read in ticks, and tokens counted beside it. Seconds are whole ticks."""
    energy, tokens = Fraction(0), 0
    low, high = Fraction(idle_watts), Fraction(max_watts)
    for seconds, busy, written in steps:
        for _ in range(round(Fraction(seconds) / TICK)):
            energy += (Fraction(busy) * high + (1 - Fraction(busy)) * low) * TICK
        tokens += written
    return float(energy / tokens)


def check_joules(target, steps, idle_watts, max_watts):
    tried = f"joules_per_token({steps}, {idle_watts}, {max_watts})"
    with unchanged(tried, steps=steps):
        got = target.joules_per_token(copy.copy(steps), idle_watts, max_watts)
    compare(got, metered(steps, idle_watts, max_watts), tried, rtol=1e-9)


def random_steps(rng, count):
    return [
        (rng.randint(1, 64) / 128, rng.randint(0, 16) / 16, rng.randint(0, 9))
        for _ in range(count)
    ] + [(rng.randint(1, 64) / 128, 0.75, rng.randint(1, 9))]


@points("1.4", 1)
def test_ex01_4_one_step(target, rng):
    check_joules(target, [(0.5, 1, 1)], 0, 100)
    check_joules(target, [(0.25, 0, 2)], 40, 100)
    check_joules(target, [(0.125, 0.5, 4)], 100, 700)
    check_joules(target, [(0.125, 0.5, 4)], 100, 100)  # draws the same, busy or not
    for _ in range(10):
        idle = rng.randint(0, 200)
        check_joules(target, random_steps(rng, 0), idle, idle + rng.randint(0, 500))


@points("1.4", 1)
def test_ex01_4_many_steps_some_without_tokens(target, rng):
    check_joules(target, [(0.25, 1, 0), (0.125, 0.5, 4)], 100, 700)
    check_joules(target, [(0.25, 1, 1), (0.5, 0, 9)], 100, 700)
    for count in (1, 3, 20):
        check_joules(target, random_steps(rng, count), 60, 350)


@points("1.4", 1)
@pytest.mark.parametrize(
    "steps, idle, most",
    [
        ([], 100, 700),
        ([(0.25, 1, 0)], 100, 700),
        ([(0.25, 1.25, 3)], 100, 700),
        ([(0.25, 0.5, 3), (0.25, -0.25, 3)], 100, 700),
        ([(0.25, 0.5, 3)], 701, 700),
    ],
)
def test_ex01_4_refuses_what_has_no_answer(target, steps, idle, most):
    check_joules(target, [(0.25, 1, 1)], 100, 700)
    with pytest.raises(ValueError):
        target.joules_per_token(steps, idle, most)


@probe("1.4")
def probe_joules(target):
    cases = [
        [(0.5, 1, 1)],
        [(0.25, 0, 2)],
        [(0.125, 0.5, 4), (0.25, 1, 0)],
        [(0.25, 1, 1), (0.5, 0, 9)],
    ]
    return [round(target.joules_per_token(steps, 100, 700), 9) for steps in cases]


@probe("1.4")
def probe_refused_joules(target):
    cases = [[(0.25, 1.25, 3)], [(0.25, -0.25, 3)], [(0.25, 1, 0)]]
    return [
        refused(lambda steps=steps: target.joules_per_token(steps, 100, 700))
        for steps in cases
    ]
