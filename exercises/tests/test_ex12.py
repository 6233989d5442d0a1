"""Tests of exercises 12. The truths: time in ticks, counting by hand, every order of a run, float64."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from minifer.course.grading import compare, points, probe, unchanged

# -- 12.1


def last_end(durations: list[int], num_sms: int) -> int:
    """In ticks: whoever has nothing to do takes the next block."""
    left, rest, now = [0] * num_sms, list(durations), 0
    while rest or any(left):
        for sm in range(num_sms):
            if left[sm] == 0 and rest:
                left[sm] = rest.pop(0)
        now += 1
        left = [max(0, n - 1) for n in left]
    return now


def cut(contexts: list[int], part: int, overhead: int) -> list[int]:
    blocks = []
    for tokens in contexts:
        starts = range(0, tokens, part)
        blocks += [min(part, tokens - start) + overhead for start in starts]
    return blocks


def ask_tail(target: Any, durations: list[int], num_sms: int) -> None:
    tried = f"tail({durations}, {num_sms})"
    with unchanged(tried, durations=durations):
        got = target.tail(durations, num_sms)
    end = last_end(durations, num_sms)
    used = sum(durations) / (num_sms * end)
    compare(got, (end, used), tried, atol=1e-12)


@points("12.1", 1)
@pytest.mark.parametrize(
    ("blocks", "num_sms"),
    [(1, 1), (5, 4), (4, 4), (3, 4), (132, 132), (133, 132), (7, 1)],
)
def test_ex12_1_equal_blocks_run_in_waves(target, blocks, num_sms):
    ask_tail(target, [3] * blocks, num_sms)


@points("12.1", 1)
@pytest.mark.parametrize("num_sms", [1, 2, 4, 7])
def test_ex12_1_the_free_sm_takes_the_next_block(target, rng, num_sms):
    ask_tail(target, [1, 1, 1, 9], num_sms)
    ask_tail(target, [9, 1, 1, 1], num_sms)
    for count in (2, 9, 30):
        ask_tail(target, [rng.randint(1, 20) for _ in range(count)], num_sms)


@points("12.1", 1)
def test_ex12_1_nothing_to_do_and_no_sm(target):
    got = target.tail([], 4)
    compare([float(n) for n in got], [0.0, 1.0], "tail([], 4)", atol=0)
    ask_tail(target, [2, 5], 2)
    for durations, num_sms in (([1], 0), ([1], -1), ([], 0)):
        with pytest.raises(ValueError):
            got = target.tail(durations, num_sms)
            raise AssertionError(
                f"tail({durations}, {num_sms}) must raise, returned {got}"
            )


CUTS = [
    ([7, 14, 9], 2, 3, [3, 5, 8, 12]),  # 5, if the rests are dropped
    ([12, 27], 3, 3, [3, 5, 8, 12]),  # 5, if a full part costs no overhead
    ([7], 4, 100, [1, 2, 7, 30]),
    ([18, 18], 3, 0, [3, 5, 8, 12]),  # 3, if rests come first; 8, if cut evenly
    ([4, 20], 3, 1, [3, 5, 8, 12]),  # 5, if rests come first; 12, if cut evenly
]


@points("12.1", 1)
def test_ex12_1_the_best_part_depends_on_the_batch(target, rng):
    cases = [
        ([8, 2], 2, 0, [2, 8, 4]),
        ([1000, 1000, 4000, 4000], 4, 125, [125, 250, 500, 1000, 2000, 4000]),
        ([4641, 45118, 1730, 1696], 132, 0, [256, 403, 420, 2048]),
        ([5, 5, 5], 1, 0, [1, 2, 5]),  # all the same: the largest
        *CUTS,
    ]
    for _ in range(8):
        contexts = [rng.randint(1, 60) for _ in range(rng.randint(1, 5))]
        cases.append(
            (contexts, rng.randint(1, 6), rng.randint(0, 6), [3, 7, 16, 20, 60])
        )
    for contexts, num_sms, overhead, parts in cases:
        ends = {p: ends_at(tuple(cut(contexts, p, overhead)), num_sms) for p in parts}
        best = max(p for p in parts if ends[p] == min(ends.values()))
        tried = f"best_part({contexts}, {num_sms}, {overhead}, {parts})  # ends: {ends}"
        with unchanged(tried, contexts=contexts, parts=parts):
            got = target.best_part(contexts, num_sms, overhead, parts)
        compare(got, best, tried)


@cache
def ends_at(durations: tuple[int, ...], num_sms: int) -> int:
    return last_end(list(durations), num_sms)


# -- 12.2


def ways(costs: list[int], needs: list[list[int]]) -> list[int]:
    """The longest chain that begins with each instruction."""

    @cache
    def way(i: int) -> int:
        return costs[i] + max(
            [way(j) for j, needed in enumerate(needs) if i in needed], default=0
        )

    return [way(i) for i in range(len(costs))]


def end_by_the_rule(costs: list[int], needs: list[list[int]], num_sms: int) -> int:
    """In ticks: whoever is idle takes the ready instruction with the longest way."""
    way, done, open_ = ways(costs, needs), set(), set(range(len(costs)))
    left: list[list[int]] = []  # [instruction, ticks it still takes]
    now = 0
    while open_ or left:
        ready = [i for i in open_ if done.issuperset(needs[i])]
        for i in sorted(ready, key=lambda i: (-way[i], i))[: num_sms - len(left)]:
            left.append([i, costs[i]])
            open_.remove(i)
        now += 1
        for entry in left:
            entry[1] -= 1
        done |= {i for i, ticks in left if ticks == 0}
        left = [entry for entry in left if entry[1]]
    return now


def run_queues(
    queues: list[list[int]], costs: list[int], needs: list[list[int]]
) -> tuple[int, list[int]]:
    """When the queues end, and the instructions that never start."""
    ends: dict[int, int] = {}
    rests = [list(queue) for queue in queues]
    clock = [0 for _ in queues]
    while able := [
        sm
        for sm, rest in enumerate(rests)
        if rest and ends.keys() >= set(needs[rest[0]])
    ]:
        for sm in able:
            i = rests[sm].pop(0)
            start = max([clock[sm], *(ends[j] for j in needs[i])])
            ends[i] = clock[sm] = start + costs[i]
    left = [i for rest in rests for i in rest]
    return max(ends.values(), default=0), left


def ask_schedule(
    target: Any, costs: list[int], needs: list[list[int]], num_sms: int
) -> tuple[int, str]:
    """When the answer's queues end. Every instruction is there once, and nothing hangs."""
    tried = f"schedule({costs}, {needs}, {num_sms})"
    with unchanged(tried, costs=costs, needs=needs):
        got = target.schedule(costs, needs, num_sms)
    said = f"tried     {tried}\ngot       {got}\n"
    assert isinstance(got, list) and all(isinstance(queue, list) for queue in got), (
        f"{said}expected  a list of lists"
    )
    compare(len(got), num_sms, f"len({tried})")
    compare(
        sorted(i for q in got for i in q), list(range(len(costs))), f"all of {tried}"
    )
    end, left = run_queues(got, costs, needs)
    assert not left, f"{said}deadlock: these never start: {sorted(left)}"
    return end, said


