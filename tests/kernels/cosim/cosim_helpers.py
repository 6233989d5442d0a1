"""Small kernels of several programs for the co-simulator: some sound, each other with one fault."""

from __future__ import annotations

import triton
import triton.language as tl

from minifer.kernels import compat


@triton.jit
def hand_over(data, out, flag, N: tl.constexpr, WAIT: tl.constexpr, TARGET: tl.constexpr):
    """Program 0 writes, program 1 copies."""
    i = tl.arange(0, N)
    if tl.program_id(0) == 0:
        tl.store(data + i, i + 1.0)
        compat.signal(flag, 1)
    else:
        if WAIT == "acquire":
            compat.wait_ge(flag, TARGET, 1 << 30)
        if WAIT == "plain load":
            while tl.load(flag) < 1:
                pass
        tl.store(out + i, tl.load(data + i))


@triton.jit
def two_phases(data, out, arrived, N: tl.constexpr, TARGET: tl.constexpr):
    """Each program writes its row; then each adds up one column of all rows."""
    me = tl.program_id(0)
    programs = tl.num_programs(0)
    i = tl.arange(0, N)
    tl.store(data + me * N + i, me * 10.0 + i)
    compat.signal(arrived, 1)
    compat.wait_ge(arrived, TARGET, 1 << 30)
    total = 0.0
    for row in range(programs):
        total += tl.load(data + row * N + me)
    tl.store(out + me, total)


@triton.jit
def reuse(data, out, full, empty, N: tl.constexpr, ROUNDS: tl.constexpr, WAIT: tl.constexpr):
    """Program 0 fills one buffer ROUNDS times, program 1 empties it: full and empty by turns."""
    i = tl.arange(0, N)
    for turn in range(ROUNDS):
        if tl.program_id(0) == 0:
            if WAIT:
                compat.wait_ge(empty, turn, 1 << 30)
            tl.store(data + i, turn * 100.0 + i)
            compat.signal(full, 1)
        else:
            compat.wait_ge(full, turn + 1, 1 << 30)
            tl.store(out + turn * N + i, tl.load(data + i))
            compat.signal(empty, 1)


@triton.jit
def same_element(out, N: tl.constexpr):
    tl.store(out, tl.program_id(0) * 1.0)


@triton.jit
def waits_again(out, flag, TIMES: tl.constexpr):
    """Program 1 waits TIMES times for the same signal, nothing between."""
    if tl.program_id(0) == 0:
        compat.signal(flag, 1)
    else:
        for _ in range(TIMES):
            compat.wait_ge(flag, 1, 1 << 30)
        tl.store(out, 1.0)


@triton.jit
def waits_and_works(out, flag, TIMES: tl.constexpr):
    """Program 1 waits TIMES times for the same signal, and stores something each time."""
    if tl.program_id(0) == 0:
        compat.signal(flag, 1)
    else:
        for turn in range(TIMES):
            compat.wait_ge(flag, 1, 1 << 30)
            tl.store(out + turn, 1.0)


@triton.jit
def polls_nothing_and_two(out, flags, N: tl.constexpr):
    """Acquires of two counters at once, masked and not."""
    i = tl.arange(0, N)
    tl.atomic_add(flags + i, 0, mask=i < 0, sem="acquire", scope="gpu")
    tl.atomic_add(flags + i, 0, sem="acquire", scope="gpu")
    tl.store(out + tl.program_id(0), 1.0)


@triton.jit
def cross_wait(flags, N: tl.constexpr):
    """Each waits for the other before it signals."""
    me = tl.program_id(0)
    compat.wait_ge(flags + (1 - me), 1, 1 << 30)
    compat.signal(flags + me, 1)


@triton.jit
def fails_in_program_one(flags, N: tl.constexpr):
    if tl.program_id(0) == 1:
        tl.static_assert(False, "program one is broken")
    else:
        compat.wait_ge(flags, 1, 1 << 30)


@triton.jit
def queue_kernel(words, data, out, counters, WORDS: tl.constexpr, LONGEST: tl.constexpr):
    """Instructions (op, begin, end, wait, target, signal): op 1 writes data[begin:end), op 2 reads
    it and writes out[begin:end). Op 3 is op 1 that writes one element less."""
    at = words + tl.program_id(0) * LONGEST * WORDS
    op = tl.load(at)
    while op != 0:
        begin = tl.load(at + 1)
        end = tl.load(at + 2)
        wait = tl.load(at + 3)
        signal = tl.load(at + 5)
        if wait >= 0:
            compat.wait_ge(counters + wait, tl.load(at + 4), 1 << 30)
        i = begin + tl.arange(0, 16)
        if op == 2:
            tl.store(out + i, tl.load(data + i, mask=i < end), mask=i < end)
        else:
            tl.store(data + i, i * 1.0, mask=i < end - (op == 3).to(tl.int32))
        if signal >= 0:
            compat.signal(counters + signal, 1)
        at += WORDS
        op = tl.load(at)
