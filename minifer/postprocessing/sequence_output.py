"""One sequence's answer: what a token adds to its text, and what ends it.

For every token, in this order: append it to its sequence; end tokens, length and grammar;
detokenize; stop strings; hooks.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Sequence

from minifer.execution.sampler import Sampled
from minifer.outputs import CompletionOutput, TokenLogprobs
from minifer.postprocessing.detokenizer import PROMPT_CONTEXT, IncrementalDetokenizer
from minifer.postprocessing.hooks import (
    CONTENT_FILTER,
    HookVerdict,
    TokenHook,
    copy_hooks,
    finish_hooks,
    run_hooks,
)
from minifer.postprocessing.stop_strings import StopStrings
from minifer.request import OutputKind, Request

Decode = Callable[[list[int], bool], str]  # token ids, skip special tokens → text


class SequenceOutput:
    """The answer of one sequence so far, and what it takes to continue it."""

    def __init__(self, request: Request, decode: Decode | None, hooks: Sequence[TokenHook]) -> None:
        params = request.params
        self.request = request
        self.hooks = list(hooks)
        # Copied now: what cannot be copied is refused before anything has run.
        self._hooks_of_forks = [copy_hooks(hooks) for _ in range(request.forks_pending)]
        self.text = ""
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.num_sent_tokens = 0  # of DELTA outputs: how much has been handed out
        self.num_sent_characters = 0
        self.reported = False  # its last chunk has been handed out
        self.detokenizer: IncrementalDetokenizer | None = None
        if decode is not None and params.detokenize:
            skip = params.skip_special_tokens
            tail = request.prompt_token_ids[-PROMPT_CONTEXT:]
            self.detokenizer = IncrementalDetokenizer(lambda ids: decode(ids, skip), tail)
        self.stops = StopStrings(list(params.stop or ()), params.include_stop_str_in_output)

    def fork(self, child: Request) -> SequenceOutput:
        """An independent copy that continues as `child`."""
        new = copy.copy(self)
        new.request = child
        new.hooks = self._hooks_of_forks.pop() if self._hooks_of_forks else copy_hooks(self.hooks)
        new._hooks_of_forks = []
        new.logprobs = list(self.logprobs)
        new.detokenizer, new.stops = copy.copy(self.detokenizer), copy.copy(self.stops)
        new.num_sent_tokens = new.num_sent_characters = 0
        return new

    def accept(self, sampled: Sampled) -> None:
        """Take one sampled token; sets finish_reason when it ends the sequence."""
        if sampled.error is not None:
            self.end("error", sampled.error)
            return
        request, token_id = self.request, sampled.token_id
        request.token_ids.append(token_id)
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)
            self.cumulative_logprob += sampled.logprob or 0.0
        armed = request.num_output_tokens > request.params.min_tokens
        stop_reason: str | int | None
        reason, stop_reason = self._token_end(token_id, armed)
        text = self._detokenize(token_id, reason)
        if request.grammar is not None and reason != "stop":
            request.grammar.accept(token_id)
            if request.grammar.complete:  # wins over the length, as an end token does
                reason = "stop"
        text = self.stops.push(text, armed=armed)
        if self.stops.hit is not None:
            reason, stop_reason = "stop", self.stops.hit
        verdict = run_hooks(self.hooks, token_id, text)
        self.text += verdict.text
        if verdict.finish_reason is not None and reason in (None, *_outranked(verdict)):
            reason, stop_reason = verdict.finish_reason, verdict.stop_reason
        if reason is not None:
            self.end(reason, stop_reason)

    def _token_end(self, token_id: int, armed: bool) -> tuple[str | None, int | None]:
        """Does this token end the sequence? An end token wins over the length."""
        request, params = self.request, self.request.params
        if armed and token_id in request.eos_token_ids:
            return "stop", None
        if armed and token_id in params.stop_token_ids:
            return "stop", token_id
        if request.num_output_tokens == params.max_tokens:
            return "length", None
        if request.num_tokens >= request.max_total_tokens:
            return "length", None
        return None, None

    def _detokenize(self, token_id: int, reason: str | None) -> str:
        """The text of a token; a token that stops is not part of the text unless asked for."""
        if self.detokenizer is None:
            return ""
        if reason == "stop" and not self.request.params.include_stop_str_in_output:
            return ""
        return self.detokenizer.push(token_id)

    def end(self, reason: str, stop_reason: str | int | None = None) -> None:
        """Finish, releasing the text that was held back and turned out to be only text."""
        rest = ""
        if self.stops.hit is None:
            armed = self.request.num_output_tokens > self.request.params.min_tokens
            tail = self.detokenizer.flush() if self.detokenizer else ""
            rest = self.stops.flush(tail, armed=armed)
            if self.stops.hit is not None and reason == "length":
                reason, stop_reason = "stop", self.stops.hit
        # Set before the hooks run: one that raises must not leave the sequence open.
        self.finish_reason, self.stop_reason = reason, stop_reason
        verdict = finish_hooks(self.hooks, rest)
        self.text += verdict.text
        if verdict.finish_reason is not None and reason in _outranked(verdict):
            self.finish_reason, self.stop_reason = verdict.finish_reason, verdict.stop_reason

    def fail(self, error: BaseException) -> None:
        """A fault in this sequence's own text or hooks: end it, ask them nothing more."""
        self.hooks = []
        self.finish_reason = "error"
        self.stop_reason = "".join(traceback.format_exception_only(error)).strip()

    def completion(self, kind: OutputKind) -> CompletionOutput:
        """This sequence as the caller sees it: all of it, or what is new since the last call."""
        tokens, characters = 0, 0
        if kind is OutputKind.DELTA:
            tokens, characters = self.num_sent_tokens, self.num_sent_characters
            self.num_sent_tokens = self.request.num_output_tokens
            self.num_sent_characters = len(self.text)
        wanted = self.request.params.logprobs is not None
        request, first = self.request, self.request.num_prompt_tokens + tokens
        looped = request.num_loops is not None
        return CompletionOutput(
            index=self.request.index,
            text=self.text[characters:],
            token_ids=self.request.token_ids[first:],
            logprobs=self.logprobs[tokens:] if wanted else None,
            cumulative_logprob=self.cumulative_logprob if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_loops=[request.loops_run[p - 1] for p in range(first, request.num_tokens)]
            if looped
            else None,
        )


def _outranked(verdict: HookVerdict) -> tuple[str, ...]:
    """Ends of a reply that a hook's reason replaces: the caller must know that text is missing."""
    return ("stop", "length") if verdict.finish_reason == CONTENT_FILTER else ()
