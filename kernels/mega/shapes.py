"""Models by name, which of them a megakernel can decode, and how it splits their contexts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from minifer.config import ModelConfig, RopeConfig
from minifer.kernels.mega.isa import DecodeShape

# Shapes only, for schedules, models of time and benchmarks with random weights. Sources: each
# model's config.json on the Hugging Face hub; minifer-tiny is bundled.
MODELS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "llama-1b": ModelConfig(  # meta-llama/Llama-3.2-1B
            architecture="LlamaForCausalLM",
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope=RopeConfig("llama3", 500000.0, 32.0, 8192),
            tie_word_embeddings=True,
            dtype="bfloat16",
        ),
        "smollm2-135m": ModelConfig(  # HuggingFaceTB/SmolLM2-135M
            architecture="LlamaForCausalLM",
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope=RopeConfig("default", 100000.0),
            tie_word_embeddings=True,
            dtype="bfloat16",
        ),
        "minifer-tiny": ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=288,
            hidden_size=192,
            intermediate_size=384,
            num_layers=4,
            num_heads=12,
            num_kv_heads=6,
            head_dim=16,
            max_position_embeddings=1024,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            dtype="bfloat16",
        ),
    }
)


SPLIT_TOKENS, MAX_SPLITS = 256, 32
PIECES = 4  # of attention, at most, for each program


def kv_splits(context: int, batch: int, kv_heads: int, programs: int) -> int:
    """S, parts that contexts of up to `context` tokens are cut into: a power of two, 1 to 32.

    One for 256 tokens of context, rounded up, as HazyResearch/Megakernels cut theirs (a power of
    two, because a kernel is compiled for each). But no more than make 4 pieces of attention
    (request, KV head, split) for each program: beyond that programs only queue, and each piece
    costs an instruction. 4 and not 1, so that the last, partly empty round of pieces is a short
    one; a guess, not measured. Raises `ValueError` for a number below 1.
    """
    given = {"context": context, "batch": batch, "kv_heads": kv_heads, "programs": programs}
    for name, number in given.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    splits = 1
    while splits < MAX_SPLITS and SPLIT_TOKENS * splits < context:
        if 2 * splits * batch * kv_heads > PIECES * programs:
            break
        splits *= 2
    return splits


def decode_shape(
    config: ModelConfig, batch: int = 1, splits: int = 1, tile: int = 16
) -> DecodeShape:
    """The decode step of a model. Raises `ValueError` for a model a megakernel cannot run, naming
    the field that it lacks an instruction for."""
    if config.loop is not None:
        raise ValueError(
            "the megakernel runs each layer once and has no instruction for the core of a loop "
            'model: use backend="triton" or "torch"'
        )
    wanted = {
        "qkv_bias": config.qkv_bias,
        "output_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "qk_norm": config.qk_norm,
        "sliding_windows": any(w is not None for w in config.sliding_windows),
    }
    for name, value in wanted.items():
        if value:
            raise ValueError(
                f"the megakernel has no instruction for {name}, which this model needs: use "
                'backend="triton" or "torch"'
            )
    return DecodeShape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        batch=batch,
        splits=splits,
        tile=tile,
    )
