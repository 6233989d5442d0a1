"""Tests of exercises 03: plans are judged rule by rule, on the answer's own choices.

Where the engine follows the same rule it is the oracle: its plans on a virtual clock (3.2), its
priority queue (3.4). Preemption is driven with a memory that knows what each slot holds, and a
model whose next token depends on every token before it (3.3).
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from typing import Any

import pytest

from minifer.course.grading import compare, points, probe, unchanged
from minifer.course.pictures.schedule_run import play, random_arrivals, serve
from minifer.outputs import RequestGroup
from minifer.request import Request, SamplingParams
from minifer.scheduling.policies import Priority


def short(value: Any) -> str:
    """A value in a message, cut where nobody reads on."""
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:400]} …"


def count_of(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# -- 3.1


def ask_admit(target: Any, queue: list[tuple[int, int]], **limits: int) -> list[int]:
    """The answer, checked rule by rule on its own choices; the first broken rule speaks."""
    words = ", ".join(f"{name}={value}" for name, value in limits.items())
    tried = f"admit({short(queue)}, {words})"
    with unchanged(tried, waiting=queue):
        got = target.admit(queue, *limits.values())
    assert isinstance(got, list) and all(type(i) is int for i in got), (
        f"tried     {tried}\ngot       {got!r}\nexpected  a list of ints"
    )
    tokens, blocks, seats, size, patience = (
        limits[name]
        for name in (
            "token_budget",
            "free_blocks",
            "free_seats",
            "block_size",
            "patience",
        )
    )
    stopped: int | None = None
    for index, (prompt, passed) in enumerate(queue):
        filled = len(range(0, prompt, size))  # blocks, counted by their first tokens
        room = prompt <= tokens and filled <= blocks and seats >= 1
        has = f"it has {count_of(prompt, 'token')} in {count_of(filled, 'block')}"
        rest = (
            f"left for it: {count_of(tokens, 'token')}, {count_of(blocks, 'block')}, "
            f"{count_of(seats, 'seat')}"
        )
        if index in got:
            assert stopped is None, (
                f"tried     {tried}\ngot       {short(got)}\nrequest {index} must not join: request "
                f"{stopped} does not fit and was passed {patience} times or more already"
            )
            assert room, (
                f"tried     {tried}\ngot       {short(got)}\nrequest {index} must not join: {has}; {rest}"
            )
            tokens, blocks, seats = tokens - prompt, blocks - filled, seats - 1
        else:
            assert not room or stopped is not None, (
                f"tried     {tried}\ngot       {short(got)}\nrequest {index} must join: {has}; {rest}"
            )
            if stopped is None and passed >= patience:
                stopped = index
    compare(got, sorted(set(got)), tried)
    return got


LIMITS = {
    "token_budget": 64,
    "free_blocks": 8,
    "free_seats": 4,
    "block_size": 8,
    "patience": 2,
}


@points("3.1", 2)
@pytest.mark.parametrize(
    ("queue", "changes", "expected"),
    [
        ([], {}, []),
        ([(1, 0)], {}, [0]),
        ([(1, 0)], {"free_seats": 0}, []),
        ([(1, 0)], {"free_blocks": 0}, []),
        ([(1, 0)], {"token_budget": 0}, []),
        ([(64, 0)], {}, [0]),  # exactly the budget, exactly the blocks
        ([(65, 0)], {}, []),
        ([(40, 0)], {"free_blocks": 5}, [0]),
        ([(41, 0)], {"free_blocks": 5}, []),  # the 41st token opens a sixth block
        ([(40, 0), (24, 0)], {}, [0, 1]),
        (
            [(40, 0), (25, 0)],
            {"free_blocks": 20},
            [0],
        ),  # only both together are too long
        ([(9, 0), (9, 0), (9, 0)], {"free_blocks": 4}, [0, 1]),  # two blocks each
        ([(1, 0)] * 6, {}, [0, 1, 2, 3]),
    ],
)
def test_ex03_1_counts_tokens_blocks_and_seats(target, queue, changes, expected):
    limits = {**LIMITS, **changes}
    compare(ask_admit(target, queue, **limits), expected, f"admit({queue}, {limits})")


@points("3.1", 2)
@pytest.mark.parametrize(
    ("queue", "patience", "expected"),
    [
        ([(65, 0), (8, 0)], 2, [1]),  # the head does not fit: it is passed
        ([(65, 1), (8, 0)], 2, [1]),  # once more
        ([(65, 2), (8, 0)], 2, []),  # and no more
        ([(65, 3), (8, 0)], 2, []),
        ([(65, 0), (8, 0)], 0, []),
        ([(8, 0), (65, 0), (8, 0), (70, 2), (8, 0)], 2, [0, 2]),
        ([(8, 9), (8, 0)], 2, [0, 1]),  # who fits is not in the way
        ([(60, 0), (30, 0), (4, 0)], 1, [0, 2]),
        ([(60, 0), (30, 1), (4, 0)], 1, [0]),
    ],
)
def test_ex03_1_overtaking_is_bounded(target, queue, patience, expected):
    limits = {**LIMITS, "free_blocks": 100, "patience": patience}
    compare(ask_admit(target, queue, **limits), expected, f"admit({queue}, {limits})")


def random_queue(
    rng: random.Random, count: int
) -> tuple[list[tuple[int, int]], dict[str, int]]:
    size = rng.choice([1, 4, 7, 16])
    queue = [(rng.randint(1, 60), rng.randint(0, 4)) for _ in range(count)]
    return queue, {
        "token_budget": rng.randint(0, 40 * count),
        "free_blocks": rng.randint(0, 40 * count // size + 1),
        "free_seats": rng.randint(0, count + 1),
        "block_size": size,
        "patience": rng.randint(0, 5),
    }


@points("3.1", 1)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_ex03_1_random_queues(target, rng, count):
    for _ in range(60):
        queue, limits = random_queue(rng, count)
        ask_admit(target, queue, **limits)


@points("3.1", 1, hidden=True)
def test_ex03_1_long_queues(target, rng):
    for _ in range(20):
        queue, limits = random_queue(rng, 40)
        ask_admit(target, queue, **{**limits, "patience": 4})


@probe("3.1")
def probe_admit(target):
    rng = random.Random(31)
    return [
        target.admit(queue, *limits.values())
        for queue, limits in (random_queue(rng, 6) for _ in range(60))
    ] + [
        target.admit([(8, 0), (65, 2), (8, 0)], 64, 9, 4, 8, 2),
        target.admit([(64, 0), (1, 0)], 64, 8, 4, 8, 2),
    ]


# -- 3.2

Row = tuple[int, int, int]
NAMES = ("running", "waiting", "token_budget", "max_chunk", "free_seats", "block_size")


def ask_mix(target: Any, *arguments: Any) -> list[tuple[int, int, str]]:
    """The answer, with the rules that any plan must keep."""
    words = ", ".join(f"{n}={v}" for n, v in zip(NAMES, arguments, strict=True))
    tried = f"mix({words})"
    running, waiting, budget, *_ = arguments
    with unchanged(tried, running=running, waiting=waiting):
        got = target.mix(*arguments)
    said = f"tried     {tried}\ngot       {got!r}\n"
    assert isinstance(got, list) and all(len(entry) == 3 for entry in got), (
        f"{said}expected  a list of triples"
    )
    spent = sum(new for _, new, _ in got)
    assert spent <= budget, f"{said}{spent} tokens are more than the budget of {budget}"
    twice = [i for i, n in Counter(i for i, _, _ in got).items() if n > 1]
    assert not twice, f"{said}request {twice} is in the plan twice"
    return got


def check_mix(target: Any, *arguments: Any) -> None:
    """Every rule of the text, on the answer's own plan: what each entry left for the next."""
    running, waiting, left, max_chunk, seats, size = arguments
    got = ask_mix(target, *arguments)
    said = f"tried     mix{arguments}\ngot       {got!r}\n"
    rows = dict(enumerate([*running, *waiting]))
    new_of = {index: (new, kind) for index, new, kind in got}
    decodes = [
        i
        for i in range(len(running))
        if sum(rows[i][:2]) - rows[i][2] == 1 and rows[i][2] >= rows[i][0]
    ]
    line = [*decodes, *(i for i in rows if i not in decodes)]
    order = [index for index, _, _ in got]
    compare(order, sorted(order, key=line.index), f"the order of mix{arguments}")
    for index in line:
        prompt, output, computed = rows[index]
        new, kind = new_of.get(index, (0, ""))
        if index in decodes:
            wanted, name = min(1, left), "decode"
        else:
            name = "prefill"
            most = min(prompt + output - computed, max_chunk, left)
            ends = [
                n
                for n in range(1, most + 1)
                if n == prompt + output - computed or (computed + n) % size == 0
            ]
            wanted = max(ends, default=0)
            if index >= len(running) and seats == 0:
                wanted = 0
        assert new == wanted and (not new or kind == name), (
            f"{said}request {index} {rows[index]}: expected {count_of(wanted, 'token')} ({name}) of the "
            f"{left} that are left, got {new} {kind}"
        )
        left -= new
        seats -= index >= len(running) and new > 0


