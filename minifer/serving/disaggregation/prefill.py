"""Which part of a prompt can be handed over, and the request that computes it."""

from __future__ import annotations

from collections.abc import Sequence

from minifer.engine import Engine
from minifer.kv.prefix_key import PrefixKey
from minifer.request import OutputKind, SamplingParams
from minifer.scheduling.admission import admit


def prefill_params(params: SamplingParams) -> SamplingParams:
    """Of a request that computes a prompt and no more: what its KV depends on, and one token.

    The engine gives nothing less than a token, and this one is thrown away: the decode worker draws
    it again, from the logits of the prompt's last token, which it has to compute in any case.
    """
    return SamplingParams(
        max_tokens=1,
        temperature=0,
        priority=params.priority,
        cache_salt=params.cache_salt,
        num_loops=params.num_loops,
        exit_threshold=params.exit_threshold,
        detokenize=False,
        output_kind=OutputKind.FINAL_ONLY,
    )


def keys_to_hand_over(
    engine: Engine, prompt: Sequence[int], params: SamplingParams
) -> list[PrefixKey]:
    """Names of the blocks of a prompt that its request can load, the same on both sides.

    Full blocks, and never all of the prompt: of k · P tokens the last block stays. None at all for
    a request that wants the log-probabilities of its prompt, which only computing it gives. Raises
    `ValueError` for a prompt that the engine refuses. Any thread may call this.
    """
    if params.prompt_logprobs is not None:
        return []
    request = admit("", None, prompt, prefill_params(params), engine.limits, 0)
    return engine.kv.loadable_keys(request)