def decode_step(
    layers: int, pieces: int, cost: int = 2
) -> tuple[list[int], list[list[int]]]:
    """Layers of `pieces` instructions, each of which needs all of the layer before, and one long
    instruction beside each layer that only the next-but-one needs."""
    costs, needs, before, aside = [], [], [], []
    for _ in range(layers):
        mine = list(range(len(costs), len(costs) + pieces))
        for _ in mine:
            costs.append(cost)
            needs.append([*before, *aside[-2:-1]])
        costs.append(3 * cost)
        needs.append(list(before))
        aside.append(len(costs) - 1)
        before = mine
    return costs, needs


def random_graph(rng: random.Random, count: int, density: float) -> tuple[Any, Any]:
    """Instructions whose numbers say nothing of their order."""
    names = rng.sample(range(count), count)
    costs, needs = [0] * count, [[] for _ in range(count)]
    for place, name in enumerate(names):
        costs[name] = rng.randint(1, 9)
        needs[name] = [other for other in names[:place] if rng.random() < density]
    return costs, needs


GRAPHS = [
    ([1], [[]], 1),
    ([1, 1, 2], [[2], [], []], 2),
    ([2, 2, 2], [[1], [2], []], 3),  # numbers against the order
    ([1, 2, 3, 4], [[], [], [], []], 2),
    ([3, 1, 1, 1, 5], [[], [0], [0], [1, 2], [3]], 2),
    # 0 and 4 end together: only then is it known that 2 goes before 3
    ([3, 2, 3, 3, 3, 3], [[], [5, 2], [0, 4], [0], [], [4]], 2),
    # equal ways: the highest number first would end at 4 instead of 3, and at 3 instead of 4
    ([1, 1, 2, 2], [[1], [], [], []], 2),
    ([2, 2, 1, 1], [[], [], [], [2]], 2),
    ([], [], 3),
]


