"""From a run to MBU and MFU, on numbers a reader can redo; engines that fail in their turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fakes import tiny_config

from minifer.perf.costs import step_cost
from minifer.perf.devices import find_device
from minifer.perf.speed.benchmark import OURS, SpeedReport, measure_speed
from minifer.perf.speed.cells import Ask, Cell, needed_blocks, workload_asks
from minifer.perf.speed.engines import Answers, Tasks
from minifer.perf.speed.measures import Task, measures
from minifer.perf.speed.report import table
from minifer.perf.speed.session import Run, StepLaps
from minifer.perf.speed.traffic import Traffic
from minifer.perf.speed.worker import WorkerError

CONFIG = tiny_config()
# 1,000 bytes of weights, nothing a row, 10 bytes of KV a token in the one layer.
TRAFFIC = Traffic(1000, 0.0, 10, ((None, 1),))
DECODE = Task("decode 2 × 4", "decode", (Ask((1, 2, 3, 4), 3),) * 2)
# First tokens after 0.5 s, then a step a second.
RUN = Run(
    0.0,
    [[0.5, 1.5, 2.5]] * 2,
    [[7, 8, 9]] * 2,
    [
        StepLaps(0.5, (9.0,) * 5),  # the prompt: not where all decode
        StepLaps(1.5, (0.01, 0.02, 0.9, 0.05, 0.02)),
        StepLaps(2.5, (0.02, 0.03, 0.9, 0.03, 0.02)),
    ],
)


def test_a_decode_step_reads_its_weights_and_the_kv_of_both_requests() -> None:
    out = measures(DECODE, RUN, CONFIG, TRAFFIC)
    assert out["tokens_per_second"] == 2.0 and out["step_seconds"] == 1.0
    # Contexts of 5, then of 6 tokens: 1,100 and 1,120 bytes in two seconds.
    assert out["bytes_per_second"] == (1100 + 1120) / 2
    flops = [step_cost(CONFIG, [(1, c), (1, c)]).total().flops for c in (5, 6)]
    assert out["flops_per_second"] == pytest.approx(sum(flops) / 2)
    assert out["forward_seconds"] == 0.9 and out["first_token_seconds"] == 0.5
    assert out["preparation_share"] == pytest.approx((0.03 + 0.05) / 2)
    assert "acceptance" not in out


def test_prompts_that_were_asked_before_have_no_first_token_time() -> None:
    assert "first_token_seconds" not in measures(DECODE, replace(RUN, repeated=True), CONFIG)


def test_drafts_are_counted_and_leave_flops_unknown() -> None:
    stamps = [[0.5, 1.5, 1.5, 2.5]]
    run = Run(0.0, stamps, [[1, 2, 3, 4]], [], [], {"drafted": 4.0, "accepted": 1.0})
    task = Task("t", "decode", (Ask((1, 2), 4),))
    out = measures(task, run, CONFIG, TRAFFIC)
    assert (out["acceptance"], out["tokens_per_step"]) == (0.25, 1.5)
    assert "flops_per_second" not in out
    nothing = Run(0.0, stamps, [[1, 2, 3, 4]], [], [], {"drafted": 0.0, "accepted": 0.0})
    assert measures(task, nothing, CONFIG, TRAFFIC)["acceptance"] == 0.0


def test_a_prompt_is_timed_to_its_first_token() -> None:
    task = Task("p", "prefill", (Ask((1,) * 30, 1),))
    out = measures(task, Run(1.0, [[1.25]], [[5]], []), CONFIG)
    assert out["tokens_per_second"] == 120 and out["first_token_seconds"] == 0.25
    assert out["flops_per_second"] == step_cost(CONFIG, [(30, 30)]).total().flops / 0.25


def test_a_workload_is_timed_to_its_last_token() -> None:
    task = Task("w", "throughput", (Ask((1,) * 6, 2), Ask((1,) * 4, 1)))
    out = measures(task, Run(0.0, [[1.0, 2.0], [4.0]], [[1, 2], [3]], []), CONFIG)
    assert out["tokens_per_second"] == 3 / 4 and out["input_tokens_per_second"] == 10 / 4
    assert out["requests_per_second"] == 2 / 4


# -- what is asked


def test_prompts_depend_on_the_seed_alone() -> None:
    cell = Cell("decode", 3, 5, 8)
    asks = cell.asks(100, 1)
    assert asks == cell.asks(100, 1) != cell.asks(100, 2)
    assert [len(a.prompt) for a in asks] == [5] * 3 and {a.max_tokens for a in asks} == {8}
    assert all(0 <= token < 100 for a in asks for token in a.prompt)


def test_prompts_of_a_text_begin_at_different_places_and_go_round() -> None:
    asks = Cell("decode", 2, 4, 2).asks(100, 0, text=(10, 11, 12, 13, 14, 15))
    assert [a.prompt for a in asks] == [(10, 11, 12, 13), (13, 14, 15, 10)]


def test_blocks_hold_every_request_to_its_end() -> None:
    assert needed_blocks([Ask((1,) * 30, 2), Ask((1,) * 31, 2)], 16) == (2 + 1) + (3 + 1)


@pytest.mark.parametrize(
    ("cell", "named"),
    [
        (("decode", 0, 4, 2), "--batch must be at least 1, got 0"),
        (("decode", 1, 0, 2), "--context must be at least 1, got 0"),
        (("decode", 1, 4, 1), "--tokens must be at least 2, got 1"),
    ],
)
def test_a_cell_without_work_is_refused(cell: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Cell(*cell)


def test_a_workload_is_drawn_from_its_seed() -> None:
    from minifer.perf.load.workload import Distribution, Workload

    lengths = Distribution.parse("uniform:2:9")
    workload = Workload(20, lengths, Distribution.parse("3"))
    asks = workload_asks(workload, 50, 4)
    assert asks == workload_asks(workload, 50, 4) and len(asks) == 20
    assert len({len(a.prompt) for a in asks}) > 1 and {a.max_tokens for a in asks} == {3}


# -- turns


class Fixed:
    """The machine reads 2,220 bytes/s at best and multiplies at 1e9 FLOP/s."""

    expected = 0

    def __init__(self) -> None:
        self.turns = 0

    def expect(self, step_bytes: int) -> None:
        self.expected = step_bytes

    def read(self) -> dict[str, float]:
        self.turns += 1
        rate = 2220.0 if self.turns == 1 else 1000.0
        return {"bytes_per_second": rate, "same_size_bytes_per_second": 500.0}

    def product(self) -> dict[str, float]:
        return {"flops_per_second": 1e9}

    def device(self, bandwidth: float, flops: float):
        return replace(find_device("t4"), memory_bandwidth=bandwidth, peak_flops=flops)


def slower(factor: float) -> Run:
    stamps = [[0.5, 0.5 + factor, 0.5 + 2 * factor]] * 2
    return Run(0.0, stamps, [[7, 8, 0]] * 2, [])


class Engine:
    """Answers with the runs it was given, one a turn; an error is raised."""

    def __init__(self, *runs: Run | Exception, **about: Any) -> None:
        self.runs, self.about = list(runs), about

    def __call__(self, tasks: Tasks) -> Answers:
        run = self.runs.pop(0)
        if isinstance(run, Exception):
            raise run
        return Answers({task.name: run for task in tasks(0)}, TRAFFIC, self.about)


def measured(engines: Mapping[str, Engine], runs: int = 2, **more: Any) -> SpeedReport:
    def tasks(turn: int) -> Sequence[Task]:
        return [DECODE]

    return measure_speed(
        "decode",
        engines,
        tasks,
        CONFIG,
        Fixed(),  # type: ignore[arg-type]
        runs=runs,
        warmup=0,
        settings={"model": "m"},
        **more,
    )


def test_mbu_is_bytes_over_seconds_over_the_best_reading_of_all_rounds() -> None:
    report = measured({OURS: Engine(RUN, RUN)})
    # 1,110 of 2,220 bytes/s, although the second round read only 1,000.
    assert report.rows[0]["mbu"] == 0.5
    arm = report.result.arms[OURS]
    assert arm["decode 2 × 4: mbu"].values == (0.5, 0.5)
    assert arm["decode 2 × 4: mbu_of_round"].values == (0.5, 1.11)
    flops = arm["decode 2 × 4: flops_per_second"].median
    assert report.rows[0]["mfu"] == arm["decode 2 × 4: mfu"].median == flops / 1e9
    middle = 1000 + 2 * 10 * 5  # bytes of a step with contexts of 4 + 3 // 2
    assert report.rows[0]["bytes"] == middle
    data = json.loads(json.dumps(report.result.to_dict(), allow_nan=False))
    assert data["schema_version"] == 1 and data["name"] == "decode"
    assert data["details"]["steps"][0]["mbu"] == 0.5
    assert data["details"]["read_bandwidth"] == {"memory": 2220.0, "same_size": 500.0}
    assert "50.0%" in table(report)


def test_ratios_are_taken_within_a_round_and_lost_ones_are_told() -> None:
    other = Engine(slower(2.0), slower(0.5), versions={"other": "1"}, dtype="bfloat16")
    report = measured({OURS: Engine(RUN, RUN), "vllm": other})
    ratio = report.versus["vllm"]["decode 2 × 4"]
    assert ratio.values == (2.0, 0.5) and ratio.median == 1.25
    # [7, 8, 0] against [7, 8, 9]: two of three.
    assert report.result.details["engines"]["vllm"]["same_tokens"] == {"decode 2 × 4": 2 / 3}
    text = table(report)
    assert "1.25×" in text and "67% of the tokens" in text and "vllm: other 1" in text
    assert report.failed == ()


@pytest.mark.parametrize(
    "turns",
    [
        (WorkerError("out of memory"),),
        (RUN, WorkerError("out of memory")),
        (RUN, Run(0.0, [[1.0], [1.0, 2.0]], [], [])),
    ],
)
def test_another_engine_that_breaks_down_is_left_out_with_its_reason(turns) -> None:
    report = measured({OURS: Engine(RUN, RUN, RUN), "vllm": Engine(*turns)}, runs=3)
    assert report.versus == {} and report.failed == ("vllm",)
    assert "vllm" not in report.result.arms and "vllm" not in report.result.details["engines"]
    why = report.skipped["vllm"]
    assert why == "out of memory" or "ask for more tokens" in why
    assert f"vllm is left out: {why}" in table(report)
    assert report.rows[0]["mbu"] == 0.5


def test_our_own_failure_is_everybodys() -> None:
    with pytest.raises(WorkerError, match="boom"):
        measured({OURS: Engine(WorkerError("boom")), "vllm": Engine(RUN, RUN)})


def test_who_was_skipped_is_told() -> None:
    report = measured({OURS: Engine(RUN, RUN)}, skipped={"llamacpp": "not installed (x)"})
    assert report.result.details["skipped"] == {"llamacpp": "not installed (x)"}
    assert "llamacpp is left out: not installed (x)" in table(report)
    assert report.failed == ()
