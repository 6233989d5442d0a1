"""Which accesses are ordered, and which only happened to come in a good order.

Every program counts its own *epochs*; its vector clock says up to which epoch of every other
program it has seen everything. A release stores the clock into a counter, an acquire joins it from
there (Lamport 1978; Mattern 1989; the per-element shadow is FastTrack's, Flanagan and Freund,
PLDI 2009, without its compression). Two accesses of one element race when they conflict and the
later one's program has not seen the earlier one's epoch: then another interleaving, or another
machine, may turn them round.

        program 0                       program 1
        writes X                        …
        releases c    clock → c         …
                                        acquires c    c → clock
                                        reads X       has seen the write: no race
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from torch import Tensor


class Access(IntEnum):
    """ATOMIC: what a counter is touched with. Two atomics never race."""

    READ = 0
    WRITE = 1
    ATOMIC = 2


_CONFLICTS = {
    Access.READ: (Access.WRITE, Access.ATOMIC),
    Access.WRITE: (Access.READ, Access.WRITE, Access.ATOMIC),
    Access.ATOMIC: (Access.READ, Access.WRITE),
}
UNWRITTEN = "UNWRITTEN"  # a kind of race too: the write that should have come first never did


@dataclass(frozen=True)
class Race:
    """Two unordered accesses: `program`'s came second, `other`'s first.

    kind: "RAW" a read after a write, "WAR", "WAW", or "UNWRITTEN": a read of what holds nothing
    yet, where `other` is −1. element: the first one, of `count`, flat in its buffer. instruction:
    the position in a program's queue, −1 before its first.
    """

    kind: str
    buffer: str
    element: int
    count: int
    program: int
    instruction: int
    other: int
    other_instruction: int


@dataclass
class Shadow:
    """One tracked buffer: last [3, programs, elements] is the epoch of the last access of each
    kind, 0 for never; unwritten [elements] is true where there is nothing to be read yet."""

    name: str
    low: int
    high: int
    itemsize: int
    last: np.ndarray
    unwritten: np.ndarray


@dataclass(frozen=True)
class _Release:
    """epoch: of the program that did it. before: the counter's value; amount: what it added."""

    program: int
    epoch: int
    clock: np.ndarray
    before: float
    amount: float


class VectorClocks:
    """The clocks of a run, and the races found so far.

    tracked: contiguous tensors by name; other memory is not looked at. undefined: flat elements of
    them whose contents before the run mean nothing. Raises `ValueError` for a strided tensor.
    """

    def __init__(
        self, num_programs: int, tracked: Mapping[str, Tensor], undefined: Mapping[str, np.ndarray]
    ) -> None:
        self.clock = np.eye(num_programs, dtype=np.int32)
        self.instruction = [-1] * num_programs
        self._instruction_at = [{1: -1} for _ in range(num_programs)]  # by epoch
        self._releases: dict[int, list[_Release]] = {}  # by the counter's address
        self._found: dict[tuple[str, str, int, int, int, int], list[int]] = {}
        self._shadows = []
        for name, tensor in tracked.items():
            if not tensor.is_contiguous():
                raise ValueError(f"tracked[{name!r}] must be contiguous, its strides are not")
            count, low = tensor.numel(), tensor.data_ptr()
            unwritten = np.zeros(count, bool)
            unwritten[undefined.get(name, [])] = True
            last = np.zeros((len(Access), num_programs, count), np.int32)
            high = low + count * tensor.element_size()
            self._shadows.append(Shadow(name, low, high, tensor.element_size(), last, unwritten))

    @property
    def races(self) -> tuple[Race, ...]:
        return tuple(
            Race(kind, buffer, element, count, *place)
            for (kind, buffer, *place), (element, count) in self._found.items()
        )

    def begin(self, program: int, instruction: int) -> None:
        """What `program` does from now on belongs to this instruction."""
        self.instruction[program] = instruction
        self._tick(program)

    def release(self, program: int, address: int, before: float = 0, after: float = 0) -> None:
        """`program` changes a counter: whoever acquires it later sees all that `program` has done
        and seen. before, after: its values."""
        clock = self.clock[program].copy()
        release = _Release(program, int(clock[program]), clock, before, after - before)
        self._releases.setdefault(address, []).append(release)
        self._tick(program)

    def acquire(self, program: int, address: int, needed: float | None = None) -> None:
        """`program` sees a counter. Where it is known which value it waits for, it is credited
        with no more releases than that takes beyond those it has seen anyway: it might have come
        no later."""
        releases, mine = self._releases.get(address, []), self.clock[program]
        unseen = [r for r in releases if r.epoch > mine[r.program]]
        value = releases[0].before if releases else 0
        value += sum(r.amount for r in releases) - sum(r.amount for r in unseen)
        for release in unseen:
            if needed is not None and value >= needed:
                return
            np.maximum(mine, release.clock, out=mine)
            value += release.amount

    def touched(self, addresses: np.ndarray) -> Iterator[tuple[Shadow, np.ndarray]]:
        """The tracked elements at these addresses, buffer by buffer."""
        if addresses.size == 0:
            return
        first, last = int(addresses.min()), int(addresses.max())
        for shadow in self._shadows:
            if first >= shadow.high or last < shadow.low:
                continue
            inside = addresses
            if first < shadow.low or last >= shadow.high:
                inside = addresses[(addresses >= shadow.low) & (addresses < shadow.high)]
            if inside.size:
                yield shadow, (inside.astype(np.int64) - shadow.low) // shadow.itemsize

    def access(self, program: int, shadow: Shadow, elements: np.ndarray, kind: Access) -> None:
        """`program` touches elements of a buffer: compare with all who did before."""
        seen = self.clock[program][:, None]
        for earlier in _CONFLICTS[kind]:
            unseen = shadow.last[earlier][:, elements] > seen
            unseen[program] = False
            for other in np.flatnonzero(unseen.any(1)):
                epoch = int(shadow.last[earlier][other, elements[unseen[other]][0]])
                name = ("W" if kind else "R") + "A" + ("W" if earlier else "R")
                where = (int(other), self._instruction_at[other][epoch])
                self._report(name, shadow, program, where, elements[unseen[other]])
        if kind is Access.READ:
            empty = shadow.unwritten[elements]
            if empty.any():
                self._report(UNWRITTEN, shadow, program, (-1, -1), elements[empty])
        else:
            shadow.unwritten[elements] = False
        shadow.last[kind][program, elements] = self.clock[program, program]

    def _report(
        self, kind: str, shadow: Shadow, program: int, other: tuple[int, int], where: np.ndarray
    ) -> None:
        key = (kind, shadow.name, program, self.instruction[program], *other)
        found = self._found.setdefault(key, [int(where[0]), 0])
        found[1] += len(where)

    def _tick(self, program: int) -> None:
        self.clock[program, program] += 1
        epoch = int(self.clock[program, program])
        self._instruction_at[program][epoch] = self.instruction[program]
