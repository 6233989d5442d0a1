"""Canaries: prompts whose log-probabilities are known, asked of a running engine now and then.

A wrong position, a lost slot or a swapped block leaves replies fluent, and evaluations are too
noisy to see it. Log-probabilities are not: after rotary positions that are off by one they differ
by some hundredths of a nat, rounding moves them by a millionth. One token of a few fixed prompts
is enough, and a thousand times cheaper than a benchmark ("Log Probability Tracking of LLM APIs",
arXiv 2512.03816, which tests hosted models this way from outside, with a permutation test where
the provider's sampling adds noise; here there is none, and a threshold does).

What it does not see: a fault that needs a situation the canaries are not in (a preemption), and
one that changes too little. One slot too many, among 64 and with plausible numbers in it, may move
the distribution by a millionth of a nat. A canary of one token, where it is one of two, sees it;
debug mode sees it anywhere.

::

    canary = Canary.of(engine)          # stored with minifer, or an error
    report = canary.check(engine)       # runs a few steps; the engine must be idle
    if not report.ok: ...               # report.alarms says why
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from minifer.engine import Engine
from minifer.execution.fingerprint import weights_digest
from minifer.execution.reference import reference_logits
from minifer.outputs import CompletionOutput, RequestOutput
from minifer.sampling_params import SamplingParams

FOLDER = Path(__file__).parent / "assets" / "canary"
TEXT = (
    "The sequence types share the same set of operations: an item is found by its index, a part "
    "of them by a slice, and the number of items is what the function len returns. For example, "
    "the first item of a list has the index 0, and the last one has the index -1. Lists can be "
    "changed in place, tuples and strings can not: an operation on them returns a new object,"
)
LENGTHS = (1, 15, 16, 17, 33, 64)  # prompt tokens: on, before and after the ends of blocks
NUM_OUTPUTS = 12  # tokens of each reply
NUM_STORED = 8  # likeliest tokens whose log-probability is stored at each of them
THRESHOLD = 0.005  # nats; float32 noise is 1e-6, and a position off by one some hundredths


@dataclass(frozen=True)
class CanaryPrompt:
    """A prompt, its greedy reply, and per token of it the likeliest tokens: id → logprob."""

    token_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]


@dataclass(frozen=True)
class CanaryReading:
    """How far one reply was from what is stored.

    run: "cold", "hit" or "alone". kl: the largest Kullback-Leibler divergence of its steps, in
    nats, a lower bound from the stored tokens. difference: mean |Δ logprob| of the reply's
    tokens. num_cached_tokens: of its prompt. error: why there is no reply.
    """

    run: str
    prompt: int
    kl: float
    difference: float
    num_cached_tokens: int
    error: str | None = None


@dataclass(frozen=True)
class CanaryReport:
    """All readings of one check. threshold: the `kl` from which one is an alarm."""

    readings: tuple[CanaryReading, ...]
    threshold: float

    @property
    def kl(self) -> float:
        """The largest of all readings; NaN counts as infinite."""
        return max(math.inf if math.isnan(r.kl) else r.kl for r in self.readings)

    @property
    def alarms(self) -> list[str]:
        """What is wrong, a sentence each."""
        found = []
        for r in self.readings:
            if r.error is not None:
                found.append(f"canary {r.prompt}, {r.run}: {r.error}")
            elif not r.kl <= self.threshold:
                found.append(f"canary {r.prompt}, {r.run}: KL {r.kl:.2g} > {self.threshold:g}")
            if r.run == "cold" and r.num_cached_tokens:
                salt = f"{r.num_cached_tokens} tokens found under a salt of its own"
                found.append(f"canary {r.prompt}, {r.run}: {salt}")
        return found

    @property
    def ok(self) -> bool:
        return not self.alarms


@dataclass(frozen=True)
class Canary:
    """The canaries of one model, in one dtype. model_digest: `weights_digest` of its weights."""

    model_digest: str
    prompts: tuple[CanaryPrompt, ...]

    @classmethod
    def of(cls, engine: Engine) -> Canary:
        """The stored canaries of an engine's model. Raises `ValueError` when there are none."""
        digest = weights_digest(_model(engine))
        for file in sorted(FOLDER.glob("*.json")):
            canary = cls.load(file)
            if canary.model_digest == digest:
                return canary
        raise ValueError(
            "no canaries are stored for this model in this dtype (weights "
            f"{digest[:16]}…): Canary.record(engine) makes some"
        )

    @classmethod
    def record(cls, engine: Engine, text: str = TEXT) -> Canary:
        """Make canaries for an idle engine's model; `save` keeps them.

        The truth is `execution/reference.py`: no cache, no batch. Raises `ValueError` when the
        engine does not agree with it, for then there is a fault already, or when the text is too
        short.
        """
        model = _model(engine)
        tokens = _encode(engine, text)
        if len(tokens) < max(LENGTHS):
            raise ValueError(f"text must have {max(LENGTHS)} tokens or more, got {len(tokens)}")
        params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUTS, ignore_eos=True)
        asked = [(tokens[:length], params) for length in LENGTHS]
        prompts = []
        for prompt, output in zip(asked, _serve(engine, asked), strict=True):
            reply = output.outputs[0].token_ids
            logits = reference_logits(model, prompt[0] + reply)[len(prompt[0]) - 1 : -1]
            scored = torch.log_softmax(logits, -1)
            best = scored.max(-1)
            chosen = scored.gather(-1, torch.tensor(reply)[:, None])[:, 0]
            if not bool((best.values - chosen < 1e-3).all()):
                raise ValueError("the engine does not draw the reference's tokens: a fault is on")
            values, ids = scored.topk(min(NUM_STORED, scored.shape[1]))
            steps = zip(ids.tolist(), values.tolist(), strict=True)
            logprobs = tuple(dict(zip(*step, strict=True)) for step in steps)
            prompts.append(CanaryPrompt(tuple(prompt[0]), tuple(reply), logprobs))
        return cls(weights_digest(model), tuple(prompts))

    @classmethod
    def load(cls, file: Path) -> Canary:
        """Read what `save` wrote."""
        data = json.loads(file.read_text(encoding="utf-8"))
        prompts = tuple(
            CanaryPrompt(
                tuple(prompt["token_ids"]),
                tuple(prompt["output_ids"]),
                tuple({int(t): p for t, p in step.items()} for step in prompt["logprobs"]),
            )
            for prompt in data["prompts"]
        )
        return cls(data["model_digest"], prompts)

    def save(self, file: Path) -> None:
        """Write JSON; log-probabilities are rounded to 6 digits after the point."""
        data = asdict(self)
        for prompt in data["prompts"]:
            prompt["logprobs"] = [
                {str(token): round(value, 6) for token, value in step.items()}
                for step in prompt["logprobs"]
            ]
        file.write_text(json.dumps(data) + "\n", encoding="utf-8")

    def requests(self, run: str) -> list[tuple[list[int], SamplingParams]]:
        """Prompts and parameters, for whoever serves them beside other requests.

        run: goes into the salts. A run with a new name finds nothing in the cache, one with an
        old name finds what that run has left.
        """
        width = 4 * NUM_STORED
        params = SamplingParams(
            temperature=0, max_tokens=NUM_OUTPUTS, ignore_eos=True, logprobs=width, detokenize=False
        )
        return [
            (list(prompt.token_ids), params.with_(cache_salt=f"canary-{run}-{i}"))
            for i, prompt in enumerate(self.prompts)
        ]

    def read(self, run: str, outputs: Sequence[RequestOutput]) -> list[CanaryReading]:
        """Compare the replies to `requests` with what is stored."""
        return [
            _reading(run, i, prompt, output)
            for i, (prompt, output) in enumerate(zip(self.prompts, outputs, strict=True))
        ]

    def check(self, engine: Engine, threshold: float = THRESHOLD) -> CanaryReport:
        """Ask all of them three times: cold, again as a prefix hit, then the last one alone.

        Raises `ValueError` when the engine is serving: the outputs of its steps would be lost.
        """
        if engine.has_unfinished_requests:
            raise ValueError("engine must be idle, it serves requests: use requests() and read()")
        name = uuid.uuid4().hex
        readings: list[CanaryReading] = []
        for run in ("cold", "hit"):
            readings += self.read(run, _serve(engine, self.requests(name)))
        alone = _serve(engine, self.requests(f"{name}-alone")[-1:])
        readings.append(_reading("alone", len(self.prompts) - 1, self.prompts[-1], alone[0]))
        return CanaryReport(tuple(readings), threshold)


