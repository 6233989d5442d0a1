"""GGUF files: metadata to `ModelConfig`, quantised blocks to tensors with Hugging Face names.

The format is llama.cpp's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Reading and
dequantising are the `gguf` library's; what is decided here is which files are understood. A file
whose meaning would be lost is refused by name: it would load and talk nonsense.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minifer.config import ModelConfig, RopeConfig
from minifer.models.registry import check_architecture
from minifer.weights.loading import Fill, fill_model
from minifer.weights.quantized import QuantizedWeight, Weight, pack_nibbles

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral files say llama, too
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

CODE_KINDS = ("Q4_0", "Q4_1", "Q8_0")  # blocks of 32 whose codes a `QuantizedWeight` can hold

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Keys that change what a layer computes, with the value that changes nothing.
_UNSUPPORTED_KEYS = {
    "attention.sliding_window": 0,
    "attention.scale": 0,
    "logit_scale": 0,
    "embedding_scale": 0,
    "residual_scale": 0,
    "rope.scaling.yarn_log_multiplier": 0,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
}
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GGUFFile:
    """Metadata and tensors of a GGUF file, or of all parts of a split one.

    tensors: name → the library's record (`data`, `tensor_type`). Nothing is dequantised yet.
    Raises `ValueError`: no such file, a part is missing, not a GGUF file, or cut short.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._gguf = _import_gguf()
        self.tensors: dict[str, Any] = {}
        self._fields: dict[str, Any] = {}
        for file in _parts(self.path):
            reader = self._open(file)
            if not self._fields:
                self._fields = reader.fields  # the first part holds the model's metadata
            self.tensors.update((tensor.name, tensor) for tensor in reader.tensors)
        count = self.get("split.tensors.count")
        if count is not None and count != len(self.tensors):
            raise ValueError(
                f"{self.path} belongs to a split model of {count} tensors, but {len(self.tensors)} "
                "were found: keep all parts together under names like model-00001-of-00002.gguf"
            )

    def _open(self, file: Path) -> Any:
        if not file.is_file():
            raise ValueError(f"{file} does not exist; check the path, and that no part is missing")
        try:
            return _reader(self._gguf)(file)
        except (ValueError, IndexError, KeyError) as error:  # whatever a torn file leads it to
            raise ValueError(
                f"{file} is not a readable GGUF file ({error}); download it again"
            ) from error

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as a Python value, `default` when the file has none."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """A metadata value that must be there; raises `ValueError` naming it."""
        if key not in self._fields:
            raise ValueError(f"{self.path} has no metadata key {key!r}: the file is incomplete")
        return self.get(key)

    def dequantize(self, name: str) -> Tensor:
        """A tensor as float32, in torch's order of dimensions. Refuses unknown kinds by name."""
        tensor = self.tensors[name]
        kind = tensor.tensor_type.name
        if kind not in KINDS:
            raise ValueError(
                f"tensor {name} of {self.path} is stored as {kind}; the supported kinds are "
                f"{', '.join(KINDS)}"
            )
        return torch.tensor(self._gguf.dequantize(tensor.data, tensor.tensor_type))

    def codes(self, name: str) -> QuantizedWeight | None:
        """A matrix as its codes and scales, to the bit; None if it is of no kind of `CODE_KINDS`.

        A block of 32 columns (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h):
        float16 d, Q4_1 float16 m, then 16 bytes whose low nibbles are the first 16 columns; Q8_0
        32 signed bytes. A weight is d · q + m, d · (q − 8) of Q4_0 and d · q.
        """
        tensor = self.tensors[name]
        kind = tensor.tensor_type.name
        if kind not in CODE_KINDS or len(tensor.shape) != 2:
            return None
        data = torch.tensor(tensor.data)  # uint8 [N, bytes of a row], a copy of mapped memory
        blocks = data.view(data.shape[0], -1, {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind])
        scale = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
        if kind == "Q8_0":
            return QuantizedWeight(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), scale)
        if kind == "Q4_1":
            zero = blocks[..., 2:4].contiguous().view(torch.float16)[..., 0]
        else:
            zero = scale.float() * -8  # exact, and in float16 unless it is too large for it
            zero = zero.half() if zero.abs().max() <= torch.finfo(torch.float16).max else zero
        nibbles = blocks[..., -16:]
        codes = torch.cat((nibbles & 15, nibbles >> 4), dim=-1).flatten(1)
        return QuantizedWeight(pack_nibbles(codes), scale, zero)


