"""The decoder-only transformer: Llama, Mistral, Qwen2 and Qwen3 are settings of one class.

The way of a token through a layer, with the shapes on the flat token axis T::

    x ─┬─ rms_norm ─ qkv_proj ─ (q, k norm) ─ rope ─ attention ─ o_proj ─ + ─┬─ rms_norm ─ …
       └──────────────────────────────────────────────────────────────────┘ └─ residual
    [T, D]           [T, (H + 2 K) · C]       q [T, H, C], k and v [T, K, C]

q, k and v are one matrix (`qkv_proj`), and so are the two halves of the MLP (`gate_up_proj`): one
wide product reads its input once. Checkpoints hold the parts; `weight_parts` says which rows of
which parameter each tensor of a checkpoint is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifer.config import ModelConfig
from minifer.models.rope import RotaryEmbedding
from minifer.weights.quantized import QuantizedWeight, Weight, quantized_weights

if TYPE_CHECKING:  # a model is handed these; it builds none of them
    from minifer.execution.backend import Backend
    from minifer.execution.forward_batch import ForwardBatch
    from minifer.execution.kv_storage import KVStorage


@dataclass(frozen=True)
class WeightPart:
    """A tensor of a checkpoint is rows start … stop of a parameter (all of them if unfused)."""

    name: str  # in a Hugging Face checkpoint
    parameter: str  # in `model.named_parameters()`
    start: int
    stop: int


class Linear(nn.Module):
    """weight [out, in] and an optional bias [out], uninitialised; `set_weight` puts in codes."""

    weight: nn.Parameter | QuantizedWeight

    def __init__(
        self, width: int, out: int, bias: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor, backend: Backend, residual: Tensor | None = None) -> Tensor:
        """x [T, in] → [T, out], added to residual [T, out] if there is one."""
        return backend.linear(x, self.weight, self.bias, residual)


class RMSNorm(nn.Module):
    """weight [D], uninitialised (https://arxiv.org/abs/1910.07467)."""

    def __init__(
        self, width: int, eps: float, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor, backend: Backend) -> Tensor:
        """x [..., D] → [..., D]."""
        return backend.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention over the KV cache: H query heads share K key and value heads."""

    def __init__(
        self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        H, K, C = config.num_heads, config.num_kv_heads, config.head_dim
        self.heads = (H, K, K)
        self.head_dim = C
        self.layer = layer
        self.scale = C**-0.5
        self.window = config.window(layer)
        self.qkv_proj = Linear(config.hidden_size, (H + 2 * K) * C, config.qkv_bias, dtype, device)
        self.o_proj = Linear(H * C, config.hidden_size, config.output_bias, dtype, device)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(C, config.rms_norm_eps, dtype, device)
            self.k_norm = RMSNorm(C, config.rms_norm_eps, dtype, device)

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        kv: KVStorage | None,
        backend: Backend,
    ) -> Tensor:
        """x [T, D] → x + attention(norm(x)) [T, D]; cos, sin [T, C/2]."""
        qkv_proj = self.qkv_proj
        qkv = backend.norm_linear(x, norm.weight, norm.eps, qkv_proj.weight, qkv_proj.bias)
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, backend), self.k_norm(k, backend)
        slot, scale = self.layer, self.scale
        out = backend.attention(q, k, v, cos, sin, kv, slot, batch, scale, self.window)
        return self.o_proj(out.flatten(1), backend, residual=x)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)) (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        D, hidden = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(D, 2 * hidden, config.mlp_bias, dtype, device)
        self.down_proj = Linear(hidden, D, config.mlp_bias, dtype, device)

    def forward(self, x: Tensor, norm: RMSNorm, backend: Backend) -> Tensor:
        """x [T, D] → x + MLP(norm(x)) [T, D]."""
        gate_up = self.gate_up_proj
        hidden = backend.norm_gate_up(x, norm.weight, norm.eps, gate_up.weight, gate_up.bias)
        return self.down_proj(hidden, backend, residual=x)


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to what flows past it."""

    def __init__(
        self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(D, eps, dtype, device)
        self.self_attn = Attention(config, layer, dtype, device)
        self.post_attention_layernorm = RMSNorm(D, eps, dtype, device)
        self.mlp = MLP(config, dtype, device)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        kv: KVStorage | None,
        backend: Backend,
    ) -> Tensor:
        """x [T, D] → [T, D]."""
        x = self.self_attn(x, self.input_layernorm, cos, sin, batch, kv, backend)
        return self.mlp(x, self.post_attention_layernorm, backend)


class Transformer(nn.Module):
    """A model with uninitialised weights: `load_weights` or `init_weights` fills them.

    The KV slot a layer writes is its index. With `tie_word_embeddings` there is no `lm_head`; the
    embedding is the head.
    """

    embedding_name = "model.embed_tokens.weight"  # in a checkpoint

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if config.loop is not None:
            raise ValueError(
                f"loop must be None for {config.architecture}, which runs each layer once; "
                f"got {config.loop}"
            )
        V, D = config.vocab_size, config.hidden_size
        self.config = config
        # Handed over, so that torch does not spend seconds on a random one.
        embedding = torch.empty(V, D, dtype=dtype, device=device)
        self.embed_tokens = nn.Embedding(V, D, _weight=embedding)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, dtype, device) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(D, config.rms_norm_eps, dtype, device)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        self.lm_head = None if config.tie_word_embeddings else Linear(D, V, False, dtype, device)

    def forward(self, batch: ForwardBatch, kv: KVStorage | None, backend: Backend) -> Tensor:
        """Hidden states [T, D] after the final norm. kv is None for back ends without a cache."""
        cos, sin = self.rotary(batch.positions)
        x = self.embed(batch.token_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, batch, kv, backend)
        return self.norm(x, backend)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] → [T, D]."""
        table: Weight = self.embed_tokens.weight
        if isinstance(table, QuantizedWeight):
            return table.rows(token_ids, self.norm.weight.dtype)
        return F.embedding(token_ids, table)

    def logits(self, hidden: Tensor, backend: Backend, float32: bool = False) -> Tensor:
        """hidden [R, D] → float32 logits [R, V].

        float32: multiply in float32. A bfloat16 product rounds logits to 8 bits, so that the two
        likeliest tokens often tie; the price is a float32 copy of the head, made each time.
        """
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        if float32:
            hidden = hidden.float()
            weight = weight if isinstance(weight, QuantizedWeight) else weight.float()
        return backend.linear(hidden, weight, None).float()

    @property
    def num_parameters(self) -> int:
        """Numbers the model holds; a tied embedding counts once."""
        dense = sum(p.numel() for p in self.parameters())
        return dense + sum(weight.numel() for _, weight in quantized_weights(self))

    @torch.no_grad()
    def init_weights(self, seed: int, std: float = 0.02) -> None:
        """Matrices from N(0, std²), norms 1, biases 0: the start of training, and of tests."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Drawn on the CPU in float32: the same numbers on every device.
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def weight_parts(self) -> Iterator[WeightPart]:
        """Every tensor a Hugging Face checkpoint of this model holds, and where it belongs."""
        H, K, C = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        F_ = self.config.intermediate_size
        fused = {
            "qkv_proj": (("q_proj", H * C), ("k_proj", K * C), ("v_proj", K * C)),
            "gate_up_proj": (("gate_proj", F_), ("up_proj", F_)),
        }
        for parameter, tensor in self.named_parameters():
            name = parameter if parameter.startswith("lm_head.") else f"model.{parameter}"
            module = parameter.split(".")[-2]
            start = 0
            for part, rows in fused.get(module, ((module, tensor.shape[0]),)):
                yield WeightPart(name.replace(module, part), parameter, start, start + rows)
                start += rows
