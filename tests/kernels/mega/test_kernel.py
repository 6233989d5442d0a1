"""Every operation of the megakernel against float64, then whole steps against the model."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as Fn
from lone_ops import C, D, H, K, Lone, P, V, assert_sum, random_tensor, wait_alone
from tiny_steps import NARROW, ROUNDING, TABLES, shape, tiny_step

from minifer.execution.noise import vocabulary_noise
from minifer.kernels.mega.isa import Instruction, Op
from minifer.kernels.mega.launch import MegakernelOptions, Tiles
from minifer.kernels.mega.schedule import assign, build

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCHES = (1, 4)

every_path = pytest.mark.parametrize(
    ("batch", "dtype"), [*itertools.product(BATCHES, DTYPES[:2]), (1, torch.float16)]
)


def only(op: Op, begin: int = 0, end: int = 0, row: int = 0, split: int = 0, layer: int = 0):
    return [Instruction(op, layer, begin, end, row, split)]


# -- one operation


@every_path
def test_embed_reads_each_requests_row(batch, dtype):
    lone = Lone(only(Op.EMBED), batch, dtype=dtype)
    x = lone.run()["X"]
    count = len(lone.tokens)
    assert torch.equal(x[:count], lone.weights.embedding[lone.tokens].float())
    assert torch.equal(x[count:], torch.zeros(batch - count, D))


@every_path
def test_qkv_norms_rotates_and_appends(batch, dtype):
    lone = Lone(only(Op.QKV, 0, (H + 2 * K) * C // 16, layer=1), batch, dtype=dtype)
    x = lone.fill("X", 1)
    before = [cache.clone() for cache in (lone.keys[1], lone.values[1])]
    others = [cache.clone() for cache in (lone.keys[0], lone.values[0])]
    got = lone.run()["Q"]
    gain, matrix = (tensor.double() for tensor in lone.weights.layers[1][:2])
    normed = lone.norm(x, gain)
    qkv = (normed @ matrix.T).view(batch, -1, C)
    terms = (normed.abs() @ matrix.abs().T).view(batch, -1, C)
    positions = torch.tensor([*lone.positions] + [0] * (batch - len(lone.positions)))
    cos, sin = lone.rope.double()[positions][:, None].chunk(2, dim=-1)

    def turn(heads):
        a, b = heads.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    size = terms.amax(-1, keepdim=True).expand_as(terms)  # a rotation mixes two of them
    assert_sum(got, turn(qkv[:, :H]).flatten(1), 2 * size[:, :H].flatten(1))
    new = (turn(qkv[:, H : H + K]), qkv[:, H + K :])
    for i, (cache, old) in enumerate(zip((lone.keys[1], lone.values[1]), before, strict=True)):
        for row, (table, position) in enumerate(zip(lone.tables, lone.positions, strict=True)):
            at = (table[position // P], position % P)
            assert_sum(cache[at], new[i][row], 2 * size[row, H + i * K : H + (i + 1) * K])
            cache[at] = old[at]  # and nothing else has changed
        assert torch.equal(cache.isnan(), old.isnan())
        assert torch.equal(cache.nan_to_num(), old.nan_to_num())
    for cache, old in zip((lone.keys[0], lone.values[0]), others, strict=True):
        assert torch.equal(cache.nan_to_num(), old.nan_to_num())


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("begin", "end"), [(0, 1), (3, 7), (5, 10)])
def test_some_tiles_of_qkv_write_their_rows_only(batch, begin, end):
    whole = Lone(only(Op.QKV, 0, 10), batch)
    whole.fill("X", 1)
    whole.run()
    part = Lone(only(Op.QKV, begin, end), batch)
    part.fill("X", 1)
    q = part.run()["Q"]
    first, last = begin * 16, min(end * 16, H * C)  # tile and head dim are 16 here
    assert torch.equal(q[:, first:last], whole.buffers["Q"][:, first:last])
    assert q[:, :first].isnan().all() and q[:, last:].isnan().all()
    written = part.keys[0][part.tables[0][3], 1].isfinite().flatten()  # position 13
    heads = [begin <= H + h < end for h in range(K)]
    assert written.tolist() == [h for h in heads for _ in range(C)]


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("splits", [1, 4])
def test_attention_reads_its_context_through_the_block_table(splits, dtype):
    """Row 2 has 31 tokens in scattered blocks, row 1 has one; everything else is NaN."""
    items = [
        Instruction(Op.ATTENTION, 0, h, h + 1, row, split)
        for row in range(4)
        for h in range(K)
        for split in range(splits)
    ]
    if splits > 1:
        items += [Instruction(Op.MERGE, 0, h, h + 1, row) for row in range(4) for h in range(K)]
    lone = Lone(items, 4, splits, dtype)
    q = lone.fill("Q", 2).view(4, H, C)
    for row, (table, position) in enumerate(zip(lone.tables, lone.positions, strict=True)):
        for cache in (lone.keys[0], lone.values[0]):  # what QKV would have appended
            at = (table[position // P], position % P)
            cache[at] = random_tensor(K, C, seed=row, dtype=dtype)
    out = lone.run()["ATTENDED"].view(4, H, C)
    for row in range(3):
        keys, values = (x.repeat_interleave(H // K, 1) for x in lone.context(row, 0))
        scores = torch.einsum("hc,shc->hs", q[row], keys) * C**-0.5
        exact = torch.einsum("hs,shc->hc", scores.softmax(-1), values)
        # exp turns an absolute error of a score (at most 8 here, 24 bits) into a relative one.
        assert (out[row].double() - exact).abs().max() <= 2.0**-18 * values.abs().max()
    assert torch.equal(out[3], torch.zeros(H, C))


def test_a_split_without_positions_weighs_nothing():
    items = [Instruction(Op.ATTENTION, 0, 0, 1, 1, split) for split in range(4)]
    lone = Lone(items, 4, 4)
    lone.fill("Q", 2)
    for cache in (lone.keys[0], lone.values[0]):
        cache[lone.tables[1][0], 0] = 1.0
    lse = lone.run()["PART_LSE"][1].view(H, 4)[: H // K]
    assert lse[:, 0].isfinite().all()
    assert torch.equal(lse[:, 1:], torch.full((H // K, 3), -torch.inf))
    assert torch.equal(
        lone.buffers["PART_OUT"][1].view(H, 4, C)[: H // K, 1:], torch.zeros(3, 3, C)
    )


@every_path
@pytest.mark.parametrize("op", [Op.OUTPUT, Op.DOWN])
def test_output_and_down_add_to_their_rows_of_x(op, batch, dtype):
    lone = Lone(only(op, 1, 3, layer=1), batch, dtype=dtype)
    x = lone.fill("X", 3)
    source = lone.fill("ATTENDED" if op == Op.OUTPUT else "HIDDEN", 4)
    matrix = lone.weights.layers[1][2 if op == Op.OUTPUT else 5].double()
    got = lone.run()["X"]
    rows = slice(16, 48)
    exact = x[:, rows] + source @ matrix[rows].T
    assert_sum(got[:, rows], exact, x[:, rows].abs() + source.abs() @ matrix[rows].abs().T)
    assert torch.equal(got[:, :16].double(), x[:, :16])


@every_path
def test_gate_up_is_silu_of_gate_times_up(batch, dtype):
    lone = Lone(only(Op.GATE_UP, 2, 5), batch, dtype=dtype)
    normed = lone.norm(lone.fill("X", 5), lone.weights.layers[0][3])
    got = lone.run()["HIDDEN"]
    rows = slice(32, 80)
    gate, up = (half[rows] for half in lone.weights.layers[0][4].double().chunk(2))
    exact = Fn.silu(normed @ gate.T) * (normed @ up.T)
    terms = (normed.abs() @ gate.abs().T) * (normed.abs() @ up.abs().T)
    assert_sum(got[:, rows], exact, 2 * terms)
    assert got[:, :32].isnan().all() and got[:, 80:].isnan().all()


@every_path
def test_head_leaves_logits_and_the_best_of_its_rows(batch, dtype):
    lone = Lone(only(Op.HEAD, 1, 4, split=2), batch, dtype=dtype)
    normed = lone.norm(lone.fill("X", 6), lone.weights.norm)
    got = lone.run()
    rows = slice(16, 64)
    head = lone.weights.head[rows].double()
    assert_sum(got["LOGITS"][:, rows], normed @ head.T, normed.abs() @ head.abs().T)
    assert got["LOGITS"][:, :16].isnan().all() and got["LOGITS"][:, 64:].isnan().all()
    best, where = got["LOGITS"][:, rows].max(1)
    assert torch.equal(got["BEST"][:, 2], best)
    assert got["BEST_ID"][:, 2].tolist() == (where + 16).tolist()
    assert got["BEST"][:, :2].isnan().all()


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_lowest_id_among_equals_wins(batch, rows):
    """In a tile, between two tiles of one instruction, and between instructions."""
    items = [Instruction(Op.HEAD, 0, 3, 5, 0, 0), Instruction(Op.HEAD, 0, 0, 3, 0, 1)]
    tiles = Tiles(rows, 64, 0 if batch == 1 else 1, 128, 2, 1, 1, 2)
    lone = Lone([*items, Instruction(Op.PICK, end=2)], batch, tiles=tiles)
    lone.fill("X", 6)
    lone.weights.head[:] = 0.5 * lone.weights.head  # then four equal rows above all others
    x = lone.norm(lone.buffers["X"].double(), lone.weights.norm)[0]
    for token in (21, 30, 40, 70):
        lone.weights.head[token] = x.float()
    lone.run()
    assert lone.buffers["BEST_ID"][0, :2].tolist() == [70, 21]
    assert lone.machine.tokens[0] == 21


def test_pick_leaves_padding_alone():
    lone = Lone([Instruction(Op.PICK, end=3)], 4)
    lone.buffers["BEST"].copy_(torch.tensor([[1.0, 3, 2], [5, 5, 4], [-1, -2, -1], [9, 9, 9]]))
    lone.buffers["BEST_ID"].copy_(torch.tensor([[5, 40, 70], [60, 6, 1], [8, 7, 2], [1, 2, 3]]))
    lone.run()
    assert lone.machine.tokens.tolist() == [40, 6, 2, 0]
    assert lone.buffers["POSITION"][:, 0].tolist() == [13, 0, 30, -1]


def test_tokens_beyond_the_capacity_are_noted_nowhere():
    """Not in the next request's row either."""
    lone = Lone([Instruction(Op.PICK, end=3)], 4, options=MegakernelOptions(advance=True))
    lone.buffers["BEST"].fill_(1.0)
    lone.buffers["BEST_ID"].fill_(9)
    lone.buffers["INDEX"][:, 0] = torch.tensor([3, 1, 4, 0])  # there is room for three
    lone.run()
    assert lone.machine.generated.tolist() == [[-1] * 3, [-1, 9, -1], [-1] * 3, [-1] * 3]
    assert lone.buffers["INDEX"][:, 0].tolist() == [4, 2, 5, 0]