@points("3.2", 1)
@pytest.mark.parametrize(
    ("running", "waiting", "budget", "expected"),
    [
        ([], [], 8, []),
        ([(4, 1, 4)], [], 8, [(0, 1, "decode")]),
        ([(4, 1, 4)], [], 0, []),
        ([(4, 1, 4), (4, 2, 5)], [], 1, [(0, 1, "decode")]),
        ([(9, 0, 4), (4, 1, 4)], [], 8, [(1, 1, "decode"), (0, 5, "prefill")]),
        ([(9, 0, 4), (4, 1, 4)], [], 5, [(1, 1, "decode"), (0, 4, "prefill")]),
        ([(4, 1, 4)], [(6, 0, 0)], 8, [(0, 1, "decode"), (1, 6, "prefill")]),
        ([(4, 1, 4), (4, 3, 6)], [(6, 0, 0)], 2, [(0, 1, "decode"), (1, 1, "decode")]),
    ],
)
def test_ex03_2_decodes_come_first(target, running, waiting, budget, expected):
    arguments = (running, waiting, budget, 100, 4, 4)
    compare(ask_mix(target, *arguments), expected, f"mix{arguments}")


@points("3.2", 1)
@pytest.mark.parametrize(
    ("running", "waiting", "expected"),
    [
        ([], [(1, 0, 0)], [(0, 1, "prefill")]),  # new: nothing of it is computed
        ([(9, 0, 8)], [], [(0, 1, "prefill")]),  # the end of a prompt
        ([(9, 0, 8), (4, 1, 4)], [], [(1, 1, "decode"), (0, 1, "prefill")]),
        ([(4, 1, 4)], [(1, 0, 0)], [(0, 1, "decode"), (1, 1, "prefill")]),
        (
            [(4, 5, 4)],
            [],
            [(0, 5, "prefill")],
        ),  # resumed: its prompt is computed, it is 5 behind
        ([(4, 5, 8)], [], [(0, 1, "decode")]),
        ([], [(4, 5, 0)], [(0, 9, "prefill")]),  # preempted after five tokens
    ],
)
def test_ex03_2_one_token_is_not_always_a_decode(target, running, waiting, expected):
    arguments = (running, waiting, 64, 64, 4, 4)
    compare(ask_mix(target, *arguments), expected, f"mix{arguments}")


