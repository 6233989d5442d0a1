"""F-04 and F-03: what the canaries see, and the limit of what they see."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from probes import make_engine

from minifer.canary import FOLDER, THRESHOLD, Canary, CanaryReport
from minifer.engine import Engine
from minifer.faults.matrix import build_engine
from minifer.faults.registry import get, patched
from minifer.postprocessing.guards.script_drift import script_of
from minifer.request import SamplingParams
from minifer.weights.resolve import LoadedModel, load_model


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("minifer-tiny", "auto", "auto")


@pytest.fixture(scope="module")
def smollm2(pulled_model: Any) -> LoadedModel:
    return load_model(str(pulled_model), "auto", "auto")


@contextmanager
def forward_of(engine: Engine, change: Callable[[Any], None]) -> Iterator[None]:
    """Change every step's input before the model sees it."""
    runner: Any = engine.runner
    forward = runner.forward

    def changed(step: Any) -> Any:
        change(step)
        return forward(step)

    with patched(runner, forward=changed):
        yield


def positions_one_too_high(step: Any) -> None:
    """RoPE + 1, of decodes: a shift of all positions would be none."""
    for first, end in itertools.pairwise(step.query_start):
        if end - first == 1:
            step.positions[first] += 1


def last_prompt_slot_lost(step: Any) -> None:
    for first, end in itertools.pairwise(step.query_start):
        if end - first > 1:
            step.slot_mapping[end - 1] = -1


def blocks_swapped(step: Any) -> None:
    """Every decode reads the first block of another request."""
    tables = [list(table) for table in step.block_tables]
    single = [b - a == 1 for a, b in itertools.pairwise(step.query_start)]
    for row, table in enumerate(tables):
        if single[row] and len(tables) > 1 and len(table) > 1:
            step.block_tables[row] = [tables[row - 1][0], *table[1:]]


SILENT = {
    "rope": positions_one_too_high,
    "lost slot": last_prompt_slot_lost,
    "swap": blocks_swapped,
}


def check_under(loaded: Any, change: Callable[[Any], None] | None) -> CanaryReport:
    engine = build_engine(loaded, num_kv_blocks=64)
    canary = Canary.of(engine)
    with forward_of(engine, change or (lambda step: None)):
        return canary.check(engine)


@pytest.mark.parametrize("change", SILENT.values(), ids=SILENT)
def test_f04_faults_that_leave_a_reply_fluent_are_seen(tiny: Any, change: Any) -> None:
    report = check_under(tiny, change)
    assert report.kl > 10 * THRESHOLD and report.alarms


def test_f04_rounding_is_far_below_the_threshold(tiny: Any) -> None:
    report = check_under(tiny, None)
    assert report.ok and report.kl < THRESHOLD / 100
    assert max(reading.num_cached_tokens for reading in report.readings) == 48
    assert {reading.run for reading in report.readings} == {"cold", "hit", "alone"}


@pytest.mark.slow
@pytest.mark.parametrize("change", SILENT.values(), ids=SILENT)
def test_f04_on_smollm2(smollm2: Any, change: Any) -> None:
    assert check_under(smollm2, change).kl > THRESHOLD


@pytest.mark.slow
def test_f04_on_smollm2_without_a_fault(smollm2: Any) -> None:
    assert check_under(smollm2, None).kl < THRESHOLD / 100


def one_slot_too_many(loaded: Any, content: float) -> list[float]:
    """The first check's `kl` of each canary, with this number in every unwritten slot."""
    engine = build_engine(loaded, num_kv_blocks=64)
    kv: Any = engine.runner.kv  # type: ignore[attr-defined]
    for tensor in (*kv.keys, *kv.values):
        tensor.fill_(content)
    canary = Canary.of(engine)
    with get("off-by-one-length").inject(engine):
        return [reading.kl for reading in canary.check(engine).readings if reading.run == "cold"]


def test_f03_one_slot_too_many_is_seen_by_poison_and_not_by_a_long_canary(tiny: Any) -> None:
    """Zeros in a context of 64 are no news; in a context of one they are, and so is poison."""
    plausible, poison = one_slot_too_many(tiny, 0.0), one_slot_too_many(tiny, 1e4)
    assert plausible[-1] < THRESHOLD < plausible[0]
    assert min(poison) > THRESHOLD


def test_f03_debug_mode_sees_it_in_one_step() -> None:
    engine = make_engine(debug=True)
    with get("off-by-one-length").inject(engine):
        engine.add_request("a", [3, 1, 4, 1, 5], SamplingParams(temperature=0, max_tokens=3))
        engine.step()  # the prompt
        (output,) = engine.step()  # the first decode
    assert output.outputs[0].stop_reason == "logits hold NaN"


