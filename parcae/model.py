"""The looped transformer, as stages that an engine can schedule one by one.

    embed ─ prelude ─ e ─ initial_state ─ step ─ step ─ … ─ step ─ readout ─ coda ─ logits
                      └── input_term ──────┴──────┴───────────┘    └──── finish ────┘

An iteration is h ← core(Ā h + B̄ e): the blocks work on the state with the input added, with the
same weights, the same e and the same positions every time (https://arxiv.org/abs/2604.12946,
section 4.1). Depth is always explicit, in training and out of it: no stage draws one.

`forward` runs whole sequences through all stages and is what everything cleverer is compared
with; the engine drives the stages itself (`minifer.execution.loops`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifer.config import ModelConfig
from minifer.models.rope import RotaryEmbedding
from minifer.models.transformer import Linear, RMSNorm, WeightPart
from minifer.parcae.injection import KINDS
from minifer.parcae.layers import GATE_CHANNELS, Attention, Block, Group, Pass, StandIns

if TYPE_CHECKING:
    from minifer.execution.backend import Backend
    from minifer.execution.forward_batch import ForwardBatch
    from minifer.execution.kv_storage import KVStorage


# Of `ModelConfig`: what every Parcae is. (Its norm of q and k has no weights.)
_FIXED = {
    "tie_word_embeddings": True,
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "sliding_windows": (),
}


class Parcae(nn.Module):
    """A model with uninitialised weights: `load_weights` or `init_weights` fills them.

    config.loop says how many layers each stack has. KV slots are `config.loop`'s.
    """

    embedding_name = "transformer.wte.weight"  # in a checkpoint

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if config.loop is None:
            raise ValueError("loop must say how many layers each stack has, got None")
        for name, value in _FIXED.items():
            if getattr(config, name) != value:
                raise ValueError(
                    f"{name} must be {value!r}, another one is not implemented for a loop model, "
                    f"got {getattr(config, name)!r}"
                )
        if config.loop.value_embeddings and config.hidden_size < GATE_CHANNELS:
            raise ValueError(
                f"hidden_size must be at least {GATE_CHANNELS}, which the gates of value "
                f"embeddings read, got {config.hidden_size}"
            )
        self.config, self.loop = config, config.loop
        V, D, eps = config.vocab_size, config.hidden_size, config.rms_norm_eps
        self.wte = _embedding(V, D, dtype, device)
        self.value_embeds = nn.ModuleDict(
            {
                str(layer): _embedding(V, config.num_kv_heads * config.head_dim, dtype, device)
                for layer in range(self.loop.num_layers)
                if self.loop.has_value_embedding(layer)
            }
        )

        def stack(first: int, count: int) -> nn.ModuleList:
            return nn.ModuleList(Block(config, first + i, i, dtype, device) for i in range(count))

        P, R, C = self.loop.prelude, self.loop.core, self.loop.coda
        self.prelude, self.core, self.coda = stack(0, P), stack(P, R), stack(P + R, C)
        self.ln_prelude = RMSNorm(D, eps, dtype, device) if self.loop.prelude_norm else None
        self.adapter = KINDS[self.loop.injection](D, dtype, device)
        self.readout_proj = Linear(D, D, False, dtype, device)
        self.ln_f = RMSNorm(D, eps, dtype, device)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        self._check_value_embeddings()

    def _check_value_embeddings(self) -> None:
        """Every table has its gate, every gate its table: the released code has two rules."""
        attention: list[Attention] = [block.attn for block in self.blocks]
        gated = [str(i) for i, attn in enumerate(attention) if attn.ve_gate is not None]
        if gated != list(self.value_embeds):
            raise AssertionError(f"gates at {gated}, tables at {list(self.value_embeds)}")

    @property
    def blocks(self) -> list[Block]:
        """All layers with weights of their own, in order: prelude, core, coda."""
        blocks: list[Block] = [*self.prelude, *self.core, *self.coda]
        return blocks

    # -- the stages

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] → [T, D]."""
        return F.embedding(token_ids, self.wte.weight)

    def prelude_pass(self, x: Tensor, p: Pass) -> Tensor:
        """x [T, D] → e [T, D], the input of every iteration. KV slots 0 … P − 1."""
        x = self._run(self.prelude, x, p)
        return x if self.ln_prelude is None else self.ln_prelude(x, p.backend)

    def input_term(self, e: Tensor) -> Tensor:
        """e [T, D] → B̄ e [T, D], float32."""
        return self.adapter.input_term(e)

    @property
    def state_std(self) -> float:
        """√(2 / 5D), of a random initial state and of weights."""
        return math.sqrt(2 / (5 * self.config.hidden_size))

    def initial_state(self, e: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """h₀ like e [T, D]: zeros, or with a generator noise of `state_std`, cut at ±3 of it.

        Training draws noise. The released code draws it for every token it generates, too; here
        inference starts from its mean, so that logits are a function of the context alone.
        """
        h = torch.zeros_like(e)
        if generator is not None:
            s = self.state_std
            nn.init.trunc_normal_(h, std=s, a=-3 * s, b=3 * s, generator=generator)
        return h

    def step(self, h: Tensor, term: Tensor, p: Pass) -> Tensor:
        """One iteration: h, B̄ e [T, D] → the next h [T, D]."""
        return self._run(self.core, self.adapter(h, term, p.backend), p)

    def finish(self, h: Tensor, p: Pass) -> Tensor:
        """The last h [T, D] → hidden states [T, D]: readout, coda, final norm."""
        x = self._run(self.coda, self.readout_proj(h, p.backend), p)
        return self.ln_f(x, p.backend)

    def _run(self, stack: nn.ModuleList, x: Tensor, p: Pass) -> Tensor:
        blocks: Sequence[Block] = stack  # type: ignore[assignment]
        for block in blocks:
            x = block(x, self._table(block.layer), p)
        return x

    def _table(self, layer: int) -> nn.Embedding | None:
        """The value embedding of a layer."""
        name = str(layer)
        if name not in self.value_embeds:
            return None
        table: nn.Embedding = self.value_embeds[name]  # type: ignore[assignment]
        return table

    def logits(self, hidden: Tensor, backend: Backend, float32: bool = False) -> Tensor:
        """hidden [R, D] → float32 logits [R, V]; the head is the embedding, tied.

        float32: multiply in float32, as `Transformer.logits`.
        """
        weight = self.wte.weight
        if float32:
            hidden, weight = hidden.float(), weight.float()
        return backend.linear(hidden, weight, None).float()

    # -- all of them, over whole sequences

    def forward(
        self,
        batch: ForwardBatch,
        kv: KVStorage | None,
        backend: Backend,
        num_loops: int | Tensor | None = None,
        *,
        h0: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, D] after the final norm.

        num_loops: an int; int64 [B], one a request; or int64 [T], one a token. None:
        `mean_recurrence`. The batch runs to the deepest, and who is done keeps its state. In the
        iterations that a token does not run, later tokens see its last keys and values. h0 [T, D]:
        None for zeros.

        kv: holds the slots of `loop.deepest` loops under `loop.policy`, and num_loops is at most
        that. A request called in chunks must have the same depth in each, unless every token has
        one. Without a cache `first-m` is kept, and the sequence is to the policies that overwrite
        what a prompt is: one pass.

        Raises `ValueError` for a depth that is not allowed.
        """
        depth, each = self._depth(batch, kv, num_loops)
        e, p = self.encode(batch, kv, backend)
        if h0 is not None and (h0.shape != e.shape or h0.dtype != e.dtype):
            raise ValueError(
                f"h0 must be of shape {tuple(e.shape)}, got {tuple(h0.shape)}"
                if h0.shape != e.shape
                else f"h0 must be of {e.dtype}, got {h0.dtype}"
            )
        term = self.input_term(e)
        h = self.initial_state(e) if h0 is None else h0
        # Tokens of a later call may go deeper than these: they find all slots filled.
        iterations = self.loop.deepest if each and kv is not None else int(depth.max())
        writes = self.loop.policy.writes
        last: dict[int, tuple[Tensor, Tensor]] = {}
        for t in range(iterations):
            looping = t < depth
            p = self.core_pass(p, batch, t)
            if each or not writes(iterations - 1):
                idle = ~looping if writes(t) else torch.ones_like(looping)
                p = replace(p, stand_ins=StandIns(idle, last))
            h = torch.where(looping[:, None], self.step(h, term, p), h)
        return self.finish(h, self.coda_pass(p, batch))

    def _depth(
        self, batch: ForwardBatch, kv: KVStorage | None, num_loops: int | Tensor | None
    ) -> tuple[Tensor, bool]:
        """int64 [T]: the depth of every row, and were they given one by one?"""
        device = batch.token_ids.device
        if num_loops is None:
            num_loops = self.loop.mean_recurrence
        try:
            depth = torch.as_tensor(num_loops, device=device)
        except (TypeError, ValueError, RuntimeError):  # text, ragged lists, more than 64 bits
            depth = torch.zeros((), dtype=torch.int64, device=device)
        B, T = batch.num_requests, batch.num_tokens
        integer = not depth.is_floating_point() and depth.dtype != torch.bool
        if not integer or depth.shape not in ((), (B,), (T,)) or int(depth.min()) < 1:
            raise ValueError(
                f"num_loops must be an integer of at least 1, one for each of {B} requests, or one "
                f"for each of {T} tokens, got {num_loops!r}"
            )
        if kv is not None and int(depth.max()) > self.loop.deepest:
            raise ValueError(
                f"num_loops must be at most max_num_loops ({self.loop.deepest}), which the KV "
                f"slots are for, got {int(depth.max())}"
            )
        if depth.shape == (T,):
            return depth, True
        starts = torch.tensor(batch.query_start_host, device=device)
        return depth.expand(B).repeat_interleave(starts.diff(), output_size=T), False

    def encode(
        self, batch: ForwardBatch, kv: KVStorage | None, backend: Backend
    ) -> tuple[Tensor, Pass]:
        """e [T, D] of a batch, and the pass over all its rows."""
        cos, sin = self.rotary(batch.positions)
        p = Pass(batch.token_ids, cos, sin, (Group(None, batch, 0),), kv, backend)
        return self.prelude_pass(self.embed(batch.token_ids), p), p

    def core_pass(self, p: Pass, batch: ForwardBatch, iteration: int) -> Pass:
        """The pass `p` at an iteration, all rows alike."""
        return _at_slot(p, batch, self.loop.core_slot(iteration))

    def coda_pass(self, p: Pass, batch: ForwardBatch) -> Pass:
        return _at_slot(p, batch, self.loop.coda_slot)

    # -- weights

    @property
    def num_parameters(self) -> int:
        """Numbers the model holds; the tied embedding counts once."""
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def init_weights(self, seed: int, *, zero_out: bool = True) -> None:
        """The start of training: "scaled-zero", orthogonal.

        Matrices are orthogonal, scaled to a standard deviation of `state_std`; those that write to
        the residual stream are 0 (unless zero_out is False: then like the others), so that every
        block is the identity and the loop is its linear system. Value embeddings are N(0, 1).
        """
        generator = torch.Generator().manual_seed(seed)
        self.adapter.init_weights(generator, self.state_std)
        for name, parameter in self.named_parameters():
            if name.startswith("adapter."):
                continue
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            elif name.startswith("value_embeds."):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif name.endswith("ve_gate.weight"):
                values = torch.rand(parameter.shape, generator=generator)
                parameter.copy_((2 * values - 1) / math.sqrt(GATE_CHANNELS))  # torch's default
            elif zero_out and name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            else:
                parts = self._split_qkv(parameter) if "qkv_proj" in name else (parameter,)
                for part in parts:
                    part.copy_(_scaled_orthogonal(part.shape, self.state_std, generator))

    def _split_qkv(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Views of the rows of q, k and v."""
        H, K, C = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        return weight.split((H * C, K * C, K * C))

    def weight_parts(self) -> Iterator[WeightPart]:
        """Every tensor of a published checkpoint of this model, and where it belongs."""
        H, K, C = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = (("c_q", H * C), ("c_k", K * C), ("c_v", K * C))
        renamed = {"o_proj": "c_proj", "up_proj": "fc", "down_proj": "proj"}
        for parameter, tensor in self.named_parameters():
            name = parameter.replace("readout_proj", "C").replace("core.", "core_block.")
            if not name.startswith("value_embeds."):
                name = f"transformer.{name}"
            module = name.split(".")[-2]
            start = 0
            parts = (
                qkv if module == "qkv_proj" else ((renamed.get(module, module), tensor.shape[0]),)
            )
            for part, rows in parts:
                yield WeightPart(
                    name.replace(f".{module}.", f".{part}."), parameter, start, start + rows
                )
                start += rows


def turned_by(before: Tensor, after: Tensor) -> Tensor:
    """1 − cosine of two successive states [n, D] → float64 [n], at least 0: what early exit asks
    for. In float32 the cosine of a state with itself is off by 1e-7, to either side; the cosine of
    nothing with anything is 0."""
    return (1 - F.cosine_similarity(before.double(), after.double(), dim=-1)).clamp_min(0)


def _embedding(
    rows: int, width: int, dtype: torch.dtype, device: torch.device | str
) -> nn.Embedding:
    # Handed over, so that torch does not spend seconds on a random one.
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width, dtype=dtype, device=device))


def _at_slot(p: Pass, batch: ForwardBatch, slot: int) -> Pass:
    """`p` through another KV slot, everybody with keys and values of their own."""
    return replace(p, groups=(Group(None, batch, slot),), stand_ins=None)


def _scaled_orthogonal(shape: torch.Size, std: float, generator: torch.Generator) -> Tensor:
    """[out, in]: orthonormal rows or columns, times what makes the entries' deviation `std`."""
    matrix = nn.init.orthogonal_(torch.empty(shape), generator=generator)
    return matrix * (std * math.sqrt(max(shape)))