@points("3.2", 2)
@pytest.mark.parametrize(
    ("running", "waiting", "budget", "max_chunk", "seats", "expected"),
    [
        ([], [(20, 0, 0)], 64, 16, 4, [(0, 16, "prefill")]),
        ([], [(20, 0, 0)], 15, 64, 4, [(0, 8, "prefill")]),
        ([], [(20, 0, 0)], 7, 64, 4, []),
        (
            [],
            [(20, 0, 0)],
            20,
            64,
            4,
            [(0, 20, "prefill")],
        ),  # the end needs no boundary
        ([(30, 0, 13)], [], 64, 10, 4, [(0, 3, "prefill")]),  # 13 + 3 is a boundary
        ([(30, 0, 13)], [], 64, 2, 4, []),
        ([], [(20, 0, 0), (5, 0, 0)], 7, 64, 4, [(1, 5, "prefill")]),
        ([(20, 0, 8)], [(5, 0, 0)], 7, 64, 4, [(1, 5, "prefill")]),
        (
            [(4, 1, 4)],
            [(20, 0, 0), (3, 0, 0)],
            6,
            64,
            1,
            [(0, 1, "decode"), (2, 3, "prefill")],
        ),
        ([], [(8, 0, 0), (8, 0, 0)], 64, 64, 1, [(0, 8, "prefill")]),
        ([], [(8, 0, 0)], 64, 64, 0, []),
        ([(20, 0, 8)], [], 64, 64, 0, [(0, 12, "prefill")]),  # it has its seat
        ([], [(9, 0, 0), (9, 0, 0)], 16, 64, 4, [(0, 9, "prefill")]),
    ],
)
def test_ex03_2_chunks(target, running, waiting, budget, max_chunk, seats, expected):
    arguments = (running, waiting, budget, max_chunk, seats, 8)
    compare(ask_mix(target, *arguments), expected, f"mix{arguments}")
    check_mix(target, *arguments)


