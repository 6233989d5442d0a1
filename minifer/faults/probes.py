"""Detectors that hold a reply against a second source: the text, a replay, the canaries."""

from __future__ import annotations

import itertools

from minifer.canary import Canary
from minifer.engine import Engine
from minifer.faults.detectors import (
    Detector,
    EndToken,
    FiniteLogits,
    HitAudit,
    Poison,
    PoolInvariants,
    Repetition,
    ScriptDrift,
    Shadow,
    TierCheck,
    ToolLoop,
)
from minifer.outputs import CompletionOutput, RequestOutput
from minifer.request import SamplingParams

TIE = 1e-3  # nats: of two tokens closer than this, rounding may pick either


class TextRoundTrip(Detector):
    name = "text-round-trip"
    title = "the text that was streamed is the text of all tokens, up to the stop string"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._open: dict[str, SamplingParams] = {}

    def on_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        if self.engine.tokenizer is not None and params.detokenize and not params.min_tokens:
            self._open[request_id] = params

    def on_output(self, output: RequestOutput) -> None:
        if not output.finished or output.request_id not in self._open:
            return
        params = self._open.pop(output.request_id)
        for answer in output.outputs:
            if answer.finish_reason == "error":
                continue
            expected = self._text(output.prompt_token_ids, answer, params)
            if answer.text != expected:
                said = f"{answer.text[-40:]!r} was sent, {expected[-40:]!r} is what the tokens say"
                self.alarms.append(f"{output.request_id}: {said}")

    def _text(self, prompt: list[int], answer: CompletionOutput, params: SamplingParams) -> str:
        tokenizer, tokens = self.engine.tokenizer, answer.token_ids
        assert tokenizer is not None  # on_request has looked
        stopped_by_token = answer.finish_reason == "stop" and not isinstance(
            answer.stop_reason, str
        )
        if stopped_by_token and not params.include_stop_str_in_output:
            tokens = tokens[:-1]
        # After the prompt: some tokenizers drop the space before the first token of a text.
        before = tokenizer.decode(prompt, params.skip_special_tokens)
        text = tokenizer.decode(prompt + tokens, params.skip_special_tokens)[len(before) :]
        ends = [text.find(stop) + len(stop) for stop in params.stop or () if stop in text]
        if not ends:
            return text
        if params.include_stop_str_in_output or not isinstance(answer.stop_reason, str):
            return text[: min(ends)]
        return text[: min(ends) - len(answer.stop_reason)]


class Replay(Detector):
    """Greedy replies are scored in one prefill, sampled ones drawn again from their seed.

    every: N of "one in N". keep: requests remembered until the engine is idle.
    """

    name = "replay"
    title = "one request in N is computed again, alone, and with nothing from the cache"

    def __init__(self, engine: Engine, every: int = 1, keep: int = 64) -> None:
        super().__init__(engine)
        self._every, self._keep = every, keep
        self._numbers = itertools.count()
        self._open: dict[str, SamplingParams] = {}
        self._done: list[tuple[RequestOutput, SamplingParams]] = []

    def on_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        # A seed that the engine has chosen is not known to the caller, and not to us.
        if (params.is_greedy or params.seed is not None) and next(self._numbers) % self._every == 0:
            self._open[request_id] = params

    def on_output(self, output: RequestOutput) -> None:
        if not output.finished or output.request_id not in self._open:
            return
        params = self._open.pop(output.request_id)
        whole = all(answer.finish_reason in ("stop", "length") for answer in output.outputs)
        if whole and len(self._done) < self._keep:
            self._done.append((output, params))

    def on_idle(self) -> None:
        done, self._done = self._done, []
        scored = [kept for kept in done if kept[1].is_greedy and not _has_rules(kept[1])]
        self._score([output for output, _ in scored])
        for output, params in done:
            if (output, params) not in scored:
                self._draw(output, params)

    def _score(self, outputs: list[RequestOutput]) -> None:
        """Is each token the likeliest after those before it, as one prefill sees it?"""
        scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        longest = self.engine.limits.max_model_len - 1
        texts = [(o.prompt_token_ids + o.outputs[0].token_ids)[:longest] for o in outputs]
        again = self._serve([(text, scoring) for text in texts])
        for output, text, scored in zip(outputs, texts, again, strict=True):
            first = len(output.prompt_token_ids)
            for place, scores in enumerate((scored.prompt_logprobs or [])[first:]):
                assert scores is not None  # only the first position of a prompt has none
                best = max(entry.logprob for entry in scores.values())
                if best - scores[text[first + place]].logprob > TIE:
                    self._differs(output, place)
                    break

    def _draw(self, output: RequestOutput, params: SamplingParams) -> None:
        """The same seed must draw the same tokens, with nobody else in the batch."""
        (again,) = self._serve([(output.prompt_token_ids, params)])
        for first, second in zip(output.outputs, again.outputs, strict=True):
            if first.token_ids != second.token_ids:
                pairs = zip(first.token_ids, second.token_ids, strict=False)
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
                self._differs(output, len(list(same)))
                return

    def _serve(self, requests: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
        """Each under a salt of its own: none of them may find anything in the cache."""
        names = [f"replay-{next(self._numbers)}" for _ in requests]
        for name, (prompt, params) in zip(names, requests, strict=True):
            self.engine.add_request(name, prompt, params.with_(cache_salt=name))
        last: dict[str, RequestOutput] = {}
        while self.engine.has_unfinished_requests:
            last |= {output.request_id: output for output in self.engine.step()}
        return [last[name] for name in names]

    def _differs(self, output: RequestOutput, place: int) -> None:
        self.alarms.append(f"{output.request_id}: another token at {place} when computed alone")


def _has_rules(params: SamplingParams) -> bool:
    """Does anything but the logits choose the token?"""
    plain = SamplingParams()
    masks = ("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "structured")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return any(getattr(params, name) != getattr(plain, name) for name in masks + penalties)


class CanaryProbe(Detector):
    """The canaries stored for the model, or recorded when the detector is attached."""

    name = "canary"
    title = "fixed prompts give the stored log-probabilities, cold and from the cache"

    def __init__(self, engine: Engine, canary: Canary | None = None) -> None:
        super().__init__(engine)
        self._canary = canary or _stored_or_recorded(engine)

    def on_idle(self) -> None:
        self.alarms += self._canary.check(self.engine).alarms


def _stored_or_recorded(engine: Engine) -> Canary:
    try:
        return Canary.of(engine)
    except ValueError:
        return Canary.record(engine)


DETECTORS: tuple[type[Detector], ...] = (
    FiniteLogits,
    Poison,
    Shadow,
    PoolInvariants,
    TierCheck,
    HitAudit,
    Replay,
    CanaryProbe,
    TextRoundTrip,
    EndToken,
    Repetition,
    ScriptDrift,
    ToolLoop,
)
