"""Several programs of one Triton kernel on a CPU, in any interleaving, with a race detector.

Triton's interpreter runs program 0 to its end, then program 1: a program that waits for another
spins for ever. Here every program has a thread, and one baton goes round. It may change hands

    - before an acquire poll        (the program may be early)
    - after a release               (another may have waited for it)
    - now and then before a load or store (an instruction is not atomic)

A strategy and a seed decide who gets it, so that every run can be repeated. "random" gives it to
anyone; "priority" to the first of a random order who can run, as far as it goes, and now and then
the first becomes the last (Burckhardt et al., ASPLOS 2010). Both can `starve` one program, which
then runs only when nobody else can. A program that polls a counter that does not change lets all
others go first until it changes; when all poll so, that is a deadlock.

A race is found even if this interleaving did no harm (`vector_clocks.py`). With a listing that
says what each wait needs, a wait is credited with no more than that: one that asks for 3 arrivals
of 4 is found even when the fourth was in time.

What no run shows here: a missing barrier inside a program, the caches of a real GPU, time.

How the interpreter is made to do this: `interpreter_hooks.py`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from minifer.kernels.cosim.footprints import Footprints, Listing, Stray
from minifer.kernels.cosim.interpreter_hooks import launch, unsupported
from minifer.kernels.cosim.vector_clocks import Access, Race, VectorClocks

STRATEGIES = ("random", "priority")
# Equal polls in a row with nothing between them: after so many a program lets all others go
# first; when all have polled so often, none will ever go on.
_SPINS, _STUCK = 3, 64


@dataclass(frozen=True)
class Interleaving:
    """Who runs when. starve: a program that runs only when no other can. preempt: how likely the
    baton may change hands at a load or store. Raises `ValueError` for an unknown strategy."""

    strategy: str = "random"
    seed: int = 0
    starve: int | None = None
    preempt: float = 0.02

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {STRATEGIES}, got {self.strategy!r}")
        if not 0 <= self.preempt <= 1:
            raise ValueError(f"preempt must be between 0 and 1, got {self.preempt}")


@dataclass(frozen=True)
class CosimResult:
    """What a run showed. A step is a load, a store or an atomic.

    hand_overs: (step, from, to) of the baton, also where a program ends. begun: (step, program,
    place in its queue) of each instruction, with a listing. strays: accesses that the instruction
    did not declare, and declared writes that never came."""

    races: tuple[Race, ...]
    strays: tuple[Stray, ...]
    deadlock: str | None
    steps: int
    hand_overs: tuple[tuple[int, int, int], ...]
    begun: tuple[tuple[int, int, int], ...]
    reasons: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.reasons


def cosimulate(
    kernel: Any,
    num_programs: int,
    args: Sequence[Any],
    *,
    tracked: Mapping[str, Tensor],
    interleaving: Interleaving | None = None,
    listing: Listing | None = None,
    undefined: Mapping[str, np.ndarray] | None = None,
    options: Mapping[str, Any] | None = None,
    max_steps: int = 1_000_000,
) -> CosimResult:
    """Launch `kernel[(num_programs,)](*args, **options)`, interleaved, and watch its memory.

    tracked: contiguous CPU tensors by name, in which races are looked for; counters belong to
    them. listing: how to tell which instruction a program is in, and what it may touch.
    undefined: flat elements of tracked tensors that hold nothing before the launch, so that to
    read them first is an error. The tensors are changed as by a launch; after a deadlock, or when
    max_steps run out, as far as it went.

    Raises `ValueError` for num_programs below 1 or an interpreter that cannot do it, `RuntimeError`
    while another co-simulation runs in this process, and whatever the kernel raises, with what was
    found before that in the exception's notes.
    """
    if num_programs < 1:
        raise ValueError(f"num_programs must be at least 1, got {num_programs}")
    reason = unsupported()
    if reason is not None:
        raise ValueError(f"the co-simulator cannot run here: {reason}")
    how = interleaving or Interleaving()
    if how.starve is not None and not 0 <= how.starve < num_programs:
        raise ValueError(f"starve must be a program below {num_programs}, got {how.starve}")
    clocks = VectorClocks(num_programs, tracked, undefined or {})
    footprints = Footprints(num_programs, listing)
    run = _Run(num_programs, how, clocks, footprints, max_steps)
    try:
        launch(kernel, num_programs, args, options or {}, run)
    except Exception as error:
        for reason in run.reasons():
            error.add_note(reason)
        raise
    return CosimResult(
        clocks.races,
        tuple(footprints.strays),
        run.deadlock,
        run.steps,
        tuple(run.hand_overs),
        tuple(run.begun),
        tuple(run.reasons()),
    )


class _Stop(BaseException):
    """Ends a program's thread; no `except Exception` of the interpreter may hold it up."""


@dataclass
class _Spin:
    """A program's last poll: which counter, what it said, how often in a row."""

    address: int = -1
    value: float = 0
    times: int = 0


