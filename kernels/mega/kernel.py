"""The megakernel: a decode step of a whole Llama in one launch.

    while op ≠ HALT:   wait until the inputs are there · do it · tell whoever waits

Every program, one a streaming multiprocessor, walks its own queue of instructions (`isa.py`); a
program knows nothing of the others but the counters they raise. There is no barrier across the
grid and no second launch. What is paid for that: all programs must be resident at once, and each
instruction costs a fetch, a wait and a signal. What these take is not measured yet; if it is as
much as the gap between two kernels of a CUDA graph (1.3 µs on an H100, HazyResearch, "Look Ma, No
Bubbles!", May 2025), only the waiting for whole grids is saved.

The slow twin of the whole is the reference machine (`reference_vm.py`), and in the end the model
itself in plain torch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minifer.kernels.compat import nanoseconds, signal
from minifer.kernels.mega.isa import WORDS, Op
from minifer.kernels.mega.ops import STRIDE, address, attention, embed, merge, pick, wait_for
from minifer.kernels.mega.project import HEAD, QKV, project

WORD = tl.constexpr(WORDS)
HALT = tl.constexpr(int(Op.HALT))
EMBED = tl.constexpr(int(Op.EMBED))
ATTENTION = tl.constexpr(int(Op.ATTENTION))
MERGE = tl.constexpr(int(Op.MERGE))
PICK = tl.constexpr(int(Op.PICK))


@triton.jit
def kernel(
    INSTRUCTIONS, COUNTERS, EPOCH, ERRORS, MARKS, WEIGHTS, CACHES, ROPE, TABLES,
    TOKEN, POSITION, INDEX, SEED, TEMPERATURE, GENERATED,
    X, Q, PART_OUT, PART_LSE, ATTENDED, HIDDEN, LOGITS, BEST, BEST_ID,
    longest, max_blocks, capacity, limit, patience,
    DTYPE: tl.constexpr, CACHE_DTYPE: tl.constexpr, DOT: tl.constexpr, EPS: tl.constexpr,
    B: tl.constexpr, BP: tl.constexpr, L: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, V: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, HEAD_SLOTS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    BK: tl.constexpr, SLICES: tl.constexpr, BT: tl.constexpr, GP: tl.constexpr, CP: tl.constexpr,
    SLOTS: tl.constexpr, STAGES: tl.constexpr, PREFETCH_BYTES: tl.constexpr,
    PREFETCH_REGISTERS: tl.constexpr, EPOCHS: tl.constexpr, ADVANCE: tl.constexpr,
    WRITE_LOGITS: tl.constexpr, SAMPLE: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """One decode step, or this program's part of it.

    INSTRUCTIONS int32 [programs, longest, WORDS]. COUNTERS int32, STRIDE apart; EPOCHS: never
    zeroed, EPOCH is the number of this launch, targets count from the first on. WEIGHTS and
    CACHES: addresses, int64 [6 L + 3] (of a layer: norm, qkv, output, norm, gate_up, down; then
    embedding, norm, head) and [2 L] (keys, values of [N, P, K, C]). ROPE float32 [positions, C]:
    cos, sin. TABLES int32 [B, max_blocks]. TOKEN, POSITION, INDEX int32, SEED int64, TEMPERATURE
    float32: [B], of the step. The rest is what `isa.buffers` says, float32 but for BEST_ID.

    limit: positions that there is room for. patience: polls that may fail before this program
    stops waiting, all waits together; then ERRORS[program] is the number of the instruction it
    gave up at, from 1 on, and the result is worthless. MARKS int64 [programs, longest, 3], TRACE:
    nanoseconds at the start of an instruction, after its wait, at its end.
    """
    program = tl.program_id(0)
    queue = INSTRUCTIONS + program * longest * WORD
    pc = 0
    op = tl.load(queue)
    epoch = 1
    if EPOCHS:  # noqa: SIM102  (a constant, and then a value)
        if op != HALT:  # nobody waits for a program without work: it must not read
            epoch = tl.load(EPOCH)
    while op != HALT:
        item = queue + pc * WORD
        layer = tl.load(item + 1)
        begin = tl.load(item + 2)
        end = tl.load(item + 3)
        row = tl.load(item + 4)
        split = tl.load(item + 5)
        counter = tl.load(item + 6)
        target = tl.load(item + 7) * epoch
        mark = MARKS
        if TRACE:
            mark = MARKS + (program * longest + pc) * 3
            tl.store(mark, nanoseconds())
        before = patience
        for OP in tl.static_range(QKV, HEAD + 1):  # compiled once for each
            if OP != ATTENTION and OP != MERGE:  # noqa: SIM102
                if op == OP:
                    patience = project(
                        OP, WEIGHTS, CACHES, X, Q, ATTENDED, HIDDEN, LOGITS, BEST, BEST_ID,
                        ROPE, TABLES, POSITION, SEED, INDEX, TEMPERATURE, COUNTERS, mark,
                        layer, begin, end, split, counter, target, patience, max_blocks,
                        DTYPE, CACHE_DTYPE, DOT, EPS, B, BP, L, D, F, H, K, C, V, P,
                        HEAD_SLOTS, TILE, ROWS, BK, SLICES, STAGES, PREFETCH_BYTES,
                        PREFETCH_REGISTERS, WRITE_LOGITS, SAMPLE, TRACE,
                    )  # fmt: skip
        if (op < QKV) | (op > HEAD) | (op == ATTENTION) | (op == MERGE):
            patience = wait_for(COUNTERS, counter, target, patience, mark, TRACE)
            if op == EMBED:
                embed(address(WEIGHTS, 6 * L, DTYPE), TOKEN, POSITION, X, B, BP, D, BK)
            elif op == ATTENTION:
                keys = address(CACHES, 2 * layer, CACHE_DTYPE)
                values = address(CACHES, 2 * layer + 1, CACHE_DTYPE)
                attention(
                    Q, keys, values, ATTENDED, PART_OUT, PART_LSE, TABLES, POSITION,
                    row, begin, split, max_blocks, H, K, C, S, P, GP, CP, BT, DOT,
                )  # fmt: skip
            elif op == MERGE:
                merge(PART_OUT, PART_LSE, ATTENDED, row, begin, H, K, C, S, CP)
            elif op == PICK:
                pick(
                    BEST, BEST_ID, TOKEN, POSITION, INDEX, GENERATED, end, capacity, limit,
                    B, BP, HEAD_SLOTS, SLOTS, ADVANCE,
                )  # fmt: skip
                if EPOCHS:
                    tl.store(EPOCH, epoch + 1)
        if (patience <= 0) & (before > 0):
            tl.store(ERRORS + program, pc + 1)
        to = tl.load(item + 8)
        if to >= 0:
            signal(COUNTERS + to * STRIDE, tl.load(item + 9))
        else:
            tl.debug_barrier()  # a queue is an order too, and of all warps
        if TRACE:
            tl.store(mark + 2, nanoseconds())
        pc += 1
        op = tl.load(queue + pc * WORD)
