"""An engine on several ranks says what an engine on one says. Ranks are threads here."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import run_engine
from rank_threads import ranks_as_threads, two_ranks

from minifer.engine import Engine
from minifer.events import ListSink
from minifer.outputs import RequestOutput
from minifer.request import SamplingParams

STEM = "The for statement is used to iterate over the elements of a sequence"
TIGHT: dict[str, Any] = {  # chunks, a full cache, blocks that are shared, copied and poisoned
    "block_size": 8,
    "num_kv_blocks": 36,
    "max_num_batched_tokens": 40,
    "max_prefill_chunk": 17,
    "debug": True,
}
ASKED = [
    (STEM, SamplingParams(temperature=0, max_tokens=24)),
    (STEM + " (such", SamplingParams(temperature=0, max_tokens=24, logprobs=3)),
    (STEM + " (such as", SamplingParams(temperature=0.9, seed=5, max_tokens=24, n=3)),
    ("The with statement", SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=20)),
    ("An expression", SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=2)),
    ("abcabcabcabcabc", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)),
    ("Lists", SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.3, stop=["."])),
]


def serve(**options: Any) -> tuple[dict[str, RequestOutput], ListSink]:
    """All of `ASKED`, two thirds of them at once, with every invariant checked."""
    sink = ListSink()
    options = {"dtype": "float32", "device": "cpu", **options}
    with Engine.from_pretrained("minifer-tiny", sinks=[sink], **options) as engine:
        for index, (prompt, params) in enumerate(ASKED):
            engine.add_request(str(index), prompt, params)
            if index == 4:
                engine.step()
        return run_engine(engine), sink


def replies(outputs: dict[str, RequestOutput]) -> dict[str, list[tuple[Any, ...]]]:
    return {
        name: [(c.token_ids, c.text, c.finish_reason) for c in output.outputs]
        for name, output in sorted(outputs.items())
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, RequestOutput]:
    """One rank that is never short of anything."""
    return serve(num_kv_blocks=300, enable_prefix_caching=False)[0]


@pytest.mark.parametrize(
    ("size", "speculative_method"),
    [
        (2, "none"),
        (3, "ngram"),
        pytest.param(2, "ngram", marks=pytest.mark.slow),
        pytest.param(3, "none", marks=pytest.mark.slow),
    ],
)
def test_replies_are_those_of_one_rank(
    monkeypatch: pytest.MonkeyPatch,
    alone: dict[str, RequestOutput],
    size: int,
    speculative_method: str,
) -> None:
    with ranks_as_threads(monkeypatch):
        outputs, sink = serve(
            tensor_parallel_size=size, speculative_method=speculative_method, **TIGHT
        )
    assert replies(outputs) == replies(alone)
    happened = {event.name for event in sink.events}
    assert {"request.preempted", "kv.prefix_hit", "request.forked"} <= happened
    for index, kind in (("1", "logprobs"), ("4", "prompt_logprobs")):
        for ours, truth in zip(
            scores(outputs[index], kind), scores(alone[index], kind), strict=True
        ):
            assert ours == pytest.approx(truth, abs=1e-4)


def scores(output: RequestOutput, kind: str) -> list[dict[int, float]]:
    positions = output.prompt_logprobs if kind == "prompt_logprobs" else output.outputs[0].logprobs
    assert positions
    return [{t: e.logprob for t, e in p.items()} for p in positions if p is not None]


def test_a_draft_model_runs_whole_on_rank_0(
    monkeypatch: pytest.MonkeyPatch, alone: dict[str, RequestOutput]
) -> None:
    draft = {"speculative_method": "draft", "speculative_model": "minifer-tiny"}
    with ranks_as_threads(monkeypatch):
        outputs, _ = serve(tensor_parallel_size=2, **draft, **TIGHT)
    assert replies(outputs) == replies(alone)


def test_bfloat16_runs_too_and_time_in_collectives_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sink = ListSink()
    with ranks_as_threads(monkeypatch), two_ranks(sinks=[sink], dtype="bfloat16") as engine:
        engine.add_request("a", STEM, SamplingParams(temperature=0, max_tokens=4))
        assert run_engine(engine)["a"].outputs[0].finish_reason == "length"
    steps = [event.data for event in sink.events if event.name == "step.forward"]
    assert len(steps) == 4
    assert all(step["collective_us"] > 0 for step in steps)