def random_rows(rng: random.Random, count: int) -> tuple[Any, ...]:
    def row(waiting: bool) -> Row:
        prompt, output = rng.randint(1, 30), rng.choice([0, 0, 1, 3, 9])
        if waiting:
            return prompt, output, 0
        total = prompt + output
        return prompt, output, rng.choice([total - 1, rng.randint(0, total - 1)])

    running = [row(False) for _ in range(rng.randint(0, count))]
    waiting = [row(True) for _ in range(rng.randint(0, count))]
    budget, chunk = rng.randint(0, 20 * count), rng.randint(1, 24)
    return running, waiting, budget, chunk, rng.randint(0, count), rng.choice([1, 4, 8])


@points("3.2", 1)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ex03_2_random_steps(target, rng, count):
    for _ in range(80):
        check_mix(target, *random_rows(rng, count))


class Row32:
    """A request for `play`, planned by the answer."""

    def __init__(self, name: str, prompt: int, wanted: int) -> None:
        self.name, self.prompt, self.wanted = name, prompt, wanted
        self.computed = self.drawn = 0

    @property
    def behind(self) -> int:
        return self.prompt + self.drawn - self.computed

    @property
    def row(self) -> Row:
        return self.prompt, self.drawn, self.computed


@points("3.2", 1, hidden=True)
def test_ex03_2_plans_as_the_engine_does(target, rng):
    """With blocks of one token and no cap on chunks the engine has the same rule."""
    for _ in range(12):
        arrivals = random_arrivals(rng, rng.randint(1, 10))
        budget, seats = rng.randint(1, 24), rng.randint(1, 5)
        options = {"max_num_batched_tokens": budget, "max_num_seqs": seats}
        truth = iter(serve(arrivals, lambda batch: 0.01, **options).plans)

        def schedule(waiting, running, budget=budget, seats=seats, truth=truth):
            everybody = [*running, *waiting]
            rows = [r.row for r in running], [r.row for r in waiting]
            arguments = (*rows, budget, budget, seats - len(running), 1)
            plan = ask_mix(target, *arguments)
            named = {everybody[index].name: new for index, new, _ in plan}
            expected = next(truth, {})
            if named != expected:
                places = {r.name: index for index, r in enumerate(everybody)}
                theirs = [(places[name], new) for name, new in expected.items()]
                compare(
                    [(index, new) for index, new, _ in plan],
                    theirs,
                    f"mix{short(arguments)}, (index, num_new) as the engine plans it",
                )
            for index, _, _ in plan:
                if everybody[index] in waiting:
                    waiting.remove(everybody[index])
                    running.append(everybody[index])
            return {everybody[index]: new for index, new, _ in plan}

        play(arrivals, schedule, lambda batch: 0.01, Row32)


