"""Many strings found in one pass: the automaton of Aho and Corasick.

A. V. Aho, M. J. Corasick, "Efficient string matching: an aid to bibliographic search" (1975). Its
state after some text is the longest suffix that begins one of the strings, so a character is
looked at once, however many and long the strings are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Automaton:
    """States are numbers; 0 is "nothing matches". Read-only once built, so it may be shared.

    strings: non-empty. Fields, one entry a state:
    next: character → state one longer. length: of the suffix that the state stands for.
    whole: whether that suffix is one of the strings. shorter: state of the next shorter suffix that
    begins a string. found: index of the first string that ends here, len(strings) if none.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.length = [0]
        self.whole = [False]
        self.shorter = [0]
        self.found = [len(strings)]
        for order, string in enumerate(strings):
            self._add(order, string)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self.next[state]:
            state = self.shorter[state]
        return self.next[state].get(character, 0)

    def _add(self, order: int, string: str) -> None:
        nothing, state = self.found[0], 0
        for length, character in enumerate(string, start=1):
            if character not in self.next[state]:
                self.next[state][character] = len(self.next)
                self.next.append({})
                self.length.append(length)
                self.whole.append(False)
                self.shorter.append(0)
                self.found.append(nothing)
            state = self.next[state][character]
        self.whole[state] = True
        self.found[state] = min(self.found[state], order)

    def _link(self) -> None:
        """Breadth first: the links of shorter suffixes are there before a longer one needs them."""
        queue = deque([0])
        while queue:
            parent = queue.popleft()
            for character, state in self.next[parent].items():
                if parent:  # else the string is one character long: nothing shorter
                    self.shorter[state] = self.step(self.shorter[parent], character)
                self.found[state] = min(self.found[state], self.found[self.shorter[state]])
                queue.append(state)
