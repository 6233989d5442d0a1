"""The co-simulator on small kernels: what is sound passes in every interleaving, each fault is
found, and nothing of a run is left behind. The megakernel itself:
`mega/test_watched_step.py`."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from typing import Any

import cosim_helpers as kernels
import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from minifer.kernels.cosim import simulate
from minifer.kernels.cosim.footprints import Listing
from minifer.kernels.cosim.interpreter_hooks import unsupported
from minifer.kernels.cosim.simulate import CosimResult, Interleaving, cosimulate
from minifer.kernels.cosim.vector_clocks import VectorClocks

pytestmark = pytest.mark.skipif(unsupported() is not None, reason=str(unsupported()))

MANY = [Interleaving(s, seed) for s in ("random", "priority") for seed in range(4)]
MANY += [Interleaving("priority", 0, starve=program) for program in (0, 1)]


def numbers(n: int) -> Tensor:
    """Memory that holds nothing yet."""
    return torch.full((n,), float("nan"))


def counters(n: int = 1) -> Tensor:
    return torch.zeros(n, dtype=torch.int32)


def run(kernel: Any, programs: int, *args: Any, how: Interleaving, **more: Any) -> CosimResult:
    """All tensor arguments tracked under their names in the kernel."""
    named = zip(kernel.arg_names, args, strict=False)
    tracked = {name: value for name, value in named if isinstance(value, Tensor)}
    return cosimulate(kernel, programs, args, tracked=tracked, interleaving=how, **more)


# ------------------------------------------------------------------------ races


@pytest.mark.parametrize("how", MANY, ids=str)
def test_a_hand_over_through_a_counter_is_no_race(how: Interleaving) -> None:
    data, out, flag = numbers(8), numbers(8), counters()
    result = run(kernels.hand_over, 2, data, out, flag, 8, "acquire", 1, how=how)
    assert result.ok and result.reasons == ()
    assert out.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("how", MANY, ids=str)
def test_a_missing_wait_is_a_race_even_when_the_numbers_are_right(how: Interleaving) -> None:
    data, out, flag = numbers(8), numbers(8), counters()
    result = run(kernels.hand_over, 2, data, out, flag, 8, "none", 1, how=how)
    (race,) = result.races
    if out.isnan().any():  # the reader was first
        assert (race.kind, race.program, race.other) == ("WAR", 0, 1)
    else:
        assert (race.kind, race.program, race.other) == ("RAW", 1, 0)
    assert (race.buffer, race.element, race.count) == ("data", 0, 8)


def test_a_missing_wait_gives_right_numbers_in_some_interleaving() -> None:
    data, out, flag = numbers(8), numbers(8), counters()
    how = Interleaving("priority", starve=1, preempt=0)
    result = run(kernels.hand_over, 2, data, out, flag, 8, "none", 1, how=how)
    assert out.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert result.reasons == ("RAW on data[0] and 7 more: program 1 did not wait for program 0",)


def test_a_read_before_any_write_is_told_apart() -> None:
    data, out, flag = numbers(8), numbers(8), counters()
    how = Interleaving("priority", starve=0, preempt=0)
    undefined = {"data": np.arange(8)}
    args = (data, out, flag, 8, "none", 1)
    result = run(kernels.hand_over, 2, *args, how=how, undefined=undefined)
    assert [race.kind for race in result.races] == ["UNWRITTEN", "WAR"]
    assert "reads what nobody has written yet" in result.reasons[0]


def test_a_spin_on_a_plain_load_is_a_race_with_the_counter_and_with_the_data() -> None:
    data, out, flag = numbers(8), numbers(8), counters()
    how = Interleaving(preempt=0.5)
    result = run(kernels.hand_over, 2, data, out, flag, 8, "plain load", 1, how=how)
    assert {("RAW", "flag"), ("RAW", "data")} <= {(r.kind, r.buffer) for r in result.races}


@pytest.mark.parametrize("how", MANY, ids=str)
def test_every_program_may_wait_for_every_other(how: Interleaving) -> None:
    data, out, arrived = numbers(16), numbers(4), counters()
    result = run(kernels.two_phases, 4, data, out, arrived, 4, 4, how=how)
    assert result.ok
    assert out.tolist() == [60.0, 64.0, 68.0, 72.0]


def test_a_wait_for_all_but_one_is_found_when_one_is_starved() -> None:
    """Whoever is last is not waited for; with the last one starved it is always the same."""
    for starve in range(4):
        data, out, arrived = numbers(16), numbers(4), counters()
        how = Interleaving("priority", starve=starve, preempt=0)
        result = run(kernels.two_phases, 4, data, out, arrived, 4, 3, how=how)
        assert {(race.kind, race.program) for race in result.races} == {("WAR", starve)}
        assert out[starve].isfinite() and out.isnan().sum() == 3


@pytest.mark.parametrize("waits", [True, False])
def test_a_buffer_that_is_filled_again_must_have_been_emptied(waits: bool) -> None:
    found = []
    for how in MANY:
        data, out = numbers(4), numbers(12)
        result = run(kernels.reuse, 2, data, out, counters(), counters(), 4, 3, waits, how=how)
        found += [race.kind for race in result.races]
        if waits:
            rows = [[100.0 * turn + i for i in range(4)] for turn in range(3)]
            assert out.view(3, 4).tolist() == rows
    assert set(found) == (set() if waits else {"WAR"})


def test_two_writers_of_one_element_race() -> None:
    result = run(kernels.same_element, 2, numbers(1), 1, how=Interleaving())
    assert [race.kind for race in result.races] == ["WAW"]


def test_untracked_memory_is_not_looked_at() -> None:
    result = cosimulate(kernels.same_element, 2, (numbers(1), 1), tracked={})
    assert result.ok


# -------------------------------------------------------------- who runs when, and deadlock


def test_a_wait_for_more_than_will_come_is_a_deadlock() -> None:
    for how in MANY:
        data, out, flag = numbers(8), numbers(8), counters()
        result = run(kernels.hand_over, 2, data, out, flag, 8, "acquire", 2, how=how)
        assert result.deadlock is not None and not result.ok
        assert "program 1 waits for the counter at" in result.deadlock
        assert "which stays 1" in result.deadlock
        assert result.steps < 100


def test_two_programs_that_wait_for_each_other_are_both_named() -> None:
    result = run(kernels.cross_wait, 2, counters(2), 1, how=Interleaving())
    assert result.deadlock is not None
    assert "program 0 waits" in result.deadlock and "program 1 waits" in result.deadlock


def test_a_program_may_wait_any_number_of_times_for_what_has_come() -> None:
    """Polls that succeed look like polls that do not: nobody may be taken for stuck."""
    for how in MANY:
        result = run(kernels.waits_again, 2, numbers(1), counters(), 9, how=how)
        assert result.ok


def test_a_program_that_works_between_its_waits_is_not_stuck() -> None:
    out = numbers(100)
    assert run(kernels.waits_and_works, 2, out, counters(), 100, how=Interleaving()).ok
    assert out.isfinite().all()


def test_a_poll_of_nothing_and_of_several_counters_is_no_wait() -> None:
    out = numbers(2)
    assert run(kernels.polls_nothing_and_two, 2, out, counters(2), 2, how=Interleaving()).ok
    assert out.tolist() == [1.0, 1.0]


def test_a_spin_that_is_no_acquire_ends_after_max_steps() -> None:
    data, out, flag = numbers(8), numbers(8), counters()
    how = Interleaving("priority", starve=0)
    args = (data, out, flag, 8, "plain load", 1)
    result = run(kernels.hand_over, 2, *args, how=how, max_steps=200)
    assert result.deadlock == "no end after 200 steps, program 1 at last"


def test_a_seed_gives_the_same_run_again_and_seeds_differ() -> None:
    def hand_overs(how: Interleaving) -> tuple[tuple[int, int, int], ...]:
        args = (numbers(16), numbers(4), counters(), 4, 4)
        return run(kernels.two_phases, 4, *args, how=how).hand_overs

    runs = [hand_overs(how) for how in MANY]
    assert runs == [hand_overs(how) for how in MANY]
    assert len(set(runs)) > 4


def test_a_starved_program_comes_last() -> None:
    for strategy in ("random", "priority"):
        for starve in range(3):
            out = numbers(1)
            how = Interleaving(strategy, starve=starve, preempt=0.5)
            run(kernels.same_element, 3, out, 1, how=how)
            assert out.item() == starve


# ------------------------------------------------------------------------ footprints


def listing(words: Tensor, declare_one_less: bool = False) -> Listing:
    """Of `queue_kernel`; declare_one_less: the instructions say they touch one element less."""

    def declared(program: int, place: int) -> tuple[dict, dict]:
        op, begin, end = words[program, place, :3].tolist() if place >= 0 else (0, 0, 0)
        elements = np.arange(begin, end - declare_one_less)
        if op == 0:
            return {}, {}
        return ({"data": elements}, {"out": elements}) if op == 2 else ({}, {"data": elements})

    return Listing(
        words,
        frozenset({"data", "out"}),
        declared,
        lambda program, place: f"op {words[program, place, 0].item()} of program {program}",
        lambda program, place, address: words[program, place, 4].item(),
        lambda program, place, address: f"c to be {words[program, place, 4].item()}",
    )


def queues(op: int = 1, wait: int = 0) -> Tensor:
    """Program 0 writes 12 elements with `op` and signals, program 1 waits and copies them."""
    halt = [0] * 6
    write, copy = [op, 0, 12, -1, 0, 0], [2, 0, 12, wait, 1, -1]
    return torch.tensor([[write, halt], [copy, halt]], dtype=torch.int32)


def run_queues(words: Tensor, shape: Listing, how: Interleaving | None = None) -> CosimResult:
    data, out, flag = numbers(16), numbers(16), counters()
    args = (words, data, out, flag, 6, 2)
    return cosimulate(
        kernels.queue_kernel,
        2,
        args,
        tracked={"data": data, "out": out, "counters": flag},
        interleaving=how or Interleaving("priority", starve=1, preempt=0),
        listing=shape,
    )


def test_instructions_that_touch_what_they_declare_do_not_stray() -> None:
    words = queues()
    assert run_queues(words, listing(words)).ok


def test_undeclared_accesses_are_found_with_their_instruction() -> None:
    words = queues()
    result = run_queues(words, listing(words, declare_one_less=True))
    found = {(s.kind, s.buffer, s.element, s.count, s.program) for s in result.strays}
    assert found == {
        ("UNDECLARED WRITE", "data", 11, 1, 0),
        ("UNDECLARED READ", "data", 11, 1, 1),
        ("UNDECLARED WRITE", "out", 11, 1, 1),
    }
    assert result.reasons[0] == "UNDECLARED WRITE of data[11]: op 1 of program 0"


def test_a_declared_write_that_does_not_happen_is_found() -> None:
    words = queues(op=3)
    result = run_queues(words, listing(words))
    (stray,) = result.strays
    assert (stray.kind, stray.buffer, stray.element, stray.program) == (
        "MISSING WRITE", "data", 11, 0,
    )  # fmt: skip


def test_a_race_and_a_deadlock_name_their_instructions() -> None:
    words = queues(wait=-1)
    (reason,) = run_queues(words, listing(words)).reasons
    assert reason == (
        "RAW on data[0] and 11 more: op 2 of program 1 did not wait for op 1 of program 0"
    )
    words = queues()
    words[1, 0, 4] = 5
    (reason,) = run_queues(words, listing(words)).reasons
    assert reason == "deadlock: op 2 of program 1 waits for c to be 5, which stays 1"


@pytest.mark.parametrize("needed", [3, 4])
def test_a_wait_is_credited_with_no_more_than_it_needs(needed: int) -> None:
    """Four writers, a reader that waits for three of them and is so late that all have written:
    only who knows what the reader waits for can see that it did not wait for the fourth."""
    halt, copy = [0] * 6, [2, 0, 16, 0, needed, -1]
    writers = [[[1, 4 * i, 4 * i + 4, -1, 0, 0], halt] for i in range(4)]
    words = torch.tensor([*writers, [copy, halt]], dtype=torch.int32)
    data, out, flag = numbers(32), numbers(16), counters()
    result = cosimulate(
        kernels.queue_kernel,
        5,
        (words, data, out, flag, 6, 2),
        tracked={"data": data, "out": out},
        interleaving=Interleaving("priority", starve=4, preempt=0),
        listing=listing(words),
    )
    assert out.tolist() == list(range(16))
    found = [(race.kind, race.buffer, race.count, race.program) for race in result.races]
    assert found == ([("RAW", "data", 4, 4)] if needed == 3 else [])


# ------------------------------------------------------------- errors, and what is left behind


def test_an_error_in_one_program_ends_all_of_them_and_nothing_is_left_behind() -> None:
    from triton.runtime.interpreter import interpreter_builder

    before, threads = dict(vars(interpreter_builder)), threading.active_count()
    with pytest.raises(InterpreterError, match="program one is broken"):
        run(kernels.fails_in_program_one, 2, counters(1), 1, how=Interleaving())
    run(kernels.cross_wait, 2, counters(2), 1, how=Interleaving())
    assert threading.active_count() == threads
    assert not set(vars(interpreter_builder)) - set(before) - {"grid_idx", "grid_dim"}
    out = numbers(1)
    kernels.same_element[(3,)](out, 1)  # the interpreter as it was: one after the other
    assert out.item() == 2


def test_an_interrupt_ends_all_programs_and_nothing_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.runtime import interpreter

    before, patch = dict(vars(interpreter.interpreter_builder)), interpreter._patch_lang
    threads, step = threading.active_count(), simulate._Run.step

    def interrupted(self: simulate._Run) -> None:
        if self.steps == 20:
            os.kill(os.getpid(), signal.SIGINT)
        step(self)

    monkeypatch.setattr(simulate._Run, "step", interrupted)
    arguments = (numbers(4), numbers(4), counters(), 4, "plain load", 1)
    with pytest.raises(KeyboardInterrupt):  # it would spin for ever
        late = Interleaving("priority", starve=0, preempt=0)
        run(kernels.hand_over, 2, *arguments, how=late, max_steps=10**9)
    assert threading.active_count() == threads
    assert interpreter._patch_lang is patch
    assert not set(vars(interpreter.interpreter_builder)) - set(before) - {"grid_idx", "grid_dim"}
    monkeypatch.undo()
    assert run(kernels.hand_over, 2, *arguments[:4], "acquire", 1, how=Interleaving()).ok


def test_a_second_run_meanwhile_is_refused_and_harms_neither() -> None:
    refused = []

    def second(program: int, place: int) -> tuple[dict, dict]:
        if not refused:
            with pytest.raises(RuntimeError, match="watches one launch at a time") as caught:
                run(kernels.same_element, 2, numbers(1), 1, how=Interleaving())
            refused.append(caught.value)
        return {}, {}

    listing = Listing(
        counters(12).view(2, 3, 2), frozenset(), second, str, lambda *_: None, lambda *_: ""
    )
    arguments = (numbers(4), numbers(4), counters(), 4, "acquire", 1)
    assert run(kernels.hand_over, 2, *arguments, how=Interleaving(), listing=listing).ok
    assert refused
    assert run(
        kernels.hand_over, 2, *arguments[:2], counters(), *arguments[3:], how=Interleaving()
    ).ok


def test_bad_arguments_are_refused() -> None:
    out = numbers(4)
    with pytest.raises(ValueError, match="num_programs must be at least 1, got 0"):
        cosimulate(kernels.same_element, 0, (out, 1), tracked={})
    with pytest.raises(ValueError, match="starve must be a program below 2, got 2"):
        cosimulate(
            kernels.same_element, 2, (out, 1), tracked={}, interleaving=Interleaving(starve=2)
        )
    with pytest.raises(ValueError, match=r"strategy must be one of .*, got 'fair'"):
        Interleaving("fair")
    with pytest.raises(ValueError, match="preempt must be between 0 and 1, got 2"):
        Interleaving(preempt=2)
    with pytest.raises(ValueError, match=r"tracked\['x'\] must be contiguous"):
        VectorClocks(2, {"x": torch.zeros(4, 4).T[:2]}, {})


def test_an_interpreter_without_a_hook_is_refused_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.delattr(InterpreterBuilder, "create_atomic_rmw")
    with pytest.raises(ValueError, match=r"the interpreter of triton .* has no create_atomic_rmw"):
        cosimulate(kernels.same_element, 2, (numbers(4), 1), tracked={})


def test_the_baton_is_never_lost_and_who_ends_hands_it_over_too() -> None:
    for how in MANY:
        result = run(kernels.two_phases, 4, numbers(16), numbers(4), counters(), 4, 4, how=how)
        assert all(a[2] == b[1] for a, b in itertools.pairwise(result.hand_overs))
        assert {result.hand_overs[0][1]} | {to for _, _, to in result.hand_overs} == {0, 1, 2, 3}