@probe("3.2")
def probe_mix(target):
    rng = random.Random(32)
    return [target.mix(*random_rows(rng, 4)) for _ in range(120)]


# -- 3.3


def make(target: Any, prompt: list[int], **state: Any) -> Any:
    sequence = target.Sequence(list(prompt))
    for name, value in state.items():
        setattr(sequence, name, value)
    return sequence


def look(sequence: Any) -> dict[str, Any]:
    """What a sequence holds, for comparisons and messages."""
    return {
        "prompt": list(sequence.prompt),
        "priority": sequence.priority,
        "output": list(sequence.output),
        "num_computed": sequence.num_computed,
        "block_table": list(sequence.block_table),
    }


def crowd(target: Any, *states: tuple[int, int]) -> list[Any]:
    """Running sequences of (priority, num_computed), two blocks each."""
    return [
        make(
            target,
            [i] * 5,
            priority=priority,
            output=[90 + i] * 3,
            num_computed=computed,
            block_table=[10 * i + 1, 10 * i],
        )
        for i, (priority, computed) in enumerate(states)
    ]


@points("3.3", 2)
@pytest.mark.parametrize(
    ("states", "victim"),
    [
        ([(0, 7)], 0),
        ([(0, 7), (0, 7)], 1),  # all equal: the one furthest back
        ([(0, 7), (0, 3), (0, 7)], 1),  # the cheapest
        ([(0, 3), (0, 3), (0, 7)], 1),
        ([(2, 7), (0, 3)], 0),  # the least important, whatever it costs
        ([(0, 1), (5, 7), (5, 6), (5, 6), (4, 0)], 3),
        ([(-1, 1), (-2, 0)], 0),
    ],
)
def test_ex03_3_preempt(target, states, victim):
    running, first = crowd(target, *states), make(target, [1])
    everybody, waiting, free = list(running), deque([first]), [77]
    before = [look(sequence) for sequence in running]
    tried = f"preempt(running with (priority, num_computed) {states}, …)"
    got = target.preempt(running, waiting, free)
    compare(
        [i for i, sequence in enumerate(everybody) if sequence is got],
        [victim],
        f"{tried}: victim",
    )
    left = [sequence for i, sequence in enumerate(everybody) if i != victim]
    assert running == left, (
        f"tried     {tried}\nrunning must keep all others, in their order"
    )
    assert list(waiting) == [got, first], (
        f"tried     {tried}\nthe victim must stand in front"
    )
    compare(
        sorted(free),
        sorted([77, *before[victim]["block_table"]]),
        f"{tried}: free_blocks",
    )
    expected = {**before[victim], "num_computed": 0, "block_table": []}
    compare(look(got), expected, f"{tried}: the victim afterwards")
    for sequence, was in zip(everybody, before, strict=True):
        if sequence is not got:
            compare(look(sequence), was, f"{tried}: somebody else")
    with pytest.raises(ValueError):
        target.preempt([], waiting, free)


