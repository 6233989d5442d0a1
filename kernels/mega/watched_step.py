"""One decode step of the megakernel in the co-simulator, all its programs interleaved.

What it must know about the megakernel, and the general co-simulator must not: where the regions
that an instruction declares lie in memory, and what holds nothing before the step.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from minifer.kernels.cosim.footprints import Elements, Listing
from minifer.kernels.cosim.simulate import CosimResult, Interleaving, cosimulate
from minifer.kernels.mega.coverage import describe
from minifer.kernels.mega.isa import COUNTER_STRIDE, Instruction, Region, buffers, regions
from minifer.kernels.mega.kernel import kernel
from minifer.kernels.mega.launch import Megakernel

STATE = ("EPOCH", "TOKEN", "POSITION", "INDEX")  # mean something before the step


def cosimulate_step(
    megakernel: Megakernel, interleaving: Interleaving | None = None, max_steps: int = 1_000_000
) -> CosimResult:
    """The step that `set_step` prepared, as `launch` would run it on as many SMs as the schedule
    has queues. Reads and writes the same tensors. Raises as `cosimulate`."""
    memory = megakernel.buffers_by_name()
    arguments = megakernel.kernel_args()
    if not megakernel.options.epochs:
        arguments["COUNTERS"].zero_()
    tracked = {**memory}
    for name in ("COUNTERS", "INDEX", "GENERATED"):
        tracked[name] = arguments[name]
    places = _Places(megakernel)
    return cosimulate(
        kernel,
        megakernel.num_programs,
        (),
        tracked=tracked,
        interleaving=interleaving,
        listing=places.listing(),
        undefined=places.undefined(),
        options=arguments,
        max_steps=max_steps,
    )


class _Places:
    """Where regions lie: their flat elements in the tensors, for this step's positions."""

    def __init__(self, megakernel: Megakernel) -> None:
        arguments = megakernel.kernel_args()
        self.shape, self.options = megakernel.shape, megakernel.options
        self.schedule = megakernel.schedule
        self.sizes = buffers(self.shape, self.schedule.head_slots)
        self.words, self.counters = arguments["INSTRUCTIONS"], arguments["COUNTERS"]
        self.epoch = int(arguments["EPOCH"]) if self.options.epochs else 1
        self.positions = arguments["POSITION"][:, 0].tolist()
        self.tables, self.block_size = arguments["TABLES"].tolist(), megakernel.block_size

    def listing(self) -> Listing:
        names = frozenset(self.sizes)
        return Listing(self.words, names, self.declared, self.name, self.needed, self.awaited)

    def declared(self, program: int, place: int) -> tuple[Elements, Elements]:
        """What `isa.regions` says, less what this step's options and positions leave out."""
        item = self._item(program, place)
        if item is None:
            return {}, {}
        reads, writes = regions(item, self.shape)
        return self._elements(reads, writing=False), self._elements(writes, writing=True)

    def undefined(self) -> dict[str, np.ndarray]:
        """Everything but the state and the older positions of the caches."""
        whole = [Region(name, 0, *size[:1], 0, size[1]) for name, size in self.sizes.items()]
        return dict(
            self._elements([area for area in whole if area.buffer not in STATE], writing=True)
        )

    def name(self, program: int, place: int) -> str:
        item = self._item(program, place)
        return f"program {program} at its end" if item is None else describe(item, program, place)

    def needed(self, program: int, place: int, address: int) -> int | None:
        item = self._item(program, place)
        if item is None or item.wait != self._counter(address):
            return None
        return item.target * self.epoch

    def awaited(self, program: int, place: int, address: int) -> str:
        needed = self.needed(program, place, address)
        return f"{self.schedule.counters[self._counter(address)]} to be {needed}"

    def _counter(self, address: int) -> int:
        return (address - self.counters.data_ptr()) // (4 * COUNTER_STRIDE)

    def _item(self, program: int, place: int) -> Instruction | None:
        queue = self.schedule.queues[program]
        return queue[place] if 0 <= place < len(queue) else None

    def _elements(self, areas: list[Region], writing: bool) -> Elements:
        found = defaultdict(list)
        for area in areas:
            for row in range(area.first_row, area.last_row):
                if writing and not self._is_written(area.buffer, row):
                    continue
                for start in self._row_starts(area.buffer, row, writing):
                    found[area.buffer].append(np.arange(area.start, area.stop) + start)
        return {name: np.concatenate(pieces) for name, pieces in found.items()}

    def _is_written(self, buffer: str, row: int) -> bool:
        switches = {
            "EPOCH": self.options.epochs,
            "POSITION": self.options.advance and self.positions[row] >= 0,
            "INDEX": self.options.advance and self.positions[row] >= 0,
            "TOKEN": self.positions[row] >= 0,
            "LOGITS": self.options.write_logits,
        }
        return switches.get(buffer, True)

    def _row_starts(self, buffer: str, row: int, writing: bool) -> list[int]:
        """Where a request's row begins; in a cache, the row of each of its positions, or of the
        new one. Nobody declares another request's."""
        columns = self.sizes[buffer][1]
        if not _is_cache(buffer):
            return [row * columns]
        last, size = self.positions[row], self.block_size
        positions = range(last, last + 1) if writing else range(last + 1)
        blocks = self.tables[row]
        return [(blocks[p // size] * size + p % size) * columns for p in positions if p >= 0]


def _is_cache(buffer: str) -> bool:
    return buffer[0] in "KV" and buffer[1:].isdigit()
