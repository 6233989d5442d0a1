"""The caller's wishes: how a request draws its tokens and when it ends.

`SamplingParams` is checked once, when it is built, against a table of limits; what depends on the
model (vocabulary, context length) is checked at admission (`scheduling/admission.py`).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from numbers import Integral, Real
from typing import Any

from minifer.structured_output import StructuredOutput

MIN_TEMPERATURE = 0.01  # below it float32 logits overflow; vLLM raises small values to it too
MAX_SEED = 2**64
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
MAX_PATTERN_SIZE = 1024  # tokens; bounds the work that a repeating reply can ask of a step


class OutputKind(StrEnum):
    """What each `RequestOutput` of a running request carries."""

    CUMULATIVE = "cumulative"  # everything so far
    DELTA = "delta"  # what is new since the last one
    FINAL_ONLY = "final_only"  # nothing until the request is finished


@dataclass(frozen=True)
class RepetitionDetection:
    """End a reply, with `finish_reason="repetition"`, whose tail repeats. Names are vLLM's.

    max_pattern_size: longest passage that is looked for, in tokens, at most 1024.
    min_count: how many times in a row it must be there, at least 2.
    min_pattern_size: shortest passage that counts; 0 stands for 1.

    Raises `ValueError` naming the field, its value and the limit.
    """

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1

    def __post_init__(self) -> None:
        def check(name: str, low: int, high: float, rule: str) -> int:
            full_name = f"repetition_detection.{name}"
            return _integer(full_name, getattr(self, name), low, high, f"an integer {rule}")

        largest = check("max_pattern_size", 1, MAX_PATTERN_SIZE, f"in [1, {MAX_PATTERN_SIZE}]")
        count = check("min_count", 2, math.inf, "of at least 2")
        rule = f"from 0 to max_pattern_size ({largest})"
        smallest = max(1, check("min_pattern_size", 0, largest, rule))
        for name, value in zip(
            ("max_pattern_size", "min_count", "min_pattern_size"),
            (largest, count, smallest),
            strict=True,
        ):
            object.__setattr__(self, name, value)


# name, lowest and highest value, and the rule in words
_Rules = tuple[tuple[str, float, float, str], ...]
_ABOVE_0 = math.ulp(0.0)  # the smallest positive number
_NUMBERS: _Rules = (
    ("temperature", 0, 2, "a number in [0, 2]"),
    ("top_p", _ABOVE_0, 1, "a number in (0, 1]"),
    ("min_p", 0, 1, "a number in [0, 1]"),
    ("repetition_penalty", _ABOVE_0, MAX_FLOAT32, "a finite number above 0"),
    ("presence_penalty", -2, 2, "a number in [-2, 2]"),
    ("frequency_penalty", -2, 2, "a number in [-2, 2]"),
)
_INTEGERS: _Rules = (
    ("top_k", -1, math.inf, "an integer: 0 or -1 for off, else at least 1"),
    ("n", 1, math.inf, "an integer of at least 1"),
    ("min_tokens", 0, math.inf, "an integer of at least 0"),
    ("priority", -(2**31), math.inf, "an integer of at least -2**31"),
)
_INTEGERS_OR_NONE: _Rules = (
    ("seed", -(2**63), MAX_SEED - 1, "a 64-bit integer or None"),
    ("max_tokens", 1, math.inf, "an integer of at least 1, or None"),
    ("logprobs", -1, math.inf, "an integer of at least 0, -1 or None"),
    ("prompt_logprobs", -1, math.inf, "an integer of at least 0, -1 or None"),
    ("num_loops", 1, math.inf, "an integer of at least 1, or None"),
)
_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")


def _number(name: str, value: Any, low: float, high: float, rule: str) -> float:
    number = math.nan  # passes no comparison
    if isinstance(value, Real) and not isinstance(value, bool):
        # An int may be too large for a float; a numpy float may be too short for the limits.
        number = value if isinstance(value, int) else float(value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be {rule}, got {value!r}")
    return float(number)


def _integer(name: str, value: Any, low: float, high: float, rule: str) -> int:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not low <= value <= high:
        raise ValueError(f"{name} must be {rule}, got {value!r}")
    return int(value)


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    rule = "a list of token ids of at least 0"
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be {rule}, got {values!r}")
    return tuple(_integer(name, value, 0, math.inf, rule) for value in values)


_TOKEN_KEY = re.compile("0|[1-9][0-9]{0,18}")  # JSON's keys are strings; one for each token id


def _logit_bias(values: Any) -> dict[int, float]:
    rule = "a mapping from token ids of at least 0 to finite float32 numbers"
    if not isinstance(values, Mapping):
        raise ValueError(f"logit_bias must be {rule}, got {values!r}")
    bias = {}
    for key, value in values.items():
        token = int(key) if isinstance(key, str) and _TOKEN_KEY.fullmatch(key) else key
        token = _integer("logit_bias", token, 0, math.inf, rule)
        if token in bias:
            raise ValueError(f"logit_bias must be {rule}, none of them twice, got {token}")
        bias[token] = _number("logit_bias", value, -MAX_FLOAT32, MAX_FLOAT32, rule)
    return bias


def _repetition_detection(value: Any) -> RepetitionDetection:
    if isinstance(value, RepetitionDetection):
        return value
    known = [field.name for field in fields(RepetitionDetection)]
    if not isinstance(value, Mapping) or not {*known[:2]} <= value.keys() <= {*known}:
        raise ValueError(
            "repetition_detection must be a RepetitionDetection or a mapping with "
            f"{known[0]}, {known[1]} and perhaps {known[2]}, got {value!r}"
        )
    return RepetitionDetection(**value)


def is_text(value: Any) -> bool:
    """A non-empty string that has UTF-8 bytes: a lone surrogate has none."""
    return isinstance(value, str) and 0 < len(value) == len(value.encode(errors="ignore").decode())


def _strings(name: str, values: Any) -> tuple[str, ...]:
    rule = "a list of non-empty strings"
    if isinstance(values, bytes) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be {rule}, got {values!r}")
    texts = (values,) if isinstance(values, str) else tuple(values)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must be {rule}, got {text!r}")
    return texts


@dataclass(frozen=True)
class SamplingParams:
    """How one request draws its tokens and when it ends. Names, defaults and limits are vLLM's.

    temperature: 0 is greedy; values below 0.01 are raised to it, with a warning. In [0, 2].
    top_k: keep the k likeliest tokens, exactly k (lowest id first among ties); 0 or -1 is off.
    top_p: keep the smallest set of likeliest tokens whose mass reaches p. In (0, 1].
    min_p: keep tokens at least min_p times as likely as the likeliest. In [0, 1].
    repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt
        or output; > 0. presence_penalty, frequency_penalty: subtracted once, or once per
        occurrence, for tokens of the output only. In [-2, 2].
    logit_bias: token id → value added to its logit.
    allowed_token_ids: if given, every other token is masked.
    bad_words: strings that must not be generated.
    seed: makes the draw repeatable whatever else is in the batch; None: from the engine's seed.
    n: independent continuations of one prompt.
    stop: strings that end the text (and are cut off unless include_stop_str_in_output).
    stop_token_ids: token ids that end it. ignore_eos: the model's own end tokens do not.
    max_tokens: output limit; None: until the model's length. min_tokens: no end before it.
    logprobs: log-probabilities of the sampled token and the k likeliest; -1: whole vocabulary.
    prompt_logprobs: the same for the prompt's tokens.
    skip_special_tokens, detokenize: how, and whether, text is made.
    priority: smaller is sooner, used by the `priority` policy.
    tenant: on whose behalf; the `vtc` policy is fair to tenants. "" is one too.
    cache_salt: requests share cached prefixes only within one salt.
    repetition_detection: end a reply that repeats itself; a mapping of its fields will do.
    structured: the form that the reply must have (a JSON schema, a regular expression, …); a
        mapping of its fields will do.
    num_loops: of a loop model, how often its core runs for each token; None: the engine's default.
    exit_threshold: a generated token leaves the loop when 1 − cosine of two successive states is
        below it; 0 never leaves. In [0, 1]; None: every token runs num_loops.

    Numbers of other libraries (numpy's) are taken and become Python's. Raises `ValueError` naming
    the field, its value and the limit.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    priority: int = 0
    tenant: str = ""
    cache_salt: str | None = None
    repetition_detection: RepetitionDetection | None = None
    structured: StructuredOutput | None = None
    num_loops: int | None = None
    exit_threshold: float | None = None
    output_kind: OutputKind = OutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        def set_(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name, low, high, rule in _NUMBERS:
            set_(name, _number(name, getattr(self, name), low, high, rule))
        for name, low, high, rule in _INTEGERS:
            set_(name, _integer(name, getattr(self, name), low, high, rule))
        for name, low, high, rule in _INTEGERS_OR_NONE:
            if getattr(self, name) is not None:
                set_(name, _integer(name, getattr(self, name), low, high, rule))
        if self.exit_threshold is not None:
            rule = "a number in [0, 1], or None"
            value = _number("exit_threshold", self.exit_threshold, 0, 1, rule)
            set_("exit_threshold", value)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raised = f"temperature {self.temperature} is raised to {MIN_TEMPERATURE}; 0 is greedy"
            warnings.warn(raised, stacklevel=3)
            set_("temperature", MIN_TEMPERATURE)
        if self.logit_bias is not None:
            set_("logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:  # an empty list is refused at admission
            set_("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        for name in ("stop", "bad_words", "stop_token_ids"):
            check = _token_ids if name == "stop_token_ids" else _strings
            values = getattr(self, name)
            set_(name, check(name, () if values is None else values))
        if self.cache_salt is not None and not is_text(self.cache_salt):
            raise ValueError(
                f"cache_salt must be a non-empty string of valid Unicode, got {self.cache_salt!r}"
            )
        if self.tenant != "" and not is_text(self.tenant):
            raise ValueError(f"tenant must be a string of valid Unicode, got {self.tenant!r}")
        if self.repetition_detection is not None:
            set_("repetition_detection", _repetition_detection(self.repetition_detection))
        if self.structured is not None:
            set_("structured", StructuredOutput.of(self.structured))
        if self.output_kind not in tuple(OutputKind):
            kinds = ", ".join(OutputKind)
            raise ValueError(f"output_kind must be one of {kinds}, got {self.output_kind!r}")
        set_("output_kind", OutputKind(self.output_kind))
        self._check_together()

    def _check_together(self) -> None:
        """Rules about two fields."""
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n must be 1 when temperature is 0 (greedy), got n={self.n}; "
                "set a temperature above 0"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if self.stop and not self.detokenize:
            raise ValueError(
                f"stop strings need detokenize=True, got detokenize=False and stop={self.stop!r}"
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)


def as_params(params: Any) -> SamplingParams:
    """`params` itself, the defaults for None; raises `ValueError` for anything else."""
    if params is not None and not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams or None, got {params!r}")
    return params if params is not None else SamplingParams()
