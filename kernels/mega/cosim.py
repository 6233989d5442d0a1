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

What no run shows here: a missing barrier inside a program, the caches of a real GPU, time.

The interpreter has no public interface for this: everything private is in `_Interpreter`.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from minifer.kernels.mega.footprints import Footprints, Listing, Stray
from minifer.kernels.mega.vector_clocks import Access, Race, VectorClocks
from torch import Tensor

STRATEGIES = ("random", "priority")
# Equal polls in a row with nothing between them: after so many a program lets all others go
# first; when all have polled so often, none will ever go on.
_SPINS, _STUCK = 3, 64
_MEMORY = ("create_masked_load", "create_masked_store")
_ATOMICS = ("create_atomic_rmw", "create_atomic_cas")
_UNKNOWN = ("create_atomic_load", "create_atomic_store", "create_atomic_poll")  # triton 3.9 on


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
    """What a run showed. hand_overs: (step, from, to); a step is a load, a store or an atomic.
    strays: accesses that the instruction did not declare, and declared writes that never came."""

    races: tuple[Race, ...]
    strays: tuple[Stray, ...]
    deadlock: str | None
    steps: int
    hand_overs: tuple[tuple[int, int, int], ...]
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

    Raises `ValueError` for num_programs below 1 or an interpreter that cannot do it, and whatever
    the kernel raises, with what was found before that in the exception's notes.
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
        _Interpreter(run).launch(kernel, args, dict(options or {}))
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

    def __post_init__(self) -> None:
        self.live = list(range(self.num_programs))
        self.spins = [_Spin() for _ in self.live]
        self._turns = [threading.Semaphore(0) for _ in self.live]
        self._random = random.Random(self.how.seed)
        self._order = self._random.sample(self.live, len(self.live))

    def reasons(self) -> list[str]:
        """Sentences about everything that was found."""
        texts = [self.footprints.race_text(race) for race in self.clocks.races]
        texts += [self.footprints.stray_text(stray) for stray in self.footprints.strays]
        return texts + ([self.deadlock] if self.deadlock else [])

    # ------------------------------------------------------------------ the baton
    def programs(self, body: Callable[[], None], resume: Callable[[int], None]) -> None:
        """Run body() once a program, each in a thread; `resume(program)` after every hand-over."""
        self._resume = resume
        threads = [
            threading.Thread(target=self._program, args=(i, body), daemon=True) for i in self.live
        ]
        for thread in threads:
            thread.start()
        try:
            self._give(self._choose(None))
            for thread in threads:
                thread.join()
        finally:
            self.stop()
            for thread in threads:
                thread.join()
        if self.failure is not None:
            raise self.failure

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
                self._give(self._choose(None))
        except _Stop:
            pass
        except BaseException as error:  # it is the launching thread's
            self.failure = self.failure or error
            self.stop()

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

    def memory(self, addresses: np.ndarray, kind: Access) -> None:
        """A plain load or store, about to happen."""
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
        for shadow, elements in self.clocks.touched(addresses):
            self.clocks.access(me, shadow, elements, kind)
            self.footprints.touch(me, shadow.name, elements, kind)

    def atomic(
        self, addresses: np.ndarray, acquire: bool, release: bool, act: Callable[[], Any]
    ) -> Any:
        """An atomic read-modify-write of counters; `act` does it and returns the old values."""
        self.step()
        spin = self.spins[self.current]
        if acquire:
            self.hand_over()
        me = self.current
        for shadow, elements in self.clocks.touched(addresses):
            self.clocks.access(me, shadow, elements, Access.ATOMIC)
        for address in map(int, addresses):
            if release:
                self.clocks.release(me, address)
        result, changed = act()
        for address in map(int, addresses):
            if acquire:
                self.clocks.acquire(me, address)
        if changed:
            for other in self.spins:
                if other.address in addresses:
                    other.times = 0
        if acquire and not release and addresses.size == 1:
            address, value = int(addresses[0]), np.ravel(result.data)[0].item()
            same = (spin.address, spin.value) == (address, value)
            spin.times = spin.times + 1 if same else 1
            spin.address, spin.value = address, value
        else:
            spin.times = 0
        if release:
            self.hand_over()
        return result


