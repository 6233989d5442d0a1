"""`config.json` of a Hugging Face model ↔ `ModelConfig`.

What the file asks for and minifer does not do is refused here, by name: a field that is read over
gives a model that runs and talks nonsense. Defaults of absent keys are those of transformers'
`configuration_<family>.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from minifer.config import ModelConfig, RopeConfig, RopeKind
from minifer.models.registry import FORMATS, check_architecture

_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DTYPES = ("float32", "bfloat16", "float16")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_SLIDING_WINDOW = 4096  # of Mistral and Qwen where the file names none


def config_from_hf(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Read a parsed `config.json`; `source` names it in errors.

    Raises `ValueError` naming the key, its value and what to do: a key that is missing; an
    architecture, activation, quantisation or rope kind that is not supported.
    """
    architecture = _architecture(raw, source)
    _refuse_unsupported(raw, source)
    heads = integer(raw, "num_attention_heads", source)
    layers = integer(raw, "num_hidden_layers", source)
    biased = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    attention_bias = biased and bool(raw.get("attention_bias"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=integer(raw, "vocab_size", source),
        hidden_size=integer(raw, "hidden_size", source),
        intermediate_size=integer(raw, "intermediate_size", source),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_num_kv_heads(raw, architecture, heads, source),
        head_dim=_head_dim(raw, architecture, heads, source),
        max_position_embeddings=integer(raw, "max_position_embeddings", source),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, source),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias")),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_windows=_sliding_windows(raw, architecture, layers, source),
        dtype=dtype_name(raw, source),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=token_ids(raw.get("eos_token_id")),
    )


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """An `eos_token_id` entry: one id, a list of them, or nothing."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def required(raw: Mapping[str, Any], key: str, source: str) -> Any:
    """A value that must be there. Raises `ValueError` when it is absent or null."""
    if raw.get(key) is None:
        raise ValueError(f"{source} has no {key!r}; download the file again or add the key")
    return raw[key]


def integer(raw: Mapping[str, Any], key: str, source: str) -> int:
    """An integer of at least 1. Raises `ValueError` naming the key."""
    value = required(raw, key, source)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} in {source} must be an integer of at least 1, got {value!r}")
    return value


def _architecture(raw: Mapping[str, Any], source: str) -> str:
    if raw.get("_class_name") and not raw.get("architectures"):
        raise ValueError(
            f"_class_name in {source} must be one of {', '.join(FORMATS)}, "
            f"got {raw['_class_name']!r}"
        )
    names = required(raw, "architectures", source)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ValueError(f"architectures in {source} must be a list of one name, got {names!r}")
    experts = next((raw[key] for key in _EXPERT_KEYS if raw.get(key)), 0)
    check_architecture(names[0], num_experts=experts)
    _refuse_own_format(names[0], source)
    return names[0]


def _refuse_own_format(architecture: str, source: str) -> None:
    for class_name, form in FORMATS.items():
        if form.architecture == architecture:
            raise ValueError(
                f"{architecture} is not described in Hugging Face's form: {source} must have "
                f'"_class_name": "{class_name}" and the fields of its authors'
            )


def _refuse_unsupported(raw: Mapping[str, Any], source: str) -> None:
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if quantization:
        # Old bitsandbytes files name no method, only load_in_4bit or load_in_8bit.
        method = quantization.get("quant_method", "bitsandbytes")
        raise ValueError(
            f"{source} describes weights quantised with {method!r} (quantization_config), which "
            "is not supported; use the unquantised checkpoint of this model or a GGUF file of it"
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(
            f"hidden_act in {source} must be 'silu', got {activation!r}; run this model with "
            "transformers or vLLM"
        )
    rope = _rope_parameters(raw, source)
    partial = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1
    if partial != 1:
        raise ValueError(
            f"partial_rotary_factor in {source} must be 1, got {partial!r}; run this model with "
            "transformers or vLLM"
        )


def _num_kv_heads(raw: Mapping[str, Any], architecture: str, heads: int, source: str) -> int:
    """Absent in the first Llama's files; null means one KV head a query head."""
    if architecture != "LlamaForCausalLM" and "num_key_value_heads" not in raw:
        return integer(raw, "num_key_value_heads", source)  # says that it is missing
    if raw.get("num_key_value_heads") is None:
        return heads
    return integer(raw, "num_key_value_heads", source)


def _head_dim(raw: Mapping[str, Any], architecture: str, heads: int, source: str) -> int:
    if raw.get("head_dim") is not None:
        return integer(raw, "head_dim", source)
    if architecture == "Qwen3ForCausalLM":
        return 128
    hidden = integer(raw, "hidden_size", source)
    if hidden % heads:
        raise ValueError(
            f"hidden_size in {source} must be a multiple of num_attention_heads where head_dim "
            f"is not given, got {hidden} and {heads}"
        )
    return hidden // heads


