"""Replies of greedy SmolLM2, labelled by hand: what loops is caught, and nothing else is.

`greedy_replies.json` holds 29 of 32 replies to questions of `study.py`, 256 tokens at temperature 0
(the other three are counting tables like the two that are here). Those labelled "loop" say one
passage over and over until they are cut. The other labels say what the rest is: some of them loop
as well, but change a little every time, or have not come round four times; the guard promises
nothing about those.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from minifer.postprocessing.guards import default_guards
from minifer.postprocessing.hooks import run_hooks

REPLIES = json.loads((Path(__file__).parent / "greedy_replies.json").read_text(encoding="utf-8"))
LOOPS = [each for each in REPLIES if each["label"] == "loop"]
OTHERS = [each for each in REPLIES if each["label"] != "loop"]


def alarms(question: str, reply: str) -> list[tuple[str, str]]:
    """What the default guards say of a reply, in tokens of a Latin word or one character."""
    seen: list[tuple[str, str]] = []
    guards = default_guards("report", lambda: question, lambda *alarm: seen.append(alarm))
    ids: dict[str, int] = {}
    for piece in re.findall(r" ?[A-Za-zÀ-ɏ]+|\s+|.", reply):
        run_hooks(guards, ids.setdefault(piece, len(ids)), piece)
    return seen


def test_there_are_enough_of_both() -> None:
    assert len(LOOPS) >= 10 and len(OTHERS) >= 10


@pytest.mark.parametrize("each", LOOPS, ids=lambda each: each["question"])
def test_f10_a_reply_that_loops_is_caught(each: dict[str, str]) -> None:
    ((guard, reason),) = alarms(each["question"], each["reply"])
    assert guard == "repetition"
    # What it names is there, as often as it says.
    passage, count = re.fullmatch(r"(.*) \(\d+ tokens\) (\d+) times in a row", reason).groups()  # type: ignore[union-attr]
    assert ast.literal_eval(passage) * int(count) in each["reply"]


@pytest.mark.parametrize("each", OTHERS, ids=lambda each: each["question"])
def test_f10_a_reply_that_does_not_raises_no_alarm(each: dict[str, str]) -> None:
    assert alarms(each["question"], each["reply"]) == []
