"""A regular expression as a safety check, with a bound on what it holds and how long it takes.

A pattern may need text that has not come yet. Every passage that it can match is at most
`max_match` characters long, so the last `max_match - 1` characters are held back; what comes
before them can no longer be part of a match.
"""

from __future__ import annotations

import re
from re import _constants as ops  # type: ignore[attr-defined]  # no public way to a pattern's tree
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from minifer.postprocessing.guards.safety import Judgement

MAX_MATCH = 1000  # characters that a check may hold back
MAX_WAYS = 1_000_000  # in which a pattern may be tried at one place

_REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT)
_NEIGHBOURS = (ops.AT_BOUNDARY, ops.AT_NON_BOUNDARY)  # look at one character on each side
_LINES = (ops.AT_BEGINNING, ops.AT_END)  # so do these with MULTILINE


class RegexCheck:
    """Blocks what a pattern matches.

    pattern: text or a compiled pattern (its flags count). max_match: longest match in characters
    that is certain to be found; needed for a pattern with `*` or `+`, else taken from the pattern.
    A longer one that reaches the newest character is blocked at once, although the next might undo
    it: text is held back no longer.
    name: None for the pattern itself.

    Raises `ValueError` for a pattern that does not compile, matches the empty text, has no bound
    (or one above 1000) without `max_match`, looks further than one character around itself
    (lookahead, lookbehind, `\\A`, `\\Z`, `^` and `$` without MULTILINE), refers back, or can match
    in more than a million ways: `(a+)+`, the classic of exponential time, has 2^max_match.
    """

    context = 1

    def __init__(
        self,
        pattern: str | re.Pattern[str],
        *,
        max_match: int | None = None,
        name: str | None = None,
    ) -> None:
        try:
            self._pattern = re.compile(pattern)
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            raise ValueError(f"pattern must be a regular expression: {error}") from error
        text = self._pattern.pattern
        if not isinstance(text, str):
            raise ValueError(f"pattern must be a pattern of text, got {text!r}")
        self.name = text if name is None else name
        tree = parser.parse(text, self._pattern.flags)
        self._looks_around = _looks_around(tree, bool(self._pattern.flags & re.MULTILINE), text)
        shortest, longest = tree.getwidth()
        if shortest == 0:
            raise ValueError(f"pattern must not match the empty text, got {text!r}")
        if max_match is None and longest > MAX_MATCH:
            raise ValueError(f"max_match must be given for {text!r}: it can match any length")
        limit = longest if max_match is None else max_match
        whole = isinstance(limit, int) and not isinstance(limit, bool)
        if not whole or not shortest <= limit <= MAX_MATCH:
            raise ValueError(
                f"max_match must be an integer in [{shortest}, {MAX_MATCH}], got {limit!r}"
            )
        self._max_match = min(limit, longest)
        if _num_ways(tree, self._max_match) > MAX_WAYS:
            raise ValueError(
                f"pattern must match in at most {MAX_WAYS} ways within {self._max_match} "
                f"characters, got {text!r}: repeat less, or lower max_match"
            )

    def judge(self, text: str, start: int, final: bool) -> Judgement:
        hold = self._max_match if self._looks_around else self._max_match - 1
        match = self._pattern.search(text, start)
        if match is not None:
            length = len(text) - match.start()
            # A match at the very end may depend on the character that follows.
            depends = self._looks_around and match.end() == len(text)
            if final or not depends or length > self._max_match:
                return Judgement(blocked=match.start())
            hold = max(hold, length)
        return Judgement(hold=min(hold, len(text) - start))


def _looks_around(tree: Any, multiline: bool, text: str) -> bool:
    """Whether a match depends on its neighbours; raises `ValueError` for what looks further."""
    looks_around = False
    for op, argument in tree:
        if op is ops.AT:
            if argument not in _NEIGHBOURS and not (multiline and argument in _LINES):
                raise ValueError(
                    f"pattern must not use \\A or \\Z, nor ^ or $ without MULTILINE, got {text!r}"
                )
            looks_around = True
        elif op in (ops.ASSERT, ops.ASSERT_NOT, ops.GROUPREF, ops.GROUPREF_EXISTS):
            raise ValueError(f"pattern must not look ahead, behind or refer back, got {text!r}")
        for part in _parts(op, argument):
            looks_around |= _looks_around(part, multiline, text)
    return looks_around


def _num_ways(tree: Any, max_match: int) -> int:
    """In how many ways a pattern can be tried on one text: a bound on backtracking."""
    ways = 1
    for op, argument in tree:
        parts = [_num_ways(part, max_match) for part in _parts(op, argument)]
        if op in _REPEATS:
            low, high, _ = argument
            ways *= sum(parts[0] ** k for k in range(min(low, max_match), min(high, max_match) + 1))
        elif parts:
            ways *= sum(parts)
        ways = min(ways, MAX_WAYS + 1)  # it only grows from here, and may get very large
    return ways


def _parts(op: Any, argument: Any) -> list[Any]:
    """The patterns inside one node of the tree."""
    if op in _REPEATS:
        return [argument[2]]
    if op is ops.SUBPATTERN:
        return [argument[3]]
    if op is ops.BRANCH:
        return list(argument[1])
    return [argument] if op is ops.ATOMIC_GROUP else []
