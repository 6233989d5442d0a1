"""What each instruction really touched, against what it says it touches.

The verifier's proof is as good as the regions that instructions declare. So the co-simulator knows
which instruction a program is in (it loads the instruction's first word), collects the elements
that are read and written until the next one begins, and compares: nothing may be touched that was
not declared, and every declared write must come.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from minifer.kernels.cosim.vector_clocks import UNWRITTEN, Access, Race

Elements = Mapping[str, np.ndarray]  # buffer → flat elements


@dataclass(frozen=True)
class Listing:
    """The instructions that a kernel walks; a place is a position in a program's queue, −1 what a
    program does before its first instruction.

    words: [programs, longest queue, words an instruction], as the kernel reads them. declared:
    (program, place) → what the instruction reads and writes, of these buffers only. name:
    (program, place) → text. needed, awaited: (program, place, address of a counter) → the value
    that the instruction waits for, None if it is not this counter's, and a text about it.
    """

    words: Tensor
    buffers: frozenset[str]
    declared: Callable[[int, int], tuple[Elements, Elements]]
    name: Callable[[int, int], str]
    needed: Callable[[int, int, int], int | None]
    awaited: Callable[[int, int, int], str]


@dataclass(frozen=True)
class Stray:
    """kind: "UNDECLARED READ", "UNDECLARED WRITE" or "MISSING WRITE" of `count` elements of a
    buffer, `element` the first."""

    kind: str
    buffer: str
    element: int
    count: int
    program: int
    instruction: int


class Footprints:
    """Which instruction every program is in, and what it has touched there.

    Without a listing it knows nothing, and nothing strays.
    """

    def __init__(self, num_programs: int, listing: Listing | None) -> None:
        self.strays: list[Stray] = []
        self._listing = listing
        self._at = [-1] * num_programs
        self._touched: list[dict[tuple[str, bool], list[np.ndarray]]] = [
            defaultdict(list) for _ in range(num_programs)
        ]

    def begins(self, program: int, addresses: np.ndarray) -> int | None:
        """The instruction that a load at these addresses begins, None where it begins none."""
        if self._listing is None or addresses.size == 0:
            return None
        words = self._listing.words
        offset, size = int(addresses[0]) - words.data_ptr(), words.element_size()
        stride = words.shape[2] * size
        if not 0 <= offset < words.numel() * size or offset % stride:
            return None
        row, place = divmod(offset // stride, words.shape[1])
        if row != program or place == self._at[program]:
            return None
        self.finish(program)
        self._at[program] = place
        return place

    def touch(self, program: int, buffer: str, elements: np.ndarray, kind: Access) -> None:
        """An access; atomics are no instruction's own."""
        listing = self._listing
        if listing is not None and buffer in listing.buffers and kind is not Access.ATOMIC:
            self._touched[program][buffer, kind is Access.WRITE].append(elements)

    def needed(self, program: int, address: int) -> int | None:
        """What a poll of this counter must find to go on; None where that is not known."""
        if self._listing is None:
            return None
        return self._listing.needed(program, self._at[program], address)

    def finish(self, program: int) -> None:
        """The instruction that `program` is in has ended: compare."""
        if self._listing is None:
            return
        reads, writes = self._listing.declared(program, self._at[program])
        touched = self._touched[program]
        for (buffer, is_write), pieces in touched.items():
            allowed = (writes if is_write else reads).get(buffer, np.empty(0, np.int64))
            beyond = np.setdiff1d(np.concatenate(pieces), allowed)
            self._report("UNDECLARED " + ("WRITE" if is_write else "READ"), buffer, program, beyond)
        for buffer, elements in writes.items():
            done = touched.get((buffer, True), [np.empty(0, np.int64)])
            missing = np.setdiff1d(elements, np.concatenate(done))
            self._report("MISSING WRITE", buffer, program, missing)
        touched.clear()

    def _report(self, kind: str, buffer: str, program: int, elements: np.ndarray) -> None:
        if elements.size:
            at = self._at[program]
            self.strays.append(
                Stray(kind, buffer, int(elements[0]), int(elements.size), program, at)
            )

    # ------------------------------------------------------------------ words for people
    def where(self, program: int, place: int | None = None) -> str:
        """A program, and where in its queue it is, or was."""
        place = self._at[program] if place is None else place
        if self._listing is None:
            return f"program {program}"
        if place < 0:
            return f"program {program} before its first instruction"
        return self._listing.name(program, place)

    def wait_text(self, program: int, address: int, value: float) -> str:
        awaited = f"the counter at {address:#x}"
        if self._listing is not None:
            awaited = self._listing.awaited(program, self._at[program], address)
        return f"{self.where(program)} waits for {awaited}, which stays {value}"

    def race_text(self, race: Race) -> str:
        me = self.where(race.program, race.instruction)
        where = f"{race.kind} on {_elements(race.buffer, race.element, race.count)}"
        if race.kind == UNWRITTEN:
            return f"{where}: {me} reads what nobody has written yet"
        other = self.where(race.other, race.other_instruction)
        return f"{where}: {me} did not wait for {other}"

    def stray_text(self, stray: Stray) -> str:
        where = f"{stray.kind} of {_elements(stray.buffer, stray.element, stray.count)}"
        return f"{where}: {self.where(stray.program, stray.instruction)}"


def _elements(buffer: str, element: int, count: int) -> str:
    more = f" and {count - 1} more" if count > 1 else ""
    return f"{buffer}[{element}]{more}"
