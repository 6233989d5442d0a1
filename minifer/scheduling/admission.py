"""The door: what is refused is refused here, before anything is allocated.

`SamplingParams` has checked itself; what remains depends on the model (vocabulary, length) and on
the engine (seats, memory). Every refusal is a `ValueError` naming parameter, value and limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol

from minifer.loops import LoopConfig
from minifer.outputs import RequestGroup
from minifer.request import MAX_SEED, Request, SamplingParams
from minifer.structured_output import StructuredOutput

if TYPE_CHECKING:
    from minifer.execution.grammar import GrammarState


class TextEncoder(Protocol):
    """The part of a tokenizer that admission uses."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class Grammars(Protocol):
    """The part of a grammar compiler that admission uses."""

    def compile(self, structured: StructuredOutput) -> GrammarState: ...


@dataclass(frozen=True)
class Limits:
    """What the model and the engine can do.

    max_model_len: positions the model knows. kv_capacity: tokens the KV cache holds. loop: of a
    loop model.
    """

    vocab_size: int
    max_model_len: int
    kv_capacity: int
    max_num_seqs: int
    max_num_batched_tokens: int | None = None
    loop: LoopConfig | None = None

    @property
    def max_prompt_len(self) -> int:
        """One position is left for an answer; the last token of a request needs no KV."""
        return min(self.max_model_len - 1, self.kv_capacity)

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output; a request that reaches it ends with `length`."""
        return min(self.max_model_len, self.kv_capacity + 1)


def admit(
    request_id: str,
    prompt: str | None,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    limits: Limits,
    seed: int,
    eos_token_ids: Iterable[int] = (),
    encoder: TextEncoder | None = None,
    grammars: Grammars | None = None,
) -> Request:
    """Check one call and build its first sequence (the other n − 1 are forked from it later).

    seed: used when `params.seed` is None. encoder: needed for `bad_words`. grammars: needed for
    `structured`.
    """
    ids = _token_ids(prompt_token_ids)
    _check_prompt(ids, params, limits)
    _check_params(params, limits)
    _check_loops(len(ids), params, limits)
    group = RequestGroup(request_id, prompt, params.n)
    bad_word_ids = _bad_word_ids(params.bad_words, encoder)
    if params.prompt_logprobs is not None:
        group.prompt_logprobs = [None]  # nothing predicts the first token
    return Request(
        request_id=request_id,
        prompt_token_ids=ids,
        params=params,
        group=group,
        seed=(seed if params.seed is None else params.seed) % MAX_SEED,
        eos_token_ids=frozenset() if params.ignore_eos else frozenset(eos_token_ids),
        max_total_tokens=limits.max_total_tokens,
        bad_word_ids=bad_word_ids,
        num_loops=_num_loops(params, limits),
        loop_kv_policy="full" if limits.loop is None else limits.loop.kv_policy,
        forks_pending=params.n - 1,
        grammar=_grammar(params.structured, grammars),
    )


def _token_ids(prompt: Any) -> list[int]:
    """Python ints of an ordered prompt; integers of other libraries (numpy's) are taken."""
    wrong = isinstance(prompt, (bytes, bytearray, Mapping, Set))
    if wrong or not isinstance(prompt, Iterable):
        raise ValueError(f"the prompt must be text or a list of token ids, got {prompt!r}")
    ids = list(prompt)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, (int, Integral)):
            raise ValueError(f"prompt_token_ids must be integers, got {token!r}")
    return [int(token) for token in ids]


def _check_prompt(ids: list[int], params: SamplingParams, limits: Limits) -> None:
    if not ids:
        raise ValueError("the prompt must hold at least 1 token, got 0")
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            raise ValueError(f"prompt_token_ids must be in [0, {limits.vocab_size}), got {token}")
    if len(ids) > limits.max_prompt_len:
        why = (
            "the model's length minus one"
            if limits.max_prompt_len < limits.kv_capacity
            else "the KV cache; raise kv_cache_bytes or num_kv_blocks"
        )
        raise ValueError(
            f"the prompt has {len(ids)} tokens, the limit is {limits.max_prompt_len} ({why})"
        )
    if params.max_tokens is not None and len(ids) + params.max_tokens > limits.max_model_len:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and max_tokens is {params.max_tokens}, together "
            f"{len(ids) + params.max_tokens}; the model's limit is {limits.max_model_len} "
            f"(max_tokens=None generates up to it)"
        )


def _check_params(params: SamplingParams, limits: Limits) -> None:
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise ValueError("allowed_token_ids must hold at least one token id, got []")
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        for token in getattr(params, name) or ():
            if token >= limits.vocab_size:
                raise ValueError(f"{name} must be below {limits.vocab_size}, got {token}")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > limits.vocab_size:
            raise ValueError(
                f"{name} must be at most {limits.vocab_size}, got {getattr(params, name)}"
            )
    if params.n > limits.max_num_seqs:
        raise ValueError(f"n must be at most max_num_seqs ({limits.max_num_seqs}), got {params.n}")


def _num_loops(params: SamplingParams, limits: Limits) -> int | None:
    return None if limits.loop is None else limits.loop.depth(params.num_loops)


def _check_loops(num_prompt_tokens: int, params: SamplingParams, limits: Limits) -> None:
    if limits.loop is None:
        for name in ("num_loops", "exit_threshold"):
            if getattr(params, name) is not None:
                raise ValueError(
                    f"{name} needs a loop model such as parcae-tiny; this one runs each layer "
                    f"once, got {getattr(params, name)}"
                )
        return
    if (params.num_loops or 1) > limits.loop.deepest:
        raise ValueError(
            f"num_loops must be at most max_num_loops ({limits.loop.deepest}), "
            f"got {params.num_loops}"
        )
    budget = limits.max_num_batched_tokens
    if limits.loop.policy.overwrites and budget is not None and num_prompt_tokens > budget:
        raise ValueError(
            f"the prompt has {num_prompt_tokens} tokens; with loop_kv_policy="
            f"{limits.loop.kv_policy} it must fit into one step, and max_num_batched_tokens "
            f"is {budget}"
        )


def _bad_word_ids(words: Sequence[str], encoder: TextEncoder | None) -> tuple[tuple[int, ...], ...]:
    """Each word as it is tokenised at the start of a text and after a space."""
    if not words:
        return ()
    if encoder is None:
        raise ValueError("bad_words need a tokenizer, this engine has none")
    spellings = [spelling for word in words for spelling in (word, " " + word.lstrip())]
    ids = (tuple(encoder.encode(text, add_special_tokens=False)) for text in spellings)
    return tuple(dict.fromkeys(sequence for sequence in ids if sequence))


def _grammar(structured: StructuredOutput | None, grammars: Grammars | None) -> GrammarState | None:
    """Compiled last: it is the only check that takes time."""
    if structured is None:
        return None
    if grammars is None:
        raise ValueError("structured output needs a grammar compiler, this engine has none")
    return grammars.compile(structured)


def derive_seed(engine_seed: int, request_number: int) -> int:
    """A seed for a request that brought none: fixed by the engine's seed and its place in line."""
    data = f"{engine_seed}/{request_number}".encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