def dtype_name(raw: Mapping[str, Any], source: str) -> str:
    """`torch_dtype` is transformers 4's name of the key, `dtype` transformers 5's."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype in {source} must be one of {', '.join(_DTYPES)}, got {name!r}")
    return name


def _rope_parameters(raw: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The rope dictionary under either name; `rope_scaling` wins, as in transformers."""
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"the rope parameters in {source} must be an object, got {parameters!r}")
    nested = [key for key, value in parameters.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(
            f"{source} gives rope parameters by layer type ({', '.join(nested)}), which is not "
            "supported; run this model with transformers or vLLM"
        )
    return parameters


def _rope(raw: Mapping[str, Any], source: str) -> RopeConfig:
    parameters = _rope_parameters(raw, source)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in get_args(RopeKind):
        raise ValueError(
            f"rope_type {kind!r} in {source} is not supported; minifer knows "
            f"{', '.join(get_args(RopeKind))}. Run this model with transformers or vLLM"
        )
    theta = parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0
    values: dict[str, Any] = {"kind": kind, "theta": float(theta)}
    if kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = (
            raw.get("original_max_position_embeddings")
            or parameters.get("original_max_position_embeddings")
            or integer(raw, "max_position_embeddings", source)
        )
    if kind == "yarn":
        original = values["original_max_position_embeddings"]
        stretched = integer(raw, "max_position_embeddings", source) / original
        values["factor"] = float(parameters.get("factor") or stretched)
        values["truncate"] = bool(parameters.get("truncate", True))
        for key in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
            if parameters.get(key) is not None:
                values[key] = float(parameters[key])
    elif kind != "default":
        values["factor"] = float(required(parameters, "factor", f"the rope scaling in {source}"))
    if kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            values[key] = float(required(parameters, key, f"the rope scaling in {source}"))
    if parameters.get("freq_factors") is not None:  # minifer's own key, for what GGUF files carry
        values["freq_factors"] = tuple(float(f) for f in parameters["freq_factors"])
    return RopeConfig(**values)


def _sliding_windows(
    raw: Mapping[str, Any], architecture: str, layers: int, source: str
) -> tuple[int | None, ...]:
    """One window a layer, or () when every layer attends to everything."""
    if architecture == "LlamaForCausalLM":
        return ()
    window = raw.get("sliding_window", _SLIDING_WINDOW)
    if window is not None:
        window = integer({"sliding_window": window}, "sliding_window", source)
    first = 0  # the first layer with a window
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        window = window if raw.get("use_sliding_window") else None
        first = raw.get("max_window_layers", 28)
    sliding = [window is not None and i >= first for i in range(layers)]
    kinds = raw.get("layer_types")
    if kinds is not None:
        allowed = {"full_attention", "sliding_attention"} if window else {"full_attention"}
        if len(kinds) != layers or not set(kinds) <= allowed:
            raise ValueError(
                f"layer_types in {source} must be {layers} entries of "
                f"{', '.join(sorted(allowed))} (sliding_window is {window}), got {kinds!r}"
            )
        sliding = [kind == "sliding_attention" for kind in kinds]
    return tuple(window if slides else None for slides in sliding) if any(sliding) else ()


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a model, in the spelling that transformers 4 and 5 both read.

    Only `freq_factors` is a word of our own: other engines read over it.

    Raises `ValueError` when the architecture cannot express the configuration.
    """
    check_architecture(config.architecture)
    _refuse_own_format(config.architecture, "config.json")
    eos = list(config.eos_token_ids)
    raw: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": _MODEL_TYPES[config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "torch_dtype": config.dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos if len(eos) > 1 else (eos[0] if eos else None),
    }
    windows = {w for w in config.sliding_windows if w is not None}
    raw["sliding_window"] = min(windows, default=None)
    if config.architecture.startswith("Qwen"):
        raw["use_sliding_window"] = bool(windows)
        raw["layer_types"] = [
            "full_attention" if config.window(i) is None else "sliding_attention"
            for i in range(config.num_layers)
        ]
    back = config_from_hf(raw)
    if back != config:
        fields = [name for name in vars(config) if getattr(config, name) != getattr(back, name)]
        raise ValueError(
            f"{config.architecture} cannot express {', '.join(fields)} of this configuration; "
            "write it under an architecture that can"
        )
    return raw


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope == RopeConfig(theta=rope.theta):
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    keys = {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
        "yarn": (
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    }[rope.kind]
    for key in (*keys, "freq_factors"):
        if getattr(rope, key) is not None:
            scaling[key] = getattr(rope, key)
    return scaling
