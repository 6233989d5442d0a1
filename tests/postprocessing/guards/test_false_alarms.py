"""The slow tier: no false alarm in 500 clean replies, and SmolLM2's greedy loops are caught."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from study import NUM_REPLIES, run

from minifer.events import ListSink
from minifer.llm import LLM

pytestmark = pytest.mark.slow


def replies(model: Path, part: range, greedy: bool) -> list[dict[str, Any]]:
    sink = ListSink()
    with LLM(str(model), max_num_seqs=32, sinks=[sink]) as llm:
        return run(llm, sink, part, greedy=greedy)


def really_loops(text: str) -> bool:
    """Another judge than the guard: some text stands there four times back to back."""
    runs = re.finditer(r"(?s)(.{1,400}?)\1{3,}", text)
    return any(len(run[0].encode()) >= 60 for run in runs)


def really_drifts(question: str, text: str) -> bool:
    """The same for scripts: five letters or more in one that the question does not name."""
    expected = ["LATIN"]
    if "Chinese" in question and "Russian" in question:
        expected += ["CYRILLIC", "CJK", "HIRAGANA", "KATAKANA", "HANGUL", "IDEOGRAPHIC", "BOPOMOFO"]
    names = (unicodedata.name(letter, "LATIN") for letter in text if letter.isalpha())
    return sum(not name.startswith(tuple(expected)) for name in names) >= 5


@pytest.mark.parametrize("first", range(0, NUM_REPLIES, 100))
def test_500_clean_replies_raise_no_false_alarm(pulled_model: Path, first: int) -> None:
    """Float rounding differs between machines, and so do the replies: alarms are judged anew."""
    part = range(first, first + 100)
    alarmed = [reply for reply in replies(pulled_model, part, greedy=False) if reply["alarms"]]
    false_alarms = [
        (alarm, reply["question"], reply["reply"])
        for reply in alarmed
        for alarm in reply["alarms"]
        if not (
            really_loops(reply["reply"])
            if alarm["guard"] == "repetition"
            else really_drifts(reply["question"], reply["reply"])
        )
    ]
    assert false_alarms == []


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_greedy_loops_are_caught(pulled_model: Path, first: int) -> None:
    part = range(first, first + 25)
    answers = replies(pulled_model, part, greedy=True)
    caught = [reply for reply in answers if reply["alarms"]]
    loops = [reply for reply in answers if really_loops(reply["reply"])]
    assert caught and sum(reply not in caught for reply in loops) <= 1
    for reply in caught:
        assert [alarm["guard"] for alarm in reply["alarms"]] == ["repetition"]
        assert really_loops(reply["reply"])
