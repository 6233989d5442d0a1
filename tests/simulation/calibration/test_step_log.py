"""The engine's own log: read back, fitted (P-04), and replayed in the simulator.

The engine here is the real one on a virtual clock that its runner moves by known prices. So the
truth is known: what is fitted must be these prices, and what is simulated must be this run.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import tiny_engine

from minifer.config import POLICIES
from minifer.events import Event, JSONLSink, ListSink
from minifer.request import SamplingParams
from minifer.simulation.calibration.fit import errors_of, fit_steps
from minifer.simulation.calibration.record import record
from minifer.simulation.calibration.step_log import LoggedStep, log_of, read_log
from minifer.simulation.calibration.validate import validate
from minifer.simulation.steps.named import load_steps
from minifer.simulation.steps.times import DecodePrices, FittedSteps, PrefillPrices
from minifer.simulation.workloads.arrivals import Arrival, Conversation

TRUTH = FittedSteps(
    PrefillPrices(0.010, 0.001, 2e-6), ((0, DecodePrices(0.010, 0.002, 5e-5)),), "known"
)


class TimedRunner:
    """Before the engine's runner: a step takes what `TRUTH` says."""

    def __init__(self, runner, clock: Clock) -> None:
        self._runner, self._clock = runner, clock

    def forward(self, step):
        chunks = [(e.num_new, e.start + e.num_new) for e in step.scheduled]
        self._clock.now += TRUTH.seconds(chunks)
        return self._runner.forward(step)

    def __getattr__(self, name: str):
        return getattr(self._runner, name)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def recorded(workload, **options) -> list[Event]:
    clock = Clock()
    engine = tiny_engine(**{"debug": False, **options})
    engine.events.clock = clock
    engine.runner = TimedRunner(engine.runner, clock)
    events = record(engine, workload, seed=1, sleep=clock.sleep)
    assert not engine.has_unfinished_requests
    engine.close()
    return events


def traffic(count: int = 60, seed: int = 0) -> list[Arrival]:
    """Enough to queue for seats now and then."""
    rng, now, out = random.Random(seed), 0.0, []
    for i in range(count):
        now += rng.expovariate(6.0)
        out.append(Arrival(f"r{i}", now, rng.randint(2, 90), rng.randint(1, 20), session=i))
    return out


OPTIONS = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "enable_prefix_caching": False}


def test_a_log_holds_what_was_asked_and_what_was_done() -> None:
    workload = traffic(20)
    log = log_of(recorded(workload, **OPTIONS))
    assert [r.request_id for r in log.requests] == [r.request_id for r in workload]
    for request, arrival in zip(log.requests, workload, strict=True):
        assert request.arrival == pytest.approx(100 + arrival.time)
        assert (request.prompt_len, request.output_len) == (arrival.prompt_len, arrival.output_len)
        assert request.finish_reason == "length"
        assert request.token_times == sorted(request.token_times)
    computed = sum(query for step in log.steps for query, _ in step.chunks)
    assert computed == sum(r.prompt_len + r.output_len - 1 for r in workload)
    assert all(step.seconds == pytest.approx(TRUTH.seconds(step.chunks)) for step in log.steps)
    assert log.num_failed == 0
    assert log.config is not None
    assert (log.config.max_num_seqs, log.config.num_kv_blocks) == (4, 64)


def test_p04_prices_are_recovered_from_the_log() -> None:
    fit = fit_steps(log_of(recorded(traffic(), **OPTIONS)).steps, "test")
    (_, decode), prefill = fit.steps.decode[0], fit.steps.prefill
    assert prefill.fixed == pytest.approx(0.010, rel=0.01)
    assert prefill.per_token == pytest.approx(0.001, rel=0.01)
    assert prefill.per_square == pytest.approx(2e-6, rel=0.01)
    assert decode.per_row == pytest.approx(0.002, rel=0.01)
    assert decode.per_context == pytest.approx(5e-5, rel=0.01)
    assert fit.r2 > 0.999 and fit.mape < 0.001 and fit.left_out == {}


def noisy(steps: list[LoggedStep], seed: int = 0) -> list[LoggedStep]:
    """A tenth of the steps takes three times as long, as on a machine with neighbours."""
    rng = random.Random(seed)
    return [replace(s, seconds=s.seconds * (3 if rng.random() < 0.1 else 1)) for s in steps]


def test_a_noisy_machine_is_not_made_faster_than_it_was() -> None:
    steps = noisy(list(log_of(recorded(traffic(), **OPTIONS)).steps))
    fit = fit_steps(steps)
    assert fit.total == pytest.approx(1.0, abs=1e-9)
    assert errors_of(TRUTH, steps).total < 0.95