@points("12.2", 3)
@pytest.mark.parametrize("num_sms", [1, 2, 3, 8])
def test_ex12_2_everything_once_and_nothing_hangs(target, rng, num_sms):
    for costs, needs, sms in GRAPHS:
        ask_schedule(target, costs, needs, sms)
    for count, density in ((5, 0.5), (12, 0.2), (30, 0.1)):
        ask_schedule(target, *random_graph(rng, count, density), num_sms)


@points("12.2", 1)
def test_ex12_2_no_barrier_between_operations(target):
    for layers, pieces, num_sms in ((3, 2, 3), (5, 3, 4), (4, 4, 5)):
        costs, needs = decode_step(layers, pieces)
        end, said = ask_schedule(target, costs, needs, num_sms)
        wanted = end_by_the_rule(costs, needs, num_sms)
        assert end <= wanted, (
            f"{said}it ends at {end}, and the rule ends at {wanted}: somebody waits for more than "
            "it needs"
        )


@points("12.2", 2)
@pytest.mark.parametrize("num_sms", [1, 2, 3, 5])
def test_ex12_2_ends_when_the_rule_says(target, rng, num_sms):
    graphs = [(costs, needs) for costs, needs, _ in GRAPHS]
    for count, density in ((4, 0.5), (8, 0.3), (14, 0.2), (25, 0.1)):
        graphs.append(random_graph(rng, count, density))
    for costs, needs in graphs:
        end, said = ask_schedule(target, costs, needs, num_sms)
        wanted = end_by_the_rule(costs, needs, num_sms)
        assert end == wanted, f"{said}it ends at {end}, and the rule ends at {wanted}"


@points("12.2", 1)
def test_ex12_2_the_longest_way_goes_first(target):
    """A long chain among many short instructions: whoever starts it late ends late."""
    for short, chain, num_sms in ((6, 4, 2), (9, 6, 3), (3, 5, 2)):
        costs = [3] * short + [2] * chain  # by itself each of the chain is short
        needs = [[] for _ in range(short)]
        needs += [[] if k == 0 else [short + k - 1] for k in range(chain)]
        end, said = ask_schedule(target, costs, needs, num_sms)
        wanted = end_by_the_rule(costs, needs, num_sms)
        assert end == wanted, f"{said}it ends at {end}, and the rule ends at {wanted}"


@points("12.2", 1)
def test_ex12_2_a_circle_has_no_schedule(target):
    ask_schedule(target, [1, 2, 3], [[], [0], [1]], 2)
    circles = [
        ([1], [[0]]),
        ([1, 1], [[1], [0]]),
        ([1, 1, 1, 1], [[], [0, 3], [1], [2]]),  # a start, and then a circle
        ([2, 1, 1], [[], [2], [1]]),
    ]
    for costs, needs in circles:
        with pytest.raises(ValueError):
            got = target.schedule(costs, needs, 2)
            raise AssertionError(
                f"schedule({costs}, {needs}, 2) must raise, returned {got}"
            )


# -- 12.3

