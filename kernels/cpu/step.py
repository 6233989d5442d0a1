"""Python's side of `step.cpp`: the structures of `abi.h`, and one call a step."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minifer.config import ModelConfig
from minifer.kernels.cpu.pack import BF16, F32, Panels

_pointer, _int32, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("data", _pointer),
        ("bias", _pointer),
        ("rows", _int32),
        ("columns", _int32),
        ("kind", _int32),
        ("pad", _int32),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, _Matrix) for name in ("qkv", "o", "gate_up", "down")),
        ("keys", _pointer),
        ("values", _pointer),
        ("window", ctypes.c_int64),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *(
            (name, _int32)
            for name in (
                "layers", "width", "heads", "kv_heads", "hidden", "vocabulary",
                "block_size", "cache_kind", "round",
            )
        ),
        *((name, _float) for name in ("eps", "scale", "rope_scaling")),
        ("threads", _int32),
        ("layer", ctypes.POINTER(_Layer)),
        ("final_norm", _pointer),
        ("head", _Matrix),
        ("inv_freq", _pointer),
    ]  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _int32) for name in ("rows", "table_width", "num_logits", "pad")),
        *(
            (name, _pointer)
            for name in (
                "x", "tokens", "positions", "slots", "tables", "table_of", "logits_rows",
                "logits", "best", "best_logit", "seconds",
            )
        ),
    ]  # fmt: skip


PHASES = ("qkv", "append", "attention", "output", "gate_up", "down", "head")


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Norms are float32 [D] and [C], those of heads None where the model has none."""

    attention_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: Panels
    o: Panels
    gate_up: Panels  # interleaved
    down: Panels
    window: int | None


@dataclass(frozen=True)
class Weights:
    layers: Sequence[LayerWeights]
    final_norm: Tensor
    head: Panels
    inv_freq: Tensor
    rope_scaling: float

    @property
    def nbytes(self) -> int:
        """Of the panels, each of which a step reads once."""
        return sum(matrix.data.nbytes for matrix in self.matrices)

    @property
    def matrices(self) -> list[Panels]:
        """All of them, in no order."""
        return [self.head, *(m for x in self.layers for m in (x.qkv, x.o, x.gate_up, x.down))]


@dataclass(frozen=True)
class Rows:
    """The rows of a step: its tokens, the position, slot and block table of each, and the rows
    whose logits are wanted, rising.

    tokens: embedded, float32 [T, D] (overwritten), or as ids where the head is the embedding.

    Plain integers, not tensors: a step of 2 ms has no time for a dozen operations of torch.
    """

    tokens: Tensor | Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    tables: Sequence[Sequence[int]]
    logits_rows: Sequence[int]


