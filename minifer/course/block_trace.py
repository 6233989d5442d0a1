"""What the programs of a launch touched: the record that `block_program` keeps, and what it tells.

A launch is a list of accesses in the order in which they happened. From it follow bytes, how often
each element is touched, how many pieces of memory an instruction needs, and whether two programs
were in each other's way. Nothing here knows Triton.

Memory comes in sectors of 32 bytes, and a warp of 32 threads asks for all its sectors at once
(NVIDIA, CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory"). The record takes 32
lanes of a block at a time, in row-major order; a compiler may deal them out in another way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

WARP, SECTOR = 32, 32  # lanes that ask together, bytes that come together

Kind = Literal["load", "store"]


@dataclass(frozen=True)
class Memory:
    """One tensor argument. key: whose storage it lies in, so that two names of one tensor are one.

    owned: bool, a flag for each element of the storage: whether it belongs to the tensor.
    """

    name: str
    tensor: Tensor
    key: int
    owned: Tensor

    @property
    def flat(self) -> Tensor:
        """The whole storage, as elements."""
        return self.tensor.as_strided((self.owned.numel(),), (1,), 0)

    @staticmethod
    def of(name: str, tensor: Tensor) -> Memory:
        size = tensor.element_size()
        owned = torch.zeros(tensor.untyped_storage().nbytes() // size, dtype=torch.bool)
        if tensor.numel():
            where = owned.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            where.fill_(True)
        return Memory(name, tensor, tensor.untyped_storage().data_ptr(), owned)


@dataclass(frozen=True)
class Access:
    """One load or store of one program.

    offsets: int64, where each lane points in the storage, in elements. active: bool, lanes that the
    mask lets through; both have the shape of the block. line: of the kernel's source.
    """

    program: tuple[int, int, int]
    kind: Kind
    memory: Memory
    offsets: Tensor
    active: Tensor
    line: int

    @property
    def touched(self) -> Tensor:
        """Offsets of the active lanes, in order."""
        return self.offsets[self.active]

    @property
    def bytes(self) -> int:
        return int(self.active.sum()) * self.memory.tensor.element_size()

    @property
    def sectors(self) -> int:
        """Sectors that its warps ask for."""
        size = self.memory.tensor.element_size()
        place = torch.where(self.active, self.offsets * size // SECTOR, -1).flatten()
        groups = [torch.unique(group[group >= 0]).numel() for group in place.split(WARP)]
        return sum(groups)


@dataclass(frozen=True)
class Conflict:
    """One element that a program wrote while another one read or wrote it, in the same launch."""

    tensor: str
    element: int
    writer: tuple[int, int, int]
    other: tuple[int, int, int]
    kind: Kind

    def __str__(self) -> str:
        verb = "reads" if self.kind == "load" else "writes, too"
        return (
            f"element {self.element} of {self.tensor} is written by program {short(self.writer)} "
            f"and program {short(self.other)} {verb}: their order is not fixed"
        )


@dataclass
class Trace:
    """One launch. grid: programs along each axis. memories: by argument name."""

    kernel: str
    grid: tuple[int, int, int]
    memories: dict[str, Memory] = field(default_factory=dict)
    accesses: list[Access] = field(default_factory=list)

    def select(
        self,
        tensor: str | None = None,
        kind: Kind | None = None,
        program: tuple[int, ...] | None = None,
    ) -> Iterator[Access]:
        """The accesses to a tensor, of a kind, by a program; None is any."""
        wanted = None if program is None else whole(program)
        for access in self.accesses:
            if (
                tensor in (None, access.memory.name)
                and kind in (None, access.kind)
                and wanted in (None, access.program)
            ):
                yield access

    def bytes(self, tensor: str | None = None, kind: Kind | None = None) -> int:
        """Bytes of all active lanes, each time they are asked for."""
        return sum(access.bytes for access in self.select(tensor, kind))

    def unique_bytes(self, tensor: str | None = None, kind: Kind | None = None) -> int:
        """Bytes of the elements touched, each counted once: what memory itself must move, if all
        that is asked for again is still in a cache."""
        total = 0
        for memory in self.memories.values():
            if tensor in (None, memory.name):
                touched = self.counts(memory.name, kind) > 0
                total += int(touched.sum()) * memory.tensor.element_size()
        return total

    def counts(self, tensor: str, kind: Kind | None = None) -> Tensor:
        """How often each element was touched, int64 in the tensor's shape."""
        memory = self._memory(tensor)
        counts = torch.zeros(memory.owned.numel(), dtype=torch.int64)
        for access in self.select(tensor, kind):
            touched = access.touched
            counts.index_add_(0, touched, torch.ones_like(touched))
        return _as(memory, counts)

    def owners(self, tensor: str, kind: Kind | None = None) -> Tensor:
        """The number of the last program that touched each element, −1 for nobody."""
        memory = self._memory(tensor)
        owners = torch.full((memory.owned.numel(),), -1, dtype=torch.int64)
        for access in self.select(tensor, kind):
            owners[access.touched] = self.number(access.program)
        return _as(memory, owners)

    def number(self, program: tuple[int, ...]) -> int:
        """A program's place in the order 0, 1, 2, …: the first axis runs fastest."""
        x, y, z = whole(program)
        return x + self.grid[0] * (y + self.grid[1] * z)

    def sectors(self, tensor: str | None = None, kind: Kind | None = None) -> int:
        return sum(access.sectors for access in self.select(tensor, kind))

    def efficiency(self, tensor: str | None = None, kind: Kind | None = None) -> float:
        """Bytes asked for ÷ bytes of the sectors they lie in; 1.0 where nothing was."""
        sectors = self.sectors(tensor, kind)
        return self.bytes(tensor, kind) / (SECTOR * sectors) if sectors else 1.0

    def conflicts(self) -> list[Conflict]:
        """For each element in dispute one conflict, in the order of the elements."""
        found: list[Conflict] = []
        for key in dict.fromkeys(memory.key for memory in self.memories.values()):
            found += self._conflicts(key)
        return found

    def _conflicts(self, key: int) -> list[Conflict]:
        here = [access for access in self.accesses if access.memory.key == key]
        writers: dict[int, Access] = {}
        found: dict[int, Conflict] = {}
        for access in here:
            if access.kind == "store":
                for element in access.touched.tolist():
                    first = writers.setdefault(element, access)
                    if first.program != access.program:
                        found.setdefault(element, _conflict(element, first, access))
        for access in here:
            if access.kind == "load" and writers:
                for element in access.touched.tolist():
                    writer = writers.get(element)
                    if writer is not None and writer.program != access.program:
                        found.setdefault(element, _conflict(element, writer, access))
        return [found[element] for element in sorted(found)]

    def _memory(self, tensor: str) -> Memory:
        if tensor not in self.memories:
            known = ", ".join(self.memories)
            raise ValueError(f"tensor must be an argument of {self.kernel} ({known}): {tensor!r}")
        return self.memories[tensor]


def _conflict(element: int, writer: Access, other: Access) -> Conflict:
    own = int(writer.memory.tensor.storage_offset())
    name = writer.memory.name
    return Conflict(name, element - own, writer.program, other.program, other.kind)


def _as(memory: Memory, values: Tensor) -> Tensor:
    tensor = memory.tensor
    if not tensor.numel():
        return values.new_zeros(tensor.shape)
    return values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).clone()


def whole(program: tuple[int, ...]) -> tuple[int, int, int]:
    """A program's place with all three axes."""
    x, y, z = (*program, 0, 0)[:3]
    return x, y, z


def short(program: tuple[int, int, int]) -> str:
    """As one writes it: 5, (5, 1) or (5, 1, 2)."""
    x, y, z = program
    if z:
        return f"({x}, {y}, {z})"
    return f"({x}, {y})" if y else str(x)