Program = list[tuple[list[str], list[str]]]
LAYER: Program = [
    ([], ["x"]),
    (["x"], ["q", "k"]),
    (["q", "k"], ["a"]),
    (["a", "x"], ["x"]),
    (["x"], ["h0"]),
    (["x"], ["h1"]),
    (["h0", "h1", "x"], ["x"]),
]
PROGRAMS: list[Program] = [
    [],
    [([], ["x"])],
    [([], ["x"]), (["x"], ["y"]), (["x"], ["z"]), (["y"], ["x"])],
    LAYER,
    LAYER + LAYER[1:],
    [(["x"], ["x"]), (["x"], ["x"]), (["x"], [])],
    [([], ["x"]), ([], ["x"]), ([], ["y"])],
    [(["x"], []), ([], ["x"]), (["y"], []), (["x"], [])],
]


def by_counting(program: Program) -> list[dict[tuple[str, str], int]]:
    """The definition, buffer by buffer."""
    found = []
    for i, (reads, writes) in enumerate(program):
        before = program[:i]
        targets = {}
        for b in sorted({*reads, *writes}):
            targets["written", b] = sum(b in other[1] for other in before)
        for b in writes:
            targets["read", b] = sum(b in other[0] for other in before)
        found.append({counter: n for counter, n in targets.items() if n})
    return found


def random_program(rng: random.Random, count: int, buffers: str) -> Program:
    def some(most: int) -> list[str]:
        return rng.sample(buffers, rng.randint(0, most))

    return [(some(3), some(2)) for _ in range(count)]


def ask_waits(
    target: Any, program: Program
) -> tuple[list[dict[tuple[str, str], int]], str]:
    tried = f"waits({program})"
    with unchanged(tried, instructions=program):
        got = target.waits(program)
    assert isinstance(got, list) and all(isinstance(item, dict) for item in got), (
        f"tried     {tried}\ngot       {got!r}\nexpected  a list of dicts"
    )
    compare(len(got), len(program), f"len({tried})")
    return got, tried


def only(kind: str, targets: list[dict[tuple[str, str], int]]) -> list[dict[str, int]]:
    return [{c[1]: n for c, n in item.items() if c[0] == kind} for item in targets]


@points("12.3", 2)
def test_ex12_3_waits_for_earlier_writers(target, rng):
    programs = [*PROGRAMS, *(random_program(rng, n, "abcde") for n in (3, 8, 20))]
    for program in programs:
        got, tried = ask_waits(target, program)
        wanted = only("written", by_counting(program))
        compare(only("written", got), wanted, f'the targets of "written" in {tried}')


@points("12.3", 1)
def test_ex12_3_a_writer_waits_for_earlier_readers(target, rng):
    programs = [*PROGRAMS[1:], *(random_program(rng, n, "abcd") for n in (3, 8, 20))]
    for program in programs:
        got, tried = ask_waits(target, program)
        wanted = only("read", by_counting(program))
        compare(only("read", got), wanted, f'the targets of "read" in {tried}')


def run_in_any_order(
    program: Program,
    targets: list[dict[tuple[str, str], int]],
    draw: random.Random | None,
) -> tuple[dict[str, Any], list[int]]:
    """Memory after a run, and who never started. draw: who goes next of those that may; None: in
    the order of the list, whatever the targets say."""
    memory: dict[str, Any] = {}
    seen_so_far: Counter[tuple[str, str]] = Counter()
    left = list(range(len(program)))
    while left:
        able = [i for i in left if seen_so_far >= Counter(targets[i])]
        if draw is not None and not able:
            break
        i = left[0] if draw is None else draw.choice(able)
        reads, writes = program[i]
        seen = tuple(memory.get(b) for b in reads)
        for b in writes:
            memory[b] = hash((i, b, seen))
        seen_so_far.update(("read", b) for b in reads)
        seen_so_far.update(("written", b) for b in writes)
        left.remove(i)
    return memory, left


