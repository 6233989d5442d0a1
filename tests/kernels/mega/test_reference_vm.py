"""The reference machine against the model itself."""

from dataclasses import replace

import pytest
import torch
from decode_case import decode_case

from minifer.kernels.mega import reference_vm
from minifer.kernels.mega.isa import DecodeShape, Instruction, Op, regions
from minifer.kernels.mega.reference_vm import ReferenceMachine, ScheduleError
from minifer.kernels.mega.schedule import POLICIES, assign, build


def fresh(case, **changes):
    """A case's inputs with caches of their own."""
    keys, values = (
        [c.clone() for c in caches] for caches in (case.inputs.keys, case.inputs.values)
    )
    return replace(case.inputs, keys=keys, values=values, **changes)


def machine(case, programs=3, policy="round_robin", sync="counters", seed=0, check=True, **inputs):
    schedule = assign(build(case.shape, programs), programs, policy, sync, seed=seed)
    return ReferenceMachine(schedule, fresh(case, **inputs), torch.float64, check)


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("contexts", [(1,), (9, 4), (5, 1, 12), (1, 8, 3, 17)])
def test_logits_and_caches_are_the_models(contexts, splits):
    case = decode_case(contexts, splits)
    vm = machine(case)
    vm.run(seed=0)
    torch.testing.assert_close(vm.logits, case.logits, rtol=0, atol=1e-12)
    assert vm.buffers["TOKEN"][:, 0].tolist() == case.logits.argmax(1).tolist()
    for mine, theirs in ((vm.inputs.keys, case.keys), (vm.inputs.values, case.values)):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(
    "config",
    [
        {"tie_word_embeddings": False},
        {"num_heads": 6, "num_kv_heads": 2, "hidden_size": 48},
        {"head_dim": 16, "vocab_size": 48},
        {"num_layers": 1, "num_kv_heads": 4},
    ],
)
def test_other_shapes(config):
    case = decode_case((3, 10), 2, **config)
    vm = machine(case, programs=5)
    vm.run(seed=0)
    torch.testing.assert_close(vm.logits, case.logits, rtol=0, atol=1e-12)


def test_float32_is_as_near_as_float32_can_be():
    case = decode_case((6, 2), 2, torch.float32)
    schedule = assign(build(case.shape, 4), 4)
    vm = ReferenceMachine(schedule, fresh(case), torch.float32)
    vm.run()
    torch.testing.assert_close(vm.logits, case.logits, rtol=0, atol=2e-5)


def test_every_order_placement_and_cut_gives_the_same_bits():
    case = decode_case((6, 1, 11), 2)
    first = machine(case, programs=1, check=False).run()
    for seed, policy in enumerate(POLICIES * 2):
        sync = "grid" if seed % 2 else "counters"
        vm = machine(case, 1 + 3 * seed, policy, sync, seed, check=False)
        memory = vm.run(seed)
        for name in ("X", "LOGITS", "TOKEN", "POSITION", "INDEX", "EPOCH"):
            assert torch.equal(memory[name], first[name]), (name, policy, seed)


def test_an_empty_seat_disturbs_nobody_and_stays_empty():
    case = decode_case((6, 0, 3), 4)
    vm = machine(case)
    before = [cache.clone() for cache in vm.inputs.keys]
    memory = vm.run(seed=3)
    torch.testing.assert_close(vm.logits[[0, 2]], case.logits[[0, 2]], rtol=0, atol=1e-12)
    assert bool(memory["ATTENDED"][1].eq(0).all())
    assert memory["POSITION"][:, 0].tolist() == [6, -1, 3]
    assert memory["INDEX"][:, 0].tolist() == [1, 0, 1]
    assert int(memory["TOKEN"][1]) == int(case.inputs.tokens[1])
    written = sum(int((new.isnan() != old.isnan()).any(-1).any(-1).sum()) for new, old in zip(
        vm.inputs.keys, before, strict=True
    ))  # fmt: skip
    assert written == 2 * case.shape.layers  # one position of each request that is there


