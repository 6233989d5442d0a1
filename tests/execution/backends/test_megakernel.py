"""backend="megakernel": tokens and logits of the model in torch, whatever is in the batch."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
from fakes import run_engine, tiny_config, tiny_engine, tiny_model
from torch import nn

from minifer.config import EngineConfig, RopeConfig
from minifer.engine import Engine
from minifer.events import ListSink
from minifer.execution.backends.megakernel import MegakernelRunner, batch_bucket
from minifer.execution.runner import ModelRunner, make_runner
from minifer.kernels.mega.launch import MegakernelError
from minifer.kv.step_input import StepInput
from minifer.llm import LLM
from minifer.request import SamplingParams
from minifer.weights.hf import config_to_hf

# One layer, one KV head, few columns: an instruction takes the interpreter 10 ms.
SMALL = tiny_config(num_layers=1, num_heads=2, num_kv_heads=1)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
PROMPTS = {"a": [5, 1, 33, 8, 21, 2, 9], "b": [7], "c": list(range(20)), "d": [3, 3], "e": [39] * 5}


def replies(backend: str, prompts, params=GREEDY, config=SMALL, **options) -> dict[str, list[int]]:
    """In debug mode: poisoned blocks, guard bands, every invariant after every step."""
    sink = ListSink()
    engine = tiny_engine(config=config, backend=backend, sinks=(sink,), **options)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params[name] if isinstance(params, dict) else params)
    outputs = run_engine(engine)
    if backend == "megakernel":
        assert engine.runner._kernels  # they were used
    found = {
        f"{name}/{i}": sequence.token_ids
        for name, output in outputs.items()
        for i, sequence in enumerate(output.outputs)
    }
    return found | {"events": sorted({event.name for event in sink.events})}


def both(prompts, params=GREEDY, config=SMALL, **options):
    """Replies of the megakernel, and those of torch."""
    return (
        replies("megakernel", prompts, params, config, **options),
        replies("torch", prompts, params, config, **options),
    )


@pytest.mark.parametrize("names", ["a", "abc", "abcde"])
def test_requests_of_different_lengths_get_torchs_tokens(names):
    got, expected = both({name: PROMPTS[name] for name in names})
    assert got == expected


def test_requests_that_join_and_leave_change_the_batch():
    """Batches of 1, 2 and 4, and of 3 and 1 again as requests end: buckets of one storage."""
    params = {
        name: SamplingParams(max_tokens=n, temperature=0.0)
        for name, n in {"a": 6, "b": 2, "c": 4}.items()
    }
    got, expected = both({name: PROMPTS[name] for name in "abc"}, params)
    assert got == expected


def test_preempted_requests_come_back():
    """Eight blocks of four: three requests do not fit, so one is computed anew."""
    params = SamplingParams(max_tokens=5, temperature=0.0)
    prompts = {name: [*PROMPTS["a"][i:], i] for i, name in enumerate("abc")}
    got, expected = both(prompts, params, num_kv_blocks=8)
    assert got == expected
    assert "request.preempted" in got["events"]


def test_shared_prefixes_and_forks():
    """Blocks that two requests share, and the copy made before one of them writes on."""
    params = SamplingParams(max_tokens=3, temperature=0.9, n=2, seed=4)
    prompts = {"first": PROMPTS["c"][:9], "second": [*PROMPTS["c"][:8], 1]}
    got, expected = both(prompts, params)
    assert got == expected
    assert {"kv.prefix_hit", "request.forked"} <= set(got["events"])


def test_a_draws_noise_does_not_depend_on_the_back_end():
    params = SamplingParams(max_tokens=4, temperature=1.5, seed=11, top_k=30)
    got, expected = both({"a": PROMPTS["a"]}, params)
    assert got == expected


def test_the_longest_context_ends_within_a_block():
    params = SamplingParams(max_tokens=None, temperature=0.0)
    got, expected = both({"a": [5, 1, 33]}, params, max_model_len=8, block_size=3)
    assert got == expected and len(got["a/0"]) == 5


def test_one_token_chunks_of_a_prompt_sample_nobody():
    """A budget of one token: each step of the prompt but the last asks for no logits."""
    got, expected = both({"a": PROMPTS["a"][:4]}, max_num_batched_tokens=1, max_num_seqs=1)
    assert got == expected


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(SMALL, rope=RopeConfig("llama3", 1e4, 8.0, 32)),
        dataclasses.replace(SMALL, rope=RopeConfig("yarn", 1e4, 4.0, 32)),
        dataclasses.replace(SMALL, tie_word_embeddings=False, num_layers=2),
        dataclasses.replace(SMALL, num_heads=3, num_kv_heads=3),
    ],
    ids=["llama3", "yarn", "untied", "three heads"],
)
def test_other_models(config):
    got, expected = both({"a": PROMPTS["c"]}, config=config)
    assert got == expected


# -- the runner alone


def step_of(tokens, positions, tables, block_size=4, rows=None) -> StepInput:
    count = len(tokens)
    return StepInput(
        block_size,
        token_ids=list(tokens),
        positions=list(positions),
        slot_mapping=[t[p // 4] * 4 + p % 4 for p, t in zip(positions, tables, strict=True)],
        query_start=list(range(count + 1)),
        seq_lens=[p + 1 for p in positions],
        block_tables=[list(table) for table in tables],
        logits_rows=list(range(count)) if rows is None else rows,
    )


def runner(backend="megakernel", config=SMALL, dtype=torch.float32, **options):
    model = copy.deepcopy(tiny_model(config)).to(dtype)
    engine = EngineConfig(backend=backend, block_size=4, **options)
    made = make_runner(model, config, engine, 16)
    draw = torch.Generator().manual_seed(0)
    for tensor in (*made.kv.keys, *made.kv.values):
        tensor.copy_(torch.randn(tensor.shape, generator=draw))
    return made


def test_logits_are_torchs_and_only_of_the_rows_asked_for():
    step = step_of([5, 9, 30], [40, 3, 17], [list(range(11)), [12], [15, 14, 13, 11, 2]])
    step.logits_rows = [2, 0]
    got, expected = (runner(name).forward(copy.deepcopy(step)) for name in ("megakernel", "torch"))
    assert got.shape == (2, SMALL.vocab_size) and got.dtype == torch.float32
    assert (got - expected).abs().max() < 1e-4


def test_nobody_asks_for_logits():
    made = runner()
    assert made.forward(step_of([5], [2], [[3]], rows=[])).shape == (0, SMALL.vocab_size)


def test_logits_outlive_the_next_step():
    made = runner()
    first = made.forward(step_of([5], [2], [[3]]))
    kept = first.clone()
    made.forward(step_of([6], [3], [[3]]))
    assert torch.equal(first, kept)


def test_a_long_context_is_split():
    config = dataclasses.replace(SMALL, max_position_embeddings=1024)
    tables = list(range(16)) * 11  # blocks may be repeated: only reads go there
    step = step_of([7], [600], [tables])
    engine = EngineConfig(block_size=4, max_model_len=1024)
    logits = []
    for kind in (MegakernelRunner, ModelRunner):
        model = tiny_model(config)
        made = kind(model, config, engine, 200)
        draw = torch.Generator().manual_seed(0)
        for tensor in (*made.kv.keys, *made.kv.values):
            tensor.copy_(torch.randn(tensor.shape, generator=draw))
        logits.append(made.forward(copy.deepcopy(step)))
        if kind is MegakernelRunner:
            assert set(made._kernels) == {(1, 4)}, "601 tokens, three times 256"
    assert (logits[0] - logits[1]).abs().max() < 1e-4


def test_bfloat16_weights_are_multiplied_in_float32():
    """Nearer to the same weights in float64 than torch's bfloat16 is."""
    step = step_of([5, 9], [0, 0], [[1], [2]])
    exact = copy.deepcopy(tiny_model(SMALL)).bfloat16().float()
    engine = EngineConfig(block_size=4)
    truth = ModelRunner(exact, SMALL, engine, 16).forward(copy.deepcopy(step))
    got, torchs = (
        runner(name, dtype=torch.bfloat16).forward(copy.deepcopy(step))
        for name in ("megakernel", "torch")
    )
    assert (got - truth).abs().max() < 0.5 * (torchs - truth).abs().max()


