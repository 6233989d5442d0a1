"""Tests of exercises 00: what the table says is what the engine computed.

The truth comes from the model's side: the steps that reached it, not the events.
"""

from __future__ import annotations

import pytest

from minifer import SamplingParams
from minifer.course import example
from minifer.course.grading import compare, points, probe, unchanged
from minifer.events import Event

LETTERS = "abcdefghij"
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def truth(
    run: example.Run, steps: int | None = None
) -> dict[str, dict[str, int | None]]:
    """The table of the first steps of a run, or of all, from what the model was given."""
    counts = ["again", "cached", "decode", "drawn", "prefill"]
    table = {
        name: {"first_step": None} | dict.fromkeys(counts, 0)
        for name in admitted(run.events)
    }
    seen: dict[str, set[int]] = {name: set() for name in table}
    for number, (step, _) in enumerate(run.steps[:steps], start=1):
        for entry in step.scheduled:
            name, prompt = entry.request.request_id, entry.request.num_prompt_tokens
            row, new = table[name], set(range(entry.start, entry.end))
            row["first_step"] = row["first_step"] or number
            row["again"] += len(new & seen[name])
            row["prefill"] += sum(position < prompt for position in new - seen[name])
            row["decode"] += sum(position >= prompt for position in new - seen[name])
            row["cached"] += len(entry.allocation.hits) * step.block_size
            seen[name] |= new
        for entry, _ in step.sampled:
            table[entry.request.request_id]["drawn"] += 1
    return table


def admitted(events: list[Event]) -> list[str]:
    return [
        event.request_id or "" for event in events if event.name == "request.admitted"
    ]


def agrees(target, events: list[Event], expected, tried: str) -> None:
    with unchanged(tried, events=events):
        got = target.life_table(events)
    compare(got, expected, tried)
    assert list(got) == list(expected), (
        f"tried     {tried}\ngot       rows {list(got)}\nexpected  rows {list(expected)}, in the "
        "order of admission"
    )


@points("0.1", 1)
@pytest.mark.parametrize("budget", [64, 16, 5, 1])
def test_ex00_1_one_request_in_chunks(target, rng, budget):
    length, count = (20, 3) if budget > 1 else (4, 2)
    prompt = "".join(rng.choices(LETTERS, k=length))
    run = example.run({"A": (prompt, count)}, max_num_batched_tokens=budget)
    text = run.outputs["A"].outputs[0].text
    tried = f"life_table(events of A alone, {length} prompt tokens, budget {budget})"
    agrees(target, run.events, truth(run), tried)
    # The same with a stop string that holds text back: fewer texts than tokens.
    sampling = GREEDY.with_(stop=[text[0] + "\x00"])
    held = example.run(
        {"A": (prompt, count)}, sampling=sampling, max_num_batched_tokens=budget
    )
    agrees(target, held.events, truth(held), f"{tried}, some text held back")


@points("0.1", 2)
@pytest.mark.parametrize("budget", [64, 16, 5])
def test_ex00_1_three_requests_share_the_steps(target, rng, budget):
    run = example.run(max_num_batched_tokens=budget)
    tried = f"life_table(events of A, B and C, budget {budget})"
    agrees(target, run.events, truth(run), tried)
    begin = "".join(rng.choices(LETTERS, k=17))
    requests = {name: (begin + name * rng.randint(1, 8), 4) for name in "zxy"}
    run = example.run(requests, max_num_batched_tokens=budget)
    agrees(
        target,
        run.events,
        truth(run),
        f"life_table(events of {requests}, budget {budget})",
    )


@points("0.1", 1)
def test_ex00_1_a_trace_that_ends_early(target):
    agrees(target, [], {}, "life_table([])")
    run = example.run()
    for steps in range(len(run.steps)):
        events = [event for event in run.events if event.step <= steps]
        tried = f"life_table(events of A, B and C up to step {steps})"
        agrees(target, events, truth(run, steps), tried)


def by_hand() -> list[Event]:
    """A is scheduled and preempted in one step, which is then not computed; P = 2."""
    told = [
        (0, "request.admitted", (0, 6)),
        (1, "request.scheduled", (0, 6)),
        (1, "token.sampled", (6, 7)),
        (2, "request.scheduled", (6, 7)),
        (2, "request.preempted", None),
        (3, "kv.prefix_hit", (0, 4)),
        (3, "request.scheduled", (4, 7)),
        (3, "token.sampled", (7, 8)),
        (4, "request.preempted", None),
        (6, "kv.prefix_hit", (0, 2)),
        (6, "kv.prefix_hit", (2, 4)),
        (6, "request.scheduled", (4, 8)),
    ]
    return [Event(float(s), s, "A", "scheduling", name, span) for s, name, span in told]


@points("0.1", 1)
def test_ex00_1_preempted_requests(target):
    row = {
        "first_step": 1,
        "prefill": 6,
        "decode": 2,
        "again": 5,
        "cached": 8,
        "drawn": 2,
    }
    shown = [(event.step, event.name, event.token_range) for event in by_hand()]
    agrees(target, by_hand(), {"A": row}, f"life_table(events {shown})")
    first = [
        event
        for event in by_hand()
        if event.name != "request.scheduled" or event.step == 2
    ]
    row = {
        "first_step": None,
        "prefill": 0,
        "decode": 0,
        "again": 0,
        "cached": 8,
        "drawn": 2,
    }
    agrees(target, first, {"A": row}, "life_table(the same, scheduled in step 2 alone)")
    for blocks in (7, 6):
        run = example.run(num_kv_blocks=blocks)
        preempted = sum(event.name == "request.preempted" for event in run.events)
        assert preempted, "the pool of this test must be too small"
        tried = f"life_table(events of A, B and C, {blocks} blocks, {preempted} preemptions)"
        agrees(target, run.events, truth(run), tried)


@probe("0.1")
def probe_trio(target):
    return target.life_table(example.run().events)


@probe("0.1")
def probe_by_hand(target):
    return target.life_table(by_hand())


@probe("0.1")
def probe_waiting(target):
    return target.life_table(
        [event for event in example.run().events if event.step <= 1]
    )


@probe("0.1")
def probe_held_back(target):
    stop = example.run().outputs["A"].outputs[0].text[0] + "\x00"
    return target.life_table(example.run(sampling=GREEDY.with_(stop=[stop])).events)