@points("12.3", 1)
def test_ex12_3_any_order_leaves_the_same_memory(target, rng):
    programs = [*PROGRAMS[2:], *(random_program(rng, n, "abcd") for n in (4, 9, 16))]
    for program in programs:
        got, tried = ask_waits(target, program)
        truth, _ = run_in_any_order(program, got, None)
        for _ in range(12):
            memory, left = run_in_any_order(program, got, rng)
            assert not left, (
                f"tried     {tried}\ngot       {got}\ninstructions {left} never start"
            )
            wrong = sorted(b for b in truth if memory[b] != truth[b])
            assert not wrong, (
                f"tried     {tried}\ngot       {got}\nrun in another order, {wrong} end up with other values"
            )
        compare(got, by_counting(program), tried)


def random_queues(rng: random.Random, count: int, sms: int) -> list[list[int]]:
    queues: list[list[int]] = [[] for _ in range(sms)]
    for i in range(count):
        rng.choice(queues).append(i)
    return queues


def never(queues: list[list[int]], program: Program, targets: Any) -> list[int]:
    """One instruction at a time, from whichever queue can go on, each time counted anew."""
    done: list[int] = []
    rest = [list(queue) for queue in queues]

    def value(counter: tuple[str, str]) -> int:
        side = 0 if counter[0] == "read" else 1
        return sum(counter[1] in program[i][side] for i in done)

    def able(queue: list[int]) -> bool:
        return bool(queue) and all(value(c) >= n for c, n in targets[queue[0]].items())

    while queue := next((queue for queue in rest if able(queue)), None):
        done.append(queue.pop(0))
    return sorted(i for queue in rest for i in queue)


def ask_stuck(
    target: Any, queues: list[list[int]], program: Program, targets: Any
) -> None:
    tried = f"stuck({queues}, {program}, {targets})"
    with unchanged(tried, queues=queues, instructions=program, targets=targets):
        got = target.stuck(queues, program, targets)
    compare(got, never(queues, program, targets), tried)


@points("12.3", 1)
def test_ex12_3_finds_who_never_starts(target, rng):
    targets = by_counting(LAYER)
    order = list(range(len(LAYER)))
    cases = [
        ([order], targets),
        ([order[::2], order[1::2]], targets),
        ([order[::-1]], targets),  # the last first: nothing ever starts
        ([[1, 0], [2, 3, 4], [5, 6]], targets),  # one circle holds up everybody
        ([[0, 1], [3, 2], [4, 5, 6]], targets),
        ([[0, 2], [3, 4, 5, 6]], targets),  # 1 is in no queue
        ([[0, 1, 2], [], [3, 4, 5, 6]], targets),
    ]
    for queues, given in cases:
        ask_stuck(target, queues, LAYER, given)
    for count in (5, 12, 20):
        program = random_program(rng, count, "abcd")
        queues = random_queues(rng, count, 3)
        ask_stuck(target, queues, program, by_counting(program))
        rng.shuffle(queues[0])
        ask_stuck(target, queues, program, by_counting(program))


@points("12.3", 1)
def test_ex12_3_finds_a_target_that_is_never_reached(target):
    queues = [[0, 2, 4], [1, 3, 5, 6]]
    for i in range(1, len(LAYER)):
        for counter in by_counting(LAYER)[i]:
            broken = by_counting(LAYER)
            broken[i][counter] += 1
            ask_stuck(target, queues, LAYER, broken)
    ask_stuck(target, queues, LAYER, by_counting(LAYER))


# -- 12.4


class Watched:
    """A matrix that notes what is loaded of it. A piece turns to NaN when the next one is loaded.

    log: the loads of all matrices, in order, with the matrix's name.
    """

    __slots__ = ("columns", "load", "loads")

    def __init__(
        self, matrix: torch.Tensor, name: str, log: list[tuple[str, int, int]]
    ) -> None:
        self.columns, self.loads = matrix.shape[1], []
        pieces: list[torch.Tensor] = []

        def load(start: int, stop: int) -> torch.Tensor:
            self.loads.append((start, stop))
            log.append((name, start, stop))
            while pieces:
                pieces.pop().fill_(torch.nan)
            pieces.append(matrix[:, start:stop].clone())
            return pieces[0]

        self.load = load


