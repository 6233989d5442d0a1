"""The megakernel's decode step with all its programs interleaved: sound schedules pass and give
float64's tokens, broken ones are found, and every access is one that the instruction declares."""

from __future__ import annotations

import random
from dataclasses import replace

import mutant_matrix
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_steps import CONFIG, NARROW, shape, tiny_step

from minifer.config import ModelConfig
from minifer.kernels.cosim.interpreter_hooks import unsupported
from minifer.kernels.cosim.simulate import STRATEGIES, Interleaving
from minifer.kernels.mega import watched_step
from minifer.kernels.mega.isa import Instruction, Op, Region, regions
from minifer.kernels.mega.launch import MegakernelOptions
from minifer.kernels.mega.mutants import MUTANTS, mutate
from minifer.kernels.mega.schedule import POLICIES, SYNCS, Schedule, assign, build
from minifer.kernels.mega.verify import verify
from minifer.kernels.mega.watched_step import cosimulate_step

pytestmark = pytest.mark.skipif(unsupported() is not None, reason=str(unsupported()))

TOLERANCE = 3e-5  # float32 against float64, logits up to about 10
# The last program of a sound schedule is late: what should have waited for it did not.
LATE = Interleaving("priority", seed=0, starve=1)


def schedule(
    batch: int = 1,
    splits: int = 1,
    programs: int = 3,
    policy: str = "round_robin",
    sync: str = "counters",
    seed: int = 0,
    config: ModelConfig = CONFIG,
) -> Schedule:
    graph = build(shape(batch, splits, config), programs)
    return assign(graph, programs, policy, sync, seed=seed)


def broken(name: str) -> Schedule:
    return mutate(name, schedule(2, 2, 2, config=NARROW))


# ------------------------------------------------------------------------ sound schedules


@pytest.mark.parametrize(
    ("config", "plan", "how"),
    [
        (CONFIG, (1, 1, 3), Interleaving("random", 0)),
        (CONFIG, (1, 2, 7, "random", "counters", 3), Interleaving("priority", 3, starve=6)),
        (NARROW, (1, 2, 2, "zig_zag"), Interleaving("priority", 1)),
        (NARROW, (2, 1, 4, "list"), Interleaving("random", 2, starve=0)),
        (NARROW, (1, 1, 3, "zig_zag", "grid"), Interleaving("random", 4)),
    ],
)
def test_every_kind_of_schedule_is_free_of_races_and_exact(
    config: ModelConfig, plan: tuple, how: Interleaving
) -> None:
    step = tiny_step(schedule(*plan, config=config), config=config)  # NaN where nothing is written
    result = cosimulate_step(step.megakernel, how)
    assert result.reasons == ()
    assert step.error() < TOLERANCE
    assert step.tokens_are_right()


def test_a_batch_with_a_row_of_padding_touches_no_cache_for_it() -> None:
    step = tiny_step(schedule(3, 2, 3, config=NARROW), requests=2, config=NARROW)
    result = cosimulate_step(step.megakernel, Interleaving("random", 0))
    assert result.reasons == ()
    assert step.error() < TOLERANCE
    assert step.tokens_are_right()


def test_steps_follow_each_other_without_a_memset() -> None:
    """Epochs: counters go on counting, the step leaves the next one's input behind."""
    options = MegakernelOptions(epochs=True, advance=True)
    step = tiny_step(schedule(1, 1, 2, config=NARROW), options=options, config=NARROW)
    for number in range(2):
        result = cosimulate_step(step.megakernel, Interleaving("random", number))
        assert result.reasons == ()
        assert step.error() < TOLERANCE
        assert step.tokens_are_right()
        step.prompts[0].append(int(step.megakernel.tokens[0]))
    assert step.megakernel.generated[0, :2].tolist() == step.prompts[0][-2:]


@pytest.mark.parametrize(
    ("splits", "requests", "options"),
    [
        (1, 1, MegakernelOptions(sample=True, advance=True, epochs=True)),
        (2, 1, MegakernelOptions(sample=True, write_logits=False)),
        (1, 2, MegakernelOptions(sample=True, advance=True, write_logits=False)),
        (2, 2, MegakernelOptions(advance=True, epochs=True, write_logits=False)),
    ],
)
def test_no_switch_makes_an_instruction_touch_what_it_does_not_declare(
    splits: int, requests: int, options: MegakernelOptions
) -> None:
    """Draws read the output index, which PICK moves on; a request of two may be padding."""
    plan = schedule(2, splits, 2, config=NARROW)
    step = tiny_step(plan, requests=requests, options=options, config=NARROW)
    step.megakernel.kernel_args()["TEMPERATURE"].fill_(0.7)
    assert cosimulate_step(step.megakernel, Interleaving("random", 5)).reasons == ()


def test_a_step_has_the_same_bits_in_every_interleaving() -> None:
    plan, logits = schedule(1, 1, 2, config=NARROW), []
    for how in (Interleaving("random", 1), LATE):
        step = tiny_step(plan, config=NARROW)
        assert cosimulate_step(step.megakernel, how).ok
        logits.append(step.megakernel.logits.clone())
    assert torch.equal(*logits)


# ------------------------------------------------------------------------- broken schedules


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_schedule_is_found_by_the_verifier_and_by_running_it(name: str) -> None:
    assert verify(broken(name)).errors
    step = tiny_step(broken(name), stale=True, config=NARROW)
    assert cosimulate_step(step.megakernel, LATE).reasons