def load_gguf(
    path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> tuple[Any, ModelConfig]:
    """Build a model in `dtype` (None: `config.dtype`) from a GGUF file and fill it.

    Raises `ValueError` naming what is not supported: architecture, experts, metadata key, tensor
    or quantisation kind.
    """
    file = GGUFFile(path)
    config = config_from_gguf(file)
    return build_from_gguf(file, config, dtype, device), config


def build_from_gguf(
    file: GGUFFile,
    config: ModelConfig,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    fill: Fill = fill_model,
) -> Any:
    """`load_gguf` for a file that is already open. fill: makes the model, or a part of it."""
    return fill(config, dtype or getattr(torch, config.dtype), device, hf_tensors(file, config))


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The architecture a file describes. Raises `ValueError` naming what is not supported."""
    arch = file.require("general.architecture")
    if arch not in ARCHITECTURES and "moe" not in arch:
        raise ValueError(
            f"{file.path} holds architecture {arch!r}; supported are {', '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES.get(arch, arch)
    check_architecture(architecture, file.get(f"{arch}.expert_count", 0))
    for key, neutral in _UNSUPPORTED_KEYS.items():
        value = file.get(f"{arch}.{key}", neutral)
        if value != neutral:
            raise ValueError(f"{file.path} sets {arch}.{key}={value}, which is not supported")
    heads = _integer(file, f"{arch}.attention.head_count")
    hidden = _integer(file, f"{arch}.embedding_length")
    kv_heads = f"{arch}.attention.head_count_kv"
    has = file.tensors.__contains__
    vocabulary = file.tensors["token_embd.weight"].data.shape[0] if has("token_embd.weight") else 0
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=_integer(file, f"{arch}.feed_forward_length"),
        num_layers=_integer(file, f"{arch}.block_count"),
        num_heads=heads,
        num_kv_heads=_integer(file, kv_heads) if file.get(kv_heads) is not None else heads,
        head_dim=_head_dim(file, arch, hidden // heads),
        max_position_embeddings=_integer(file, f"{arch}.context_length"),
        rms_norm_eps=_exact(file.require(f"{arch}.attention.layer_norm_rms_epsilon")),
        rope=_rope(file, arch),
        tie_word_embeddings=not has("output.weight"),
        qkv_bias=has("blk.0.attn_q.bias"),
        output_bias=has("blk.0.attn_output.bias"),
        mlp_bias=has("blk.0.ffn_gate.bias"),
        qk_norm=arch == "qwen3",
        dtype=_dtype(file),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(file),
    )


def hf_tensors(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in float32 under its Hugging Face name, one at a time."""
    for name in file.tensors:
        if name != "rope_freqs.weight":  # that is in the configuration
            yield hf_name(name), _hf_rows(name, config)(file.dequantize(name))


def hf_codes(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, Weight]]:
    """`hf_tensors`, but matrices stored as one of `CODE_KINDS` keep their codes."""
    for name in file.tensors:
        if name == "rope_freqs.weight":
            continue
        change = _hf_rows(name, config)
        weight = file.codes(name)
        if weight is not None:
            yield hf_name(name), weight.map_rows(change)
        else:
            yield hf_name(name), change(file.dequantize(name))


