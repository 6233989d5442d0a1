"""The verifier against brute force, against the reference machine, and its words."""

import random
from dataclasses import replace

import pytest
import torch
from decode_case import decode_case
from hypothesis import given, settings
from hypothesis import strategies as st

from minifer.kernels.mega.isa import DecodeShape, Instruction, Op, regions
from minifer.kernels.mega.reference_vm import ReferenceMachine
from minifer.kernels.mega.schedule import POLICIES, SYNCS, Schedule, assign, build, stage
from minifer.kernels.mega.shapes import MODELS, decode_shape
from minifer.kernels.mega.verify import MAX_ERRORS, verify

TINY = DecodeShape(2, 16, 16, 2, 2, 8, 24, batch=2, splits=2, tile=8)


def tiny(programs: int = 3, policy: str = "round_robin", shape: DecodeShape = TINY) -> Schedule:
    return assign(build(shape, programs), programs, policy)


def put(schedule: Schedule, program: int, *queue: Instruction) -> Schedule:
    queues = list(schedule.queues)
    queues[program] = queue
    return replace(schedule, queues=tuple(queues))


def change(schedule: Schedule, kind: Op, **words: int) -> Schedule:
    """The first instruction of a kind, in other words."""
    places = [
        (p, i)
        for p, queue in enumerate(schedule.queues)
        for i, item in enumerate(queue)
        if item.op == kind
    ]
    p, i = places[0]
    queue = schedule.queues[p]
    return put(schedule, p, *queue[:i], queue[i]._replace(**words), *queue[i + 1 :])


# -- what is rejected, in which words


@pytest.mark.parametrize(
    ("op", "words", "text"),
    [
        (Op.DOWN, {"op": 77}, "opcode 77 (program 0, place 7): there is no such opcode"),
        (Op.DOWN, {"op": -1}, "there is no such opcode"),
        (Op.DOWN, {"op": 0}, "HALT inside a queue"),
        (Op.DOWN, {"layer": 2}, "layer must be 0…1, got 2"),
        (Op.DOWN, {"layer": -1}, "layer must be 0…1, got -1"),
        (Op.DOWN, {"begin": -1}, "tiles must be some of 0…1, got -1…"),
        (Op.DOWN, {"begin": 1, "end": 1}, "tiles must be some of 0…1, got 1…0"),
        (Op.DOWN, {"end": 3}, "tiles must be some of 0…1, got 1…2"),
        (Op.HEAD, {"split": 3}, "slot must be 0…2, got 3"),
        (Op.PICK, {"end": 2}, "must pick from all 3 slots, picks from 2"),
        (Op.ATTENTION, {"begin": 2, "end": 3}, "KV head must be one of 0…1, got 2…2"),
        (Op.ATTENTION, {"begin": 0, "end": 2}, "KV head must be one of 0…1, got 0…1"),
        (Op.ATTENTION, {"row": 2}, "request must be 0…1, got 2"),
        (Op.ATTENTION, {"split": 2}, "split must be 0…1, got 2"),
        (Op.MERGE, {"row": -1}, "request must be 0…1, got -1"),
        (Op.DOWN, {"wait": 99}, "wait must be a counter, 0…"),
        (Op.DOWN, {"signal": -2}, "or -1 for none, got -2"),
        (Op.DOWN, {"target": 0}, "target of counter gate_up[0] must be at least 1, got 0"),
        (Op.OUTPUT, {"row": 2**31}, "row must fit 32 bits, got 2147483648"),
        (Op.PICK, {"amount": -(2**31) - 1}, "amount must fit 32 bits, got -2147483649"),
        (Op.DOWN, {"amount": -1}, "amount of counter down[0] must be at least 1, got -1"),
    ],
)
def test_words_out_of_range(op, words, text):
    report = verify(change(tiny(), op, **words))
    assert text in report.errors[0]
    assert not report.ok


def test_a_target_beyond_32_bits_is_refused_though_all_join():
    """The kernel's words and counters have 32 bits."""
    schedule = tiny(1)
    counter = schedule.counters.index("qkv[0]")
    queue = [
        item._replace(
            amount=2**31 if item.signal == counter else item.amount,
            target=2**31 if item.wait == counter else item.target,
        )
        for item in schedule.queues[0]
    ]
    errors = verify(put(schedule, 0, *queue)).errors
    assert "amount must fit 32 bits, got 2147483648" in errors[0]