@points("3.3", 1)
@pytest.mark.parametrize(
    ("prompt", "output", "num_free", "resumes"),
    [
        ([1], [], 1, True),
        ([1], [], 0, False),
        ([1, 2, 3, 4], [], 1, True),  # exactly one block
        ([1, 2, 3, 4], [5], 1, False),
        ([1, 2, 3, 4], [5], 2, True),
        ([5, 6, 7], [9, 9], 3, True),
        ([1, 2, 3], [4, 5, 6, 7, 8], 1, False),  # the prompt alone would fit
    ],
)
def test_ex03_3_resume(target, prompt, output, num_free, resumes):
    head, behind, other = (
        make(target, prompt, output=output),
        make(target, [8]),
        make(target, [9]),
    )
    running, waiting, free = (
        [other],
        deque([head, behind]),
        list(range(20, 20 + num_free)),
    )
    tried = (
        f"resume(…) of prompt {prompt} and output {output}, {num_free} free blocks of 4"
    )
    before, blocks = look(head), list(free)
    got = target.resume(running, waiting, free, 4)
    if not resumes:
        compare(got, [], tried)
        assert list(waiting) == [head, behind] and running == [other], (
            f"tried     {tried}\nnobody fits, so nobody may move"
        )
        compare((free, look(head)), (blocks, before), f"{tried}: nothing changes")
        return
    compare(got, prompt + output, f"{tried}: tokens to compute")
    assert list(waiting) == [behind] and running == [other, head], (
        f"tried     {tried}\nthe head must move from waiting to the end of running"
    )
    count = len(range(0, len(prompt) + len(output), 4))
    expected = {**before, "block_table": blocks[::-1][:count]}
    compare(look(head), expected, f"{tried}: the sequence afterwards")
    compare(free, blocks[: len(blocks) - count], f"{tried}: free_blocks")
    got.append(-1)  # a list of its own
    compare(look(head)["prompt"], prompt, f"{tried}: the answer must be a new list")
    compare(target.resume([], deque(), [1], 4), [], "resume with nobody waiting")


@points("3.3", 1)
def test_ex03_3_finish(target):
    running = crowd(target, (0, 7), (0, 8), (0, 9))
    first, done, last = running
    free, waits = [77], make(target, [1], num_computed=0)
    before = look(done)
    assert target.finish(done, running, free) is None
    assert running == [first, last], "finish must take the sequence out of running"
    compare(
        sorted(free),
        sorted([77, *before["block_table"]]),
        "finish(done, …): free_blocks",
    )
    compare(look(done), {**before, "block_table": []}, "finish(done, …): the sequence")
    stranger = make(target, [1, 2], num_computed=2, block_table=[55])
    others = (
        ("finished before", done),
        ("waiting", waits),
        ("running elsewhere", stranger),
    )
    for name, sequence in others:
        state = (list(running), list(free), look(sequence))
        target.finish(sequence, running, free)
        same = running == state[0] and free == state[1] and look(sequence) == state[2]
        assert same, (
            f"tried     finish of a sequence that is {name}\nnothing must happen"
        )


def next_token(tokens: list[int]) -> int:
    """A model whose answer depends on every token and its place."""
    value = 7
    for token in tokens:
        value = (31 * value + token + 1) % 10_007
    return value % 50