def most_held(log: list[tuple[str, int, int]]) -> int:
    """How many columns of one matrix were there, at most, before those of the other one."""
    columns: dict[str, set[int]] = {"x": set(), "weight": set()}
    most = 0
    for name, start, stop in log:
        columns[name].update(range(start, stop))
        x, weight = columns.values()
        most = max(most, len(x - weight), len(weight - x))
    return most


def product_case(generator, B, D, N, *, scale=1.0, dtype=torch.float32):
    def rand(*shape):
        return torch.randn(*shape, generator=generator)

    return (
        (rand(B, D) * scale).to(dtype),
        (1 + rand(D) / 4).to(dtype),
        rand(N, D).to(dtype),
    )


def norm_then_product(x, gain, weight, eps):
    """In float64, from the numbers as they are stored."""
    x, gain, weight = x.double(), gain.double(), weight.double()
    h = gain * x / torch.sqrt(x.pow(2).mean(dim=1, keepdim=True) + eps)
    return h @ weight.T


def ask_product(target, case, eps, width):
    x, gain, weight = case
    name = "" if x.dtype == torch.float32 else f", {x.dtype}"
    tried = f"norm_product(x {list(x.shape)}, gain, weight {list(weight.shape)}, {eps}, {width}){name}"
    log: list[tuple[str, int, int]] = []
    memory, weights = Watched(x, "x", log), Watched(weight, "weight", log)
    with unchanged(tried, gain=gain):
        got = target.norm_product(memory, gain, weights, eps, width)
    held = most_held(
        [(name, start, min(stop, x.shape[1])) for name, start, stop in log]
    )
    return got, memory, weights, held, tried


SHAPES = [(1, 2, 1, 1), (1, 8, 3, 4), (3, 8, 5, 8), (2, 64, 7, 16), (4, 96, 33, 32)]


@points("12.4", 2)
@pytest.mark.parametrize(("B", "D", "N", "width"), SHAPES)
def test_ex12_4_equals_norm_then_product(target, generator, B, D, N, width):
    for scale, eps in ((1.0, 1e-6), (30.0, 1e-5), (1.0, 0.5)):
        case = product_case(generator, B, D, N, scale=scale)
        got, _, _, _, tried = ask_product(target, case, eps, width)
        compare(got, norm_then_product(*case, eps), tried, atol=1e-4)


@points("12.4", 1)
def test_ex12_4_small_rows_and_a_row_of_zeros(target, generator):
    for scale in (1e-3, 1e-5):
        case = product_case(generator, 2, 24, 5, scale=scale)
        got, _, _, _, tried = ask_product(target, case, 1e-6, 8)
        compare(
            got, norm_then_product(*case, 1e-6), f"{tried}, x about {scale}", atol=1e-4
        )
    case = product_case(generator, 3, 24, 5)
    case[0][1] = 0
    got, _, _, _, tried = ask_product(target, case, 1e-6, 8)
    compare(got, norm_then_product(*case, 1e-6), f"{tried}, x[1] = 0", atol=1e-4)


@points("12.4", 1)
@pytest.mark.parametrize(("D", "width"), [(7, 4), (9, 8), (65, 32), (5, 100)])
def test_ex12_4_columns_that_the_width_does_not_divide(target, generator, D, width):
    case = product_case(generator, 2, D, 6)
    got, _, _, _, tried = ask_product(target, case, 1e-6, width)
    compare(got, norm_then_product(*case, 1e-6), tried, atol=1e-4)


@points("12.4", 1)
@pytest.mark.parametrize(("D", "width"), [(8, 8), (64, 16), (65, 16), (6, 1)])
def test_ex12_4_each_column_is_loaded_once(target, generator, D, width):
    case = product_case(generator, 3, D, 6)
    got, memory, weights, held, tried = ask_product(target, case, 1e-6, width)
    compare(got, norm_then_product(*case, 1e-6), tried, atol=1e-4)
    for name, loads in (("x", memory.loads), ("weight", weights.loads)):
        columns = sorted(c for start, stop in loads for c in range(start, min(stop, D)))
        compare(columns, list(range(D)), f"the columns of {name} that {tried} loads")
        widest = max(stop - start for start, stop in loads)
        assert widest <= width, (
            f"tried     {tried}\n{widest} columns of {name} in one load, at most {width} may be"
        )
    assert held <= width, (
        f"tried     {tried}\n{held} columns of one matrix were loaded before those of the other: "
        "columns are held that are gone at the next load"
    )


