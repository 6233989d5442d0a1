"""Tiny GGUF files, written the way llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

D, F, V = 256, 512, 48  # D: the K kinds pack 256 weights a block
HEADS, KV_HEADS, C = 4, 2, 64
QWEN3_C = 128  # what transformers takes it for, whatever a GGUF file says
LAYERS = 2
ARCHITECTURES = ("llama", "qwen2", "qwen3")


def hf_state(arch: str, seed: int = 0, tied: bool = True) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face names, as a checkpoint of this architecture has them."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int, scale: float = 0.08) -> np.ndarray:
        return rng.normal(0, scale, shape).astype(np.float32)

    width = QWEN3_C if arch == "qwen3" else C
    state = {"model.embed_tokens.weight": draw(V, D, scale=1.0)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            state[f"{layer}self_attn.{name}_proj.weight"] = draw(rows * width, D)
            if arch == "qwen2":
                state[f"{layer}self_attn.{name}_proj.bias"] = draw(rows * width, scale=1.0)
        state[f"{layer}self_attn.o_proj.weight"] = draw(D, HEADS * width)
        if arch == "qwen3":
            state[f"{layer}self_attn.q_norm.weight"] = 1 + draw(width, scale=0.5)
            state[f"{layer}self_attn.k_norm.weight"] = 1 + draw(width, scale=0.5)
        state[f"{layer}mlp.gate_proj.weight"] = draw(F, D)
        state[f"{layer}mlp.up_proj.weight"] = draw(F, D)
        state[f"{layer}mlp.down_proj.weight"] = draw(D, F)
        state[f"{layer}input_layernorm.weight"] = 1 + draw(D)
        state[f"{layer}post_attention_layernorm.weight"] = 1 + draw(D)
    state["model.norm.weight"] = 1 + draw(D)
    if not tied:
        state["lm_head.weight"] = draw(V, D)
    return state


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(arch: str, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights under GGUF names (the library's own table), Llama's q and k permuted."""
    kind = {name: arch_id for arch_id, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(kind, LAYERS)
    tensors = {}
    for name, value in state.items():
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            value = permute(value, HEADS if ".q_proj." in name else KV_HEADS)
        stem, suffix = name.rsplit(".", 1)
        tensors[f"{names.get_name(stem)}.{suffix}"] = value
    return tensors


def write_gguf(
    path: Path,
    arch: str = "llama",
    kind: str = "F32",
    tensors: dict[str, np.ndarray] | None = None,
    metadata: dict[str, object] | None = None,
    raw: dict[str, tuple[np.ndarray, str]] | None = None,
    **writer_options: int,
) -> Path:
    """Write a model. kind: how matrices are stored (vectors stay F32). metadata: keys after
    "{arch}." (None leaves a key out), or whole keys if they have a known first word. raw: tensors
    given as packed bytes [rows, bytes] and a kind."""
    if tensors is None:
        tensors = gguf_tensors(arch, hf_state(arch))
    values: dict[str, object] = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": D,
        "feed_forward_length": F,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "vocab_size": V,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if arch == "qwen3":
        values |= {"attention.key_length": QWEN3_C, "attention.value_length": QWEN3_C}
    writer = gguf.GGUFWriter(path, arch, **writer_options)
    for key, value in (values | (metadata or {})).items():
        if not key.startswith(("tokenizer.", "general.", "split.")):
            key = f"{arch}.{key}"
        add_value(writer, key, value)
    for name, value in tensors.items():
        if raw and name in raw:
            continue
        stored = gguf.GGMLQuantizationType[kind if value.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quantize(value, stored), raw_dtype=stored)
    for name, (packed, packed_kind) in (raw or {}).items():
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType[packed_kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """One metadata entry, its type taken from the Python value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
