"""Stop strings on a stream: release no text that is, or may become, part of one.

All stop strings are matched at once by the automaton of Aho and Corasick (1975, "Efficient string
matching: an aid to bibliographic search"). Its state after some text is the longest suffix that
begins a stop string, which is exactly the text that has to be held back. For the stop "xyy"::

    text      x   x   x  ' '  y   y        state (held back)  x   x   x   -   -   -
    released  -   x   x  'x ' y   y

A character is looked at once, however long the stops are and however the text is cut in chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Watches the text of one sequence for the first of its stop strings.

    stops: non-empty strings. The one that completes first wins; of two that complete at the same
        character, the one earlier in the list.
    include: release the text through the end of the stop string instead of up to its start (and
        then nothing has to be held back).

    hit: the stop string that was found, or None. held: the text held back.
    `copy.copy` gives an independent copy. Raises `ValueError` for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if "" in stops:
            raise ValueError(f"stop must hold non-empty strings, got {list(stops)!r}")
        self.hit: str | None = None
        self.held = ""
        self._stops = tuple(stops)
        self._include = include
        self._state = 0
        # One entry a state, state 0 being "nothing matches". All are read-only once built.
        self._next: list[dict[str, int]] = [{}]  # character → state one longer
        self._length = [0]  # of the suffix that the state stands for
        self._found = [len(stops)]  # index of the first stop that ends here; len(stops): none
        self._shorter = [0]  # state of the next shorter suffix that begins a stop string
        self._build()

    def push(self, text: str, *, armed: bool = True) -> str:
        """Take new text and return what may be released now; "" after a hit.

        armed: False while `min_tokens` is not reached. A stop string that completes within this
        text is then ignored; one that has only begun may complete later and is held back.
        """
        if self.hit is not None:
            return ""
        for end, character in enumerate(text, start=1):
            state = self._step(self._state, character)
            if armed and self._found[state] < len(self._stops):
                self.hit = self._stops[self._found[state]]
                released = self.held + text[:end]
                self.held = ""
                return released if self._include else released[: -len(self.hit)]
            while state and not self._next[state]:  # a whole, ignored stop: nothing can follow
                state = self._shorter[state]
            self._state = state
        text = self.held + text
        split = len(text) - (0 if self._include else self._length[self._state])
        self.held = text[split:]
        return text[:split]

    def flush(self, text: str = "", *, armed: bool = True) -> str:
        """At the end: take the last text and return it with all that was held back."""
        released = self.push(text, armed=armed) + self.held
        self.held = ""
        self._state = 0
        return released

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def _build(self) -> None:
        for order, stop in enumerate(self._stops):
            state = 0
            for length, character in enumerate(stop, start=1):
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._length.append(length)
                    self._found.append(len(self._stops))
                    self._shorter.append(0)
                state = self._next[state][character]
            self._found[state] = min(self._found[state], order)
        # Breadth first: the links of shorter suffixes are there before a longer one needs them.
        queue = deque([0])
        while queue:
            parent = queue.popleft()
            for character, state in self._next[parent].items():
                if parent:  # else the string is one character long: nothing shorter
                    self._shorter[state] = self._step(self._shorter[parent], character)
                self._found[state] = min(self._found[state], self._found[self._shorter[state]])
                queue.append(state)
