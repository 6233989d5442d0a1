"""Lazy cheats at exercises 11 and 14: what they compute beside the kernel or the engine is seen."""

import importlib.util
import random
import sys
import types
from pathlib import Path

import pytest
import torch

from minifer.course.block_program import simulate, tl, triton
from minifer.course.loop_model import attention

TESTS = Path(__file__).parents[2] / "exercises" / "tests"


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ex11, ex14 = loaded("test_ex11"), loaded("test_ex14")
FACTOR = torch.tensor(1.0)


@triton.jit
def copy_kernel(X, WEIGHT, OUT, row_stride, D, WIDTH: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    x = tl.load(X + row * row_stride + column, mask=column < D, other=0.0)
    weight = tl.load(WEIGHT + column, mask=column < D, other=0.0)
    tl.store(OUT + row * D + column, x + 0 * weight, mask=column < D)


@triton.jit
def global_kernel(X, WEIGHT, OUT, row_stride, D, WIDTH: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    x = tl.load(X + row * row_stride + column, mask=column < D, other=0.0)
    tl.store(OUT + row * D + column, x * FACTOR, mask=column < D)


def launched(kernel, x, weight, out):
    rows, D = x.shape
    width = triton.next_power_of_2(D)
    kernel[(rows,)](x, weight, out, x.stride(0), D, WIDTH=width)


def host_after(x, weight, eps, out):
    launched(copy_kernel, x, weight, out)
    out.copy_(ex11.norm_truth(x, weight, eps))


def host_before(x, weight, eps, out):
    launched(copy_kernel, ex11.norm_truth(x, weight, eps).float(), weight, out)


def host_in_the_input(x, weight, eps, out):
    before = x.clone()
    x.copy_(ex11.norm_truth(x, weight, eps))
    launched(copy_kernel, x, weight, out)
    x.copy_(before)


def global_in_a_kernel(x, weight, eps, out):
    launched(global_kernel, x, weight, out)


@pytest.mark.parametrize(
    ("cheat", "told"),
    [
        (host_after, "must stay as it is: out was changed outside of the kernel"),
        (host_before, "X is another one, that was made outside of the kernel"),
        (host_in_the_input, "as they come: x was changed outside of the kernel"),
        (global_in_a_kernel, "may use no global but tl, triton and kernels: FACTOR"),
    ],
)
def test_what_the_host_computes_for_a_kernel_is_no_answer(cheat, told):
    target = types.SimpleNamespace(rms_norm=cheat)
    x, weight = torch.randn(3, 5), torch.randn(5)
    with pytest.raises(AssertionError, match=told):
        ex11.norm_case(target, x, weight, 1e-5, ex11.SINGLE)


def test_a_launch_is_watched_before_and_after():
    x, weight, out = torch.ones(2, 3), torch.ones(3), torch.zeros(2, 3)
    seen = []

    def watch(moment, trace, kernel):
        seen.append((moment, trace.kernel, kernel.__name__, out.sum().item()))

    simulate(lambda: launched(copy_kernel, x, weight, out), watch=watch)
    name = "copy_kernel"
    assert seen == [("before", name, name, 0.0), ("after", name, name, 6.0)]


def everything_anew(model, requests, parts, budget, seats, share=True):
    """No cache, no blocks: each token computes all that stand before it."""
    replies = []
    for prompt, wanted, loops in requests:
        tokens = list(prompt)
        for _ in range(wanted):
            n = len(tokens)
            hidden = model.hidden(
                tokens, list(range(n)), [loops] * n, lambda place, rows, *qkv: attention(*qkv)
            )
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
        replies.append(tokens[len(prompt) :])
    return replies


def test_an_engine_without_a_cache_gets_no_point_for_blocks():
    target = types.SimpleNamespace(serve=everything_anew)
    test = ex14.test_ex14_7_blocks_are_held_long_enough_and_given_back
    with pytest.raises(AssertionError):
        test(target, random.Random(1))


def test_a_watched_model_is_reached_through_what_is_counted_alone():
    model = ex14.LoopModel(ex14.parcae_of((0, 1, 0), 1))
    watched = ex14.Watched(model)
    held = [*vars(watched).values(), getattr(watched.logits, "__self__", None)]
    assert not any(value is model for value in held)