def test_a_drawn_token_is_the_winner_of_the_race():
    case = decode_case((4, 4), 1)
    noise = torch.randn(2, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    temperature = torch.tensor([0.0, 5.0])
    vm = machine(case, temperature=temperature, noise=noise)
    vm.run()
    drawn = (case.logits[1] / 5.0 - noise[1]).argmax()
    assert vm.buffers["TOKEN"][:, 0].tolist() == [int(case.logits[0].argmax()), int(drawn)]
    assert int(drawn) != int(case.logits[1].argmax())  # the noise decides


def test_of_equal_logits_the_lowest_id_wins():
    case = decode_case((2,))
    weights = dict(case.inputs.weights)
    row = weights["embed_tokens.weight"].clone()
    best = int(case.logits.argmax())
    row[[7, 9, 30]] = row[best].clone()
    vm = machine(case, weights={**weights, "lm_head.weight": row})
    vm.run()
    assert int(vm.buffers["TOKEN"]) == min(7, best)


def test_the_scoreboard_names_instruction_and_counter():
    vm = machine(decode_case((2,)))
    with pytest.raises(ScheduleError) as error:
        vm.execute(1)
    assert str(error.value) == (
        "QKV of layer 0, tiles 0…1 (program 1, place 0) waits for 1 of counter embed, which is 0"
    )


def test_a_deadlock_is_an_error():
    vm = machine(decode_case((2,)))
    queues = list(vm.schedule.queues)
    queues[0] = queues[0][1:]  # nobody embeds
    stuck = ReferenceMachine(replace(vm.schedule, queues=tuple(queues)), vm.inputs)
    with pytest.raises(ScheduleError, match=r"deadlock: .* counter embed, which is 0"):
        stuck.run(seed=0)


SHAPE = DecodeShape(2, 32, 48, 4, 2, 8, 40, batch=2, splits=2, tile=8)
KINDS = {
    (item.op, i): (item, area)
    for item in {int(item.op): item for item in build(SHAPE, 2).instructions}.values()
    for i, area in enumerate(regions(item, SHAPE)[0])
    # The launch reads the epoch; noise is an input, so nobody has to draw number INDEX of it.
    if area.buffer != "EPOCH" and (item.op, area.buffer) != (Op.HEAD, "INDEX")
}


@pytest.mark.parametrize("which", KINDS, ids=lambda key: f"{Op(key[0]).name}-{key[1]}")
def test_an_undeclared_read_is_noticed(which, monkeypatch):
    """Of everything an instruction declares to read: without it, it is caught. So no declared read
    is idle, and the check sees each."""
    lost = KINDS[which][1]

    def without(item: Instruction, shape: DecodeShape):
        reads, writes = regions(item, shape)
        if item.op == which[0] and which[1] < len(reads):
            reads = [area for area in reads if area.buffer != lost.buffer]
        return reads, writes

    monkeypatch.setattr(reference_vm, "regions", without)
    vm = machine(decode_case((6, 6), 2), temperature=torch.ones(2), noise=torch.zeros(2, 40))
    with pytest.raises(ScheduleError, match="declared"):
        vm.run(seed=0)


@pytest.mark.parametrize("op", [op for op in Op if op not in (Op.HALT, Op.NOTHING)])
def test_an_undeclared_write_is_noticed(op, monkeypatch):
    def without(item: Instruction, shape: DecodeShape):
        reads, writes = regions(item, shape)
        return reads, writes[1:] if item.op == op else writes

    monkeypatch.setattr(reference_vm, "regions", without)
    with pytest.raises(ScheduleError, match="outside of what it has declared"):
        machine(decode_case((6, 6), 2)).run(seed=0)


def test_a_declared_write_must_come(monkeypatch):
    monkeypatch.setitem(reference_vm.OPERATIONS, Op.GATE_UP, lambda vm, item, memory: None)
    with pytest.raises(ScheduleError, match=r"GATE_UP .* does not write all of"):
        machine(decode_case((6,))).run(seed=0)