@pytest.mark.parametrize(
    ("op", "words", "text"),
    [
        (
            Op.OUTPUT,
            {"target": 5},
            "deadlock: OUTPUT of layer 0, tiles 0…0 (program 1, place 5) waits until counter "
            "attended[0] is 5, and all signals add up to 4",
        ),
        (Op.QKV, {"signal": -1, "amount": 0}, "and 7 others wait until counter qkv[0] is 3"),
        (Op.EMBED, {"signal": -1, "amount": 0}, "embed is 1, and nobody signals it"),
        (
            Op.OUTPUT,
            {"target": 3},
            "partial wait: OUTPUT of layer 0, tiles 0…0 (program 1, place 5) waits until counter "
            "attended[0] is 3, and all signals add up to 4: the last of them is not waited for",
        ),
        (Op.OUTPUT, {"amount": 2}, "partial wait: GATE_UP of layer 0"),
        (
            Op.DOWN,
            {"wait": -1, "target": 0},
            "race: GATE_UP of layer 0, tiles 1…1 (program 1, place 6) writes HIDDEN rows 0…1, "
            "columns 8…15, DOWN of layer 0, tiles 1…1 (program 0, place 7) reads it, and nothing "
            "orders the two: the result depends on timing",
        ),
        (Op.DOWN, {"wait": -1, "target": 0}, "uninitialised: DOWN of layer 0"),
        (Op.OUTPUT, {"begin": 0, "end": 2}, "done twice: tile 1 of OUTPUT in layer 0, by OUTPUT"),
        (Op.OUTPUT, {"op": Op.NOTHING}, "never done: tile 0 of OUTPUT in layer 0"),
        (Op.GATE_UP, {"layer": 1}, "never done: tile 0 of GATE_UP in layer 0"),
        (Op.ATTENTION, {"row": 1}, "never done: ATTENTION of layer 0, request 0, KV head"),
        (Op.MERGE, {"begin": 1, "end": 2}, "never done: MERGE of layer 0, request 0, KV head 0"),
        (Op.HEAD, {"split": 0}, "done twice: slot 0 of the best tokens"),
        (Op.EMBED, {"op": Op.NOTHING}, "never done: EMBED"),
        (Op.PICK, {"op": Op.NOTHING}, "never done: PICK"),
    ],
)
def test_what_is_wrong_is_said(op, words, text):
    errors = verify(change(tiny(), op, **words)).errors
    assert any(text in error for error in errors), errors


def test_a_circle_is_shown_as_short_as_it_is():
    schedule = tiny()
    first, *rest = schedule.queues[0]
    assert first.op == Op.EMBED
    report = verify(put(schedule, 0, *rest, first))
    assert len(report.errors) == 1
    circle = report.errors[0].removeprefix(
        "deadlock: a circle, in which each must be done before the next: "
    )
    names = circle.split(" → ")
    assert names[0] == names[-1]
    assert {"EMBED (program 0, place 15)", "counter embed"} < set(names)
    assert len(names) == 4


def test_a_circle_through_two_programs():
    shape = DecodeShape(1, 16, 16, 1, 1, 8, 16, tile=8)
    a, b = build(shape, 2), assign(build(shape, 2), 2)
    gate, down = (
        [item for item in a.instructions if item.op == op] for op in (Op.GATE_UP, Op.DOWN)
    )

    def swapped(item: Instruction) -> Instruction:
        """Each program does its DOWN before its GATE_UP."""
        for one, two in zip(gate, down, strict=True):
            if item in (one, two):
                return two if item == one else one
        return item

    report = verify(replace(b, queues=tuple(tuple(map(swapped, q)) for q in b.queues)))
    assert report.errors[0].startswith("deadlock: a circle")
    assert len(report.errors) == 1


def test_a_merge_without_splits_is_not_a_part_of_the_step():
    schedule = tiny(shape=replace(TINY, splits=1))
    last = schedule.queues[1][-1]
    merge = Instruction(Op.MERGE, 0, 0, 1, 0, 0, last.wait, last.target)
    errors = verify(put(schedule, 1, *schedule.queues[1], merge)).errors
    assert any("not a part of this step: MERGE of layer 0" in error for error in errors)