class World:
    """Memory that knows what each slot holds, around the answer's three functions.

    A block that is given back is poisoned; a token is drawn from what the slots hold.
    """

    def __init__(self, target: Any, num_blocks: int, size: int) -> None:
        self.target, self.size, self.num_blocks = target, size, num_blocks
        self.free = list(range(num_blocks))
        self.running: list[Any] = []
        self.waiting: deque[Any] = deque()
        self.memory: dict[int, int] = {}  # slot → token; missing: poisoned
        self.finished: Counter[int] = Counter()
        self.preemptions = 0

    def check(self, after: str) -> None:
        tables = [b for s in (*self.running, *self.waiting) for b in s.block_table]
        places = Counter([*tables, *self.free])
        wrong = [b for b in range(self.num_blocks) if places[b] != 1]
        assert not wrong and len(places) == self.num_blocks, (
            f"after {after}: block {wrong[0] if wrong else max(places)} is in "
            f"{places[wrong[0]] if wrong else 1} places; held {tables}, free {self.free}"
        )
        for block in self.free:
            for slot in range(block * self.size, (block + 1) * self.size):
                self.memory.pop(slot, None)

    def compute(self, sequence: Any, tokens: list[int]) -> int:
        """Write KV of `tokens` behind what is computed, read all of it, draw the next token."""
        for token in tokens:
            place, offset = divmod(sequence.num_computed, self.size)
            self.memory[sequence.block_table[place] * self.size + offset] = token
            sequence.num_computed += 1
        read = []
        for position in range(sequence.num_computed):
            place, offset = divmod(position, self.size)
            slot = sequence.block_table[place] * self.size + offset
            assert slot in self.memory, (
                f"position {position} reads a slot that was given back"
            )
            read.append(self.memory[slot])
        return next_token(read)

    def step(self, wanted: dict[int, int], rng: random.Random) -> None:
        while tokens := self.target.resume(
            self.running, self.waiting, self.free, self.size
        ):
            sequence = self.running[-1]
            sequence.output.append(self.compute(sequence, list(tokens)))
            self.check("resume")
            self.end_if_done(sequence, wanted)
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            if rng.random() < 0.1:
                self.preempt()
            while (
                sequence in self.running
                and self.needs_block(sequence)
                and not self.free
            ):
                self.preempt()
            if sequence not in self.running:
                continue
            if self.needs_block(sequence):
                sequence.block_table.append(self.free.pop())
            sequence.output.append(self.compute(sequence, [sequence.output[-1]]))
            self.end_if_done(sequence, wanted)

    def needs_block(self, sequence: Any) -> bool:
        return sequence.num_computed == len(sequence.block_table) * self.size

    def preempt(self) -> None:
        self.target.preempt(self.running, self.waiting, self.free)
        self.preemptions += 1
        self.check("preempt")

    def end_if_done(self, sequence: Any, wanted: dict[int, int]) -> None:
        if len(sequence.output) >= wanted[id(sequence)]:
            self.target.finish(sequence, self.running, self.free)
            self.finished[id(sequence)] += 1
            self.check("finish")