def test_f03_the_shadow_sees_a_slot_of_another_request_whatever_it_holds() -> None:
    """The same numbers as its own would have: only who wrote them tells."""
    engine = make_engine(debug=True)
    for name, prompt in (("a", [3, 1, 4, 1, 5]), ("b", [3, 1, 4, 2, 5])):
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=3))
    engine.step()
    prepare = engine.kv.prepare

    def swapped(plan: Any) -> Any:
        step = prepare(plan)
        step.block_tables = [
            [step.block_tables[1][0], *step.block_tables[0][1:]],
            step.block_tables[1],
        ]
        return step

    with patched(engine.kv, prepare=swapped):
        outputs = {output.request_id: output.outputs[0] for output in engine.step()}
    assert "which holds the KV of other tokens there" in str(outputs["a"].stop_reason)


def test_a_recorded_canary_is_read_back_as_it_was(tmp_path: Any) -> None:
    engine = make_engine()
    canary = Canary.record(engine)
    canary.save(tmp_path / "c.json")
    loaded = Canary.load(tmp_path / "c.json")
    assert loaded.model_digest == canary.model_digest and len(loaded.prompts) == 6
    assert loaded.prompts[0].output_ids == canary.prompts[0].output_ids
    assert loaded.check(engine).ok


def test_canaries_are_found_by_their_models_weights(tiny: Any) -> None:
    digests = [Canary.load(file).model_digest for file in sorted(FOLDER.glob("*.json"))]
    assert len(set(digests)) == len(digests) >= 2
    assert Canary.of(build_engine(tiny, num_kv_blocks=8)).model_digest in digests
    with pytest.raises(ValueError, match="no canaries are stored for this model"):
        Canary.of(make_engine())


def test_a_canary_is_not_recorded_from_a_broken_engine() -> None:
    engine = make_engine()
    with (
        get("wrong-script").inject(engine),
        pytest.raises(ValueError, match="the engine does not draw the reference's tokens"),
    ):
        Canary.record(engine)


def test_a_serving_engine_is_not_interrupted() -> None:
    engine = make_engine()
    canary = Canary.record(engine)
    engine.add_request("a", [1, 2, 3])
    with pytest.raises(ValueError, match="engine must be idle"):
        canary.check(engine)
    with pytest.raises(ValueError, match="text must have 64 tokens or more, got 1"):
        Canary.record(make_engine(), "x")


def test_canaries_can_be_served_beside_other_requests(tiny: Any) -> None:
    """For a server: `requests` go the way of all requests, `read` judges the replies."""
    engine = build_engine(tiny, num_kv_blocks=64)
    canary = Canary.of(engine)
    engine.add_request("user", "The for statement", SamplingParams(max_tokens=30, seed=1))
    for i, (prompt, params) in enumerate(canary.requests("now")):
        engine.add_request(f"canary-{i}", prompt, params)
    outputs = {}
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output for output in engine.step()}
    readings = canary.read("now", [outputs[f"canary-{i}"] for i in range(len(canary.prompts))])
    assert CanaryReport(tuple(readings), THRESHOLD).ok


def test_salts_that_are_ignored_and_errors_are_alarms() -> None:
    engine = make_engine()
    canary = Canary.record(engine)
    with get("salt-ignored").inject(engine):
        assert any("under a salt of its own" in alarm for alarm in canary.check(engine).alarms)
    loud = make_engine(loud=True)
    canary = Canary.record(loud)
    with get("softmax-without-max").inject(loud):
        report = canary.check(loud)
    assert report.kl == math.inf and "logits hold NaN" in report.alarms[0]


CHINESE = "请用中文详细介绍一下上海的历史、文化和美食，并说明改革开放对这座城市的影响。"
QUESTIONS = ("What is the capital of France?", "Give me a tip for a good night's sleep.")


@pytest.mark.slow
def test_f03_leftovers_of_another_scale_turn_an_english_reply_chinese(smollm2: Any) -> None:
    """A user's view of the same fault: nothing at the leftovers' own scale, Chinese at four times.

    The cache has held Chinese conversations only. (A scale that two layers of a quantised cache
    disagree on makes such leftovers.)
    """
    replies: dict[tuple[float, bool], list[str]] = {}
    for scale, broken in ((1.0, False), (1.0, True), (4.0, True)):
        engine = build_engine(smollm2, num_kv_blocks=16, enable_prefix_caching=False)
        for i in range(4):  # 16 blocks of them
            reply(engine, f"{i} {CHINESE}")
        kv: Any = engine.runner.kv  # type: ignore[attr-defined]
        for tensor in (*kv.keys, *kv.values):
            tensor.mul_(scale)
        with get("off-by-one-length").inject(engine) if broken else nullcontext():
            replies[scale, broken] = [reply(engine, question) for question in QUESTIONS]
    scripts = {key: {script_of(c) for c in "".join(texts)} for key, texts in replies.items()}
    assert scripts[1.0, False] == scripts[1.0, True] == {"Latin", None}
    assert "Han" in scripts[4.0, True]


def reply(engine: Engine, question: str) -> str:
    """A greedy answer of 40 tokens."""
    assert engine.tokenizer is not None
    ids = engine.tokenizer.apply_chat_template([{"role": "user", "content": question}])
    engine.add_request("chat", ids, SamplingParams(temperature=0, max_tokens=40))
    last = []
    while engine.has_unfinished_requests:
        last = engine.step() or last
    return last[0].outputs[0].text
