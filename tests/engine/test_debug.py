"""Debug mode: each of its checks fires when what it watches goes wrong, and never otherwise."""

import pytest
import torch
from fakes import run_engine, tiny_engine

from minifer.debug import DebugError
from minifer.request import SamplingParams

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]  # two full blocks of 4 and one token
OTHER = [27, 18, 28, 18, 28, 4, 5, 9, 0]


def error_of(engine, request_id="a"):
    output = run_engine(engine)[request_id].outputs[0]
    assert output.finish_reason == "error"
    return output.stop_reason


def holds_nan(engine, block_id):
    """Per position: are keys and values of all layers NaN there? None when they disagree."""
    tensors = [t[block_id].isnan() for t in (*engine.runner.kv.keys, *engine.runner.kv.values)]
    return [
        all(t[p].all() for t in tensors) or (None if any(t[p].any() for t in tensors) else False)
        for p in range(4)
    ]


def test_memory_that_nobody_owns_holds_nan():
    engine = tiny_engine(num_kv_blocks=6)
    assert all(holds_nan(engine, block) == [True] * 4 for block in range(6))
    engine.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=8))
    engine.step()
    (request,) = engine.scheduler.running
    first, second, third = request.block_table
    assert holds_nan(engine, third) == [False, True, True, True]
    engine.abort("a")
    engine.add_request("b", OTHER, SamplingParams(temperature=0, max_tokens=2))
    engine.step()
    # The full blocks can still be found; the rest of the aborted request is gone.
    assert holds_nan(engine, first) == holds_nan(engine, second) == [False] * 4
    assert holds_nan(engine, third) == [True] * 4


def test_an_evicted_block_is_poisoned_before_it_is_written_again():
    engine = tiny_engine(num_kv_blocks=3)
    for request_id, prompt in (("a", PROMPT), ("b", OTHER)):
        engine.add_request(request_id, prompt, SamplingParams(temperature=0, max_tokens=1))
        run_engine(engine)
    last = [block for block in range(3) if any(holds_nan(engine, block))]
    assert [holds_nan(engine, block) for block in last] == [[False, True, True, True]]


def test_a_step_that_fails_keeps_no_block_from_its_poison(monkeypatch):
    """What was to be poisoned in the failed step is poisoned when it is handed out."""
    engine = tiny_engine(num_kv_blocks=4)
    engine.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=8))
    engine.step()
    engine.step()
    (request,) = engine.scheduler.running
    third = request.block_table[2]
    assert holds_nan(engine, third) == [False, False, True, True]
    engine.abort("a")
    engine.add_request("b", [1, 2], SamplingParams(temperature=0, max_tokens=1))
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "forward", lambda step: 1 / 0)
        assert "ZeroDivisionError" in error_of(engine, "b")
    engine.add_request("c", [7], SamplingParams(temperature=0, max_tokens=8))
    engine.step()
    assert engine.scheduler.running[0].block_table == [third]
    assert holds_nan(engine, third) == [False, True, True, True]


def test_a_slot_too_many_makes_the_request_fail_and_no_other(monkeypatch):
    """Attention that reads one position beyond the context: the numbers tell, at once."""
    from minifer.execution.forward_batch import DecodeIndex, ForwardBatch

    honest = tiny_engine()
    honest.add_request("b", OTHER[:7], SamplingParams(temperature=0, max_tokens=4))
    expected = run_engine(honest)["b"].outputs[0].token_ids

    engine = tiny_engine()
    engine.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=4))
    engine.add_request("b", OTHER[:7], SamplingParams(temperature=0, max_tokens=4))
    engine.step()
    decode = ForwardBatch.decode.func

    def off_by_one(batch):
        index = decode(batch)
        beyond = index.slots.clone()
        if len(index.rows) == 2:
            beyond[0, -1] += 1  # the newest token of "a": the slot after it instead
        return DecodeIndex(index.rows, beyond, index.lengths, index.ragged)

    monkeypatch.setattr(ForwardBatch, "decode", property(off_by_one))
    outputs = run_engine(engine)
    assert outputs["a"].outputs[0].finish_reason == "error"
    assert outputs["b"].outputs[0].token_ids == expected


def test_a_write_beside_the_pool_is_seen():
    engine = tiny_engine(num_kv_blocks=8)
    engine.runner.kv.check_guard_bands()
    keys = engine.runner.kv.keys[1]
    whole = keys.as_strided((keys.numel() + 1,), (1,), keys.storage_offset())
    whole[-1] = 0.0
    engine.add_request("a", PROMPT)
    assert error_of(engine) == "DebugError: something wrote after the keys of KV slot 1"


def test_a_foreign_block_is_seen(monkeypatch):
    engine = tiny_engine()
    for request_id, prompt in (("a", PROMPT), ("b", OTHER)):
        engine.add_request(request_id, prompt, SamplingParams(temperature=0, max_tokens=8))
    engine.step()
    prepare = engine.kv.prepare

    def swapped(plan):
        step = prepare(plan)
        a, b = step.block_tables
        step.block_tables[0] = [b[0], *a[1:]]
        return step

    monkeypatch.setattr(engine.kv, "prepare", swapped)
    assert "reads position 0" in (reason := error_of(engine))
    assert reason.endswith("which holds the KV of other tokens there")


def test_wrong_tokens_or_positions_of_a_batch_are_seen(monkeypatch):
    for field, what in (("positions", "position 10"), ("token_ids", "token")):
        engine = tiny_engine()
        engine.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=8))
        engine.step()
        prepare = engine.kv.prepare

        def wrong(plan, prepare=prepare, field=field):
            step = prepare(plan)
            getattr(step, field)[-1] += 1
            return step

        monkeypatch.setattr(engine.kv, "prepare", wrong)
        assert what in error_of(engine)


def test_a_context_of_another_length_is_seen(monkeypatch):
    engine = tiny_engine()
    engine.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=8))
    prepare = engine.kv.prepare

    def longer(plan):
        step = prepare(plan)
        step.seq_lens[0] += 1
        return step

    monkeypatch.setattr(engine.kv, "prepare", longer)
    assert "has 9 tokens of context, attention reads 10" in error_of(engine)


def test_broken_books_raise_out_of_the_step():
    engine = tiny_engine()
    engine.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=8))
    engine.step()
    engine.kv.pool.blocks[engine.scheduler.running[0].block_table[0]].ref_count += 1
    with pytest.raises(DebugError, match="is in 1 tables"):
        engine.step()


@pytest.mark.parametrize("prefix_index", ["hash", "radix"])
def test_the_tokens_are_the_same_with_and_without(prefix_index):
    """Forks, preemption and evictions included: the checks change nothing and find nothing."""
    found = []
    for debug in (False, True):
        engine = tiny_engine(debug=debug, num_kv_blocks=9, prefix_index=prefix_index)
        torch.manual_seed(0)
        for i in range(6):
            prompt = [(7 * i + j * j) % 40 for j in range(3 + 2 * i)]
            params = SamplingParams(temperature=0.7, n=1 + i % 3, max_tokens=12, seed=i)
            engine.add_request(f"r{i}", prompt if i % 2 else PROMPT, params)
        outputs = run_engine(engine)
        assert engine.scheduler.num_preemptions > 0
        found.append({k: [s.token_ids for s in v.outputs] for k, v in outputs.items()})
    assert found[0] == found[1]