# -- draws


@pytest.mark.parametrize("batch", BATCHES)
def test_a_draw_takes_the_noise_of_its_seed_and_output_index(batch):
    """As the engine's sampler does: argmax(logits / temperature − log q)."""
    items = [Instruction(Op.HEAD, 0, 0, 2, 0, 0), Instruction(Op.HEAD, 0, 2, 5, 0, 1)]
    lone = Lone(
        [*items, Instruction(Op.PICK, end=2)], batch, options=MegakernelOptions(sample=True)
    )
    lone.fill("X", 8)
    count = len(lone.positions)
    drawn = set()
    for index in range(6):
        seeds = [2**63 + 7 * index, -1, 12345 + index][:count]
        indices, temperatures = [index, 2, 9 + index][:count], [1.7, 0.0, 0.6][:count]
        lone.machine.set_step(
            lone.tokens, lone.positions, lone.tables,
            seeds=seeds, indices=indices, temperatures=temperatures,
        )  # fmt: skip
        lone.run()
        logits = lone.machine.logits[:count].double()
        race = vocabulary_noise(seeds, indices, V).double().log()
        for row, temperature in enumerate(temperatures):
            scores = logits[row] / temperature - race[row] if temperature else logits[row]
            assert lone.machine.tokens[row] == scores.argmax()
            best = lone.buffers["BEST"][row, :2].max().double()
            assert (best - scores.max()).abs() <= 2.0**-20 * scores.max().abs().clamp(min=1)
        drawn.add(int(lone.machine.tokens[0]))
    assert len(drawn) > 1


