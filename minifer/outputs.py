"""What comes back: the answer to one call, its sequences and its times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one position, from the raw logits.

    rank: 1 for the likeliest token of the vocabulary.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


# token id → Logprob, for one position; the chosen token is always among them
TokenLogprobs = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One of the n sequences of a request.

    finish_reason: None while it runs; "stop" (end token, stop id or stop string), "length",
    "abort", "error"; or what a hook says: "repetition", "language_drift", "content_filter".
    stop_reason: the stop string or stop id that hit, the error's text, or the hook's reason.
    num_loops: of a loop model, the iterations that each token of token_ids took.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_loops: list[int] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of one request in seconds on the engine's clock; None until it happened."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_output_tokens: int = 0
    num_preemptions: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that worked on the request."""
        if self.first_scheduled_time is None:
            return None
        return self.first_scheduled_time - self.arrival_time

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from arrival to the first sampled token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds; None with fewer than two tokens."""
        if self.first_token_time is None or self.last_token_time is None:
            return None
        if self.num_output_tokens < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (self.num_output_tokens - 1)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: queue_time, ttft, tpot in seconds, and the two counters."""
        return {
            "queue_time": self.queue_time,
            "ttft": self.ttft,
            "tpot": self.tpot,
            "num_output_tokens": self.num_output_tokens,
            "num_preemptions": self.num_preemptions,
        }


@dataclass
class RequestOutput:
    """The answer to one call so far: a prompt and its n sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


@dataclass(eq=False)
class RequestGroup:
    """What the n sequences of one call share. `request_id` is the caller's."""

    request_id: str
    prompt: str | None
    n: int = 1
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
