"""Two small hooks: a word filter that holds text back until judged, and a token counter."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from minifer.postprocessing.hooks import HookVerdict, TokenHook, finish_hooks, run_hooks


@dataclass
class WordFilter:
    """Holds the last word back until it is complete; ends the reply at a forbidden one."""

    forbidden: str
    held: str = ""
    blocked: bool = False

    def on_token(self, token_id: int, text: str) -> HookVerdict:
        *words, self.held = re.split(r"(?<= )", self.held + text)
        if self.forbidden in (word.strip() for word in words):
            self.blocked = True
            fine = words[: [word.strip() for word in words].index(self.forbidden)]
            return HookVerdict("".join(fine), "stop", "word filter")
        return HookVerdict("".join(words))

    def on_finish(self, text: str) -> str:
        text = self.held + text
        return "" if self.blocked or self.forbidden in text.split() else text


@dataclass
class Counter:
    """Ends the reply after `limit` tokens; remembers what it was shown."""

    limit: int
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def on_token(self, token_id: int, text: str) -> HookVerdict:
        self.ids.append(token_id)
        self.texts.append(text)
        return HookVerdict(text, "length" if len(self.ids) >= self.limit else None)

    def on_finish(self, text: str) -> str:
        return text


def reply(hooks: Sequence[TokenHook], pieces: Sequence[str], tail: str = "") -> tuple[str, object]:
    """Released text and the verdict that ended the reply, or None."""
    text = ""
    for token_id, piece in enumerate(pieces):
        verdict = run_hooks(hooks, token_id, piece)
        text += verdict.text
        if verdict.finish_reason is not None:
            return text + finish_hooks(hooks, tail).text, verdict
    return text + finish_hooks(hooks, tail).text, None


PIECES = ["a ", "se", "cr", "et", " b", " c"]


def test_without_hooks_text_passes_as_it_is() -> None:
    assert run_hooks([], 5, "text") == HookVerdict("text")
    assert finish_hooks([], "text").text == "text"


def test_text_is_held_until_judged_and_the_last_of_it_comes_at_the_end() -> None:
    hook = WordFilter("secret")
    assert [run_hooks([hook], 0, piece).text for piece in ["a ", "sec", "tion", " b"]] == [
        "a ",
        "",
        "",
        "section ",
    ]
    assert finish_hooks([hook], "c").text == "bc"


def test_a_hook_ends_the_reply_and_what_it_held_is_never_released() -> None:
    text, verdict = reply([WordFilter("secret")], PIECES, tail="tail")
    assert text == "a "
    assert verdict == HookVerdict("", "stop", "word filter")


def test_a_forbidden_word_that_the_end_completes_is_not_released() -> None:
    assert reply([WordFilter("secret")], ["a ", "secr"], tail="et") == ("a ", None)


def test_each_hook_sees_the_text_that_the_one_before_let_through() -> None:
    counter = Counter(limit=100)
    reply([WordFilter("never"), counter], PIECES)
    assert counter.texts == ["a ", "", "", "", "secret ", "b "]
    assert counter.ids == [0, 1, 2, 3, 4, 5]  # every token, also those without text


def test_a_hook_that_ends_the_reply_keeps_no_later_one_from_judging_its_text() -> None:
    text, verdict = reply([Counter(limit=5), WordFilter("secret")], PIECES)
    assert text == "a "
    assert verdict == HookVerdict("", "length")  # the first reason counts


def test_text_held_by_one_hook_is_released_when_another_ends_the_reply() -> None:
    text, verdict = reply([WordFilter("never"), Counter(limit=3)], PIECES)
    assert text == "a secr"
    assert verdict == HookVerdict("", "length")


def test_an_error_in_a_hook_reaches_the_caller() -> None:
    class Broken(Counter):
        def on_token(self, token_id: int, text: str) -> HookVerdict:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        run_hooks([Broken(limit=1)], 0, "a")