# -- whole steps


def one_program(batch: int = 1, splits: int = 1):
    return assign(build(shape(batch, splits, NARROW), 1), 1)


@pytest.mark.parametrize(("batch", "requests", "splits"), [(1, 1, 1), (1, 1, 4), (4, 3, 2)])
def test_a_step_is_the_models(batch, requests, splits):
    step = tiny_step(one_program(batch, splits), requests, config=NARROW)
    step.megakernel.launch()
    step.megakernel.check()
    assert step.error() < ROUNDING
    assert step.tokens_are_right()
    assert torch.equal(step.megakernel.logits[requests:], torch.zeros(batch - requests, 256))


@pytest.mark.parametrize(
    ("batch", "tiles"),
    [
        (1, Tiles.for_gpu(shape(1), torch.bfloat16)),
        (4, Tiles.for_gpu(shape(4), torch.bfloat16)),
        (1, Tiles(rows=16, block_k=32, slices=0, block_t=4, group=16)),
        (4, Tiles(rows=16, block_k=32, slices=4, block_t=4, group=16)),
    ],
)
def test_a_gpus_tiles_and_prefetches_change_nothing(batch, tiles):
    """Few rows a tile, several tiles of columns, the first of them loaded before the wait."""
    options = MegakernelOptions(prefetch_bytes=4096, prefetch_registers=True)
    step = tiny_step(one_program(batch), 1, options, config=NARROW, tiles=tiles)
    step.megakernel.launch()
    assert step.error() < ROUNDING


