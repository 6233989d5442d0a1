"""Prompt look-up: what followed these tokens the last time?

Replies repeat their prompts, and themselves: names, code, quotations. The longest run of last
tokens, of `prompt_lookup_max` down to `prompt_lookup_min`, that occurred before is found, and
what followed it there is the guess. No model is asked, so a wrong guess costs nearly nothing.

Source: Saxena, "Prompt Lookup Decoding", 2023, https://github.com/apoorvumang/prompt-lookup-decoding
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from minifer.kv.step_input import StepInput
from minifer.request import Request


class NgramIndex:
    """Where the n-grams of one growing sequence occurred first. shortest, longest: the n."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._first: dict[tuple[int, ...], int] = {}  # n-gram → place of the token after it
        self._end = 0  # n-grams that end before here are known

    def extend(self, token_ids: list[int]) -> None:
        """Take in what is new in a sequence. Each n-gram that has a token after it counts."""
        for end in range(self._end + 1, len(token_ids)):
            for n in self._sizes:
                if n <= end:
                    self._first.setdefault(tuple(token_ids[end - n : end]), end)
        self._end = max(self._end, len(token_ids) - 1)

    def find(self, token_ids: list[int]) -> int | None:
        """Where a sequence went on after the longest of its last n-grams that it held before.

        The earliest place, as in vLLM: the most tokens are known to follow it.
        """
        for n in self._sizes:
            place = self._first.get(tuple(token_ids[-n:])) if n < len(token_ids) else None
            if place is not None:
                return place
        return None


class NgramProposer:
    """`NgramIndex` of every request; each token is looked at once for each n."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = (shortest, longest)
        self._indexes: WeakKeyDictionary[Request, NgramIndex] = WeakKeyDictionary()

    def num_drafts(self, request: Request, most: int) -> int:
        """What followed the request's last tokens when it held them before, up to `most` tokens."""
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = NgramIndex(*self._sizes)
        index.extend(request.token_ids)
        place = index.find(request.token_ids)
        if place is not None:
            request.draft_token_ids = request.token_ids[place : place + most]
        return len(request.draft_token_ids)

    def propose(self, step: StepInput) -> None:
        """The tokens are known already."""