@points("12.4", 1)
def test_ex12_4_bfloat16_is_summed_in_float32(target, generator):
    for B, D, N in ((1, 512, 4), (3, 300, 8)):
        case = product_case(generator, B, D, N, dtype=torch.bfloat16)
        got, _, _, _, tried = ask_product(target, case, 1e-6, 32)
        compare(str(got.dtype), "torch.float32", f"{tried}.dtype")
        compare(got, norm_then_product(*case, 1e-6), tried, atol=1e-3)


# -- probes


@probe("12.1")
def probe_tail(target):
    cases = [
        ([3] * 5, 4),
        ([1, 1, 1, 9], 2),
        ([9, 1, 1, 1], 2),
        ([2, 7, 1, 8, 2, 8], 3),
        ([5, 1], 4),
        ([], 2),
    ]
    return [[float(n) for n in target.tail(list(blocks), sms)] for blocks, sms in cases]


@probe("12.1")
def probe_no_sm(target):
    return target.tail([1], 0)


@probe("12.1")
def probe_no_sm_and_nothing_to_do(target):
    return target.tail([], 0)


@probe("12.1")
def probe_best_part(target):
    cases = [
        ([8, 2], 2, 0, [2, 8, 4]),
        *CUTS,
    ]
    return [target.best_part(*case) for case in cases]


def ends_of(target, graphs):
    found = []
    for costs, needs, sms in graphs:
        queues = target.schedule(list(costs), [list(n) for n in needs], sms)
        end, left = run_queues(queues, costs, needs)
        found.append([end, sorted(left), sorted(i for q in queues for i in q)])
    return found


@probe("12.2")
def probe_schedule(target):
    return ends_of(target, GRAPHS[:-1])


@probe("12.2")
def probe_graphs(target):
    draw = random.Random(12)
    graphs = [(*random_graph(draw, n, 0.2), sms) for n in (6, 12, 20) for sms in (2, 3)]
    return ends_of(target, [*graphs, (*decode_step(4, 3), 4)])


@probe("12.2")
def probe_circle(target):
    return target.schedule([1, 1, 1], [[], [2], [1]], 2)


def listed(targets):
    return [sorted([*counter, n] for counter, n in item.items()) for item in targets]


@probe("12.3")
def probe_waits(target):
    return [listed(target.waits(program)) for program in PROGRAMS]


@probe("12.3")
def probe_stuck(target):
    targets, order = by_counting(LAYER), list(range(len(LAYER)))
    broken = by_counting(LAYER)
    broken[3]["read", "x"] += 1
    cases = [
        ([order], targets),
        ([order[::-1]], targets),
        ([[1, 0], [2, 3, 4], [5, 6]], targets),
        ([order[::2], order[1::2]], broken),
    ]
    return [target.stuck(queues, LAYER, given) for queues, given in cases]


@probe("12.4")
def probe_product(target):
    found = []
    for B, D, N, width, scale in (
        (1, 8, 3, 4, 1.0),
        (2, 9, 4, 4, 1.0),
        (2, 12, 3, 5, 1e-3),
    ):
        case = product_case(torch.Generator().manual_seed(D), B, D, N, scale=scale)
        got, memory, weights, held, _ = ask_product(target, case, 1e-6, width)
        found.append([got, memory.loads, weights.loads, held])
    return found


@probe("12.4")
def probe_bfloat16(target):
    case = product_case(
        torch.Generator().manual_seed(3), 1, 256, 2, dtype=torch.bfloat16
    )
    return ask_product(target, case, 1e-6, 32)[0]
