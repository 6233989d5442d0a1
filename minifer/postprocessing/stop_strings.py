"""Stop strings on a stream: release no text that is, or may become, part of one.

All stop strings are matched at once by an automaton (`aho_corasick.py`). Its state after some text
is the longest suffix that begins a stop string, which is exactly the text that has to be held back.
For the stop "xyy"::

    text      x   x   x  ' '  y   y        state (held back)  x   x   x   -   -   -
    released  -   x   x  'x ' y   y

A character is looked at once, however long the stops are and however the text is cut in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

from minifer.postprocessing.aho_corasick import Automaton


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
        self._automaton = Automaton(self._stops)

    def push(self, text: str, *, armed: bool = True) -> str:
        """Take new text and return what may be released now; "" after a hit.

        armed: False while `min_tokens` is not reached. A stop string that completes within this
        text is then ignored; one that has only begun may complete later and is held back.
        """
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        automaton = self._automaton
        for end, character in enumerate(text, start=1):
            state = automaton.step(self._state, character)
            if armed and automaton.found[state] < len(self._stops):
                self.hit = self._stops[automaton.found[state]]
                released = self.held + text[:end]
                self.held = ""
                return released if self._include else released[: -len(self.hit)]
            while state and not automaton.next[state]:  # a whole, ignored stop: nothing can follow
                state = automaton.shorter[state]
            self._state = state
        text = self.held + text
        split = len(text) - (0 if self._include else automaton.length[self._state])
        self.held = text[split:]
        return text[:split]

    def flush(self, text: str = "", *, armed: bool = True) -> str:
        """At the end: take the last text and return it with all that was held back."""
        released = self.push(text, armed=armed) + self.held
        self.held = ""
        self._state = 0
        return released