class CpuStep:
    """A model whose steps are one call each.

    With bfloat16 keys and values, vectors are rounded to bfloat16 where they meet a matrix, but on
    a CPU that has no instructions for it they stay float32.

    library: of `build.load`, for this head_dim and query group. keys, values: of each layer,
    [N, P, K, C] in float32 or bfloat16. vocabulary: logits a row. eps: of the norms.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        weights: Weights,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> None:
        self._library = library
        self._held = (weights, keys, values)  # the addresses below are theirs
        self._vocabulary = config.vocab_size
        dtype = keys[0].dtype
        if dtype == torch.bfloat16 and any(m.kind == F32 for m in weights.matrices):
            raise ValueError("bfloat16 vectors meet no float32 panels: pack with dense=bfloat16")
        self._layers = (_Layer * len(weights.layers))(
            *(
                _Layer(
                    _address(layer.attention_norm),
                    _address(layer.mlp_norm),
                    _address(layer.q_norm),
                    _address(layer.k_norm),
                    _matrix(layer.qkv),
                    _matrix(layer.o),
                    _matrix(layer.gate_up),
                    _matrix(layer.down),
                    _address(k),
                    _address(v),
                    layer.window or 0,
                )
                for layer, k, v in zip(weights.layers, keys, values, strict=True)
            )
        )
        kind = F32 if dtype == torch.float32 else BF16
        self._model = _Model(
            layers=len(weights.layers),
            width=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            hidden=config.intermediate_size,
            vocabulary=config.vocab_size,
            block_size=keys[0].shape[1],
            cache_kind=kind,
            round=kind == BF16,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            rope_scaling=weights.rope_scaling,
            layer=self._layers,
            final_norm=_address(weights.final_norm),
            head=_matrix(weights.head),
            inv_freq=_address(weights.inv_freq),
        )

    def logits(self, rows: Rows) -> Tensor:
        """float32 [R, V]."""
        logits = torch.empty(len(rows.logits_rows), self._vocabulary)
        self._run(rows, logits)
        return logits

    def largest(self, rows: Rows, seconds: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The lowest index of the largest logit int64 [R], and that logit float32 [R] (NaN where
        any logit is). seconds: float64 [PHASES], to which the time of each phase is added."""
        return self._run(rows, None, seconds)

    def _run(
        self, rows: Rows, logits: Tensor | None, seconds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        count = len(rows.logits_rows)
        if count > len(rows.positions):
            raise ValueError(f"logits_rows must name each row once, got {count} of them")
        best, best_logit = torch.empty(count, dtype=torch.int64), torch.empty(count)
        positions, slots = array("q", rows.positions), array("q", rows.slots)
        tables, width, table_of = _tables(rows.tables)
        if isinstance(rows.tokens, Tensor):
            x, token_ids = rows.tokens, None
        else:
            if min(rows.tokens) < 0 or max(rows.tokens) >= self._vocabulary:
                raise IndexError(
                    f"tokens must be 0 … {self._vocabulary - 1}, got {list(rows.tokens)}"
                )
            x = torch.empty(len(rows.tokens), self._model.width)
            token_ids = array("q", rows.tokens)
        wanted = array("i", rows.logits_rows)
        step = _Step(
            rows=len(positions),
            table_width=width,
            num_logits=count,
            x=_address(x),
            tokens=None if token_ids is None else token_ids.buffer_info()[0],
            positions=positions.buffer_info()[0],
            slots=slots.buffer_info()[0],
            tables=tables.buffer_info()[0],
            table_of=table_of.buffer_info()[0],
            logits_rows=wanted.buffer_info()[0],
            logits=_address(logits),
            best=_address(best),
            best_logit=_address(best_logit),
            seconds=_address(seconds),
        )
        self._model.threads = torch.get_num_threads()
        if self._library.minifer_step(ctypes.byref(self._model), ctypes.byref(step)):
            raise MemoryError(f"no memory for a step of {step.rows} rows")
        return best, best_logit


def _tables(tables: Sequence[Sequence[int]]) -> tuple[array[int], int, array[int]]:
    """Different tables as int32, one after the other; the width of each; and each row's number.

    Rows that follow one another with one and the same table are of one request.
    """
    different: list[Sequence[int]] = []
    table_of = array("i")
    for table in tables:
        if not different or different[-1] is not table:
            different.append(table)
        table_of.append(len(different) - 1)
    width = max(map(len, different), default=0)
    flat = array("i")
    for table in different:
        flat.extend(table)
        flat.extend([0] * (width - len(table)))
    return flat, width, table_of


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return tensor.data_ptr()


def _matrix(panels: Panels) -> _Matrix:
    data, bias = _address(panels.data), _address(panels.bias)
    return _Matrix(data, bias, panels.rows, panels.columns, panels.kind)


def read_all(library: ctypes.CDLL, tensor: Tensor) -> int:
    """Read a tensor's memory and nothing else, with torch's number of threads: what the step's own
    way of reading reaches at best. Returns the sum of its 32-bit words modulo 2³², of which the
    last is filled up with zeros. The fastest where it begins at a multiple of 64 bytes."""
    library.minifer_read.restype = ctypes.c_int64
    pointer, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(tensor.nbytes)
    return int(library.minifer_read(pointer, size, ctypes.c_int32(torch.get_num_threads())))