def test_kernels_are_made_when_needed_and_kept():
    made = runner()
    made.forward(step_of([5], [2], [[3]]))
    made.forward(step_of([5], [3], [[3]]))
    made.forward(step_of([5, 1, 2], [3, 0, 0], [[3], [4], [5]]))
    assert set(made._kernels) == {(1, 1), (4, 1)}
    pointers = [kernel.kernel_args()["WEIGHTS"].tolist() for kernel in made._kernels.values()]
    assert pointers[0] == pointers[1]


def test_prefill_mixed_steps_and_big_batches_take_the_ordinary_path():
    made = runner()
    mixed = step_of([5, 6, 7], [0, 1, 9], [[3], [3], [4, 5, 6]])
    mixed.query_start, mixed.seq_lens = [0, 2, 3], [2, 10]
    mixed.block_tables = [[3], [4, 5, 6]]
    made.forward(mixed)
    made.forward(step_of([5] * 17, [0] * 17, [[b % 16] for b in range(17)]))
    assert not made._kernels


def test_buckets():
    assert [batch_bucket(n) for n in (1, 2, 3, 5, 9, 16)] == [1, 2, 4, 8, 16, 16]


def test_a_full_gpu_splits_less():
    """Sixteen requests keep the programs busy without."""
    made = runner()
    made._programs = 8
    assert [made._splits(5000, batch) for batch in (1, 2, 4, 16)] == [32, 16, 8, 2]