@dataclass
class _Run:
    """The baton, and everything that happens while a program has it.

    Only the thread of program `current` runs; all others wait for their turn.
    """

    num_programs: int
    how: Interleaving
    clocks: VectorClocks
    footprints: Footprints
    max_steps: int
    steps: int = 0
    current: int = -1
    deadlock: str | None = None
    failure: BaseException | None = None
    stopping: bool = False
    hand_overs: list[tuple[int, int, int]] = field(default_factory=list)
    begun: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.live = list(range(self.num_programs))
        self.spins = [_Spin() for _ in self.live]
        self._turns = [threading.Semaphore(0) for _ in self.live]
        self._ended = [threading.Event() for _ in self.live]
        self._random = random.Random(self.how.seed)
        self._order = self._random.sample(self.live, len(self.live))

    def reasons(self) -> list[str]:
        """Sentences about everything that was found."""
        texts = [self.footprints.race_text(race) for race in self.clocks.races]
        texts += [self.footprints.stray_text(stray) for stray in self.footprints.strays]
        return texts + ([self.deadlock] if self.deadlock else [])

    # ------------------------------------------------------------------ the baton
    def run(self, body: Callable[[], None], resume: Callable[[int], None]) -> None:
        """Each program in a thread."""
        self._resume = resume
        threads = [
            threading.Thread(target=self._program, args=(i, body), daemon=True) for i in self.live
        ]
        for thread in threads:
            thread.start()
        try:
            self._give(self._choose(None))
            self._wait_for_all()
        finally:
            self.stop()
            self._wait_for_all()
            for thread in threads:
                thread.join()
        if self.failure is not None:
            raise self.failure

    def _wait_for_all(self) -> None:
        """Not `join`: a join that Ctrl-C interrupts takes its thread for ended (Python 3.11).

        In short turns: a Ctrl-C that comes just before a wait without end would not wake it.
        """
        for ended in self._ended:
            while not ended.wait(0.1):
                pass

    def stop(self) -> None:
        """Every program ends at its next step."""
        self.stopping = True
        for turn in self._turns:
            turn.release()

    def _program(self, me: int, body: Callable[[], None]) -> None:
        try:
            self._wait_for_turn(me)
            body()
            self.footprints.finish(me)
            self.live.remove(me)
            if self.live:
                to = self._choose(None)
                self.hand_overs.append((self.steps, me, to))
                self._give(to)
        except _Stop:
            pass
        except BaseException as error:  # it is the launching thread's
            self.failure = self.failure or error
            self.stop()
        finally:
            self._ended[me].set()

    def _wait_for_turn(self, me: int) -> None:
        self._turns[me].acquire()
        if self.stopping:
            raise _Stop
        self._resume(me)

    def _give(self, to: int) -> None:
        self.current = to
        self._turns[to].release()

    def hand_over(self) -> None:
        """Perhaps let another program go on; returns when it is this one's turn again."""
        me = self.current
        to = self._choose(me)
        if to != me:
            self.hand_overs.append((self.steps, me, to))
            self._give(to)
            self._wait_for_turn(me)

    def _choose(self, me: int | None) -> int:
        able = [i for i in self.live if self.spins[i].times < _SPINS]
        able = able or [i for i in self.live if self.spins[i].times < _STUCK]
        if not able:
            spins = [(i, self.spins[i]) for i in self.live]
            waits = [self.footprints.wait_text(i, spin.address, spin.value) for i, spin in spins]
            self.deadlock = "deadlock: " + "; ".join(waits)
            self.stop()
            raise _Stop
        others = [i for i in able if i != self.how.starve] or able
        if self.how.strategy == "priority":
            return min(others, key=self._order.index)
        return self._random.choice(others)

    # ------------------------------------------------------------------ what a program does
    def step(self) -> None:
        if self.stopping:
            raise _Stop
        self.steps += 1
        if self.steps > self.max_steps:
            who = self.footprints.where(self.current)
            self.deadlock = f"no end after {self.max_steps} steps, {who} at last"
            self.stop()
            raise _Stop

    def load(self, addresses: np.ndarray) -> None:
        self._memory(addresses, Access.READ)

    def store(self, addresses: np.ndarray) -> None:
        self._memory(addresses, Access.WRITE)

    def _memory(self, addresses: np.ndarray, kind: Access) -> None:
        self.step()
        self.spins[self.current].times = 0
        me = self.current
        if self._random.random() < self.how.preempt:
            self._order.append(self._order.pop(self._order.index(me)))
            self.hand_over()
        if kind is Access.READ:
            begun = self.footprints.begins(me, addresses)
            if begun is not None:
                self.clocks.begin(me, begun)
                self.begun.append((self.steps, me, begun))
        for shadow, elements in self.clocks.touched(addresses):
            self.clocks.access(me, shadow, elements, kind)
            self.footprints.touch(me, shadow.name, elements, kind)

    def atomic(
        self,
        addresses: np.ndarray,
        acquire: bool,
        release: bool,
        act: Callable[[], tuple[np.ndarray, np.ndarray]],
    ) -> None:
        self.step()
        spin = self.spins[self.current]
        if acquire:
            self.hand_over()
        me = self.current
        for shadow, elements in self.clocks.touched(addresses):
            self.clocks.access(me, shadow, elements, Access.ATOMIC)
        before, after = act()
        for address, *values in zip(
            addresses.tolist(), before.tolist(), after.tolist(), strict=True
        ):
            if acquire:
                self.clocks.acquire(me, address, self.footprints.needed(me, address))
            if release:
                self.clocks.release(me, address, *values)
        changed = addresses[before != after]
        for other in self.spins:
            if other.address in changed:
                other.times = 0
        if acquire and not release and addresses.size == 1:
            now = (int(addresses[0]), before[0].item())
            spin.times = spin.times + 1 if now == (spin.address, spin.value) else 1
            spin.address, spin.value = now
        else:
            spin.times = 0
        if release:
            self.hand_over()