def test_steps_follow_each_other_without_the_host():
    """`advance` and `epochs`: nothing is set and no counter zeroed between three launches."""
    options = MegakernelOptions(epochs=True, advance=True, write_logits=False)
    step = tiny_step(one_program(4), 3, options, config=NARROW)
    expected = []
    for _ in range(3):
        step.megakernel.launch()
        step.megakernel.check()
        tokens = [int(row.argmax()) for row in step.expected()]
        assert step.megakernel.tokens[:3].tolist() == tokens
        expected.append(tokens)
        for prompt, token in zip(step.prompts, tokens, strict=True):
            prompt.append(token)
    generated = step.megakernel.generated
    assert generated[:3, :3].T.tolist() == expected
    assert generated[3].tolist() == [-1] * 4
    memory = step.megakernel.buffers_by_name()
    assert memory["EPOCH"].item() == 4
    assert memory["INDEX"][:, 0].tolist() == [3, 3, 3, 0]
    assert memory["POSITION"][:, 0].tolist() == [9, 4, 7, -1]
    assert memory["LOGITS"].isnan().all()


def test_a_request_without_room_for_another_token_becomes_padding():
    """Three blocks of four: the first request's twelfth token is its last."""
    step = tiny_step(one_program(2), 2, MegakernelOptions(advance=True), config=NARROW)
    tokens, positions = [prompt[-1] for prompt in step.prompts], [11, 1]
    memory = step.megakernel.buffers_by_name()
    for name in ("K0", "V0", "K1", "V1"):
        memory[name].zero_()
    step.megakernel.set_step(tokens, positions, TABLES[:2])
    for expected in ([-1, 2], [-1, 3]):
        step.megakernel.launch()
        assert memory["POSITION"][:, 0].tolist() == expected
    assert memory["INDEX"][:, 0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("counter", "target", "left"),
    [(5, 5, 3), (6, 5, 3), (4, 5, 0), (2**31 - 1, -(2**31), 0), (-(2**31), 2**31 - 1, 3)],
)
def test_counters_may_wrap_around(counter, target, left):
    """Epochs count on: after some million launches a counter passes 2³¹."""
    counters, out = torch.tensor([counter], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    wait_alone[(1,)](counters, out, target, 3)
    assert out.item() == left


def test_tracing_marks_every_instruction():
    step = tiny_step(one_program(), 1, MegakernelOptions(trace=True), config=NARROW)
    step.megakernel.marks.fill_(-5)
    step.megakernel.launch()
    (marks,) = step.megakernel.marks
    count = step.megakernel.schedule.num_instructions
    assert torch.equal(marks[:count], torch.zeros(count, 3, dtype=torch.int64))  # no clock here
    assert (marks[count:] == -5).all()
