"""What guesses the next tokens, who picks it, and how often it was right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from minifer.config import EngineConfig, ModelConfig
from minifer.execution.speculation.ngram import NgramProposer
from minifer.kv.step_input import StepInput
from minifer.request import Request

if TYPE_CHECKING:
    from minifer.execution.runner import ModelRunner


class Proposer(Protocol):
    """Guesses what follows the newest tokens of some requests.

    While a step is planned, each request that has caught up is asked for how many drafts it has
    a use: a draft is one more token of the step. When all of them have their KV slots, `propose`
    says which tokens they are.
    """

    def num_drafts(self, request: Request, most: int) -> int:
        """Put up to `most` (at least 1) drafts into `request.draft_token_ids`; how many they are.

        They may be placeholders until `propose` is called.
        """
        ...

    def propose(self, step: StepInput) -> None:
        """Fill in the drafts: in `request.draft_token_ids` and in the step's own `token_ids`."""
        ...


@dataclass
class SpeculationStats:
    """Counted since the start, vLLM's names. num_drafts: guesses, of one or more tokens each.

    num_accepted_tokens_per_pos[i]: how often draft i of a guess was right, and all before it.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def count(self, num_draft: int, num_accepted: int) -> None:
        """One guess has been judged."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft
        self.num_accepted_tokens += num_accepted
        missing = num_draft - len(self.num_accepted_tokens_per_pos)
        self.num_accepted_tokens_per_pos += [0] * missing
        for place in range(num_accepted):
            self.num_accepted_tokens_per_pos[place] += 1

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafts that were right, in [0, 1]."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a guess brought, the model's own included: 1 when no draft is ever right."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


def make_proposer(
    config: EngineConfig,
    model: ModelConfig | None = None,
    runner: ModelRunner | None = None,
    draft: Any = None,
    num_blocks: int = 0,
) -> Proposer | None:
    """The proposer of `config.speculative_method`; None for "none".

    model, runner: the target's, for proposers that run one. draft: the `LoadedModel` of
    `config.speculative_model`, which gets KV storage of its own for `num_blocks` blocks.
    Raises `ValueError` for a method that needs what is not there.
    """
    method = config.speculative_method
    if method == "none":
        return None
    if method == "ngram":
        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    if model is None or runner is None:
        raise ValueError(
            f'speculative_method="{method}" needs a model that the engine loads itself: use '
            "Engine.from_pretrained"
        )
    from minifer.execution.speculation import draft_model

    rejection = config.speculative_acceptance == "rejection"
    if method == "draft":
        return draft_model.DraftModelProposer(
            draft_model.draft_runner(draft, config, num_blocks), rejection
        )
    loops = draft_model.draft_loops(config, model)
    return draft_model.LoopProposer(runner, loops, rejection)


def load_draft(config: EngineConfig, model: ModelConfig, max_model_len: int) -> Any:
    """The `LoadedModel` that drafts for `model`; None unless the method is "draft".

    Raises `ValueError` for one that cannot: each of its tokens must be the target's token of the
    same id, and it must know every position.
    """
    if config.speculative_method != "draft":
        return None
    from minifer.weights.resolve import load_model, read_config

    name = str(config.speculative_model)
    check_draft(name, read_config(name), model, max_model_len)
    return load_model(name, config.dtype, config.device, config.quantize)


def check_speculation(config: EngineConfig, model: ModelConfig) -> None:
    """Raises `ValueError` for a method that this model does not have; no weights are read."""
    if config.speculative_method == "loops":
        from minifer.execution.speculation.draft_model import draft_loops

        draft_loops(config, model)
    elif config.speculative_method == "draft":
        from minifer.weights.resolve import read_config

        name = str(config.speculative_model)
        most = config.max_model_len or model.max_position_embeddings
        check_draft(name, read_config(name), model, most)


def check_draft(name: str, draft: ModelConfig, model: ModelConfig, max_model_len: int) -> None:
    """Raises `ValueError` for a draft model that does not fit to its target."""
    if draft.vocab_size != model.vocab_size:
        raise ValueError(
            f"speculative_model must have the model's vocabulary of {model.vocab_size} tokens, "
            f"{name!r} has {draft.vocab_size}"
        )
    if draft.loop is not None:
        raise ValueError(
            f"speculative_model must be a plain transformer, {name!r} is a loop model; "
            'speculative_method="loops" lets a loop model draft for itself'
        )
    if draft.max_position_embeddings < max_model_len:
        raise ValueError(
            f"speculative_model must know {max_model_len} positions, {name!r} knows "
            f"{draft.max_position_embeddings}: lower max_model_len"
        )
