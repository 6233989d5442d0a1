"""Every fault is refused with a reason that a reader can act on, and is a fault indeed."""

from dataclasses import replace

import pytest
import torch
from decode_case import decode_case

from minifer.kernels.mega.isa import DecodeShape
from minifer.kernels.mega.mutants import MUTANTS, mutate
from minifer.kernels.mega.reference_vm import ReferenceMachine, ScheduleError
from minifer.kernels.mega.schedule import POLICIES, assign, build
from minifer.kernels.mega.verify import verify

CASE = decode_case((6, 3), 2, vocab_size=48)
REASONS = {  # what the first sentence is about
    "dropped-wait": "race: ",
    "target-too-high": "deadlock: OUTPUT",
    "target-too-low": "partial wait: GATE_UP",
    "wrong-counter": "race: ",
    "swapped-waits": "deadlock: a circle",
    "waits-for-itself": "deadlock: a circle",
    "stale-epoch": "race: HEAD",
    "missing-signal": "deadlock: ATTENTION",
    "amount-two": "partial wait: GATE_UP",
    "counter-reused": "partial wait: ",
    "producer-behind-consumer": "deadlock: a circle",
    "row-reused": "done twice: ATTENTION",
    "head-slot-reused": "done twice: slot 0",
    "wrong-layer": "done twice: tile",
    "split-count-mismatch": "deadlock: MERGE",
    "tile-twice": "done twice: tile",
    "tile-never": "never done: tile",
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_verifier_rejects(name, policy):
    for programs in (2, 3, 5, 11):
        sound = assign(build(CASE.shape, programs), programs, policy)
        assert verify(sound).ok
        errors = verify(mutate(name, sound)).errors
        assert errors, programs


@pytest.mark.parametrize("name", MUTANTS)
def test_the_first_sentence_says_what_would_happen(name):
    sound = assign(build(CASE.shape, 4), 4)
    first, *_ = verify(mutate(name, sound)).errors
    assert first.startswith(REASONS[name])


def logits(schedule, seed: int, check: bool) -> torch.Tensor:
    inputs = CASE.inputs
    keys, values = ([c.clone() for c in caches] for caches in (inputs.keys, inputs.values))
    vm = ReferenceMachine(
        schedule, replace(inputs, keys=keys, values=values), torch.float64, check=check
    )
    memory = vm.run(seed)
    return torch.cat((memory["LOGITS"], memory["BEST"][:, :1], memory["TOKEN"]), 1)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_a_fault_and_not_another_way_to_say_the_same(name):
    """Some order of the programs hangs, reads what nobody has written, or gives other bits."""
    sound = assign(build(CASE.shape, 4), 4)
    truth = logits(sound, 0, check=False)
    broken = mutate(name, sound)
    for seed in range(40):
        try:
            # NaN is a difference too.
            if not torch.equal(logits(broken, seed, check=False), truth):
                return
        except (ScheduleError, ValueError, IndexError):
            return
    pytest.fail("forty orders, and nothing is wrong")


@pytest.mark.parametrize("name", MUTANTS)
def test_every_fault_says_what_a_gpu_would_do(name):
    effect = MUTANTS[name].effect
    assert effect.endswith(".")
    assert 30 < len(effect) < 200


def test_a_fault_that_a_schedule_has_no_room_for_is_refused():
    shape = DecodeShape(1, 16, 16, 1, 1, 8, 16, tile=8)
    schedule = assign(build(shape, 1), 1)
    for name in ("wrong-counter", "row-reused", "head-slot-reused", "split-count-mismatch"):
        with pytest.raises(ValueError, match=f"mutant '{name}' needs an instruction"):
            mutate(name, schedule)


def test_an_unknown_fault_is_refused():
    schedule = assign(build(CASE.shape, 2), 2)
    with pytest.raises(ValueError, match=r"mutant must be one of dropped-wait, .*, got 'x'"):
        mutate("x", schedule)


def test_a_mutant_leaves_the_sound_schedule_alone():
    sound = assign(build(CASE.shape, 3), 3)
    for name in MUTANTS:
        assert mutate(name, sound) != sound
    assert verify(sound).ok
