"""Loop models of the laboratory: any layout and injection, small enough for one core."""

from __future__ import annotations

from minifer.config import ModelConfig, RopeConfig
from minifer.loops import LoopConfig
from minifer.parcae.model import Parcae


def lab_model(
    num_symbols: int,
    *,
    width: int = 32,
    heads: int = 2,
    layers: tuple[int, int, int] = (1, 2, 1),
    injection: str = "diagonal",
    prelude_norm: bool = True,
    length: int = 64,
    mean_recurrence: int = 8,
    zero_out: bool = True,
    seed: int = 0,
) -> Parcae:
    """A float32 `Parcae` without value embeddings, initialised from a seed.

    layers: of prelude, core and coda; (0, 1, 0) is a pure loop. length: the longest context.
    zero_out: whether every block starts as the identity.

    Raises `ValueError` for a width that the heads do not divide, and what `ModelConfig` and
    `LoopConfig` refuse.
    """
    if not isinstance(layers, tuple) or len(layers) != 3:
        raise ValueError(f"layers must be three, of prelude, core and coda, got {layers!r}")
    if heads < 1 or width % heads:
        raise ValueError(f"width must be a multiple of heads, got width={width}, heads={heads}")
    loop = LoopConfig(
        *layers,
        mean_recurrence=mean_recurrence,
        mean_backprop_depth=(mean_recurrence + 1) // 2,
        injection=injection,
        prelude_norm=prelude_norm,
        value_embeddings=False,
    )
    config = ModelConfig(
        architecture="ParcaeForCausalLM",
        vocab_size=num_symbols,
        hidden_size=width,
        intermediate_size=4 * width,
        num_layers=loop.num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=50000.0),
        tie_word_embeddings=True,
        loop=loop,
    )
    model = Parcae(config)
    model.init_weights(seed, zero_out=zero_out)
    return model
