"""The kernels of a decode step at a model's shapes, each with its reference and its cost.

Every group imports its own kernels, so that one that breaks takes no other with it. Numbers are
random, drawn anew for every copy of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minifer.config import ModelConfig
from minifer.execution.noise import vocabulary_noise
from minifer.perf.gpu.kernels import KernelCase

Cases = Iterator[KernelCase]
_BLOCK_SIZE = 16


class _Draw:
    """Random tensors on a device, reproducible."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *size: int, std: float = 1.0) -> Tensor:
        drawn = torch.empty(size, dtype=self.dtype, device=self.device)
        return drawn.normal_(0.0, std, generator=self.generator)


def groups(
    config: ModelConfig,
    device: torch.device,
    context: int = 4096,
    rows: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> Mapping[str, Callable[[], Cases]]:
    """Name → cases. context: of attention. rows: of small-batch products. Costs are
    those of bfloat16, whatever the dtype."""
    draw = _Draw(device, dtype)
    return {
        "gemv": partial(_gemv, config, draw),
        "norm_gemv": partial(_norm_gemv, config, draw, rows),
        "gate_up": partial(_gate_up, config, draw, rows),
        "quantized_gemv": partial(_quantized_gemv, config, draw),
        "gemm_small": partial(_gemm_small, config, draw, rows),
        "rms_norm": partial(_rms_norm, config, draw, rows),
        "rope_append": partial(_rope_append, config, draw, rows),
        "paged_decode": partial(_paged_decode, config, draw, context),
        "sample": partial(_sample, config, draw, rows),
        "inject": partial(_inject, config, draw, rows),
        "gemm": partial(_gemm, config, draw, 16 * rows),
        "flash_attention": partial(_flash_attention, config, draw, min(context, 2048)),
    }


def _products(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """[out, in] of the products of a layer and the head; the head first, it is the largest."""
    D, F, C = config.hidden_size, config.intermediate_size, config.head_dim
    H, K = config.num_heads, config.num_kv_heads
    return {
        "head": (config.vocab_size, D),
        "gate_up": (2 * F, D),
        "down": (D, F),
        "qkv": ((H + 2 * K) * C, D),
        "output": (D, H * C),
    }


def _gemv(config: ModelConfig, draw: _Draw) -> Cases:
    from minifer.kernels.gemv import gemv, gemv_cost, gemv_reference

    for name, (out, width) in _products(config).items():
        make = partial(_vector_and_weight, draw, 1, out, width)
        yield KernelCase(f"gemv {name}", make, gemv, gemv_reference, gemv_cost(width, out))


def _vector_and_weight(draw: _Draw, rows: int, out: int, width: int) -> tuple[Tensor, Tensor]:
    return draw(rows, width), draw(out, width, std=width**-0.5)


def _gemm_small(config: ModelConfig, draw: _Draw, rows: int) -> Cases:
    from minifer.kernels.gemm_small import gemm_small, gemm_small_cost, gemm_small_reference

    for name, (out, width) in _products(config).items():
        make = partial(_vector_and_weight, draw, rows, out, width)
        cost = gemm_small_cost(rows, width, out)
        yield KernelCase(
            f"gemm_small {name}, {rows} rows", make, gemm_small, gemm_small_reference, cost
        )


def _norm_gemv(config: ModelConfig, draw: _Draw, rows: int) -> Cases:
    from minifer.kernels.norm_gemv import norm_gemv, norm_gemv_cost, norm_gemv_reference

    for some in (1, rows):
        for name in ("head", "qkv"):
            out, width = _products(config)[name]
            yield KernelCase(
                f"norm_gemv {name}, {_count(some)}",
                partial(_normed, config, draw, some, out),
                norm_gemv,
                norm_gemv_reference,
                norm_gemv_cost(some, width, out),
            )


def _normed(config: ModelConfig, draw: _Draw, rows: int, out: int) -> tuple[object, ...]:
    """What a product with a norm before it takes."""
    D = config.hidden_size
    return draw(rows, D), draw(D), config.rms_norm_eps, draw(out, D, std=D**-0.5)


def _gate_up(config: ModelConfig, draw: _Draw, rows: int) -> Cases:
    from minifer.kernels.gate_up import gate_up, gate_up_cost, gate_up_reference

    D, F = config.hidden_size, config.intermediate_size
    for some in (1, rows):
        make = partial(_normed, config, draw, some, 2 * F)
        cost = gate_up_cost(some, D, F)
        yield KernelCase(f"gate_up, {_count(some)}", make, gate_up, gate_up_reference, cost)


def _count(rows: int) -> str:
    return f"{rows} row{'s' * (rows > 1)}"


def _quantized_gemv(config: ModelConfig, draw: _Draw) -> Cases:
    from minifer.kernels.quantization import quantize_int4, quantize_int8
    from minifer.kernels.quantized_gemv import (
        quantized_gemv,
        quantized_gemv_cost,
        quantized_gemv_reference,
    )

    for name in ("head", "down"):
        out, width = _products(config)[name]
        for bits, quantize, group in ((8, quantize_int8, None), (4, quantize_int4, 32)):

            def make(
                out: int = out, width: int = width, quantize: Callable[..., Any] = quantize
            ) -> tuple[object, ...]:
                x, weight = _vector_and_weight(draw, 1, out, width)
                return x, *quantize(weight)

            cost = quantized_gemv_cost(1, width, out, bits, group, zeros=bits == 4)
            yield KernelCase(
                f"int{bits} gemv {name}", make, quantized_gemv, quantized_gemv_reference, cost
            )


def _gemm(config: ModelConfig, draw: _Draw, rows: int) -> Cases:
    from minifer.kernels.gemm import gemm, gemm_cost, gemm_reference

    for name in ("gate_up", "down"):
        out, width = _products(config)[name]
        make = partial(_vector_and_weight, draw, rows, out, width)
        cost = gemm_cost(rows, width, out)
        yield KernelCase(f"gemm {name}, {rows} rows", make, gemm, gemm_reference, cost)


def _rms_norm(config: ModelConfig, draw: _Draw, rows: int) -> Cases:
    from minifer.kernels.rms_norm import rms_norm, rms_norm_cost, rms_norm_reference

    D, eps = config.hidden_size, config.rms_norm_eps
    yield KernelCase(
        f"rms_norm, {rows} rows",
        lambda: (draw(rows, D), draw(D), eps),
        rms_norm,
        rms_norm_reference,
        rms_norm_cost(rows, D),
    )


def _cache(config: ModelConfig, draw: _Draw, blocks: int) -> tuple[Tensor, Tensor]:
    size = (blocks, _BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    return draw(*size), draw(*size)


def _rope_append(config: ModelConfig, draw: _Draw, rows: int) -> Cases:
    from minifer.kernels.rope_append import rope_append, rope_append_cost, rope_append_reference

    H, K, C = config.num_heads, config.num_kv_heads, config.head_dim

    def make() -> tuple[Tensor, ...]:
        angles = draw(rows, C // 2).float()  # the table is float32
        slots = torch.arange(rows, device=draw.device) * 3
        cache = _cache(config, draw, -(-3 * rows // _BLOCK_SIZE))
        heads = draw(rows, H, C), draw(rows, K, C), draw(rows, K, C)
        return *heads, angles.cos(), angles.sin(), *cache, slots

    def outputs(query: Tensor, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        keys, values, slots = arguments[-3:]
        return query, keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots]

    yield KernelCase(
        f"rope_append, {rows} rows",
        make,
        rope_append,
        rope_append_reference,
        rope_append_cost(rows, H, K, C),
        outputs,
    )


def _paged_decode(config: ModelConfig, draw: _Draw, context: int) -> Cases:
    from minifer.kernels.compat import num_programs_at_once
    from minifer.kernels.paged_decode import (
        num_splits,
        paged_decode,
        paged_decode_cost,
        paged_decode_reference,
    )

    H, K, C = config.num_heads, config.num_kv_heads, config.head_dim
    for batch in (1, 16):
        splits = num_splits(batch, K, context, num_programs_at_once(draw.device))
        yield KernelCase(
            f"paged_decode, batch {batch}, context {context}",
            partial(_contexts, config, draw, batch, context),
            partial(paged_decode, scale=C**-0.5, num_splits=splits),
            partial(paged_decode_reference, scale=C**-0.5),
            paged_decode_cost([context] * batch, H, K, C, num_splits=splits),
        )


def _contexts(config: ModelConfig, draw: _Draw, batch: int, context: int) -> tuple[Tensor, ...]:
    """query [B, H, C], caches, tables in any order, lengths."""
    width = -(-context // _BLOCK_SIZE)
    order = torch.randperm(batch * width, generator=draw.generator, device=draw.device)
    lengths = torch.full((batch,), context, device=draw.device)
    query = draw(batch, config.num_heads, config.head_dim)
    return query, *_cache(config, draw, batch * width), order.view(batch, width), lengths


def _flash_attention(config: ModelConfig, draw: _Draw, tokens: int) -> Cases:
    from minifer.kernels.flash_attention import (
        flash_attention,
        flash_attention_cost,
        flash_attention_reference,
    )

    H, K, C = config.num_heads, config.num_kv_heads, config.head_dim

    def make() -> tuple[Tensor, ...]:
        _, keys, values, tables, lengths = _contexts(config, draw, 1, tokens)
        start = torch.tensor([0, tokens], device=draw.device)
        return draw(tokens, H, C), keys, values, tables, start, lengths

    yield KernelCase(
        f"flash_attention, {tokens} tokens",
        make,
        partial(flash_attention, scale=C**-0.5, max_query=tokens),
        partial(flash_attention_reference, scale=C**-0.5),
        flash_attention_cost([(tokens, tokens)], H, K, C),
    )


def _sample(config: ModelConfig, draw: _Draw, rows: int) -> Cases:
    from minifer.kernels.sample import sample, sample_cost, sample_reference

    V, device = config.vocab_size, draw.device

    def make() -> tuple[Tensor, ...]:
        logits = draw(rows, V, std=3.0).float()
        settings = (
            torch.full((rows,), 0.8, device=device),
            torch.full((rows,), 50, device=device),
            torch.full((rows,), 0.95, device=device),
        )
        return logits, *settings, torch.arange(rows, device=device), settings[1] - 50

    def reference(
        logits: Tensor, t: Tensor, k: Tensor, p: Tensor, seeds: Tensor, indices: Tensor
    ) -> Tensor:
        noise = vocabulary_noise(seeds.tolist(), indices.tolist(), V, device)
        return sample_reference(logits, t, k, p, noise)

    cost = sample_cost(rows, V, top_k=True, top_p=True)
    yield KernelCase(f"sample, {_count(rows)}", make, sample, reference, cost)


def _inject(config: ModelConfig, draw: _Draw, rows: int) -> Cases:
    from minifer.kernels.inject import inject, inject_cost, inject_reference

    D = config.hidden_size

    def make() -> tuple[Tensor, ...]:  # a decay in (0, 1), and in float32 like the term
        return draw(rows, D), draw(D).float().sigmoid(), draw(rows, D).float()

    cost = inject_cost(rows, D)
    yield KernelCase(f"inject, {_count(rows)}", make, inject, inject_reference, cost)
