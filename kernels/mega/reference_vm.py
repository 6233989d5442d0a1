"""The slow twin of the megakernel: one plain torch function an opcode, one instruction at a time.

Programs take turns in any order that their counters allow; the result is the same to the bit,
because every tile is computed alone and sums are taken in one order. A scoreboard keeps the
counters. With `check`, each instruction sees only what `isa.regions` says it reads (everything
else is NaN), and must change all of what it says it writes and nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minifer.kernels.mega.coverage import describe
from minifer.kernels.mega.isa import Instruction, Op, Region, buffers, regions
from minifer.kernels.mega.schedule import Schedule

Buffers = dict[str, Tensor]


class ScheduleError(RuntimeError):
    """An instruction that may not run now, or that touches what it should not."""


@dataclass(frozen=True)
class Inputs:
    """What a step is given. B requests, one new token each; a position of −1 is an empty seat.

    weights: a model's `state_dict()`. eps: of its norms. tokens, positions: int64 [B]. keys,
    values: L caches [N, P, K, C], written in place. block_tables: int64 [B, blocks]. cos, sin:
    [B, C/2] of the positions. indices: int64 [B], output tokens so far. temperature, noise: [B]
    and [B, V]: a request above 0 takes the token with the best logit / temperature − noise, where
    noise is the logarithm of an exponential draw; None: greedy. attention_tile: splits are
    multiples of so many positions, as the kernel's are; partial results depend on it.
    """

    weights: Mapping[str, Tensor]
    eps: float
    tokens: Tensor
    positions: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    block_tables: Tensor
    cos: Tensor
    sin: Tensor
    indices: Tensor | None = None
    temperature: Tensor | None = None
    noise: Tensor | None = None
    attention_tile: int = 1


class ReferenceMachine:
    """A schedule on its way: `buffers` as `isa.buffers` names them, all of one dtype.

    dtype: float32 or float64, which also hold token ids exactly. Memory that nobody has written is
    NaN.
    """

    def __init__(
        self,
        schedule: Schedule,
        inputs: Inputs,
        dtype: torch.dtype = torch.float32,
        check: bool = True,
    ) -> None:
        self.schedule, self.shape, self.check = schedule, schedule.shape, check
        convert = {name: weight.detach().to(dtype) for name, weight in inputs.weights.items()}
        self.inputs = replace(
            inputs, weights=convert, cos=inputs.cos.to(dtype), sin=inputs.sin.to(dtype)
        )
        self.counters = [0] * len(schedule.counters)
        self.places = [0] * len(schedule.queues)  # how far every program has come
        self.buffers: Buffers = {
            name: torch.full(size, torch.nan, dtype=dtype)
            for name, size in buffers(self.shape, schedule.head_slots).items()
        }
        indices = torch.zeros_like(inputs.tokens) if inputs.indices is None else inputs.indices
        self.buffers["EPOCH"].fill_(1)
        for name, values in (
            ("TOKEN", inputs.tokens),
            ("POSITION", inputs.positions),
            ("INDEX", indices),
        ):
            self.buffers[name][:, 0] = values.to(dtype)

    @property
    def logits(self) -> Tensor:
        """[B, V]"""
        return self.buffers["LOGITS"]

    def ready(self, program: int) -> bool:
        """Has the program an instruction left, and has its counter reached the target?"""
        queue, place = self.schedule.queues[program], self.places[program]
        if place == len(queue):
            return False
        item = queue[place]
        return item.wait < 0 or self.counters[item.wait] >= item.target

    def execute(self, program: int) -> None:
        """The next instruction of a program. Raises `ScheduleError` where it may not run yet, or
        touches memory it has not declared."""
        place = self.places[program]
        item = self.schedule.queues[program][place]
        if not self.ready(program):
            raise ScheduleError(f"{describe(item, program, place)} {self._waits(item)}")
        if self.check:
            self._execute_checked(item, describe(item, program, place))
        else:
            OPERATIONS[Op(item.op)](self, item, self.buffers)
        self.places[program] += 1
        if item.signal >= 0:
            self.counters[item.signal] += item.amount

    def run(self, seed: int | None = None) -> Buffers:
        """All queues to their end; a random program moves each time, None: the lowest that can.

        Returns `buffers`. Raises `ScheduleError` when nobody can go on.
        """
        draw = random.Random(seed)
        while ready := [p for p in range(len(self.places)) if self.ready(p)]:
            self.execute(ready[0] if seed is None else draw.choice(ready))
        for program, place in enumerate(self.places):
            if place < len(self.schedule.queues[program]):
                item = self.schedule.queues[program][place]
                raise ScheduleError(
                    f"deadlock: {describe(item, program, place)} {self._waits(item)}, and no "
                    "program can go on"
                )
        return self.buffers

    def _waits(self, item: Instruction) -> str:
        name = self.schedule.counters[item.wait]
        return f"waits for {item.target} of counter {name}, which is {self.counters[item.wait]}"

    def _execute_checked(self, item: Instruction, name: str) -> None:
        reads, writes = regions(item, self.shape)
        seen = {key: torch.full_like(whole, torch.nan) for key, whole in self.buffers.items()}
        for area in reads:
            _part(seen, area).copy_(_part(self.buffers, area))
            if bool(_part(seen, area).isnan().any()):
                raise ScheduleError(f"{name} reads {area.buffer} where nobody has written")
        before = {key: whole.clone() for key, whole in seen.items()}
        try:
            OPERATIONS[Op(item.op)](self, item, seen)
        except ScheduleError as error:
            raise ScheduleError(f"{name}: {error}") from None
        for area in writes:
            if bool(_part(seen, area).isnan().any()):
                raise ScheduleError(
                    f"{name} does not write all of {area}, or reads what it has not declared"
                )
            _part(self.buffers, area).copy_(_part(seen, area))
            _part(before, area).copy_(_part(seen, area))
        for key, whole in seen.items():
            if not torch.equal(whole.nan_to_num(nan=-0.5), before[key].nan_to_num(nan=-0.5)):
                raise ScheduleError(f"{name} writes {key} outside of what it has declared")


def _part(memory: Buffers, area: Region) -> Tensor:
    return memory[area.buffer][area.first_row : area.last_row, area.start : area.stop]


def _integers(column: Tensor) -> list[int]:
    if bool(column.isnan().any()):
        raise ScheduleError("an index is read that is not declared")
    return [int(number) for number in column[:, 0].tolist()]


# -- one function an opcode: (machine, instruction, memory)


def _nothing(vm: ReferenceMachine, item: Instruction, memory: Buffers) -> None:
    pass


def _embed(vm: ReferenceMachine, item: Instruction, memory: Buffers) -> None:
    embedding = vm.inputs.weights["embed_tokens.weight"]
    positions = _integers(memory["POSITION"])
    for row, token in enumerate(_integers(memory["TOKEN"])):
        memory["X"][row] = embedding[token] if positions[row] >= 0 else 0


def _qkv(vm: ReferenceMachine, item: Instruction, memory: Buffers) -> None:
    H, K, C = vm.shape.heads, vm.shape.kv_heads, vm.shape.head_dim
    weight, inputs = _weight(vm, item, "self_attn.qkv_proj"), vm.inputs
    normed = _norm(vm, memory["X"], f"layers.{item.layer}.input_layernorm")
    positions = _integers(memory["POSITION"])
    for tile in range(item.begin, item.end):
        halves = [list(rows) for rows in vm.shape.qkv_columns(tile)]
        head, first, second = halves[0][0] // C, *([row % C for row in half] for half in halves)
        a, b = (normed @ weight[half].T for half in halves)  # [B, tile / 2]
        if head < H + K:  # a query or a key: rotate
            cos, sin = inputs.cos[:, first], inputs.sin[:, first]
            a, b = a * cos - b * sin, b * cos + a * sin
        new, columns = torch.cat((a, b), 1), [*first, *second]
        if head < H:
            memory["Q"][:, [head * C + column for column in columns]] = new
            continue
        kind, caches = ("K", inputs.keys) if head < H + K else ("V", inputs.values)
        head = (head - H) % K
        memory[f"{kind}{item.layer}"][:, [head * C + column for column in columns]] = new
        cache = caches[item.layer]
        for row, position in enumerate(positions):
            if position >= 0:
                block, offset = _slot(vm, row, position)
                cache[block, offset, head, columns] = new[row].to(cache.dtype)


def _attention(vm: ReferenceMachine, item: Instruction, memory: Buffers) -> None:
    """The step's own key and value come from the buffers, older ones from the cache."""
    shape, row, h = vm.shape, item.row, item.begin
    C, G, S = shape.head_dim, shape.group, shape.splits
    length = _integers(memory["POSITION"][row : row + 1])[0] + 1
    tile = vm.inputs.attention_tile
    each = -(-length // (S * tile)) * tile
    span = range(item.split * each, min((item.split + 1) * each, length))
    q = memory["Q"][row, h * G * C : (h + 1) * G * C].view(G, C)
    out, lse = torch.zeros_like(q), q.new_full((G,), -torch.inf)
    if len(span):
        caches = (
            (vm.inputs.keys, memory[f"K{item.layer}"]),
            (vm.inputs.values, memory[f"V{item.layer}"]),
        )
        keys, values = (
            torch.stack(
                [
                    new[row, h * C : (h + 1) * C].to(cache[item.layer].dtype)
                    if position == length - 1
                    else cache[item.layer][(*_slot(vm, row, position), h)]
                    for position in span
                ]
            ).to(q.dtype)
            for cache, new in caches
        )
        scores = q @ keys.T * C**-0.5
        lse = torch.logsumexp(scores, 1)
        out = torch.softmax(scores, 1) @ values
    heads = range(h * G, (h + 1) * G)
    for g, head in enumerate(heads):
        if S == 1:
            memory["ATTENDED"][row, head * C : (head + 1) * C] = out[g]
        else:
            slot = head * S + item.split
            memory["PART_OUT"][row, slot * C : (slot + 1) * C] = out[g]
            memory["PART_LSE"][row, slot] = lse[g]


def _merge(vm: ReferenceMachine, item: Instruction, memory: Buffers) -> None:
    C, S, G = vm.shape.head_dim, vm.shape.splits, vm.shape.group
    for head in range(item.begin * G, (item.begin + 1) * G):
        parts = memory["PART_OUT"][item.row, head * S * C : (head + 1) * S * C].view(S, C)
        lse = memory["PART_LSE"][item.row, head * S : (head + 1) * S]
        # Of an empty seat every part is empty: −∞ − −∞ has no share.
        empty = bool(lse.max() == -torch.inf)
        shares = torch.zeros_like(lse) if empty else torch.softmax(lse, 0)
        memory["ATTENDED"][item.row, head * C : (head + 1) * C] = shares @ parts


def _add_product(vm: ReferenceMachine, item: Instruction, memory: Buffers) -> None:
    output = item.op == Op.OUTPUT
    weight = _weight(vm, item, "self_attn.o_proj" if output else "mlp.down_proj")
    source = memory["ATTENDED" if output else "HIDDEN"]
    for rows in _tiles(vm, item):
        memory["X"][:, rows] += source @ weight[rows].T


def _gate_up(vm: ReferenceMachine, item: Instruction, memory: Buffers) -> None:
    gate, up = _weight(vm, item, "mlp.gate_up_proj").chunk(2)
    normed = _norm(vm, memory["X"], f"layers.{item.layer}.post_attention_layernorm")
    for rows in _tiles(vm, item):
        memory["HIDDEN"][:, rows] = F.silu(normed @ gate[rows].T) * (normed @ up[rows].T)


def _head(vm: ReferenceMachine, item: Instruction, memory: Buffers) -> None:
    weights, inputs = vm.inputs.weights, vm.inputs
    weight = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    normed = _norm(vm, memory["X"], "norm")
    for rows in _tiles(vm, item):
        memory["LOGITS"][:, rows] = normed @ weight[rows].T
    span = slice(item.begin * vm.shape.tile, item.end * vm.shape.tile)
    scores = memory["LOGITS"][:, span].clone()
    if inputs.temperature is not None and inputs.noise is not None:
        for row, temperature in enumerate(inputs.temperature.tolist()):
            if temperature > 0:
                scores[row] = scores[row] / temperature - inputs.noise[row, span]
    best, where = scores.max(1)
    memory["BEST"][:, item.split] = best
    memory["BEST_ID"][:, item.split] = (where + span.start).to(best.dtype)


def _pick(vm: ReferenceMachine, item: Instruction, memory: Buffers) -> None:
    """The lowest id among equals. An empty seat stays as it is."""
    best, ids = memory["BEST"][:, : item.end], memory["BEST_ID"][:, : item.end]
    top = best == best.max(1, keepdim=True).values
    token = ids.masked_fill(~top, torch.inf).min(1).values
    token = token.masked_fill(best.isnan().any(1), torch.nan)  # what nobody wrote is not hidden
    active = memory["POSITION"][:, 0] >= 0
    memory["TOKEN"][:, 0] = torch.where(active, token, vm.inputs.tokens.to(token.dtype))
    for name in ("POSITION", "INDEX"):
        memory[name] += active[:, None]
    memory["EPOCH"] += 1


OPERATIONS: Mapping[Op, Callable[[ReferenceMachine, Instruction, Buffers], None]] = {
    Op.HALT: _nothing,
    Op.EMBED: _embed,
    Op.QKV: _qkv,
    Op.ATTENTION: _attention,
    Op.MERGE: _merge,
    Op.OUTPUT: _add_product,
    Op.GATE_UP: _gate_up,
    Op.DOWN: _add_product,
    Op.HEAD: _head,
    Op.PICK: _pick,
    Op.NOTHING: _nothing,
}


def _weight(vm: ReferenceMachine, item: Instruction, name: str) -> Tensor:
    return vm.inputs.weights[f"layers.{item.layer}.{name}.weight"]


def _norm(vm: ReferenceMachine, x: Tensor, name: str) -> Tensor:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + vm.inputs.eps)
    return x * scale * vm.inputs.weights[f"{name}.weight"]


def _tiles(vm: ReferenceMachine, item: Instruction) -> list[slice]:
    """Rows of each weight tile: a product a tile, so that bits do not depend on who has which."""
    tile = vm.shape.tile
    return [slice(i * tile, (i + 1) * tile) for i in range(item.begin, item.end)]


def _slot(vm: ReferenceMachine, row: int, position: int) -> tuple[int, int]:
    """Block and offset of a request's position."""
    size = vm.inputs.keys[0].shape[1]
    return int(vm.inputs.block_tables[row, position // size]), position % size
