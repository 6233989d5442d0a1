"""Broken schedules, one fault each: what `verify` and the co-simulator must reject.

A mutant is a sound schedule with one word or two changed, or one instruction moved. On a GPU most
of them would work most of the time, which is why they are dangerous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from minifer.kernels.mega.isa import Instruction, Op
from minifer.kernels.mega.schedule import Schedule

_FLEET = "https://github.com/ROCm/fleet-chiplet-megakernel/pull/6"


@dataclass(frozen=True)
class Mutant:
    """effect: what a GPU would do. resembles: a public bug of this kind, "" where none is known."""

    name: str
    apply: Callable[[Schedule], Schedule]
    effect: str
    resembles: str = ""


_MUTANTS: dict[str, Mutant] = {}
_Fault = Callable[[Schedule], Schedule]


def _fault(resembles: str = "") -> Callable[[_Fault], _Fault]:
    """Enter a mutation under its name; its docstring says what a GPU would do."""

    def enter(apply: _Fault) -> _Fault:
        name = apply.__name__.strip("_").replace("_", "-")
        effect = " ".join((apply.__doc__ or "").split())
        _MUTANTS[name] = Mutant(name, apply, effect, resembles)
        return apply

    return enter


def mutate(name: str, schedule: Schedule) -> Schedule:
    """The schedule with the fault `name` of `MUTANTS`.

    Two layers, two programs, two splits and two requests have room for every fault. Raises
    `ValueError` for an unknown name, or a schedule without the instructions the fault needs.
    """
    if name not in MUTANTS:
        raise ValueError(f"mutant must be one of {', '.join(MUTANTS)}, got {name!r}")
    try:
        return MUTANTS[name].apply(schedule)
    except StopIteration:
        raise ValueError(
            f"mutant {name!r} needs an instruction that this schedule lacks: try at least 2 "
            "layers, 2 programs, batch 2 and splits 2, without grid barriers"
        ) from None


# -- tools


def _find(
    schedule: Schedule, op: Op, wanted: Callable[[Instruction], bool] = lambda item: True
) -> tuple[int, int]:
    """(program, place in its queue) of the first instruction of a kind, queue by queue."""
    return next(
        (program, place)
        for program, queue in enumerate(schedule.queues)
        for place, item in enumerate(queue)
        if item.op == op and wanted(item)
    )


def _at(schedule: Schedule, where: tuple[int, int]) -> Instruction:
    return schedule.queues[where[0]][where[1]]


def _put(schedule: Schedule, where: tuple[int, int], *items: Instruction) -> Schedule:
    """The schedule with other instructions, or none, in place of one."""
    program, place = where
    queue = schedule.queues[program]
    changed = (*queue[:place], *items, *queue[place + 1 :])
    queues = (*schedule.queues[:program], changed, *schedule.queues[program + 1 :])
    return replace(schedule, queues=queues)


def _change(schedule: Schedule, where: tuple[int, int], **words: int) -> Schedule:
    return _put(schedule, where, _at(schedule, where)._replace(**words))


def _each(schedule: Schedule, to: Callable[[Instruction], Instruction]) -> Schedule:
    return replace(schedule, queues=tuple(tuple(map(to, queue)) for queue in schedule.queues))


# -- faults of waits


@_fault()
def _dropped_wait(schedule: Schedule) -> Schedule:
    """DOWN multiplies a hidden vector that other SMs are still writing: wrong numbers, often only
    slightly, and often the same greedy token.
    """
    return _change(schedule, _find(schedule, Op.DOWN), wait=-1, target=0)


@_fault("https://github.com/mirage-project/mirage/issues/357 (decoding hangs, cause unknown)")
def _target_too_high(schedule: Schedule) -> Schedule:
    """OUTPUT waits for one arrival that never comes: the kernel hangs."""
    where = _find(schedule, Op.OUTPUT, lambda item: item.wait >= 0)
    return _change(schedule, where, target=_at(schedule, where).target + 1)


@_fault('the "first k of n" race of https://arxiv.org/abs/2606.09682 (AutoMegaKernel)')
def _target_too_low(schedule: Schedule) -> Schedule:
    """GATE_UP starts when all but one of its producers are done, whichever comes last: it reads a
    residual stream that lacks one tile's sum.
    """
    where = _find(schedule, Op.GATE_UP, lambda item: item.target > 1)
    return _change(schedule, where, target=_at(schedule, where).target - 1)


@_fault()
def _wrong_counter(schedule: Schedule) -> Schedule:
    """Attention reads queries and keys of its layer before they are written, so those of the layer
    below: fluent nonsense.
    """
    # Layer 1's attention, all of it, waits for layer 0's q, k and v.
    old = _at(schedule, _find(schedule, Op.ATTENTION, lambda item: item.layer == 0))
    new = _at(schedule, _find(schedule, Op.ATTENTION, lambda item: item.layer == 1))

    def early(item: Instruction) -> Instruction:
        if item.op == Op.ATTENTION and item.wait == new.wait:
            return item._replace(wait=old.wait, target=old.target)
        return item

    return _each(schedule, early)


@_fault()
def _swapped_waits(schedule: Schedule) -> Schedule:
    """DOWN reads what GATE_UP has not written, while GATE_UP waits for its own result: the kernel
    hangs.
    """
    # The two halves of an MLP, each waiting for what the other should. Not any two waits will do.
    # Where the queues order the splits anyway, two merges may swap theirs without harm: the
    # verifier accepts that, and it is right.
    one = _find(schedule, Op.GATE_UP)
    a = _at(schedule, one)
    two = _find(schedule, Op.DOWN, lambda item: item.layer == a.layer)
    b = _at(schedule, two)
    schedule = _change(schedule, one, wait=b.wait, target=b.target)
    return _change(schedule, two, wait=a.wait, target=a.target)


@_fault()
def _waits_for_itself(schedule: Schedule) -> Schedule:
    """An instruction waits for a counter that it is to raise itself: the kernel hangs."""
    where = _find(schedule, Op.GATE_UP, lambda item: item.signal >= 0)
    item = _at(schedule, where)
    producers = (other for queue in schedule.queues for other in queue)
    total = sum(other.amount for other in producers if other.signal == item.signal)
    return _change(schedule, where, wait=item.signal, target=total)


@_fault(f'{_FLEET} ("+1" counter snapshots read unordered against their producers)')
def _stale_epoch(schedule: Schedule) -> Schedule:
    """PICK ends the step before the logits exist: an old token is emitted, and programs that read
    the epoch late wait for the next step's counts.
    """
    return _change(schedule, _find(schedule, Op.PICK), wait=-1, target=0)


# -- faults of signals


@_fault(
    "https://github.com/triton-lang/triton/pull/10816 is the milder form: a release that does not "
    "wait for the other warps' stores"
)
def _missing_signal(schedule: Schedule) -> Schedule:
    """A QKV instruction does its work and tells nobody: attention waits for ever."""
    where = _find(schedule, Op.QKV, lambda item: item.signal >= 0)
    return _change(schedule, where, signal=-1, amount=0)


@_fault()
def _amount_two(schedule: Schedule) -> Schedule:
    """One tile counts as two, so the last of the others is not waited for."""
    # Only a counter with a second producer has anything to overtake.
    items = [item for queue in schedule.queues for item in queue]

    def shared(item: Instruction) -> bool:
        return sum(other.signal == item.signal for other in items) > 1

    return _change(schedule, _find(schedule, Op.OUTPUT, shared), amount=2)


@_fault(f"{_FLEET} (stale descriptors in the loop over layers)")
def _counter_reused(schedule: Schedule) -> Schedule:
    """Layer 1 finds its counter already at the target: it reads what is not there yet."""
    # Layer 1's MLP counts on layer 0's counter, with targets as if that began at 0.
    old = _at(schedule, _find(schedule, Op.GATE_UP, lambda item: item.layer == 0)).signal
    new = _at(schedule, _find(schedule, Op.GATE_UP, lambda item: item.layer == 1)).signal

    def renamed(item: Instruction) -> Instruction:
        return item._replace(
            wait=old if item.wait == new else item.wait,
            signal=old if item.signal == new else item.signal,
        )

    return _each(schedule, renamed)


# -- faults of order and of place


@_fault()
def _producer_behind_consumer(schedule: Schedule) -> Schedule:
    """A program waits for what stands further back in its own queue: the kernel hangs."""
    where = _find(schedule, Op.EMBED)
    queue = schedule.queues[where[0]]
    if len(queue) < 2:
        raise StopIteration
    rest = [item for i, item in enumerate(queue) if i != where[1]]
    moved = (*rest, queue[where[1]])
    queues = (*schedule.queues[: where[0]], moved, *schedule.queues[where[0] + 1 :])
    return replace(schedule, queues=queues)


@_fault()
def _row_reused(schedule: Schedule) -> Schedule:
    """Two requests' attention is written over each other, and one request gets whatever lay in its
    row.
    """
    return _change(schedule, _find(schedule, Op.ATTENTION, lambda item: item.row == 1), row=0)


@_fault()
def _head_slot_reused(schedule: Schedule) -> Schedule:
    """Two parts of the vocabulary leave their best token in one slot: the later wins, and a slot
    that nobody filled takes part.
    """
    return _change(schedule, _find(schedule, Op.HEAD, lambda item: item.split == 1), split=0)


@_fault(f"{_FLEET} (stale descriptors in the loop over layers)")
def _wrong_layer(schedule: Schedule) -> Schedule:
    """Layer 0's weights run twice, keys go to the wrong layer's cache: wrong text from the next
    step on.
    """
    return _change(schedule, _find(schedule, Op.QKV, lambda item: item.layer == 1), layer=0)


# -- faults of coverage


@_fault(f"{_FLEET} (workers waited for chunks that were never dispatched)")
def _split_count_mismatch(schedule: Schedule) -> Schedule:
    """A merge waits for a split that was never dispatched: the kernel hangs."""
    # One split fewer is dispatched than its merge waits for.
    last = schedule.shape.splits - 1
    return _put(schedule, _find(schedule, Op.ATTENTION, lambda item: item.split == last > 0))


@_fault()
def _tile_twice(schedule: Schedule) -> Schedule:
    """Two instructions add the same product to the residual stream: one sum too many, or a
    lost update.
    """
    where = _find(schedule, Op.OUTPUT, lambda item: item.begin > 0)
    return _change(schedule, where, begin=_at(schedule, where).begin - 1)


@_fault()
def _tile_never(schedule: Schedule) -> Schedule:
    """An instruction signals and does nothing: memory that nobody wrote is read."""
    where = _find(schedule, Op.GATE_UP)
    return _change(schedule, where, op=Op.NOTHING, begin=0, end=0)


MUTANTS: Mapping[str, Mutant] = MappingProxyType(_MUTANTS)
