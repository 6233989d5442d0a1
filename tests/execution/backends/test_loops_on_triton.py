"""A loop model on our kernels, in Triton's interpreter, against the torch back end."""

from __future__ import annotations

import pytest
import torch
from fakes import run_engine
from loop_fakes import loop_engine, loop_model_config

from minifer import SamplingParams
from minifer.execution.backend import TorchBackend
from minifer.execution.backends import triton_backend
from minifer.execution.backends.triton_backend import TritonBackend
from minifer.loops import LoopConfig

PROMPTS = [[5, 9, 2, 31, 7, 7], [11, 4], [5, 9, 2, 31, 8]]
SMALL = loop_model_config(
    num_layers=3,
    hidden_size=40,  # wider than what a value embedding's gate reads of it
    num_heads=2,
    num_kv_heads=2,
    loop=LoopConfig(prelude=1, core=1, coda=1, mean_recurrence=3),
)


MORE_POLICIES = ("first-2", "terminal", "cyclic-2")
slow = pytest.mark.slow


def answers(backend: str, depths, *, config=SMALL, max_tokens=3, threshold=None, **options):
    """Greedy tokens and loops of requests, one of each depth, and what the runner counted."""
    engine = loop_engine(config=config, backend=backend, max_num_seqs=3, **options)
    assert engine.runner.backend.name == backend
    for i, depth in enumerate(depths):
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, num_loops=depth, exit_threshold=threshold
        )
        engine.add_request(f"r{i}", PROMPTS[i], params)
    outputs = run_engine(engine)
    given = [outputs[f"r{i}"].outputs[0] for i in range(len(depths))]
    return [(o.token_ids, o.num_loops) for o in given], engine.runner.stats


def test_greedy_tokens_equal_torch_with_rows_at_different_iterations() -> None:
    """Chunked prompts beside decodes, depths 3 and 2: groups of rows that attend through KV slots
    of their own; the cache is NaN elsewhere."""
    options = {"max_prefill_chunk": 4, "max_num_batched_tokens": 6, "max_tokens": 2}
    got = answers("triton", [3, 2], **options)
    assert got == answers("torch", [3, 2], **options)
    assert all(len(tokens) == 2 for tokens, _ in got[0])
    assert got[1].token_loops > got[1].core_applications  # some of them went together


@pytest.mark.parametrize(
    "policy", ["first-1", *(pytest.param(name, marks=slow) for name in MORE_POLICIES)]
)
def test_iterations_without_keys_of_their_own(policy: str) -> None:
    """first-m: an iteration that writes nothing hands -1 to the kernel for every slot."""
    options = {"loop_kv_policy": policy, "enable_prefix_caching": False, "max_tokens": 2}
    assert answers("triton", [3, 2], **options) == answers("torch", [3, 2], **options)


@slow
def test_early_exit_leaves_at_the_same_loops() -> None:
    depths, config = [8, 5], loop_model_config()
    got = answers("triton", depths, config=config, threshold=0.05)
    assert got == answers("torch", depths, config=config, threshold=0.05)
    run = [loops for (_, loops), depth in zip(got[0], depths, strict=True) if min(loops) < depth]
    assert run, "no token left early"


def test_a_step_of_the_core_calls_the_kernel(monkeypatch) -> None:
    """And no step composes the injection of torch operations."""
    seen = []

    def spied(h, decay, term, **options):
        seen.append(tuple(h.shape))
        return inject(h, decay, term, **options)

    inject = triton_backend.inject
    monkeypatch.setattr(triton_backend, "inject", spied)
    _, stats = answers("triton", [2], max_tokens=1)
    assert len(seen) == stats.core_applications == 2
    assert seen[0] == (len(PROMPTS[0]), SMALL.hidden_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_operation_is_torchs_to_the_last_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(3, 33, generator=generator).to(dtype)
    decay, term = torch.rand(33, generator=generator), torch.randn(3, 33, generator=generator)
    out = TritonBackend("cpu").inject(h, decay, term)
    assert out.dtype == dtype and torch.equal(out, TorchBackend().inject(h, decay, term))
