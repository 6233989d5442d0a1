"""Every schedule that the scheduler can emit is proved, and is the step it should be."""

import itertools
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minifer.kernels.mega.isa import WORDS, DecodeShape, Instruction, Op
from minifer.kernels.mega.schedule import (
    POLICIES,
    SYNCS,
    Schedule,
    assign,
    build,
    byte_cost,
    chunks,
    stage,
)
from minifer.kernels.mega.verify import verify

TINY = DecodeShape(2, 32, 48, 4, 2, 8, 40, batch=2, splits=2, tile=8)


@st.composite
def shapes(draw) -> DecodeShape:
    tile = draw(st.sampled_from([2, 4, 8]))
    kv_heads = draw(st.integers(1, 3))
    tiles = st.integers(1, 5).map(lambda count: count * tile)
    return DecodeShape(
        layers=draw(st.integers(1, 3)),
        hidden=draw(tiles),
        intermediate=draw(tiles),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(tiles),
        vocab=draw(tiles),
        batch=draw(st.integers(1, 4)),
        splits=draw(st.sampled_from([1, 2, 4])),
        tile=tile,
    )


@given(
    shape=shapes(),
    pieces=st.integers(1, 40),
    programs=st.integers(1, 60),
    policy=st.sampled_from(POLICIES),
    sync=st.sampled_from(SYNCS),
    seed=st.integers(0, 99),
)
def test_whatever_is_emitted_is_proved(shape, pieces, programs, policy, sync, seed):
    """Also when it was cut for another number of programs than it is dealt to."""
    graph = build(shape, pieces)
    schedule = assign(graph, programs, policy, sync, seed=seed)
    report = verify(schedule)
    assert report.errors == ()
    assert len(schedule.queues) == programs
    assert report.num_instructions == schedule.num_instructions
    assert report.longest_queue <= report.critical_path <= report.num_instructions
    everything = [item for queue in schedule.queues for item in queue]
    for numbers in ([i.wait for i in everything], [i.signal for i in everything]):
        assert set(numbers) - {-1} == set(range(len(schedule.counters)))  # none for nobody
    work = [item for item in everything if item.op != Op.NOTHING]
    if sync == "counters":
        assert Counter(work) == Counter(graph.instructions)
    else:  # the same work, other waits
        assert Counter(item[:6] for item in work) == Counter(i[:6] for i in graph.instructions)


def test_a_graph_is_its_own_schedule_for_one_program():
    graph = build(TINY, 3)
    schedule = assign(graph, 1)
    assert schedule.queues == (graph.instructions,)
    assert verify(schedule).critical_path == len(graph.instructions)


def test_more_programs_than_work_leaves_queues_empty():
    shape = DecodeShape(1, 8, 8, 1, 1, 8, 8, tile=8)
    schedule = assign(build(shape, 50), 50)
    assert sum(not queue for queue in schedule.queues) == 50 - schedule.num_instructions
    assert verify(schedule).ok


def test_packed_queues_end_with_halt_and_decode_to_what_they_were():
    schedule = assign(build(TINY, 5), 5, "random")
    packed = schedule.packed()
    assert len({len(queue) for queue in packed}) == 1
    for words, queue in zip(packed, schedule.queues, strict=True):
        items = [Instruction.decode(item) for item in words]
        assert tuple(items[: len(queue)]) == queue
        assert {item.op for item in items[len(queue) :]} == {Op.HALT}
        assert all(len(item) == WORDS for item in words)


@pytest.mark.parametrize(
    ("policy", "programs"),
    [("round_robin", [0, 1, 2, 0, 1, 2, 0]), ("zig_zag", [0, 2, 1, 0, 0, 1, 2])],
)
def test_who_gets_the_first_instructions(policy, programs):
    graph = build(TINY, 3)
    schedule = assign(graph, 3, policy)
    by = {item: p for p, queue in enumerate(schedule.queues) for item in queue}
    assert [by[item] for item in graph.instructions[:7]] == programs


def test_zig_zag_gives_nobody_two_pieces_of_an_operation_that_has_few():
    schedule = assign(build(TINY, 5), 5, "zig_zag")
    for queue in schedule.queues:
        pieces = Counter((item.op, item.layer) for item in queue if TINY.tiles(Op(item.op)))
        assert set(pieces.values()) == {1}


def test_random_schedules_repeat_with_their_seed_and_differ_without():
    graph = build(TINY, 3)
    one, again, other = (assign(graph, 3, "random", seed=seed) for seed in (1, 1, 2))
    assert one == again != other


def test_stages_follow_the_model():
    shape = DecodeShape(2, 8, 8, 1, 1, 8, 8, splits=2, tile=8)
    names = ["EMBED", "QKV", "ATTENTION", "ATTENTION", "MERGE", "OUTPUT", "GATE_UP", "DOWN"]
    names += ["QKV", "ATTENTION", "ATTENTION", "MERGE", "OUTPUT", "GATE_UP", "DOWN", "HEAD", "PICK"]
    items = build(shape, 1).instructions
    assert [Op(item.op).name for item in items] == names
    numbers = [stage(item, shape) for item in items]
    assert numbers == [0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12, 13, 14]
    assert stage(Instruction(Op.NOTHING), shape) == -1


# -- list scheduling


