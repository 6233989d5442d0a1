"""`config.json` of a published Parcae ↔ `ModelConfig`.

What a field decides about the model is read or refused, by name; a field that says how it was
trained is passed over. Nothing that the model needs has a default here: a field that is missing is
an error, because a wrong guess gives a model that runs and talks nonsense.

Source: the fields are the authors' (https://github.com/sandyresearch/parcae).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minifer.config import ModelConfig, RopeConfig
from minifer.loops import LoopConfig
from minifer.weights.hf_config import dtype_name, integer, required, token_ids

CLASS_NAME = "ParcaeConfig"
ARCHITECTURE = "ParcaeForCausalLM"

# Our kind of injection → the authors'. No checkpoint with another than diagonal is published, so
# the name of the tensor of "linear" is ours.
_INJECTIONS = {"diagonal": "diagonal", "concat": "linear", "add": "add"}
_ROPE = {"use_rope": True, "rope_condense_ratio": 1}

# What the model is, where only one kind is implemented.
_MUST_BE: dict[str, Any] = {
    "block_class_name": "TransformerPreNormBlock",
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "BaseMLP",
    "nonlin_name": "ReLU2",
    "bias": False,
    "qk_bias": False,
    "qk_norm": True,
    "tie_embeddings": True,
}
# What may be absent: then it is off.
_MUST_BE_OFF: dict[str, tuple[Any, ...]] = {
    "logit_softcap": (None,),
    "clip_qkv": (None,),
    "debias_attention": (None, False),
    "center_attention": (None, False),
    "randomize_positions_from": (None,),
    "mup_model_scaling_factor": (None, 1),
}
MAX = sys.float_info.max
_STATE_INITS = ("like-init", "zero")


def config_from_parcae(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Read a parsed `config.json` of the published kind; `source` names it in errors.

    Four keys are this project's own, and none of them is published: `torch_dtype`,
    `bos_token_id`, `eos_token_id`, and `value_embeddings` (false: there are none).

    Raises `ValueError` naming the key and its value: a key that is missing, or one whose value is
    not implemented.
    """
    _refuse_unsupported(raw, source)
    width, heads = integer(raw, "n_embd", source), integer(raw, "num_attention_heads", source)
    if width % heads:
        raise ValueError(
            f"n_embd in {source} must be a multiple of num_attention_heads, got {width} and {heads}"
        )
    loop = LoopConfig(
        prelude=_count(raw, "n_layers_in_prelude", source),
        core=integer(raw, "n_layers_in_recurrent_block", source),
        coda=_count(raw, "n_layers_in_coda", source),
        mean_recurrence=integer(raw, "mean_recurrence", source),
        mean_backprop_depth=integer(raw, "mean_backprop_depth", source),
        injection=_injection(raw, source),
        prelude_norm=_flag(raw, "prelude_norm", source),
        value_embeddings=_flag({"value_embeddings": True, **raw}, "value_embeddings", source),
    )
    return ModelConfig(
        architecture=ARCHITECTURE,
        vocab_size=_vocabulary(raw, source),
        hidden_size=width,
        intermediate_size=integer(raw, "intermediate_size", source),
        num_layers=loop.num_layers,
        num_heads=heads,
        num_kv_heads=integer(raw, "num_key_value_heads", source),
        head_dim=width // heads,
        max_position_embeddings=integer(raw, "block_size", source),
        rms_norm_eps=_positive(raw, "norm_eps", source),
        rope=RopeConfig(theta=_rope_base(raw, source)),
        tie_word_embeddings=True,
        dtype=dtype_name(raw, source),
        bos_token_id=_bos(raw, source),
        eos_token_ids=_eos(raw, source),
        loop=loop,
    )