def test_the_epoch_ends_after_everything():
    """A program that is still there after PICK may take the next step's epoch for this one's."""
    schedule = tiny()
    embed = schedule.counters.index("embed")
    late = Instruction(Op.NOTHING, wait=embed, target=1)
    picks = next(p for p, queue in enumerate(schedule.queues) if queue[-1].op == Op.PICK)
    other = (picks + 1) % 3
    errors = verify(put(schedule, other, *schedule.queues[other], late)).errors
    assert len(errors) == 1
    assert errors[0].startswith("race: PICK")
    assert "writes EPOCH" in errors[0]
    errors = verify(put(schedule, picks, *schedule.queues[picks], late)).errors
    assert errors[0].startswith("wrong order: PICK")


def unsynchronised(items) -> Schedule:
    """One program, which needs no counters: its queue is an order."""
    bare = [item._replace(wait=-1, target=0, signal=-1, amount=0) for item in items]
    return Schedule(TINY, (tuple(bare),), (), build(TINY, 3).head_slots)


def test_one_program_needs_no_counters():
    assert verify(unsynchronised(build(TINY, 3).instructions)).ok


def test_the_wrong_order_is_wrong_without_any_race():
    """One program cannot race, but it can attend before it has projected."""
    items = list(build(TINY, 3).instructions)
    layer = [i for i, item in enumerate(items) if item.layer == 1]
    qkv = [i for i in layer if items[i].op == Op.QKV]
    moved = items.pop(qkv[-1])
    items.insert(next(i for i, item in enumerate(items) if item.op == Op.HEAD), moved)
    errors = verify(unsynchronised(items)).errors
    assert errors
    assert not any("race" in error for error in errors)
    assert any(error.startswith("wrong order: ") for error in errors)
    assert any(error.startswith("uninitialised: ") for error in errors)  # of this layer's keys


def test_errors_are_counted_no_further_than_anybody_reads():
    schedule = tiny()
    report = verify(replace(schedule, queues=((), (), ())))
    assert len(report.errors) == MAX_ERRORS
    assert report.num_instructions == report.longest_queue == report.critical_path == 0


WORDS = st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 6)


@given(
    queues=st.lists(st.lists(st.builds(Instruction, *[WORDS] * 10), max_size=4), max_size=3),
    counters=st.integers(0, 3),
    slots=st.integers(0, 3),
)
def test_nonsense_is_rejected_and_raises_nothing(queues, counters, slots):
    names = tuple(f"counter {i}" for i in range(counters))
    assert not verify(Schedule(TINY, tuple(map(tuple, queues)), names, slots)).ok


# -- against brute force


def brute_force(schedule: Schedule) -> bool:
    """Is every conflicting pair ordered as in the model? All pairs, all paths, no bit masks."""
    items = [
        (item, (p, i)) for p, queue in enumerate(schedule.queues) for i, item in enumerate(queue)
    ]
    total: dict[int, int] = {}
    for item, _ in items:
        total[item.signal] = total.get(item.signal, 0) + item.amount
    after: dict[int, set[int]] = {}

    def reach(i: int) -> set[int]:
        if i not in after:
            after[i] = set()
            item, (p, place) = items[i]
            for j, (other, (q, where)) in enumerate(items):
                in_queue = q == p and where == place + 1
                told = 0 <= item.signal == other.wait and other.target == total[item.signal]
                if in_queue or told:
                    after[i] |= {j} | reach(j)
        return after[i]

    for i, (a, _) in enumerate(items):
        for j, (b, _) in enumerate(items):
            if i == j:
                continue
            writes = regions(a, schedule.shape)[1]
            other_reads, other_writes = regions(b, schedule.shape)
            conflict = any(x.overlaps(y) for x in writes for y in other_reads + other_writes)
            if conflict:
                first, second = (i, j) if stage(a, TINY) < stage(b, TINY) else (j, i)
                if stage(a, TINY) == stage(b, TINY) or second not in reach(first):
                    return False
    return True


