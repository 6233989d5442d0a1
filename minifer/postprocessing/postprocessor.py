"""Stage 5: a sampled token becomes text, or the end.

`sequence_output.py` says what happens to a token; here all sequences of all requests are kept
together and reported. Whatever ends a sequence ends only that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from minifer.events import EventBus
from minifer.execution.sampler import NON_FINITE, Sampled
from minifer.outputs import RequestGroup, RequestMetrics, RequestOutput, TokenLogprobs
from minifer.postprocessing.guards.watch import GuardWatch
from minifer.postprocessing.hooks import TokenHook
from minifer.postprocessing.sequence_output import Decode, SequenceOutput
from minifer.request import OutputKind, Request


class Postprocessor:
    """All sequences' outputs.

    decode: None for an engine without a tokenizer. guards: what the default guards do when they
    see something, as `EngineConfig.guards`.
    """

    def __init__(self, decode: Decode | None, events: EventBus, guards: str = "report") -> None:
        self._decode = decode
        self._events = events
        self.guards = GuardWatch(guards, decode, events)
        self._groups: dict[RequestGroup, list[SequenceOutput]] = {}
        self._pieces: dict[int, str] = {}  # text of single tokens, for logprobs

    def open(self, request: Request, hooks: Sequence[TokenHook] = ()) -> None:
        """Begin with a request's first sequence. hooks: the caller's; guards come after them.

        Raises `ValueError` for hooks that cannot be copied for each of n sequences.
        """
        hooks = [*hooks, *self.guards.of(request)]
        self._groups[request.group] = [SequenceOutput(request, self._decode, hooks)]

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child`'s output begin as a copy of the parent's."""
        sequence = self._of(parent).fork(child)
        self._groups.setdefault(child.group, []).append(sequence)

    def sequences(self, group: RequestGroup) -> list[Request]:
        return [sequence.request for sequence in self._groups[group]]

    def _of(self, request: Request) -> SequenceOutput:
        return next(s for s in self._groups[request.group] if s.request is request)

    def accept(self, request: Request, sampled: Sampled) -> bool:
        """Take one token of one sequence; True when that ended it."""
        self.guards.watching = request.request_id
        if sampled.error in NON_FINITE:
            self.guards.trip("non_finite", sampled.error, "stop")
        sequence = self._of(request)
        before = len(sequence.text)
        try:
            sequence.accept(self._with_pieces(sampled))
        except Exception as error:  # a hook's or decoder's fault stays with its request
            sequence.fail(error)
        if sampled.error is None:
            self._count(sequence)
            if self._events:
                self._report(sequence, sampled.token_id, before)
        return self._ended(sequence)

    def end(self, request: Request, reason: str, stop_reason: str | None = None) -> None:
        """End a sequence from outside: an abort, or an error of the step."""
        sequence = self._of(request)
        if sequence.finish_reason is not None:
            return
        try:
            sequence.end(reason, stop_reason)
        except Exception as error:
            sequence.fail(error)
        self._ended(sequence)

    def fail(self, request: Request, error: BaseException) -> None:
        """End a sequence that was interrupted in the middle of a token, whatever it had become."""
        sequence = self._of(request)
        sequence.fail(error)
        self._ended(sequence)

    def add_prompt_logprobs(self, group: RequestGroup, scored: Iterable[TokenLogprobs]) -> None:
        if group.prompt_logprobs is not None:
            group.prompt_logprobs += [self._name_tokens(position) for position in scored]

    def output(self, group: RequestGroup) -> RequestOutput | None:
        """What the caller gets after a step; None when there is nothing to say yet.

        The last sequence to finish takes the group with it.
        """
        sequences = self._groups[group]
        finished = self.finished(group)
        kind = sequences[0].request.params.output_kind
        if kind is OutputKind.FINAL_ONLY and not finished:
            return None
        if finished:
            del self._groups[group]
        if kind is OutputKind.DELTA:  # one that had its last chunk says no more
            sequences = [s for s in sequences if not s.reported]
        completions = [s.completion(kind) for s in sequences]
        for sequence in sequences:
            sequence.reported = sequence.finish_reason is not None
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=sequences[0].request.prompt_token_ids if sequences else [],
            outputs=sorted(completions, key=lambda c: c.index),
            finished=finished,
            num_cached_tokens=group.num_cached_tokens,
            prompt_logprobs=group.prompt_logprobs,
            metrics=RequestMetrics(**vars(group.metrics)),
        )

    def finished(self, group: RequestGroup) -> bool:
        """Have all n sequences been forked, and come to their end?"""
        sequences = self._groups[group]
        return len(sequences) == group.n and all(s.finish_reason is not None for s in sequences)

    def _count(self, sequence: SequenceOutput) -> None:
        metrics, now = sequence.request.group.metrics, self._events.clock()
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        metrics.last_token_time = now
        metrics.num_output_tokens = max(
            metrics.num_output_tokens, sequence.request.num_output_tokens
        )

    def _ended(self, sequence: SequenceOutput) -> bool:
        if sequence.finish_reason is None:
            return False
        request = sequence.request
        if self.finished(request.group):
            request.group.metrics.finished_time = self._events.clock()
        if self._events:
            self._events.emit(
                "postprocessing",
                "request.finished",
                request.request_id,
                finish_reason=sequence.finish_reason,
                stop_reason=sequence.stop_reason,
            )
        return True

    def _report(self, sequence: SequenceOutput, token_id: int, before: int) -> None:
        request, emit = sequence.request, self._events.emit
        span = (request.num_tokens - 1, request.num_tokens)
        emit("decode", "token.sampled", request.request_id, span, token_id=token_id)
        new = sequence.text[before:]
        if new:
            emit("postprocessing", "text.released", request.request_id, span, text=new)
        elif sequence.finish_reason is None:
            held = sequence.stops.held
            emit("postprocessing", "text.held_back", request.request_id, span, held=held)

    def _with_pieces(self, sampled: Sampled) -> Sampled:
        if sampled.logprobs is None:
            return sampled
        return replace(sampled, logprobs=self._name_tokens(sampled.logprobs))

    def _name_tokens(self, logprobs: TokenLogprobs) -> TokenLogprobs:
        """Fill in `decoded_token`."""
        if self._decode is None:
            return logprobs
        for token_id in logprobs.keys() - self._pieces.keys():
            self._pieces[token_id] = self._decode([token_id], False)
        return {
            token_id: replace(entry, decoded_token=self._pieces[token_id])
            for token_id, entry in logprobs.items()
        }