def test_right_tokens_are_no_proof_of_a_right_schedule() -> None:
    """A wait is missing: the logits are wrong, the likeliest tokens are not."""
    step = tiny_step(broken("wrong-counter"), stale=True, config=NARROW)
    result = cosimulate_step(step.megakernel, LATE)
    assert step.tokens_are_right()
    assert step.error() > 0.1
    assert {race.buffer for race in result.races} >= {"Q"}
    assert "did not wait for" in result.reasons[0]


def test_a_deadlock_says_who_waits_for_what() -> None:
    step = tiny_step(broken("target-too-high"), stale=True, config=NARROW)
    result = cosimulate_step(step.megakernel)
    assert result.deadlock is not None
    assert "waits for attended[0] to be 3, which stays 2" in result.deadlock


# --------------------------------------------------------------------- declared regions


def test_what_instructions_do_not_declare_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare nothing: then every read and write of every opcode must be reported."""
    monkeypatch.setattr(watched_step, "regions", lambda item, shape: ([], []))
    plan = schedule(1, 2, 2)
    result = cosimulate_step(tiny_step(plan).megakernel)
    found = {
        (plan.queues[s.program][s.instruction].op, s.kind.split()[1], s.buffer)
        for s in result.strays
    }
    assert found == _declared(plan)


def _declared(plan: Schedule) -> set[tuple[int, str, str]]:
    """Every (opcode, READ or WRITE, buffer) that a step does: without epochs and without advance
    nobody touches EPOCH, PICK leaves the position, and only a draw reads its index."""
    never = {"EPOCH", "INDEX"}
    found = set()
    for queue in plan.queues:
        for item in queue:
            for kind, areas in zip(("READ", "WRITE"), regions(item, plan.shape), strict=True):
                found |= {
                    (item.op, kind, area.buffer) for area in areas if area.buffer not in never
                }
    found -= {(Op.PICK, "WRITE", "POSITION"), (Op.HEAD, "READ", "POSITION")}
    return found


def test_a_declared_write_that_never_comes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def more(item: Instruction, shape: object) -> tuple[list[Region], list[Region]]:
        reads, writes = regions(item, shape)
        return reads, writes + [Region("HIDDEN", 0, 1, 8, 10)] * (item.op == Op.EMBED)

    monkeypatch.setattr(watched_step, "regions", more)
    result = cosimulate_step(tiny_step(schedule(1, 1, 2)).megakernel)
    (stray,) = result.strays
    assert (stray.kind, stray.buffer, stray.element, stray.count) == (
        "MISSING WRITE",
        "HIDDEN",
        8,
        2,
    )
    assert result.reasons == (
        "MISSING WRITE of HIDDEN[8] and 1 more: EMBED (program 0, place 0)",
    )  # fmt: skip


# --------------------------------------------------------------------- many more of them


@st.composite
def accepted_schedules(draw: st.DrawFn) -> Schedule:
    """Any policy's schedule, and then up to 30 instructions moved to other places, as long as the
    verifier accepts the result: placements that no policy would make."""
    programs = draw(st.integers(1, 7))
    plan = schedule(
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 2, 4])),
        programs,
        draw(st.sampled_from(POLICIES)),
        draw(st.sampled_from(SYNCS)),
        draw(st.integers(0, 99)),
    )
    rng = random.Random(draw(st.integers(0, 9999)))
    for _ in range(draw(st.integers(0, 30))):
        queues = [list(queue) for queue in plan.queues]
        source = rng.choice([queue for queue in queues if queue])
        item = source.pop(rng.randrange(len(source)))
        target = rng.choice(queues)
        target.insert(rng.randint(0, len(target)), item)
        moved = replace(plan, queues=tuple(map(tuple, queues)))
        plan = moved if verify(moved).ok else plan
    return plan


@st.composite
def any_interleaving(draw: st.DrawFn, programs: int) -> Interleaving:
    return Interleaving(
        draw(st.sampled_from(STRATEGIES)),
        draw(st.integers(0, 9999)),
        draw(st.none() | st.integers(0, programs - 1)),
        draw(st.sampled_from([0, 0.02, 0.3])),
    )


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_what_the_verifier_accepts_runs_clean_and_exact(data: st.DataObject) -> None:
    plan = data.draw(accepted_schedules())
    how = data.draw(any_interleaving(len(plan.queues)))
    requests = data.draw(st.integers(1, plan.shape.batch))
    epochs = data.draw(st.booleans())
    step = tiny_step(plan, requests, MegakernelOptions(epochs=epochs))
    for _ in range(1 + epochs):  # twice the same step: the second without zeroed counters
        step.set()
        result = cosimulate_step(step.megakernel, how)
        assert result.reasons == ()
        assert step.error() < TOLERANCE
        assert step.tokens_are_right()


# Mutants after which the greedy tokens of some interleaving are still right.
UNSEEN_IN_TOKENS = ("dropped-wait", "stale-epoch", "wrong-layer")


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_rejected_by_both_on_2_and_on_3_programs(name: str) -> None:
    row = mutant_matrix.examine(name)
    assert row.verifier
    assert all(row.found.values())
    assert name not in UNSEEN_IN_TOKENS or row.right_tokens > 0


def test_a_run_says_when_each_instruction_began() -> None:
    plan = schedule(1, 1, 2, config=NARROW)
    result = cosimulate_step(tiny_step(plan, config=NARROW).megakernel, Interleaving("random", 1))
    for program, queue in enumerate(plan.queues):
        begun = [(at, place) for at, who, place in result.begun if who == program]
        assert [place for _, place in begun] == list(range(len(queue) + 1))  # HALT ends it
        assert begun == sorted(begun)
