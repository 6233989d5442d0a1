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
from minifer.kernels.mega.vector_clocks import UNWRITTEN, Access, Race
from torch import Tensor

Elements = Mapping[str, np.ndarray]  # buffer → flat elements


@dataclass(frozen=True)
class Listing:
    """The instructions that a kernel walks; a position is a place in a program's queue, −1 what a
    program does before its first instruction.

    words: [programs, longest queue, words an instruction], as the kernel reads them. declared:
    (program, position) → what the instruction reads and writes. name: (program, position) → text.
    counter: address → name.
    """

    words: Tensor
    declared: Callable[[int, int], tuple[Elements, Elements]]
    name: Callable[[int, int], str]
    counter: Callable[[int], str]


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
        row, position = divmod(offset // stride, words.shape[1])
        if row != program or position == self._at[program]:
            return None
        self.finish(program)
        self._at[program] = position
        return position

    def touch(self, program: int, buffer: str, elements: np.ndarray, kind: Access) -> None:
        if self._listing is not None and kind is not Access.ATOMIC:
            self._touched[program][buffer, kind is Access.WRITE].append(elements)

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
    def place(self, program: int, position: int | None = None) -> str:
        """A program, and where it is, or was."""
        position = self._at[program] if position is None else position
        if self._listing is None:
            return f"program {program}"
        if position < 0:
            return f"program {program} before its first instruction"
        return f"program {program} at {position}, {self._listing.name(program, position)},"

    def wait_text(self, program: int, address: int, value: float) -> str:
        counter = f"the counter at {address:#x}"
        if self._listing is not None:
            counter = self._listing.counter(address)
        return f"{self.place(program)} polls {counter}, which stays {value}"

    def race_text(self, race: Race) -> str:
        me = self.place(race.program, race.instruction)
        where = f"{race.kind} on {_elements(race.buffer, race.element, race.count)}"
        if race.kind == UNWRITTEN:
            return f"{where}: {me} reads what nobody has written yet"
        other = self.place(race.other, race.other_instruction)
        return f"{where}: {me} did not wait for {other.rstrip(',')}"

    def stray_text(self, stray: Stray) -> str:
        where = f"{stray.kind} of {_elements(stray.buffer, stray.element, stray.count)}"
        return f"{where}: {self.place(stray.program, stray.instruction).rstrip(',')}"


def _elements(buffer: str, element: int, count: int) -> str:
    more = f" and {count - 1} more" if count > 1 else ""
    return f"{buffer}[{element}]{more}"