@pytest.mark.parametrize("seed", range(12))
def test_order_is_what_brute_force_says(seed):
    """Waits dropped at random from a sound schedule: some were needed, some were not."""
    draw = random.Random(seed)
    shape = replace(TINY, layers=1, batch=1)
    policy = POLICIES[seed % len(POLICIES)]
    schedule = assign(build(shape, 2), 2, policy, seed=seed)
    dropped = Schedule(
        shape,
        tuple(
            tuple(
                item._replace(wait=-1, target=0) if draw.random() < seed / 40 else item
                for item in queue
            )
            for queue in schedule.queues
        ),
        schedule.counters,
        schedule.head_slots,
    )
    assert verify(dropped).ok == brute_force(dropped)


def test_brute_force_sees_both_outcomes():
    shape = replace(TINY, layers=1, batch=1)
    schedule = assign(build(shape, 2), 2)
    assert brute_force(schedule)
    assert not brute_force(change(schedule, Op.DOWN, wait=-1, target=0))


# -- against the reference machine: what is accepted computes the model, in any order


CASE = decode_case((5, 2), 2, num_layers=1, vocab_size=24, hidden_size=16, intermediate_size=16)


def result(schedule: Schedule, seed: int) -> torch.Tensor:
    caches = {
        name: [cache.clone() for cache in getattr(CASE.inputs, name)] for name in ("keys", "values")
    }
    vm = ReferenceMachine(schedule, replace(CASE.inputs, **caches), torch.float64, check=False)
    return vm.run(seed)["LOGITS"]


@st.composite
def changed(draw, schedule: Schedule) -> Schedule:
    """Another word in an instruction, two places of a queue swapped, or another queue."""
    program = draw(st.sampled_from([p for p, queue in enumerate(schedule.queues) if queue]))
    queue = list(schedule.queues[program])
    place = draw(st.integers(0, len(queue) - 1))
    kind = draw(st.sampled_from(["word", "dropped wait", "swap", "move"]))
    if kind == "word":
        field = draw(st.sampled_from(Instruction._fields))
        queue[place] = queue[place]._replace(**{field: draw(st.integers(-1, 12))})
    elif kind == "dropped wait":
        queue[place] = queue[place]._replace(wait=-1, target=0)
    elif kind == "swap":
        other = draw(st.integers(0, len(queue) - 1))
        queue[place], queue[other] = queue[other], queue[place]
    else:
        item = queue.pop(place)
        schedule = put(schedule, program, *queue)
        program = draw(st.integers(0, len(schedule.queues) - 1))
        queue = list(schedule.queues[program])
        queue.insert(draw(st.integers(0, len(queue))), item)
    return put(schedule, program, *queue)


def check_what_is_accepted(data) -> None:
    programs = data.draw(st.integers(1, 4))
    policy, sync = data.draw(st.sampled_from(POLICIES)), data.draw(st.sampled_from(SYNCS))
    sound = assign(build(CASE.shape, programs), programs, policy, sync)
    schedule = sound
    for _ in range(data.draw(st.integers(1, 2))):
        schedule = data.draw(changed(schedule))
    if schedule != sound and verify(schedule).ok:
        truth = result(sound, 0)
        torch.testing.assert_close(truth, CASE.logits, rtol=0, atol=1e-12)
        for seed in range(3):
            assert torch.equal(result(schedule, seed), truth)


@settings(max_examples=60)
@given(data=st.data())
def test_what_is_accepted_gives_the_models_logits(data):
    """A sound schedule is changed. Accepted all the same: every order gives the same bits."""
    check_what_is_accepted(data)


@pytest.mark.slow
@settings(max_examples=2000)
@given(data=st.data())
def test_what_is_accepted_gives_the_models_logits_often(data):
    check_what_is_accepted(data)


# -- size


@pytest.mark.parametrize("policy", ["round_robin", "list"])
def test_llama_1b_on_an_h100(policy):
    shape = decode_shape(MODELS["llama-1b"], batch=1, splits=4)
    report = verify(assign(build(shape, 132), 132, policy))
    assert report.errors == ()
    assert report.num_instructions == 9094
    assert report.num_pairs > 2e7


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["counters", "grid"])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_at_every_batch(model, sync):
    for batch, splits in ((1, 1), (4, 4), (16, 8)):
        shape = decode_shape(MODELS[model], batch, splits)
        assert verify(assign(build(shape, 132), 132, "list", sync)).errors == ()
