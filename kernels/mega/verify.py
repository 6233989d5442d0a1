"""A proof, without running anything, that a schedule neither hangs nor races.

Nodes are instructions and counters. Edges: each instruction → the next in its queue; each producer
of a counter → the counter → everyone who waits for it. a *happens before* b when a path leads from
a to b. `verify` accepts a schedule only if

1. every wait is all-join: its target is the sum of all amounts ever added to its counter;
2. the graph has no cycle;
3. every tile, and every (request, KV head, split), is computed exactly once;
4. of any two instructions that touch one element, one of them writing, the one whose operation
   comes first in the model happens before the other.

Theorem. If all programs are resident at once, every run of an accepted schedule ends, and leaves
in every buffer, bit for bit, what one program leaves that runs the operations in the model's order.

*It ends.* Suppose it stops short. Of the instructions that are not done, take the first in a
topological order (2). All before it in its queue, and all producers of its counter, are done. So
its counter has reached the sum, which is the target (1), and the instruction runs: contradiction.
Timing never entered. Residency did: a program that is not yet started cannot signal, hence the
cooperative launch.

*It does not race.* The producer's warps store, meet at a barrier, and one thread adds to the
counter with release; the consumer's poll reads with acquire, and a barrier follows. A poll that
sees the sum of all additions comes after each of them in the counter's coherence order, and
additions are read-modify-write operations, so the poll observes every release, not only the last:
each synchronises with it (release and acquire patterns, and observation through read-modify-write,
in Lustig, Sahasrabuddhe, Giroux: "A Formal Analysis of the NVIDIA PTX Memory Consistency Model",
ASPLOS 2019; scope gpu, since all programs are on one). Happens-before is therefore causality order
in the PTX model, and by (4) it orders every conflicting pair: no race, and a read returns the last
write before it. Within one program, which has many warps, a barrier stands at the end of each
instruction, whether it signals or not.

*It computes the right thing.* By (4) each read has the same last write before it as in the model's
order; by (3) there is one, and the same instructions. Induction along the graph gives equal bits.
(Two orders that agree on every conflicting pair: conflict serialisability, Papadimitriou 1979.)
Part 4 demands more than freedom from races: a schedule that orders attention, firmly, *before* the
q it should read has no race and is wrong.

*Steps follow each other.* Counters that are never zeroed grow by the same sum in every step (1), so
a wait for epoch · target is met in its own step and not before. Every instruction reads EPOCH, PICK
writes it, and so, by (4), after all of them.

What this trusts: `isa.regions`. The reference machine and the co-simulator check that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from minifer.kernels.mega.coverage import coverage_errors, describe, wrong_words
from minifer.kernels.mega.isa import Region, regions
from minifer.kernels.mega.schedule import Schedule, stage

MAX_ERRORS = 20
STATE = ("EPOCH", "TOKEN", "POSITION", "INDEX")  # what a step finds and leaves changed


@dataclass(frozen=True)
class Report:
    """What was proved, or why not.

    errors: sentences, at most `MAX_ERRORS`. num_pairs: conflicting pairs (a writer, another that
    touches what it writes) that were found in the model's order. longest_queue: instructions.
    critical_path: instructions of the longest chain, each after the one before.
    """

    errors: tuple[str, ...]
    num_instructions: int
    num_pairs: int
    longest_queue: int
    critical_path: int

    @property
    def ok(self) -> bool:
        return not self.errors


def verify(schedule: Schedule) -> Report:
    """Prove a schedule, or say in words what is wrong with it. Raises nothing."""
    longest = max(map(len, schedule.queues), default=0)
    proof = _Proof(schedule)
    num_pairs = critical = 0
    if not proof.check_words():  # a wrong word has no meaning that more could be said about
        proof.check_counters()
        for text in coverage_errors(schedule):  # 3: everything once
            proof.error(text)
        order = proof.check_cycles()
        if order is not None:
            critical = proof.reach(order)
            num_pairs = proof.check_order()
    return Report(tuple(proof.errors), len(proof.items), num_pairs, longest, critical)


class _Proof:
    """One schedule, flattened: instruction i is items[i]; counter c is node len(items) + c."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.shape = schedule, schedule.shape
        self.places = [(p, i) for p, queue in enumerate(schedule.queues) for i in range(len(queue))]
        self.items = [schedule.queues[p][i] for p, i in self.places]
        self.stages = [stage(item, schedule.shape) for item in self.items]
        self.errors: list[str] = []
        self.successors: list[list[int]] = [
            [] for _ in range(len(self.items) + len(schedule.counters))
        ]

    def who(self, i: int) -> str:
        return describe(self.items[i], *self.places[i])

    def error(self, text: str) -> None:
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(text)

    # -- 0: words that mean something

    def check_words(self) -> bool:
        """Every field of every instruction in its range; True if one is not."""
        for i, item in enumerate(self.items):
            for text in wrong_words(item, self.schedule):
                self.error(f"{self.who(i)}: {text}")
        return bool(self.errors)

    # -- 1: all-join

    def check_counters(self) -> None:
        """Targets equal sums; leaves the edges of the graph in `successors`."""
        items, first_counter = self.items, len(self.items)
        total = Counter[int]()
        for i, item in enumerate(items):
            if i + 1 < len(items) and self.places[i + 1][1] > 0:
                self.successors[i].append(i + 1)
            if item.signal >= 0:
                total[item.signal] += item.amount
                self.successors[i].append(first_counter + item.signal)
        waiters = defaultdict[tuple[int, int], list[int]](list)
        for i, item in enumerate(items):
            if item.wait >= 0:
                waiters[item.wait, item.target].append(i)
        for (counter, target), waiting in waiters.items():
            if target >= total[counter]:  # a partial wait orders nothing for certain
                self.successors[first_counter + counter] += waiting
            if target == total[counter]:
                continue
            others = f" and {len(waiting) - 1} others wait" if len(waiting) > 1 else " waits"
            wants = f"{self.who(waiting[0])}{others} until counter "
            wants += f"{self.schedule.counters[counter]} is {target}"
            if total[counter] == 0:
                self.error(f"deadlock: {wants}, and nobody signals it")
            elif target > total[counter]:
                self.error(f"deadlock: {wants}, and all signals add up to {total[counter]}")
            else:
                self.error(
                    f"partial wait: {wants}, and all signals add up to {total[counter]}: the last "
                    "of them is not waited for, and which is last depends on timing"
                )

    # -- 2: no cycle

    def check_cycles(self) -> list[int] | None:
        """A topological order of the nodes, or None and an error that shows a cycle."""
        missing = [0] * len(self.successors)
        for out in self.successors:
            for node in out:
                missing[node] += 1
        order = [node for node, count in enumerate(missing) if count == 0]
        for node in order:
            for after in self.successors[node]:
                missing[after] -= 1
                if missing[after] == 0:
                    order.append(after)
        if len(order) == len(self.successors):
            return order
        cycle = self._shortest_cycle({node for node, count in enumerate(missing) if count})
        text = " → ".join(map(self._node_name, [*cycle, cycle[0]]))
        self.error(f"deadlock: a circle, in which each must be done before the next: {text}")
        return None

    def _node_name(self, node: int) -> str:
        if node < len(self.items):
            return self.who(node)
        return f"counter {self.schedule.counters[node - len(self.items)]}"

    def _shortest_cycle(self, stuck: set[int]) -> list[int]:
        """A cycle among the nodes that cannot run, and as short as breadth first finds one.

        From an instruction to any later one of its queue is one step.
        """
        back = {after: node for node in stuck for after in self.successors[node] if after in stuck}
        node, walked = next(iter(back)), list[int]()
        while node not in walked:  # everyone stuck waits for one who is: backwards into a cycle
            walked.append(node)
            node = back[node]
        best = walked[walked.index(node) :][::-1]
        for start in best[:32]:
            before: dict[int, int] = {}
            frontier = [start]
            while frontier and start not in before:
                following = []
                for node in frontier:
                    for after in (*self.successors[node], *self._later_in_queue(node)):
                        if after in stuck and after not in before:
                            before[after] = node
                            following.append(after)
                frontier = following
            path = [before[start]]
            while path[-1] != start:
                path.append(before[path[-1]])
            if len(path) < len(best):
                best = path[::-1]
        return best

    def _later_in_queue(self, node: int) -> range:
        if node >= len(self.items):
            return range(0)
        program, place = self.places[node]
        return range(node + 1, node + len(self.schedule.queues[program]) - place)

    # -- 4: conflicting pairs in the model's order

    def reach(self, order: list[int]) -> int:
        """Bit masks of what happens before and after each instruction; the longest chain."""
        count = len(self.items)
        masks: list[list[int]] = []
        for forward in (True, False):
            mask = [0] * len(self.successors)
            for node in order if forward else reversed(order):
                own = 1 << node if node < count else 0
                if forward:
                    for after in self.successors[node]:
                        mask[after] |= mask[node] | own
                else:
                    for after in self.successors[node]:
                        mask[node] |= mask[after] | (1 << after if after < count else 0)
            masks.append(mask[:count])
        self.before, self.after = masks
        depth = [0] * len(self.successors)
        for node in order:
            depth[node] += node < count
            for after in self.successors[node]:
                depth[after] = max(depth[after], depth[node])
        return max(depth, default=0)

    def check_order(self) -> int:
        """Every pair that conflicts, and every read after its write; how many pairs were fine."""
        conflicts: dict[int, int] = defaultdict(int)  # writer → who else touches what it writes
        orphans = []
        for cell, readers, touching, writers in self._cells():
            initialised = 0
            for w in writers:
                conflicts[w] |= touching
                initialised |= self.after[w]
            if cell.buffer not in STATE and readers & ~initialised:
                orphans.append((_lowest(readers & ~initialised), cell))
        earlier, same = self._stage_masks()
        pairs = 0
        for w, touching in sorted(conflicts.items()):
            first, equal = earlier[self.stages[w]], same[self.stages[w]]
            fine = first & self.before[w] | self.after[w] & ~(first | equal)
            others = touching & ~(1 << w)
            pairs += (others & fine).bit_count()
            if wrong := others & ~fine:
                self._explain(w, _lowest(wrong))
        for i, cell in orphans:
            self.error(
                f"uninitialised: {self.who(i)} reads {_memory(cell)}, and nothing that certainly "
                "ran before has written it"
            )
        return pairs

    def _explain(self, w: int, other: int) -> None:
        """The sentence about writer w and another instruction that touches the same memory."""
        reads, writes = regions(self.items[other], self.shape)
        cell, does = next(
            (area.intersection(mine), does)
            for mine in regions(self.items[w], self.shape)[1]
            for does, areas in (("writes", writes), ("reads", reads))
            for area in areas
            if area.overlaps(mine)
        )
        one, two, where = self.who(w), self.who(other), _memory(cell)
        if not (self.before[w] | self.after[w]) >> other & 1:
            self.error(
                f"race: {one} writes {where}, {two} {does} it, and nothing orders the two: the "
                "result depends on timing"
            )
        elif self.stages[w] == self.stages[other]:
            self.error(f"conflict: {one} and {two}, parts of one operation, both touch {where}")
        else:
            first, second = (one, two) if self.after[w] >> other & 1 else (two, one)
            self.error(
                f"wrong order: {first} runs before {second}, after which it comes in the model, "
                f"and both touch {where}: an old value is read or left"
            )

    def _stage_masks(self) -> tuple[dict[int, int], dict[int, int]]:
        """Stage → instructions of earlier stages, and of the stage itself."""
        same: dict[int, int] = defaultdict(int)
        for i, number in enumerate(self.stages):
            same[number] |= 1 << i
        earlier, seen = {}, 0
        for number in sorted(same):
            earlier[number] = seen
            seen |= same[number]
        return earlier, same

    def _cells(self) -> Iterator[tuple[Region, int, int, list[int]]]:
        """(memory, mask of who reads it, of who touches it, who writes it), every buffer cut at
        all edges of regions; of cells that the same regions cover, one."""
        readers: dict[Region, int] = defaultdict(int)
        touching: dict[Region, int] = defaultdict(int)
        writers: dict[Region, list[int]] = defaultdict(list)
        for i, item in enumerate(self.items):
            reads, writes = regions(item, self.shape)
            for area in reads:
                readers[area] |= 1 << i
            for area in writes:
                writers[area].append(i)
            for area in {*reads, *writes}:
                touching[area] |= 1 << i
        by_buffer: dict[str, list[Region]] = defaultdict(list)
        for area in touching:
            by_buffer[area.buffer].append(area)
        for name, areas in by_buffer.items():
            rows = sorted({edge for a in areas for edge in (a.first_row, a.last_row)})
            columns = sorted({edge for a in areas for edge in (a.start, a.stop)})
            row_at = {edge: i for i, edge in enumerate(rows)}
            column_at = {edge: i for i, edge in enumerate(columns)}
            grid: dict[tuple[int, int], list[Region]] = defaultdict(list)
            for a in areas:
                for r in range(row_at[a.first_row], row_at[a.last_row]):
                    for c in range(column_at[a.start], column_at[a.stop]):
                        grid[r, c].append(a)
            seen = set()
            for (r, c), covering in grid.items():
                key = tuple(covering)
                if key in seen:
                    continue
                seen.add(key)
                cell = Region(name, rows[r], rows[r + 1], columns[c], columns[c + 1])
                read = touched = 0
                for area in covering:
                    read |= readers.get(area, 0)
                    touched |= touching[area]
                yield cell, read, touched, [w for area in covering for w in writers.get(area, ())]


def _lowest(mask: int) -> int:
    """The position of a mask's lowest one."""
    return (mask & -mask).bit_length() - 1


def _memory(cell: Region) -> str:
    return (
        f"{cell.buffer} rows {cell.first_row}…{cell.last_row - 1}, "
        f"columns {cell.start}…{cell.stop - 1}"
    )