def test_what_the_log_cannot_tell_has_no_price() -> None:
    one = [(query, query) for query in (4, 8, 16, 32)]
    log = [LoggedStep(0.0, TRUTH.seconds([c]), 0.0, (c,)) for c in one]
    fit = fit_steps(log)
    assert set(fit.left_out) == {"per_row", "per_context"}
    assert fit.left_out["per_row"] == "the log has none"
    equal = [LoggedStep(0.0, 0.5, 0.0, ((8, 8), (1, 20))), LoggedStep(0.0, 0.25, 0.0, ((1, 20),))]
    fit = fit_steps(equal * 3)
    assert fit.left_out["per_square"] == "the log cannot tell it from the others"
    assert fit.mape == pytest.approx(0.0, abs=1e-9)


def test_as_many_prices_as_steps_are_no_fit() -> None:
    """They would tell every step, and explain all of the variance, whatever the steps were."""
    rng = random.Random(0)
    log = [LoggedStep(0.0, rng.random(), 0.0, ((n, n),)) for n in (8, 16, 40)]
    two, three = fit_steps(log[:2]), fit_steps(log)
    assert two.left_out["per_token"] == "the log has too few steps to check it"
    assert two.r2 < 0.5 and two.mape > 0.01
    assert set(three.left_out) >= {"per_square"} and three.r2 < 1


def test_a_log_that_goes_back_in_time_is_of_two_runs() -> None:
    events = recorded(traffic(5), **OPTIONS)
    with pytest.raises(ValueError, match="not in order, or of several recordings"):
        log_of(events + events)


def test_traffic_that_is_too_long_is_refused_before_it_is_served() -> None:
    workload = [*traffic(3), Arrival("long", 9.0, 200, 60), *traffic(1)]
    with pytest.raises(ValueError, match=r"long has 200 \+ 60 tokens, the engine takes \d+"):
        recorded(workload, **OPTIONS)
    fits = Conversation((Arrival("a", 0.0, 10, 3), Arrival("b", 0.0, 900, 3)))
    with pytest.raises(ValueError, match=r"b has 900 \+ 3 tokens"):
        recorded([fits], **OPTIONS)


def test_nothing_gets_faster_by_more_work() -> None:
    log = [LoggedStep(0.0, 1.0 - 0.01 * n, 0.0, ((1, 50),) * n) for n in range(1, 20)]
    fit = fit_steps(log)
    assert fit.left_out["per_row"] == "its price came out below 0"
    assert fit.steps.decode[0][1].per_row == 0.0


def test_a_batch_size_that_is_out_of_line_has_its_own_mean() -> None:
    """A CPU's products of three rows are slower than of four; a context of 50 tokens costs 5 ms."""
    alone = {1: 0.040, 2: 0.069, 3: 0.090, 4: 0.072}
    rng = random.Random(0)
    log = [
        LoggedStep(0.0, alone[n] + 1e-4 * sum(ends), 0.0, tuple((1, end) for end in ends))
        for n in alone
        for ends in ([rng.randint(1, 100) for _ in range(n)] for _ in range(40))
    ]
    log += [LoggedStep(0.0, 0.02 + 0.001 * n, 0.0, ((n, n),)) for n in range(2, 80)]
    steps = fit_steps(log).steps
    for step in log[:160]:
        assert steps.seconds(step.chunks) == pytest.approx(step.seconds, rel=0.08)
    assert fit_steps(log).total == pytest.approx(1.0, abs=1e-9)
    line = replace(steps, decode_alone=())
    assert errors_of(steps, log).mape < errors_of(line, log).mape / 3


def test_a_fit_goes_through_a_file(tmp_path: Path) -> None:
    fit = fit_steps(log_of(recorded(traffic(20), **OPTIONS)).steps, "test")
    (tmp_path / "steps.json").write_text(json.dumps(fit.to_dict()))
    assert load_steps(tmp_path / "steps.json") == fit.steps


@pytest.mark.parametrize("policy", POLICIES)
def test_the_simulator_repeats_the_run(policy: str) -> None:
    """With the right prices every time is right: queue, chunks, batches and preemptions."""
    options = {**OPTIONS, "num_kv_blocks": 40, "scheduling_policy": policy}
    events = recorded(traffic(), **options)
    assert sum(event.name == "request.preempted" for event in events) > 2
    log = log_of(events)
    result = validate(log)
    for metric in ("ttft", "tpot", "e2e"):
        assert result.errors[metric].mape < 0.01, metric
        assert result.errors[metric].count > 50
    assert result.missed == [] and result.num_left_out == 0
    assert result.half_steps.mape < 0.02
    assert result.half_errors is not None and result.half_errors["ttft"].mape < 0.05


