"""Core applications of a mixed-depth workload: by hand, simulated, and counted in the engine."""

from __future__ import annotations

import json
import random

import pytest

from minifer.cli import main
from minifer.loops import LOOP_BATCHING
from minifer.parcae.lab.depth_batching import (
    Count,
    Job,
    bound,
    edge_of,
    measure,
    simulate,
    table,
    workload,
)
from minifer.parcae.presets import PRESETS

# Two requests of depth 2 with four tokens, two of depth 4 with two: eight loops each.
DIAGRAM = [Job(2, 4), Job(2, 4), Job(4, 2), Job(4, 2)]


def test_the_diagram_of_the_runner_by_hand():
    """Continuous: nobody ever waits, 8 applications; a step ends at 2, 4, 6 and 8. Lockstep: two
    steps of 4 until the deep ones are done, then two of 2."""
    assert simulate(DIAGRAM, 4) == Count("continuous", 8, 4, 4 * 8)
    assert simulate(DIAGRAM, 4, "lockstep") == Count("lockstep", 4 + 4 + 2 + 2, 4, 4 * 8)
    assert bound(DIAGRAM, 4) == 8


def test_the_same_by_hand_when_half_must_be_through():
    """At 2 both shallow requests are through, half of the four; at 4 all are; 6 and 8 likewise.
    Of three requests two must be through: depths 1, 2, 4 with one token end at 2, then 4."""
    assert simulate(DIAGRAM, 4, "patient") == Count("patient", 8, 4, 4 * 8)
    three = [Job(1, 1), Job(2, 1), Job(4, 1)]
    assert simulate(three, 3, "patient") == Count("patient", 4, 2, 7)


def test_half_is_never_far_from_the_better_of_the_two_extremes():
    """All weights read, for the layers of every published size, on 200 random workloads."""
    rng, edges = random.Random(1), [edge_of(config) for config in PRESETS.values()]
    worst = 0.0
    for _ in range(200):
        seats = rng.choice([4, 8, 16])
        jobs = [Job(rng.choice([1, 2, 4, 8]), rng.randint(4, 12)) for _ in range(4 * seats)]
        one, half, every = (simulate(jobs, seats, ending) for ending in LOOP_BATCHING)
        for edge in edges:
            best = min(one.reads(edge), every.reads(edge))
            worst = max(worst, half.reads(edge) / best)
    assert worst < 1.25


def test_four_tokens_of_depth_two_beside_deep_ones_that_go_on():
    jobs = [Job(2, 4), Job(4, 4)]
    assert simulate(jobs, 2).core_applications == 16
    assert simulate(jobs, 2, "lockstep").core_applications == 16
    # With the next shallow request waiting for the seat, the eight it waited count.
    jobs = [Job(2, 4), Job(4, 4), Job(2, 4)]
    assert simulate(jobs, 2) == Count("continuous", 16, 8, 32)
    assert simulate(jobs, 2, "lockstep") == Count("lockstep", 24, 8, 32)
    assert bound(jobs, 2) == 16


@pytest.mark.parametrize("batching", LOOP_BATCHING)
@pytest.mark.parametrize(
    "jobs",
    [DIAGRAM, workload((1, 2, 4, 8), 9, 3), [Job(3, 2), Job(1, 5, 2), Job(2, 2, 5), Job(8, 1, 40)]],
    ids=["diagram", "mixed", "arrivals"],
)
def test_the_engine_counts_what_the_simulation_does(jobs, batching):
    simulated = simulate(jobs, 3, batching)
    counted = measure(jobs, 3, batching)
    assert counted.token_loops == sum(job.depth * job.tokens for job in jobs)
    assert (counted.core_applications, counted.steps, counted.token_loops) == (
        simulated.core_applications,
        simulated.steps,
        simulated.token_loops,
    )


def test_bounds_of_random_workloads():
    """The bound holds, and continuous is never further from it than a list schedule may be."""
    rng = random.Random(0)
    for _ in range(200):
        seats = rng.randint(1, 5)
        jobs = [Job(rng.choice([1, 2, 4, 8]), rng.randint(1, 6)) for _ in range(rng.randint(1, 12))]
        least = bound(jobs, seats)
        continuous, lockstep = (simulate(jobs, seats, e) for e in ("continuous", "lockstep"))
        assert least <= continuous.core_applications <= (2 - 1 / seats) * least
        assert least <= lockstep.core_applications
        assert continuous.token_loops == lockstep.token_loops
        assert continuous.steps >= max(job.tokens for job in jobs)


