"""What goes wrong inside a step, or before the first one. Ranks are threads here."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from fakes import check_engine, run_engine
from rank_threads import ranks_as_threads, two_ranks

from minifer.config import EngineConfig
from minifer.engine import Engine
from minifer.execution.parallel import runner as parallel_runner
from minifer.execution.parallel.ranks import RankError
from minifer.request import SamplingParams

STEM = "The for statement is used to iterate over"
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def test_ctrl_c_waits_for_the_end_of_the_step_and_nothing_is_torn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ranks_as_threads(monkeypatch), two_ranks() as engine:
        engine.add_request("a", STEM, GREEDY)
        truth = run_engine(engine)["a"].outputs[0].token_ids
        engine.add_request("b", STEM, GREEDY)
        engine.step()
        press_in_the_middle(monkeypatch, engine)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert engine.runner.lost is None
        assert run_engine(engine)["b"].outputs[0].token_ids == truth
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