# ---------------------------------------------------------------------- triton's interpreter
def unsupported() -> str | None:
    """Why the co-simulator cannot run in this process; None where it can."""
    from minifer.kernels.compat import INTERPRETED, TRITON_VERSION

    if not INTERPRETED.value:
        return "triton was imported without TRITON_INTERPRET=1"
    try:
        from triton.runtime import interpreter

        builder = interpreter.interpreter_builder
        missing = [name for name in (*_MEMORY, *_ATOMICS) if not hasattr(builder, name)]
        needed = ("GridExecutor", "_patch_lang")
        missing += [name for name in needed if not hasattr(interpreter, name)]
        missing += [] if hasattr(interpreter.InterpretedFunction, "rewrite") else ["rewrite"]
    except (ImportError, AttributeError) as error:
        missing = [str(error)]
    if missing:
        version = ".".join(map(str, TRITON_VERSION))
        return f"the interpreter of triton {version} has no {', '.join(missing)}"
    return None


class _Interpreter:
    """A run's hooks in the interpreter, while it lasts. Works on triton 3.6 … 3.9."""

    def __init__(self, run: _Run) -> None:
        from triton.runtime import interpreter

        self._run = run
        self._module = interpreter
        self._executor = interpreter.GridExecutor
        self._builder = interpreter.interpreter_builder
        self._patch_language = interpreter._patch_lang
        self._patched: set[int] = set()

    def launch(self, kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> None:
        """`kernel[(programs,)](*args, **options)`: one call of the body by the interpreter, which
        has converted the arguments, becomes one thread a program."""
        body, n = kernel.rewrite(), self._run.num_programs

        def resume(program: int) -> None:
            self._builder.set_grid_idx(program, 0, 0)

        def programs(**arguments: Any) -> None:
            self._builder.set_grid_dim(n, 1, 1)
            self._run.programs(lambda: body(**arguments), resume)

        patched = [name for name in _UNKNOWN if hasattr(self._builder, name)]
        patched += [*_MEMORY, *_ATOMICS]
        hooks = {name: self._hook(name) for name in patched}
        vars(self._builder).update(hooks)
        self._module._patch_lang = self._patch_once
        try:
            self._executor(_Body(body, programs), kernel.arg_names, (1,))(*args, **options)
        finally:
            self._module._patch_lang = self._patch_language
            for name in hooks:
                vars(self._builder).pop(name)

    def _patch_once(self, function: Any) -> Any:
        """The interpreter makes `tl` its own at every call of a device function, which takes half
        of its time. While a kernel runs, once for each module is enough."""
        space = id(function.__globals__)
        if space in self._patched:
            return None
        self._patched.add(space)
        return self._patch_language(function)

    def _hook(self, name: str) -> Callable[..., Any]:
        original = getattr(self._builder, name)
        run = self._run

        def load(pointers: Any, mask: Any, *rest: Any) -> Any:
            run.memory(_addresses(pointers, mask), Access.READ)
            return original(pointers, mask, *rest)

        def store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            run.memory(_addresses(pointers, mask), Access.WRITE)
            return original(pointers, value, mask, *rest)

        def read_modify_write(op: Any, pointers: Any, value: Any, mask: Any, *order: Any) -> Any:
            def act() -> tuple[Any, bool]:
                return original(op, pointers, value, mask, *order), bool(np.any(value.data))

            return run.atomic(_addresses(pointers, mask), *_order(order[0]), act)

        def compare_and_swap(pointers: Any, expected: Any, value: Any, *order: Any) -> Any:
            def act() -> tuple[Any, bool]:
                old = original(pointers, expected, value, *order)
                return old, bool(np.any(old.data == expected.data))

            return run.atomic(_addresses(pointers, None), *_order(order[0]), act)

        def unknown(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"the co-simulator does not know {name}: use atomic_add")

        known = (load, store, read_modify_write, compare_and_swap)
        return dict(zip((*_MEMORY, *_ATOMICS), known, strict=True)).get(name, unknown)


class _Body:
    """A kernel's body for the interpreter, which asks it for its signature and its globals."""

    def __init__(self, body: Callable[..., None], call: Callable[..., None]) -> None:
        self.__name__ = body.__name__
        self.__globals__ = body.__globals__
        self.__annotations__ = dict(body.__annotations__)
        self.__signature__ = inspect.signature(body)
        self._call = call

    def __call__(self, **arguments: Any) -> None:
        self._call(**arguments)


def _addresses(pointers: Any, mask: Any) -> np.ndarray:
    """The addresses an access touches, flat."""
    addresses = np.ravel(pointers.data)
    if mask is None:
        return addresses
    keep = np.ravel(np.broadcast_to(mask.data, pointers.data.shape))
    return addresses[keep.astype(bool)]


def _order(semantics: Any) -> tuple[bool, bool]:
    """Does it acquire, does it release?"""
    name = str(semantics).upper()
    return "ACQUIRE" in name, "RELEASE" in name