def _hf_rows(name: str, config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """What puts the rows of a tensor into Hugging Face's order.

    llama.cpp's converter reorders the rows of Llama's query and key projections for a rotation
    of neighbouring pairs; here they go back to the half-split order. Qwen files keep the order.
    """
    permuted = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    heads = permuted.get(name.split(".")[-2])
    if config.architecture != "LlamaForCausalLM" or heads is None:
        return lambda rows: rows
    return lambda rows: unpermute(rows, heads)


def hf_name(name: str) -> str:
    """GGUF tensor name → Hugging Face name. Raises `ValueError` for a tensor nobody knows."""
    match name.split("."):
        case [part, kind] if part in _TENSORS:
            return f"{_TENSORS[part]}.{kind}"
        case ["blk", layer, part, kind] if part in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.{kind}"
    raise ValueError(f"GGUF tensor {name!r} is not part of a dense Llama, Qwen2 or Qwen3 model")


def unpermute(rows: Tensor, num_heads: int) -> Tensor:
    """Interleaved rotary pairs → half-split: rows [heads · C, …] of a weight or a bias.

    Within a head the file's rows are x0, x_{C/2}, x1, x_{C/2 + 1}, …; they become x0, x1, …
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [heads, C/2, 2, …]
    return pairs.transpose(1, 2).reshape(rows.shape)


def _rope(file: GGUFFile, arch: str) -> RopeConfig:
    """`rope.*` keys, and the frequency divisors of `rope_freqs.weight` (Llama 3)."""
    scaling = f"{arch}.rope.scaling"
    factor = file.get(f"{scaling}.factor", file.get(f"{arch}.rope.scale_linear", 1.0)) or 1.0
    kind = file.get(f"{scaling}.type", "linear")  # llama.cpp's rule for a factor without a type
    fields: dict[str, Any] = {"theta": _exact(file.get(f"{arch}.rope.freq_base", 10000.0))}
    if kind == "yarn":
        fields["kind"] = "yarn"
        fields["factor"] = _exact(factor)
        original = file.require(f"{scaling}.original_context_length")
        fields["original_max_position_embeddings"] = original
        for key in ("beta_fast", "beta_slow"):
            if (value := file.get(f"{scaling}.yarn_{key}")) is not None:
                fields[key] = _exact(value)
        # llama.cpp multiplies YaRN's own 0.1 ln(factor) + 1 by this; Hugging Face replaces it.
        if (attn_factor := file.get(f"{scaling}.attn_factor", 1.0)) != 1.0:
            own = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
            fields["attention_factor"] = attn_factor * own
    elif kind not in ("none", "linear"):
        raise ValueError(
            f"{file.path} sets {scaling}.type={kind!r}; supported are none, linear and yarn"
        )
    elif kind == "linear" and factor != 1.0:
        fields |= {"kind": "linear", "factor": _exact(factor)}
    if "rope_freqs.weight" in file.tensors:
        fields["freq_factors"] = tuple(file.dequantize("rope_freqs.weight").tolist())
    return RopeConfig(**fields)


def _exact(value: float) -> float:
    """The short decimal number that was stored as float32: 9.999999747378752e-06 → 1e-05."""
    return float(f"{value:.7g}")


def _head_dim(file: GGUFFile, arch: str, default: int) -> int:
    head_dim = file.get(f"{arch}.attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := file.get(f"{arch}.{key}", head_dim)) != head_dim:
            raise ValueError(
                f"{file.path} sets {arch}.{key}={value}; only the head dimension, {head_dim}, "
                "is supported"
            )
    return int(head_dim)


def _integer(file: GGUFFile, key: str) -> int:
    value = file.require(key)
    if not isinstance(value, int):
        raise ValueError(f"{file.path} sets {key}={value!r:.60}; one number for all layers needed")
    return value


def _dtype(file: GGUFFile) -> str:
    """The file's half precision, or float32: dequantised blocks need its 24 bits."""
    kinds = {tensor.tensor_type.name for tensor in file.tensors.values()} - {"F32"}
    halves = {("F16",): "float16", ("BF16",): "bfloat16"}
    return halves.get(tuple(kinds), "float32")


def _eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """End of text, of turn and of message, each once."""
    ids = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _parts(path: Path) -> list[Path]:
    """All files of a model: `path` itself, or its siblings when it is named as a part."""
    if (match := _SPLIT_NAME.fullmatch(path.name)) is None:
        return [path]
    stem, _, count = match.groups()
    return [path.with_name(f"{stem}-{i:05d}-of-{count}.gguf") for i in range(1, int(count) + 1)]


def _reader(gguf: Any) -> Any:
    """The library's reader, over a plain array: a vocabulary is a hundred thousand slices, and
    slices of np.memmap, as it would take them, cost three times as much."""

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(np.ndarray)

    return Reader


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ValueError(
            'reading GGUF files needs the gguf package: pip install "minifer[gguf]"'
        ) from error
    return gguf