def live(target: Any, rng: random.Random, count: int, size: int) -> int:
    """Run requests to the end; every answer must be that of an undisturbed run."""
    prompts = [
        [rng.randrange(50) for _ in range(rng.randint(1, 9))] for _ in range(count)
    ]
    world = World(target, -(-26 // size) + 1, size)
    sequences = [make(target, prompt, priority=rng.randint(0, 2)) for prompt in prompts]
    wanted = {id(s): rng.randint(1, 16) for s in sequences}
    world.waiting.extend(sequences)
    for _ in range(4000):
        if not world.running and not world.waiting:
            break
        world.step(wanted, rng)
    tried = (
        f"{count} requests, {world.num_blocks} blocks of {size}, preempted at random"
    )
    assert not world.running and not world.waiting, (
        f"tried     {tried}\nafter 4000 steps somebody still waits"
    )
    compare(len(world.free), world.num_blocks, f"{tried}: blocks free at the end")
    compare(
        sorted(world.finished.values()),
        [1] * count,
        f"{tried}: how often each finished",
    )
    for sequence, prompt in zip(sequences, prompts, strict=True):
        truth = list(prompt)
        for _ in range(wanted[id(sequence)]):
            truth.append(next_token(truth))
        compare(
            sequence.output, truth[len(prompt) :], f"{tried}: the reply to {prompt}"
        )
    return world.preemptions


@points("3.3", 1)
@pytest.mark.parametrize(("count", "size"), [(1, 4), (2, 4), (4, 1), (5, 3)])
def test_ex03_3_no_token_and_no_block_is_lost(target, rng, count, size):
    for _ in range(6):
        live(target, rng, count, size)


@points("3.3", 1, hidden=True)
def test_ex03_3_a_long_life(target, rng):
    preemptions = sum(
        live(target, rng, 12, size) for size in (1, 2, 4, 5) for _ in range(3)
    )
    assert preemptions > 100  # or the test would test nothing


@probe("3.3")
def probe_preemption(target):
    found: list[Any] = []
    for states in (
        [(0, 7), (0, 3), (0, 3)],
        [(2, 7), (0, 3)],
        [(1, 5), (1, 4), (0, 1)],
    ):
        running, waiting, free = crowd(target, *states), deque([make(target, [1])]), [5]
        names = {id(s): i for i, s in enumerate(running)}
        victim = target.preempt(running, waiting, free)
        place = next(i for i, s in enumerate(waiting) if s is victim)
        found += [names[id(victim)], place, look(victim), sorted(free)]
        room = list(range(9))
        found += [target.resume(running, waiting, room, 4), room]
        target.finish(running[-1], running, free)
        found += [sorted(free), len(running)]
    running, free = crowd(target, (0, 7)), [5]
    only = running[0]
    target.finish(only, running, free)
    target.finish(only, running, free)
    stranger = make(target, [1, 2], block_table=[55])
    target.finish(stranger, running, free)
    tight = [1]
    found += [sorted(free), look(only), look(stranger)]
    found += [
        target.resume([], deque([make(target, [1, 2, 3], output=[4, 5])]), tight, 4)
    ]
    return found


# -- 3.4


def engine_queue(
    rows: list[tuple[int, int]], ageing: int | None
) -> tuple[Any, list[Any]]:
    """The engine's own priority queue with these requests, the oldest added first."""
    queue, requests = Priority(ageing), []
    for priority, arrival in rows:
        params = SamplingParams(priority=priority)
        request = Request("r", [1], params, RequestGroup("r", None))
        # The engine breaks ties by its order of arrival, which here is (step, index).
        request.arrival, request.arrival_step = arrival, arrival
        requests.append(request)
        queue.add(request)
    return queue, requests


@points("3.4", 1)
@pytest.mark.parametrize("ageing", [None, 1, 3, 10, 10**9 + 7])
def test_ex03_4_pick(target, rng, ageing):
    for count in (1, 2, 2, 3, 5, 9) * 8:
        now = rng.choice([5, 40, 10**6])
        rows = [(rng.randint(-2, 3), rng.randint(0, now)) for _ in range(count)]
        if rng.random() < 0.5:  # a tie in fractions that floats do not see
            rows = [(1, now - 4), (0, now - 1), *rows][:count]
        queue, requests = engine_queue(rows, ageing)
        expected = requests.index(queue.head())
        tried = f"pick({rows}, now={now}, ageing={ageing})"
        with unchanged(tried, waiting=rows):
            got = target.pick(rows, now, ageing)
        compare(got, expected, tried)


@points("3.4", 1)
@pytest.mark.parametrize("ageing", [None, 1, 3, 10, 10**9 + 7])
def test_ex03_4_takes_seat(target, rng, ageing):
    pairs = [((0, 12), (1, 0)), ((0, 1), (1, 4)), ((0, 4), (1, 1)), ((1, 0), (1, 9))]
    pairs += [((0, 3), (1, 0)), ((0, 2), (1, 0)), ((0, 10), (1, 0)), ((0, 9), (1, 0))]
    for _ in range(150):
        pairs.append(tuple((rng.randint(-1, 2), rng.randint(0, 40)) for _ in range(2)))
    for waiter, runner in pairs:
        queue, _ = engine_queue([waiter], ageing)
        _, (other,) = engine_queue([runner], ageing)
        tried = f"takes_seat({waiter}, {runner}, now=40, ageing={ageing})"
        compare(
            target.takes_seat(waiter, runner, 40, ageing), queue.outranks(other), tried
        )


@probe("3.4")
def probe_ageing(target):
    rng = random.Random(34)
    found: list[Any] = []
    for ageing, _ in itertools.product((None, 3, 10), range(20)):
        rows = [(rng.randint(0, 2), rng.randint(0, 30)) for _ in range(4)]
        found.append(target.pick(rows, 30, ageing))
        found.append(bool(target.takes_seat(rows[0], rows[1], 30, ageing)))
    found.append(target.pick([(0, 29), (1, 26)], 30, 3))
    return found
