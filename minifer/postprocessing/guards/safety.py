"""Text that must not pass: held back until it is judged, and never longer than needed.

`SafetyHook` shows each check the text that is not released yet; a check says how much of its end
may still become something forbidden, and where something forbidden begins::

    check "secret":    my se|       hold 2: "se" may become "secret"
                       my se cr|    hold 0: it did not
                       my secret|   blocked at 3; released: "my "

A reply that is blocked ends with `finish_reason="content_filter"` and the name of the check as
`stop_reason`. Nothing of a forbidden passage is ever released, whatever the tokens' borders.
"""

from __future__ import annotations

import copy
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minifer.postprocessing.aho_corasick import Automaton
from minifer.postprocessing.hooks import CONTENT_FILTER, HookVerdict


@dataclass(frozen=True)
class Judgement:
    """What a check says about a text.

    blocked: place of the first character that must not pass, or None. hold: characters at the end
    that may become part of something forbidden.
    """

    blocked: int | None = None
    hold: int = 0


class SafetyCheck(Protocol):
    """Judges text. It keeps no state between calls: one instance serves all sequences.

    name: given as `stop_reason`. context: characters before the text it wants to see.
    """

    name: str
    context: int

    def judge(self, text: str, start: int, final: bool) -> Judgement:
        """Judge `text[start:]`; `text[:start]` is context, released already.

        Text that was held comes again, with more behind it. final: nothing will follow; a hold
        is then meaningless.
        """
        ...


class SafetyHook:
    """The token hook that runs checks. Raises `ValueError` for what is not a list of checks."""

    def __init__(self, checks: Iterable[SafetyCheck]) -> None:
        self._checks = tuple(checks) if isinstance(checks, Iterable) else (checks,)
        for check in self._checks:
            named = isinstance(getattr(check, "name", None), str)
            if not named or not callable(getattr(check, "judge", None)):
                raise ValueError(f"checks must be objects with name, context, judge, got {check!r}")
        self._context = max((check.context for check in self._checks), default=0)
        self._seen = ""  # the end of what was released
        self._held = ""
        self._blocked_by: str | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SafetyHook:
        return copy.copy(self)  # checks hold no state, the rest is strings

    def on_token(self, token_id: int, text: str) -> HookVerdict:
        return self._pass(text, final=False) if text else self._verdict("")

    def on_finish(self, text: str) -> HookVerdict:
        return self._pass(text, final=True)

    def _pass(self, text: str, final: bool) -> HookVerdict:
        """Judge the text that is held and the new one; release what may pass."""
        if self._blocked_by is not None:
            return self._verdict("")
        start = len(self._seen)
        text = self._seen + self._held + text
        end, self._blocked_by = self._judge(text, start, final)
        released, self._held = text[start:end], text[end:]
        self._seen = text[max(0, end - self._context) : end]
        return self._verdict(released)

    def _judge(self, text: str, start: int, final: bool) -> tuple[int, str | None]:
        """Where the text that may pass ends, and which check blocks what follows."""
        end, by = len(text), None
        judged = [(check.judge(text, start, final), check.name) for check in self._checks]
        for judgement, name in judged:
            if judgement.blocked is not None and (by is None or judgement.blocked < end):
                end, by = judgement.blocked, name
        if by is None and not final:
            end = min((len(text) - judgement.hold for judgement, _ in judged), default=end)
        return max(start, end), by

    def _verdict(self, text: str) -> HookVerdict:
        reason = None if self._blocked_by is None else CONTENT_FILTER
        return HookVerdict(text, reason, self._blocked_by)


class WordListCheck:
    """Blocks any of some words or phrases, in upper or lower case.

    words: non-empty. Compared by Unicode case folding ("STRASSE" is "Straße"); accents count, and
    composed and decomposed ones differ. whole_word: "art" is then not found in "party", nor where
    an accent follows. Held back is the longest suffix that may still become a word, and no more.
    Raises `ValueError` for an empty list or word.
    """

    context = 1

    def __init__(
        self, words: Sequence[str], *, whole_word: bool = True, name: str = "word list"
    ) -> None:
        words = [words] if isinstance(words, str) else list(words)
        if not words or not all(isinstance(word, str) and word for word in words):
            raise ValueError(f"words must be a list of non-empty strings, got {words!r}")
        self.name = name
        self._whole_word = whole_word
        self._automaton = Automaton([word.casefold() for word in words])

    def judge(self, text: str, start: int, final: bool) -> Judgement:
        before = text[start - 1].casefold()[-1] if start else ""
        letters, origin = _fold(text, start)
        automaton, state = self._automaton, 0
        pending: int | None = None  # begin of a word whose end the next letter decides
        for i, letter in enumerate(letters):
            if pending is not None and not _is_word(letter):
                return Judgement(blocked=origin[pending])
            state = automaton.step(state, letter)
            pending = self._found(state, letters, i + 1, before)
            if pending is not None and not (self._whole_word and _is_word(letter)):
                return Judgement(blocked=origin[pending])
        if final:
            return Judgement(blocked=None if pending is None else origin[pending])
        first = len(letters) - self._live(state, letters, before)
        if pending is not None:
            first = min(first, pending)
        return Judgement(hold=len(text) - origin[first] if first < len(letters) else 0)

    def _found(self, state: int, letters: str, end: int, before: str) -> int | None:
        """Where the longest word begins that `letters[:end]` ends with."""
        automaton = self._automaton
        while state:
            begin = end - automaton.length[state]
            if automaton.whole[state] and self._may_begin(letters, begin, before):
                return begin
            state = automaton.shorter[state]
        return None

    def _live(self, state: int, letters: str, before: str) -> int:
        """How many of the last letters may become a word."""
        automaton = self._automaton
        while state:
            length = automaton.length[state]
            if automaton.next[state] and self._may_begin(letters, len(letters) - length, before):
                return length
            state = automaton.shorter[state]
        return 0

    def _may_begin(self, letters: str, begin: int, before: str) -> bool:
        if not self._whole_word:
            return True
        previous = letters[begin - 1] if begin else before
        return not (previous and _is_word(previous) and _is_word(letters[begin]))


def _fold(text: str, start: int) -> tuple[str, Sequence[int]]:
    """Case-folded `text[start:]`, and for each of its letters the place in the text it is from."""
    letters = text[start:].casefold()
    if len(letters) == len(text) - start:
        return letters, range(start, len(text))
    return letters, [i for i in range(start, len(text)) for _ in text[i].casefold()]


def _is_word(character: str) -> bool:
    if character.isalnum() or character == "_":
        return True
    return not character.isascii() and unicodedata.category(character).startswith("M")