# -- refusals and faults


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv_bias": True}, "no instruction for qkv_bias"),
        ({"qk_norm": True}, "no instruction for qk_norm"),
        ({"sliding_windows": (8,)}, "no instruction for sliding_windows"),
        ({"vocab_size": 41}, "vocab must be a multiple of tile=8, got 41"),
    ],
)
def test_a_model_without_instructions_is_refused_at_once(change, message):
    config = dataclasses.replace(SMALL, **change)
    with pytest.raises(ValueError, match=message):
        tiny_engine(config=config, backend="megakernel")


@pytest.mark.parametrize("build", [LLM, Engine.from_pretrained])
def test_it_is_refused_before_its_weights_are_looked_for(build, tmp_path):
    config = config_to_hf(
        dataclasses.replace(SMALL, architecture="Qwen2ForCausalLM", qkv_bias=True)
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no instruction for qkv_bias"):
        build(str(tmp_path), backend="megakernel", device="cpu")


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="runs plain transformers, got Linear"):
        MegakernelRunner(nn.Linear(2, 2), SMALL, EngineConfig(backend="megakernel"), 4)


def test_a_kernel_that_gives_up_ends_the_requests_of_its_step(monkeypatch):
    engine = tiny_engine(config=SMALL, backend="megakernel")
    engine.add_request("a", PROMPTS["a"], GREEDY)
    engine.step()  # the prompt

    def give_up(self, step):
        raise MegakernelError("program 3 gave up")

    monkeypatch.setattr(MegakernelRunner, "_logits", give_up)
    (output,) = run_engine(engine).values()
    assert output.outputs[0].finish_reason == "error"
    assert "program 3 gave up" in output.outputs[0].stop_reason


# -- the bundled model


def tiny_replies(backend: str, max_tokens: int) -> list[list[int]]:
    llm = LLM("minifer-tiny", backend=backend, num_kv_blocks=16, debug=True)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(["The list of"], params)]


def test_minifer_tiny_says_the_same():
    assert tiny_replies("megakernel", 3) == tiny_replies("torch", 3)


@pytest.mark.slow
def test_minifer_tiny_says_the_same_for_32_tokens():
    (reply,) = tiny_replies("megakernel", 32)
    assert [reply] == tiny_replies("torch", 32)
    assert len(reply) == 32