@pytest.mark.parametrize("policy", ["sjf", "srpt"])
def test_lengths_are_measured_as_the_engine_measured_them(policy: str) -> None:
    """In tokens, and a step of waiting is worth a full budget: in seconds it is another order."""
    workload = [replace(r, time=r.time / 2) for r in traffic()]
    events = recorded(workload, **OPTIONS, scheduling_policy=policy, prefill_ageing=0.02)
    result = validate(log_of(events))
    assert result.errors["ttft"].mape < 0.01 and result.errors["e2e"].mape < 0.01


def test_wrong_settings_are_seen() -> None:
    log = log_of(recorded(traffic(), **OPTIONS))
    assert log.config is not None
    other = validate(log, replace(log.config, max_num_seqs=1))
    assert other.errors["ttft"].mape > 0.25 and "ttft" in other.missed


def test_hits_of_the_cache_are_taken_from_the_log() -> None:
    turns = [Arrival(f"t{k}", 0.05 * (k > 0), 30 + 25 * k, 5, turn=k) for k in range(4)]
    log = log_of(
        recorded([Conversation(tuple(turns))], **{**OPTIONS, "enable_prefix_caching": True})
    )
    cached = [request.cached_len for request in log.requests]
    assert cached[0] == 0 and all(length % 4 == 0 and length > 0 for length in cached[1:])
    result = validate(log)
    assert result.errors["ttft"].mape < 0.01


def test_turns_wait_for_the_answer_before() -> None:
    turns = tuple(Arrival(f"t{k}", 2.0 * k, 20 + 10 * k, 4, turn=k) for k in range(3))
    log = log_of(recorded([Conversation(turns)], **OPTIONS))
    for k in (1, 2):
        before, after = log.requests[k - 1], log.requests[k]
        assert before.end is not None
        assert after.arrival == pytest.approx(before.end + 2.0 * k, abs=1e-9)


def test_time_counts_from_when_a_request_was_due() -> None:
    """The second comes while the first one's step runs, and is admitted after it."""
    workload = [Arrival("a", 0.0, 40, 2), Arrival("b", 0.01, 5, 2)]
    log = log_of(recorded(workload, **OPTIONS))
    second = log.requests[1]
    step_end = log.steps[1].start
    assert second.arrival == pytest.approx(100.01) and step_end > 100.04
    assert second.token_times[0] - second.arrival > step_end - 100.01


# -- files


def written(path: Path, events: list[Event]) -> Path:
    with JSONLSink(path) as sink:
        for event in events:
            sink.write(event)
    return path


def test_a_file_is_the_same_log(tmp_path: Path) -> None:
    events = recorded(traffic(10), **OPTIONS)
    assert read_log(written(tmp_path / "log.jsonl", events)) == log_of(events)


def test_a_log_without_settings_asks_for_them() -> None:
    log = log_of(recorded(traffic(10), **OPTIONS)[1:])
    assert log.config is None
    with pytest.raises(ValueError, match="does not tell the engine's settings"):
        validate(log)


def test_steps_that_failed_are_counted_and_left_out() -> None:
    events = recorded(traffic(10), **OPTIONS)
    whole = log_of(events)
    last = max(i for i, event in enumerate(events) if event.name == "step.postprocessed")
    cut = log_of(events[:last])
    assert (len(cut.steps), cut.num_failed) == (len(whole.steps) - 1, 1)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2: no event of an engine"),
        ("[]", "line 2: no event of an engine"),
        ('{"time": 1}', "line 2: no event of an engine: field 'token_range' is missing"),
        (
            '{"time": "x", "step": 1, "request_id": null, "stage": "kv", "name": "a", '
            '"token_range": null, "data": {}}',
            "line 2: no event of an engine: could not convert",
        ),
    ],
)
def test_lines_that_are_no_events_are_named(tmp_path: Path, line: str, why: str) -> None:
    events = recorded(traffic(3), **OPTIONS)
    file = written(tmp_path / "log.jsonl", events[:1])
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(ValueError, match=why):
        read_log(file)


def test_a_log_without_steps_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text("")
    with pytest.raises(ValueError, match="the log holds no finished step"):
        read_log(file)


def test_drafts_and_several_answers_are_refused() -> None:
    for options, params, name in (
        ({"speculative_method": "ngram"}, {"max_tokens": 30}, "draft"),
        ({}, {"n": 2, "temperature": 1.0, "max_tokens": 3}, "forked"),
    ):
        engine = tiny_engine(**options)
        sink = ListSink()
        engine.events.sinks.append(sink)
        engine.add_request("a", [1, 2, 3, 1, 2, 3, 1, 2], SamplingParams(**params))
        while engine.has_unfinished_requests:
            engine.step()
        engine.close()
        assert any(name in event.name for event in sink.events), name
        with pytest.raises(ValueError, match=name):
            log_of(sink.events)


def test_an_engine_that_is_busy_is_not_recorded() -> None:
    engine = tiny_engine()
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="no open requests"):
        record(engine, [])
    engine.close()
