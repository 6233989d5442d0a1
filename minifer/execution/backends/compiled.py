"""backend="compiled": a step is one call of C++ that this machine's compiler made.

Whatever the rows of a step are (decodes, drafts to be verified, a prompt), they go through
`minifer.kernels.cpu` in one launch. Where a CPU has matrix units (AMX), torch's library uses them
and these kernels do not: there, steps of more than `MAX_ROWS` tokens take the ordinary path
through the model in torch. Both write the same KV storage, so a request may take either.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from minifer.config import EngineConfig, ModelConfig
from minifer.execution.runner import ModelRunner
from minifer.execution.sampler import Picked
from minifer.kernels.cpu.build import CompilerError, has_matrix_units, load
from minifer.kernels.cpu.memory import Arena, prefer_large_pages
from minifer.kernels.cpu.pack import Panels, interleave, pack, packed_bytes
from minifer.kernels.cpu.step import CpuStep, LayerWeights, Rows, Weights
from minifer.kv.step_input import StepInput
from minifer.models.transformer import RMSNorm, Transformer
from minifer.weights.quantized import QuantizedWeight
from minifer.weights.resolve import read_config

MAX_ROWS = 128 if has_matrix_units() else sys.maxsize


class CompiledRunner(ModelRunner):
    """Steps in one call each; see above for those that are not.

    It keeps a second copy of the weights, in panels. Vectors are rounded to the model's dtype
    where they meet a matrix (on a CPU without instructions for bfloat16 they stay float32). Sums
    are float32 and never rounded, those of the logits included: so `float32_logits` changes
    nothing in such a step. Use `compiled_runner` to make one.
    """

    def __init__(
        self, model: Any, config: ModelConfig, engine: EngineConfig, num_blocks: int, library: Any
    ) -> None:
        super().__init__(model, config, engine, num_blocks)
        for cache in (*self.kv.keys, *self.kv.values):
            prefer_large_pages(cache)
        self._step = CpuStep(library, config, weights_of(model), self.kv.keys, self.kv.values)

    def _logits(self, step: StepInput) -> Tensor | Picked:
        if len(step.token_ids) > MAX_ROWS:
            return super()._logits(step)
        rows = self._rows(step)
        return Picked(*self._step.largest(rows)) if step.greedy else self._step.logits(rows)

    def _rows(self, step: StepInput) -> Rows:
        """A row is a token; each brings the block table of its request."""
        tables = [
            table
            for table, (start, end) in zip(
                step.block_tables, pairwise(step.query_start), strict=True
            )
            for _ in range(end - start)
        ]
        tokens: Tensor | list[int] = step.token_ids
        if self.model.lm_head is not None:  # the table is not among the panels
            tokens = self.model.embed(torch.tensor(tokens)).float()
        return Rows(tokens, step.positions, step.slot_mapping, tables, step.logits_rows)


def compiled_runner(
    model: Any, config: ModelConfig, engine: EngineConfig, num_blocks: int
) -> ModelRunner:
    """The runner, or that of torch with a warning where there is no compiler.

    Raises `ValueError` for a model that the compiled step does not run.
    """
    parameter = next(model.parameters())
    _check_place(str(parameter.device), str(parameter.dtype).removeprefix("torch."))
    _check_model(config)
    if not isinstance(model, Transformer):
        raise ValueError(
            f'backend="compiled" runs plain transformers, got {type(model).__name__}: use '
            'backend="torch"'
        )
    try:
        library = _library(config)
    except CompilerError as error:
        # Told at this very line, so that Python says it once a process.
        warnings.warn(f"{error}; running in torch, slower", RuntimeWarning, stacklevel=1)
        return ModelRunner(model, config, engine, num_blocks)
    return CompiledRunner(model, config, engine, num_blocks, library)


def prepare_compiled(engine: EngineConfig) -> None:
    """Before any weights are read: refuse what cannot run, and let the compiler run.

    Raises `ValueError`. That there is no compiler, `compiled_runner` tells.
    """
    device, dtype = engine.device, engine.dtype
    if device == "auto" and torch.cuda.is_available():
        raise ValueError(
            'backend="compiled" runs on a CPU, and device="auto" takes the GPU that is here: use '
            'device="cpu"'
        )
    _check_place("cpu" if device == "auto" else device, "float32" if dtype == "auto" else dtype)
    for name in (engine.model, engine.speculative_model):
        if name is not None:
            config = read_config(str(name))
            _check_model(config)
            with suppress(CompilerError):
                _library(config)


def _library(config: ModelConfig) -> ctypes.CDLL:
    return load(config.head_dim, config.num_heads // config.num_kv_heads)


def _check_place(device: str, dtype: str) -> None:
    if not device.startswith("cpu"):
        raise ValueError(
            f'backend="compiled" runs on a CPU, got device={device}: use backend="triton" or '
            '"megakernel" on a GPU'
        )
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f'backend="compiled" needs dtype float32 or bfloat16, got {dtype}')


def _check_model(config: ModelConfig) -> None:
    if config.loop is not None:
        raise ValueError(
            'backend="compiled" runs each layer once, and this is a loop model: use backend="torch"'
        )
    if config.head_dim % 16:
        raise ValueError(
            f'backend="compiled" needs a head_dim that is a multiple of 16, got {config.head_dim}: '
            'use backend="torch"'
        )


def weights_of(model: Transformer) -> Weights:
    """The model's weights in panels, one after the other in the order a step reads them."""
    dense = model.norm.weight.dtype  # of the vectors
    arena = Arena(sum(packed_bytes(weight, dense) for weight in _matrices(model)))

    def held(panels: Panels) -> Panels:
        return replace(panels, data=arena.hold(panels.data))

    decoders: list[Any] = list(model.layers)
    layers = []
    for layer in decoders:
        attention, mlp = layer.self_attn, layer.mlp
        gate, up = _halves(mlp.gate_up_proj)
        layers.append(
            LayerWeights(
                _norm(layer.input_layernorm),
                _norm(layer.post_attention_layernorm),
                _norm(attention.q_norm),
                _norm(attention.k_norm),
                held(pack(attention.qkv_proj.weight, attention.qkv_proj.bias, dense)),
                held(pack(attention.o_proj.weight, attention.o_proj.bias, dense)),
                held(interleave(pack(*gate, dense), pack(*up, dense))),
                held(pack(mlp.down_proj.weight, mlp.down_proj.bias, dense)),
                attention.window,
            )
        )
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    rotary = model.rotary
    return Weights(
        layers,
        _norm(model.norm),
        held(pack(head.weight, dense=dense)),
        rotary.inv_freq.contiguous(),
        rotary.scaling,
    )


def _matrices(model: Transformer) -> Iterator[Tensor | QuantizedWeight]:
    decoders: list[Any] = list(model.layers)
    for layer in decoders:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.qkv_proj, attention.o_proj, mlp.down_proj):
            yield linear.weight
        for weight, _ in _halves(mlp.gate_up_proj):
            yield weight
    head: Any = model.embed_tokens if model.lm_head is None else model.lm_head
    yield head.weight


def _norm(norm: RMSNorm | None) -> Any:
    return None if norm is None else norm.weight.detach().float().contiguous()


def _halves(linear: Any) -> list[tuple[Any, Tensor | None]]:
    """gate and up: (weight, bias) of the first and the second half of the rows."""
    rows = linear.weight.shape[0] // 2
    found = []
    for part in (slice(0, rows), slice(rows, None)):
        weight, bias = linear.weight, linear.bias
        if isinstance(weight, QuantizedWeight):
            half: Any = weight.map_rows(itemgetter(part))
        else:
            half = weight[part]
        found.append((half, None if bias is None else bias[part]))
    return found