def _model(engine: Engine) -> Any:
    model = getattr(engine.runner, "model", None)
    if model is None:
        raise ValueError("engine must run a model: this runner has no weights to compare with")
    return model


def _encode(engine: Engine, text: str) -> list[int]:
    if engine.tokenizer is not None:
        return engine.tokenizer.encode(text)
    return [byte % engine.limits.vocab_size for byte in text.encode()]


def _serve(
    engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]]
) -> list[RequestOutput]:
    """All of them at once on an engine that serves nobody else; outputs in order."""
    name = uuid.uuid4().hex
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(f"canary-{name}-{i}", prompt, params)
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        last |= {output.request_id: output for output in engine.step()}
    return [last[f"canary-{name}-{i}"] for i in range(len(requests))]


def _reading(run: str, index: int, prompt: CanaryPrompt, output: RequestOutput) -> CanaryReading:
    answer = output.outputs[0]
    cached = output.num_cached_tokens
    if answer.finish_reason == "error":
        return CanaryReading(run, index, math.nan, math.nan, cached, str(answer.stop_reason))
    kls, differences = _compare(prompt, answer)
    return CanaryReading(run, index, max(kls), sum(differences) / len(differences), cached)


def _compare(prompt: CanaryPrompt, answer: CompletionOutput) -> tuple[list[float], list[float]]:
    """Per step, up to the first other token (its own step included): KL and |Δ logprob|.

    All tokens that are not stored count as one, which makes the divergence no larger. A stored
    token outside the reply's candidates gets the probability of the last of these: no less than
    it has, so the divergence becomes no larger either.
    """
    kls, differences = [], []
    steps = zip(
        prompt.output_ids, prompt.logprobs, answer.token_ids, answer.logprobs or (), strict=False
    )
    for expected, stored, token, measured in steps:
        least = min(entry.logprob for entry in measured.values())
        found = {t: measured[t].logprob if t in measured else least for t in stored}
        kl = sum(math.exp(p) * (p - found[t]) for t, p in stored.items())
        rest_p = max(1 - sum(map(math.exp, stored.values())), 1e-9)
        rest_q = max(1 - sum(map(math.exp, found.values())), 1e-9)
        kls.append(kl + rest_p * math.log(rest_p / rest_q))
        differences.append(abs(stored[expected] - found[expected]))
        if token != expected:
            break
    return kls, differences