def test_one_depth_is_the_same_either_way():
    jobs = workload((4,), 8, 5)
    continuous, lockstep = (simulate(jobs, 4, e) for e in ("continuous", "lockstep"))
    assert continuous.core_applications == lockstep.core_applications == bound(jobs, 4) == 40
    assert continuous.steps == lockstep.steps == 10


def test_who_comes_in_the_middle_of_a_step_waits_for_its_end():
    """A seat is free. The running request has 3 loops, the new one comes after the first."""
    jobs = [Job(3, 1), Job(1, 1, 1)]
    assert simulate(jobs, 2).idle_wait == 2
    # Beside a shallow one the step ends sooner; lockstep waits for the deep one.
    jobs = [Job(8, 1), Job(2, 4), Job(1, 1, 1)]
    assert simulate(jobs, 3).idle_wait == 1
    assert simulate(jobs, 3, "lockstep").idle_wait == 7


def test_many_steps_can_read_more_than_waiting_would():
    """Depths 7 and 8 on two seats, seven and eight tokens: 56 applications, no two ends coincide
    before the last; in lockstep 8 steps of 8."""
    jobs = [Job(8, 7), Job(7, 8)]
    continuous, lockstep = (simulate(jobs, 2, e) for e in ("continuous", "lockstep"))
    assert (continuous.core_applications, continuous.steps) == (56, 14)
    assert (lockstep.core_applications, lockstep.steps) == (7 * 8 + 7, 8)
    assert continuous.reads(1.0) == 70 < lockstep.reads(1.0) == 71
    assert continuous.reads(2.0) == 84 > lockstep.reads(2.0) == 79


def test_what_a_step_reads_once_beside_the_core_of_140m():
    """By hand: 768 wide; two layers in each stack, with 12 D² weights, two norms and, in every
    second layer, gates of 6 · 32; the head 32768 · D, the readout D², B and its two vectors."""
    D = 768
    stack = 2 * (12 * D * D + 2 * D) + 6 * 32
    expected = (32768 * D + 2 * stack + D * D + D * D + 2 * D) / stack
    assert edge_of(PRESETS["parcae-140m"]) == pytest.approx(expected, rel=1e-12)


def test_the_table_ends_with_the_bound():
    rows = table(workload((1, 2, 4, 8), 16, 4), 4, 2.0)
    assert [row["steps end"] for row in rows] == ["continuous", "patient", "lockstep", "(bound)"]
    assert rows[0]["reads"] == rows[0]["core applications"] + 2.0 * rows[0]["steps"]
    assert rows[-2]["saving"] == 0.0 < rows[0]["saving"] <= 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Job(0, 1), "depth must be an integer of at least 1, got 0"),
        (lambda: Job(1, True), "tokens must be an integer of at least 1, got True"),
        (lambda: Job(1, 1, -1), "arrival must be an integer of at least 0, got -1"),
        (lambda: simulate([], 0), "seats must be an integer of at least 1, got 0"),
        (lambda: simulate([], 1, "eager"), "ending must be one of continuous, patient, lockstep"),
    ],
)
def test_bad_workloads_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_command_prints_counts(capsys):
    arguments = ["--requests", "6", "--tokens", "2", "--seats", "3", "--model", "parcae-tiny"]
    assert main(["parcae", "batching", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "6 requests of depth 1, 2, 4, 8 in turn, 2 tokens each"
    assert main(["parcae", "batching", *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    jobs = workload((1, 2, 4, 8), 6, 2)
    assert result["rows"] == table(jobs, 3, edge_of(PRESETS["parcae-tiny"]))
    assert f"{simulate(jobs, 3).core_applications:>19}" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seats", "0"], "--seats must be at least 1, got 0"),
        (["--depths", "1,x"], "must be integers such as 1,2,4,8, got '1,x'"),
        (["--depths", "0"], "depth must be an integer of at least 1, got 0"),
        (["--model", "x"], "--model must be one of parcae-tiny,"),
    ],
)
def test_the_command_refuses_in_one_sentence(arguments, message, capsys):
    assert main(["parcae", "batching", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