def makespan(schedule: Schedule, cost) -> float:
    """Seconds until the last program is done, each instruction as soon as it can."""
    missing = Counter(item.signal for queue in schedule.queues for item in queue)
    ready: dict[int, float] = defaultdict(float)
    free, place = [0.0] * len(schedule.queues), [0] * len(schedule.queues)
    moved = True
    while moved:
        moved = False
        for p, queue in enumerate(schedule.queues):
            while place[p] < len(queue) and not missing[queue[place[p]].wait] * (
                queue[place[p]].wait >= 0
            ):
                item = queue[place[p]]
                start = max(free[p], ready[item.wait] if item.wait >= 0 else 0.0)
                free[p] = start + cost(item)
                missing[item.signal] -= 1
                ready[item.signal] = max(ready[item.signal], free[p])
                place[p] += 1
                moved = True
    assert place == [len(queue) for queue in schedule.queues]
    return max(free)


@given(
    shape=shapes(),
    programs=st.integers(1, 12),
    costs=st.lists(st.integers(1, 20), min_size=7, max_size=7),
)
def test_list_scheduling_keeps_grahams_bound(shape, programs, costs):
    """No list schedule is longer than work / P + (1 − 1/P) · critical path (Graham 1969)."""

    def cost(item):
        return float(costs[(item.op * 3 + item.begin + item.row + item.split) % 7])

    graph = build(shape, programs)
    path: dict[int, float] = defaultdict(float)
    longest = 0.0
    for item in graph.instructions:
        end = cost(item) + (path[item.wait] if item.wait >= 0 else 0.0)
        path[item.signal] = max(path[item.signal], end)
        longest = max(longest, end)
    work = sum(map(cost, graph.instructions))
    span = makespan(assign(graph, programs, "list", cost=cost), cost)
    assert max(longest, work / programs) - 1e-6 <= span
    assert span <= work / programs + (1 - 1 / programs) * longest + 1e-6


def test_list_scheduling_starts_the_longest_way_first():
    """One program must take HEAD tiles by nothing but the length of their way: the dear first."""
    shape = DecodeShape(1, 8, 8, 1, 1, 8, 40, tile=8)

    def cost(item):
        return 10.0 if item.op == Op.HEAD and item.begin == 3 else 1.0

    queue = assign(build(shape, 5), 1, "list", cost=cost).queues[0]
    heads = [item.begin for item in queue if item.op == Op.HEAD]
    assert heads == [3, 0, 1, 2, 4]


def test_byte_cost_is_bytes_over_bandwidth_and_an_overhead():
    shape = DecodeShape(1, 64, 128, 4, 2, 16, 256, splits=4)
    seconds = byte_cost(shape, bytes_per_second=1000.0, overhead=0.5, context=32)
    assert seconds(Instruction(Op.DOWN, 0, 1, 3)) == 0.5 + 2 * 16 * 128 * 2 / 1000
    assert seconds(Instruction(Op.GATE_UP, 0, 0, 1)) == 0.5 + 16 * 2 * 64 * 2 / 1000
    assert seconds(Instruction(Op.ATTENTION, 0, 0, 1)) == 0.5 + 2 * (32 / 4) * 16 * 2 / 1000
    assert seconds(Instruction(Op.MERGE, 0, 0, 1)) == 0.5 + 2 * 4 * (16 + 1) * 4 / 1000
    assert seconds(Instruction(Op.PICK, end=9)) == 0.5


# -- grid barriers


@pytest.mark.parametrize("policy", POLICIES)
def test_at_a_grid_barrier_everybody_arrives_once_and_everybody_waits(policy):
    programs = 7
    schedule = assign(build(TINY, programs), programs, policy, "grid", seed=3)
    stages = 2 + 6 * TINY.layers + 1
    assert schedule.counters == tuple(f"barrier[{i}]" for i in range(stages - 1))
    for queue in schedule.queues:
        arrivals = [item.signal for item in queue if item.signal >= 0]
        assert arrivals == list(range(stages - 1))
        past = -1
        for item in queue:
            assert (item.wait, item.target) == ((past, programs) if past >= 0 else (-1, 0))
            past = item.signal if item.signal >= 0 else past
    order = [stage(item, TINY) for queue in schedule.queues for item in queue]
    assert set(order) == {-1, *range(stages)}


def test_a_program_without_work_arrives_with_nothing():
    schedule = assign(build(TINY, 2), 9, "round_robin", "grid")
    kinds = Counter(Op(item.op) for queue in schedule.queues for item in queue)
    arriving = sum(item.signal >= 0 for queue in schedule.queues for item in queue)
    assert arriving == 9 * len(schedule.counters)
    assert 0 < kinds[Op.NOTHING] < arriving


# -- refusals, and small things


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "best"}, "policy must be one of round_robin, zig_zag, list, random, got"),
        ({"sync": "none"}, "sync must be one of counters, grid, got 'none'"),
        ({"num_programs": 0}, "num_programs must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_assigned(arguments, message):
    with pytest.raises(ValueError, match=message):
        assign(build(TINY, 2), **{"num_programs": 2, **arguments})


def test_what_cannot_be_built():
    with pytest.raises(ValueError, match="num_programs must be at least 1, got 0"):
        build(TINY, 0)
    with pytest.raises(ValueError, match="tile must be at least 2"):
        DecodeShape(1, 8, 8, 1, 1, 8, 8, tile=1)


@given(count=st.integers(1, 500), pieces=st.integers(1, 200))
def test_chunks_cover_everything_evenly(count, pieces):
    parts = chunks(count, pieces)
    assert [i for begin, end in parts for i in range(begin, end)] == list(range(count))
    sizes = {end - begin for begin, end in parts}
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
