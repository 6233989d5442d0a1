"""From a loaded model to the parts of an engine: sizes first, then what has tensors."""

from __future__ import annotations

from typing import Any

from minifer.config import EngineConfig, with_engine_loops
from minifer.execution.fingerprint import kv_namespace
from minifer.execution.runner import make_runner, num_kv_blocks
from minifer.execution.speculation.proposer import load_draft, make_proposer
from minifer.kv.tiers.opening import open_tiers
from minifer.request import SamplingParams
from minifer.scheduling.admission import Limits
from minifer.weights.resolve import LoadedModel, load_model


def load(config: EngineConfig) -> LoadedModel:
    """The model of an engine: all of it, or what rank 0 holds of one that is cut for several.

    Raises `ValueError` as `load_model` does, and for a model that cannot be cut so.
    """
    if config.tensor_parallel_size == 1:
        return load_model(str(config.model), config.dtype, config.device, config.quantize)
    from minifer.execution.parallel.loading import load_rank, places
    from minifer.execution.parallel.shard import Shard

    size = config.tensor_parallel_size
    device = places(config.device, size)[0]
    return load_rank(str(config.model), config.dtype, device, Shard(0, size))


def parts_of(loaded: Any, config: EngineConfig) -> dict[str, Any]:
    """Arguments of `Engine` for a `LoadedModel`. Raises `ValueError` for options that do not fit
    to the model."""
    model_config = with_engine_loops(loaded.config, config)
    parameter = next(loaded.model.parameters())
    known = model_config.max_position_embeddings
    if (config.max_model_len or 0) > known:
        raise ValueError(
            f"max_model_len must be at most {known} for this model, got {config.max_model_len}"
        )
    max_model_len = config.max_model_len or known
    draft = load_draft(config, model_config, max_model_len)
    where = (parameter.dtype, str(parameter.device))
    blocks = num_kv_blocks(model_config, config, *where, None if draft is None else draft.config)
    limits = Limits(
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        kv_capacity=blocks * config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        loop=model_config.loop,
    )
    runner = make_runner(loaded.model, model_config, config, blocks)
    disk = config.kv_disk_path is not None
    namespace = kv_namespace(loaded.model, model_config) if disk else ()
    return {
        "runner": runner,
        "limits": limits,
        "tiers": open_tiers(config, runner.kv, namespace),
        "proposer": make_proposer(config, model_config, runner, draft, blocks),
        "tokenizer": loaded.tokenizer,
        "eos_token_ids": loaded.eos_token_ids,
        "default_params": SamplingParams(**loaded.generation_defaults),
    }