def config_to_parcae(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a loop model. An engine's choices (the deepest loop, the KV policy) are
    no part of a model and are left out. Raises `ValueError` for what the format cannot express."""
    loop = config.loop
    if loop is None:
        raise ValueError("loop must say how many layers each stack has, got None")
    eos = list(config.eos_token_ids)
    raw: dict[str, Any] = {
        "_class_name": CLASS_NAME,
        "block_size": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        **_MUST_BE,
        "norm_eps": config.rms_norm_eps,
        "logit_softcap": None,
        "clip_qkv": None,
        "rope_settings": {**_ROPE, "rope_base": config.rope.theta},
        "injection_type": _INJECTIONS[loop.injection],
        "state_init": "like-init",
        "prelude_norm": loop.prelude_norm,
        "n_layers_in_prelude": loop.prelude,
        "n_layers_in_recurrent_block": loop.core,
        "n_layers_in_coda": loop.coda,
        "recurrent_embedding_dimension": config.hidden_size,
        "recurrent_intermediation_embedding_dimension": config.intermediate_size,
        "mean_recurrence": loop.mean_recurrence,
        "mean_backprop_depth": loop.mean_backprop_depth,
        "torch_dtype": config.dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos if len(eos) > 1 else (eos[0] if eos else None),
    }
    if not loop.value_embeddings:
        raw["value_embeddings"] = False
    model = replace(config, loop=replace(loop, max_num_loops=0, kv_policy="full"))
    back = config_from_parcae(raw)
    if back != model:
        fields = [name for name in vars(back) if getattr(back, name) != getattr(model, name)]
        raise ValueError(
            f"config.json of a {CLASS_NAME} cannot express {', '.join(fields)} of this model"
        )
    return raw


def _refuse_unsupported(raw: Mapping[str, Any], source: str) -> None:
    if raw.get("_class_name") != CLASS_NAME:
        raise ValueError(
            f"_class_name in {source} must be {CLASS_NAME!r}, got {raw.get('_class_name')!r}"
        )
    for key, value in _MUST_BE.items():
        _one_of(raw, key, (value,), source)
    for key, values in _MUST_BE_OFF.items():
        _one_of({key: None, **raw}, key, values, source)
    _one_of(raw, "state_init", _STATE_INITS, source)
    for key, other in (
        ("recurrent_embedding_dimension", "n_embd"),
        ("recurrent_intermediation_embedding_dimension", "intermediate_size"),
    ):
        required(raw, key, source)
        _one_of(raw, key, (integer(raw, other, source),), source)
    _one_of(
        {"recurrent_num_attention_heads": None, **raw},
        "recurrent_num_attention_heads",
        (None, raw.get("num_attention_heads")),
        source,
    )


def _present(raw: Mapping[str, Any], key: str, source: str) -> Any:
    """A value that may be null, of a key that must be there."""
    if key not in raw:
        required({}, key, source)
    return raw[key]


def _one_of(raw: Mapping[str, Any], key: str, allowed: tuple[Any, ...], source: str) -> Any:
    value = _present(raw, key, source)
    # In Python 1 == True, but a file that says "bias": 0 is not one of theirs.
    if not any(value == known and _is_bool(value) == _is_bool(known) for known in allowed):
        names = " or ".join(repr(known) for known in allowed if known is not None) or "null"
        raise ValueError(
            f"{key} in {source} must be {names}, got {value!r}; another one is not implemented"
        )
    return value


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _flag(raw: Mapping[str, Any], key: str, source: str) -> bool:
    return bool(_one_of(raw, key, (True, False), source))


def _count(raw: Mapping[str, Any], key: str, source: str) -> int:
    value = required(raw, key, source)
    return 0 if value == 0 and type(value) is int else integer(raw, key, source)


def _positive(raw: Mapping[str, Any], key: str, source: str) -> float:
    value = required(raw, key, source)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX:
        raise ValueError(f"{key} in {source} must be a number above 0, got {value!r}")
    return float(value)


def _bos(raw: Mapping[str, Any], source: str) -> int | None:
    value = raw.get("bos_token_id")
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"bos_token_id in {source} must be a token id or null, got {value!r}")
    return value


def _eos(raw: Mapping[str, Any], source: str) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(
            f"eos_token_id in {source} must be a token id, a list of them or null, got {value!r}"
        )
    return token_ids(value)


def _injection(raw: Mapping[str, Any], source: str) -> str:
    theirs = _one_of(raw, "injection_type", tuple(_INJECTIONS.values()), source)
    return next(ours for ours, name in _INJECTIONS.items() if name == theirs)


def _vocabulary(raw: Mapping[str, Any], source: str) -> int:
    """Rows of the embedding: the vocabulary is padded to a round number."""
    tokens, rows = integer(raw, "vocab_size", source), integer(raw, "padded_vocab_size", source)
    if rows < tokens:
        raise ValueError(
            f"padded_vocab_size in {source} must be at least vocab_size = {tokens}, got {rows}"
        )
    return rows


def _rope_base(raw: Mapping[str, Any], source: str) -> float:
    settings, where = required(raw, "rope_settings", source), f"rope_settings in {source}"
    if not isinstance(settings, Mapping):
        raise ValueError(f"{where} must be an object, got {settings!r}")
    unknown = sorted(set(settings) - {*_ROPE, "rope_base"})
    if unknown:
        raise ValueError(f"{unknown[0]} of {where} is not implemented")
    for key, value in _ROPE.items():
        _one_of(settings, key, (value,), where)
    return _positive(settings, "rope_base", where)
