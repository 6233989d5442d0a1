"""KV policies: which iteration attends to which slot, and what that does to logits."""

import numpy as np
import pytest
import torch
from loop_models import Cached, dense_logits, float64, loop_model, some_tokens
from parcae_float64 import Float64Decode

from minifer.execution.kv_storage import KVStorage
from minifer.loops import LoopConfig, LoopKVPolicy

POLICIES = ["full", "terminal", "cyclic-1", "cyclic-2", "cyclic-3", "first-1", "first-2", "first-9"]
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("name", "slots", "writes"),
    [
        ("full", [0, 1, 2, 3, 4], [1, 1, 1, 1, 1]),
        ("terminal", [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]),
        ("cyclic-1", [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]),
        ("cyclic-2", [0, 1, 0, 1, 0], [1, 1, 1, 1, 1]),
        ("cyclic-3", [0, 1, 2, 0, 1], [1, 1, 1, 1, 1]),
        ("cyclic-12", [0, 1, 2, 3, 4], [1, 1, 1, 1, 1]),
        ("first-1", [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]),
        ("first-3", [0, 1, 2, 2, 2], [1, 1, 1, 0, 0]),
        ("first-9", [0, 1, 2, 3, 4], [1, 1, 1, 1, 1]),
    ],
)
def test_slots_of_five_iterations(name, slots, writes):
    policy = LoopKVPolicy(name)
    assert [policy.slot(t) for t in range(5)] == slots
    assert [policy.writes(t) for t in range(5)] == [bool(w) for w in writes]
    assert policy.num_slots(5) == len(set(slots))
    assert policy.overwrites == (name.startswith("cyclic") or name == "terminal")


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("num_loops", [1, 2, 5, 8])
def test_every_slot_is_written_before_it_is_read_and_none_is_spare(name, num_loops):
    policy = LoopKVPolicy(name)
    written = set()
    for t in range(num_loops):
        if policy.writes(t):
            written.add(policy.slot(t))
        assert policy.slot(t) in written
    assert written == set(range(policy.num_slots(num_loops)))
    if not policy.overwrites:
        times = [policy.slot(t) for t in range(num_loops) if policy.writes(t)]
        assert len(times) == len(set(times))


@pytest.mark.parametrize(
    "name",
    ["", "Full", "full ", "full\n", "first", "first-", "first-0", "first-01", "cyclic-0",
     "cyclic--1", "cyclic-1.5", "cyclic-٢", "terminal-1", "full-2", "last-2", None, 2],
)  # fmt: skip
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match=r"loop_kv_policy must be full, terminal, cyclic-M or"):
        LoopKVPolicy(name)
    with pytest.raises(ValueError, match="loop_kv_policy must be"):
        LoopConfig(1, 1, 1, kv_policy=name)


@pytest.mark.parametrize(
    ("field", "value"),
    [("prelude", -1), ("core", 0), ("coda", -1), ("mean_recurrence", 0), ("mean_backprop_depth", 0),
     ("max_num_loops", -1), ("core", 1.0), ("prelude", True), ("injection", "linear"),
     ("prelude_norm", "no"), ("value_embeddings", None)],
)  # fmt: skip
def test_other_loops_are_refused(field, value):
    sizes = {"prelude": 1, "core": 1, "coda": 1, field: value}
    with pytest.raises(ValueError, match=f"{field} must be .*got {value!r}"):
        LoopConfig(**sizes)


@pytest.mark.parametrize(
    ("policy", "slots"), [("full", 20), ("terminal", 6), ("cyclic-3", 10), ("first-2", 8)]
)
def test_memory_is_p_plus_s_r_plus_c_slots(policy, slots):
    """parcae-140m: 2 + S · 2 + 2 slots of 2 · 6 heads · 128 · 2 bytes; 60 KiB a token at full depth
    8, 18 KiB without a loop."""
    loop = LoopConfig(2, 2, 2, max_num_loops=8, kv_policy=policy)
    assert loop.num_kv_slots == slots
    per_token = KVStorage.bytes_per_block(slots, 1, 6, 128, torch.bfloat16)
    assert per_token == slots * 3072
    assert {"full": 60 * 1024, "terminal": 18 * 1024}.get(policy, per_token) == per_token


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_of_the_three_stacks_fill_the_storage_without_overlap(policy):
    loop = LoopConfig(2, 3, 1, max_num_loops=5, kv_policy=policy)
    used = [{0, 1}, {loop.coda_slot}]
    used += [{loop.core_slot(t) + j for j in range(3)} for t in range(5)]
    assert set().union(*used) == set(range(loop.num_kv_slots))
    distinct = {frozenset(stack) for stack in used}
    assert sum(map(len, distinct)) == loop.num_kv_slots


# -- logits


def passes(run, tokens, prompt=6):
    """A prompt in one pass, then token by token: logits [T, V]."""
    return np.concatenate(
        [run(tokens[:prompt]), *(run(tokens[i : i + 1]) for i in range(prompt, len(tokens)))]
    )


@pytest.mark.parametrize("layers", [(2, 2, 2), (1, 2, 1), (0, 1, 0)], ids=str)
def test_full_cached_decode_is_the_full_forward(layers):
    model, tokens = loop_model(layers), some_tokens(14)
    cached = Cached(model)
    logits = passes(lambda ids: cached.run(ids, 4), tokens)
    whole = dense_logits(model, tokens, num_loops=4)
    scale = whole.abs().max().item()
    np.testing.assert_allclose(logits / scale, whole / scale, rtol=0, atol=1e-5)
    truth = float64(model)
    decode = passes(Float64Decode(truth, 4).run, tokens)
    np.testing.assert_allclose(decode, truth.forward(tokens, 4), rtol=0, atol=1e-12)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layers", [(1, 2, 1), (2, 3, 2)], ids=str)
def test_a_prompt_and_decode_equal_float64_under_every_policy(layers, policy):
    model, tokens = loop_model(layers, kv_policy=policy, max_num_loops=5), some_tokens(14)
    cached = Cached(model)
    truth = passes(Float64Decode(float64(model), 5, policy).run, tokens)
    ours = passes(lambda ids: cached.run(ids, 5), tokens)
    np.testing.assert_allclose(ours, truth, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("policy", ["terminal", "cyclic-2", "cyclic-3"])
def test_where_slots_are_overwritten_prefill_is_exact_and_decode_is_not(policy):
    model, tokens = loop_model((1, 2, 1), kv_policy=policy), some_tokens(14)
    whole = float64(model).forward(tokens, 4)
    cached = Cached(model)
    for logits in (
        passes(Float64Decode(float64(model), 4, policy).run, tokens),
        passes(lambda ids: cached.run(ids, 4), tokens),
    ):
        difference = np.abs(logits - whole).max(axis=1)
        assert difference[:6].max() < TOLERANCE
        assert difference[6:].min() > 0.02


@pytest.mark.parametrize("policy", ["full", "first-1", "first-2"])
def test_where_slots_are_written_once_any_chunks_give_the_same(policy):
    model, tokens = loop_model((1, 2, 1), kv_policy=policy), some_tokens(14)
    whole = dense_logits(model, tokens, num_loops=4)
    cached = Cached(model)
    chunks = [cached.run(tokens[a:b], 4) for a, b in ((0, 3), (3, 4), (4, 11), (11, 14))]
    np.testing.assert_allclose(torch.cat(chunks), whole, rtol=0, atol=TOLERANCE)
    full = dense_logits(loop_model((1, 2, 1)), tokens, num_loops=4)
    assert ((whole - full).abs().max() > 0.02) == (policy != "full")
