"""An engine on several ranks says what an engine on one says. Ranks are threads here."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from fakes import check_engine, run_engine
from rank_threads import ranks_as_threads

from minifer.config import EngineConfig
from minifer.engine import Engine
from minifer.events import ListSink
from minifer.execution.kv_storage import KVStorage
from minifer.execution.parallel import runner as parallel_runner
from minifer.execution.parallel.loading import places
from minifer.execution.parallel.ranks import RankError
from minifer.execution.runner import num_kv_blocks
from minifer.outputs import RequestOutput
from minifer.request import SamplingParams
from minifer.weights.resolve import load_model, read_config

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


def two_ranks(**options: Any) -> Engine:
    settings = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 64, **options}
    return Engine.from_pretrained("minifer-tiny", tensor_parallel_size=2, **settings)


# -- what goes wrong


def test_ctrl_c_waits_for_the_end_of_the_step_and_nothing_is_torn(
    monkeypatch: pytest.MonkeyPatch, alone: dict[str, RequestOutput]
) -> None:
    with ranks_as_threads(monkeypatch), two_ranks() as engine:
        engine.add_request("0", *ASKED[0])
        engine.step()
        press_in_the_middle(monkeypatch, engine)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert engine.runner.lost is None
        assert replies(run_engine(engine))["0"] == replies(alone)["0"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def press_in_the_middle(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Ctrl-C between two sums of the next step."""
    group = engine.runner.model.group
    real, sums = group.all_reduce, iter(range(10**6))

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        if next(sums) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return real(x)

    monkeypatch.setattr(group, "all_reduce", all_reduce)


class TornError(Exception):
    pass


def test_after_an_error_inside_a_step_nobody_is_served_and_everybody_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that missed a sum would put its next one into the wrong place."""
    with ranks_as_threads(monkeypatch), two_ranks(max_num_seqs=1) as engine:
        for name in ("running", "waiting"):
            engine.add_request(name, STEM, SamplingParams(max_tokens=200, temperature=0))
        engine.step()

        def torn(*_: Any) -> None:
            raise TornError("in the middle")

        monkeypatch.setattr(engine.runner.model.norm, "forward", torn)
        outputs = run_engine(engine)
        engine.add_request("late", STEM, SamplingParams(max_tokens=2))
        outputs |= run_engine(engine)
        check_engine(engine)
        assert engine.runner.lost is not None
    assert {name: o.outputs[0].finish_reason for name, o in outputs.items()} == dict.fromkeys(
        ("running", "waiting", "late"), "error"
    )
    for output in outputs.values():
        reason = output.outputs[0].stop_reason
        assert "rank 0 of 2 failed with TornError: in the middle" in str(reason)


def test_what_another_rank_fails_with_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: parallel_runner.RankRunner, step: Any) -> None:
        if self.model.group.rank == 1:
            raise MemoryError("of rank 1")
        return real(self, step)

    real = parallel_runner.RankRunner._logits
    monkeypatch.setattr(parallel_runner.RankRunner, "_logits", broken)
    with ranks_as_threads(monkeypatch), two_ranks() as engine:
        engine.add_request("a", STEM, SamplingParams(max_tokens=2))
        (output,) = run_engine(engine).values()
    assert "rank 1 of 2 failed with MemoryError: of rank 1" in str(output.outputs[0].stop_reason)


def test_a_rank_that_cannot_load_its_part_is_an_error_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def order_for(*arguments: Any) -> dict[str, Any]:
        order = real(*arguments)
        order["engine"]["model"] = "/nowhere"
        return order

    real = parallel_runner.order_for
    monkeypatch.setattr(parallel_runner, "order_for", order_for)
    with (
        ranks_as_threads(monkeypatch),
        pytest.raises(RankError, match=r"rank 1 of 2 failed with ValueError: .*/nowhere"),
    ):
        two_ranks()


def test_a_model_can_be_given_to_the_next_engine_but_not_to_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from minifer.assembly import load

    config = EngineConfig(
        "minifer-tiny", device="cpu", tensor_parallel_size=2, num_kv_blocks=32, dtype="float32"
    )
    loaded = load(config)
    params = SamplingParams(max_tokens=4, temperature=0)
    found = []
    with ranks_as_threads(monkeypatch):
        for _ in range(2):
            with Engine.from_loaded(loaded, config) as engine:
                with pytest.raises(ValueError, match="in use by another engine"):
                    Engine.from_loaded(loaded, config)
                engine.add_request("a", STEM, params)
                found.append(run_engine(engine)["a"].outputs[0].token_ids)
    assert found[0] == found[1]


# -- what is refused, before anything is started


def test_a_whole_model_is_refused() -> None:
    loaded = load_model("minifer-tiny")
    with pytest.raises(ValueError, match="needs a model that was loaded in 2 parts, got one whole"):
        Engine.from_loaded(loaded, EngineConfig(tensor_parallel_size=2, num_kv_blocks=8))


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [("minifer-tiny", 5, r"1, 2, 3, 6, 12 .* got 5"), ("parcae-tiny", 2, "a loop model")],
)
def test_a_model_that_cannot_be_cut_so_is_refused(model: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(model, tensor_parallel_size=size, device="cpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", "compiled"),
        ("backend", "megakernel"),
        ("quantize", "int8"),
        ("kv_dram_bytes", 1000),
        ("kv_disk_path", "blocks"),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .* with tensor_parallel_size=2"):
        EngineConfig(tensor_parallel_size=2, **{name: value})


@pytest.mark.parametrize("name", ["tensor_parallel_size", "distributed_timeout_seconds"])
@pytest.mark.parametrize("value", [0, -1, True, "2"])
def test_values_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        EngineConfig(**{name: value})


# -- sizes and places


def test_kv_bytes_are_of_each_rank_so_that_two_ranks_hold_twice_as_many_blocks() -> None:
    config = read_config("minifer-tiny")
    whole = KVStorage.bytes_per_block(4, 16, 6, 16, torch.float32)
    settings = {"kv_cache_bytes": 6 * whole, "device": "cpu"}
    counts = {
        size: num_kv_blocks(
            config, EngineConfig(tensor_parallel_size=size, **settings), torch.float32, "cpu"
        )
        for size in (1, 2, 3)
    }
    assert counts == {1: 6, 2: 12, 3: 18}


@pytest.mark.parametrize(
    ("device", "count", "expected"),
    [
        ("auto", 0, ["cpu", "cpu"]),
        ("auto", 2, ["cuda:0", "cuda:1"]),
        ("cuda", 3, ["cuda:0", "cuda:1"]),
        ("cuda:1", 2, ["cuda:1", "cuda:1"]),
        ("cpu", 2, ["cpu", "cpu"]),
    ],
)
def test_each_rank_has_its_own_gpu_or_all_share_a_device(
    monkeypatch: pytest.MonkeyPatch, device: str, count: int, expected: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert places(device, 2) == expected
    if count:
        with pytest.raises(ValueError, match=f"at most {count}, the number of GPUs here, got 4"):
            places("cuda", 4)
