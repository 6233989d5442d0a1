"""Doom loops: a reply whose tail says the same thing over and over.

A sequence repeats with period p when its last tokens equal those p places before. For every p at
once the detector keeps the length of that run, and looks at a new token once::

    tokens   a  b  c  a  b  c  a  b            place of the next token: 8
    next     c     stood at places 2 and 5  →  periods 6 and 3
    runs     {6: 2, 3: 5}                   →  {6: 3, 3: 6}, every other run is over

so a token costs as many operations as it occurs in the last `max_period` tokens: a handful.

Exact repetition is a strong sign and not a proof. Rules of Markdown tables, `====`, indentation,
arrays of zeros and padding in base64 repeat for good reasons, and have been killed in public: a
table rule `| --- ` eight times over ended a valid tool call (weicj/vLLM-2080Ti-Definitive#122).
`repeats_legitimately` knows them by their text, and they get a far larger limit instead of none:
nothing runs for ever. A loop that changes a little every time (a list that counts) is not found.
"""

from __future__ import annotations

import re
from collections import deque

from minifer.postprocessing.guards.alarm import Alarm
from minifer.postprocessing.hooks import HookVerdict
from minifer.sampling_params import RepetitionDetection

MAX_PERIOD = 128  # tokens of the longest repeated passage that is found
MIN_COUNT = 4  # times it must be there
MIN_TOKENS = 64  # and tokens it must fill: "ha ha ha" is no loop yet
MAX_LEGITIMATE_TOKENS = 1024  # that tables, indentation and zeros may fill

_RULES = re.compile(r"[\s|=\-_*#~+.:·─-╿]+")  # tables, rulers, indentation, boxes
_NUMBERS = re.compile(r"[\s0-9a-fA-FxX,;.()\[\]{}+\-|]*")  # arrays, rows of tables, hex dumps
_BASE64 = re.compile(r"(?=.*[A-Z0-9+/])[A-Za-z0-9+/=]+")


def repeats_legitimately(passage: str) -> bool:
    """Is this text, seen many times in a row, layout or data rather than a loop?

    passage: one period, which may begin anywhere in it; "" where there is no text to judge.
    """
    if not passage:
        return False
    if _RULES.fullmatch(passage) or _BASE64.fullmatch(passage):
        return True
    digits = sum(c.isdigit() for c in passage)
    letters = sum(c.isalpha() for c in passage)
    return digits > 0 and digits >= letters and _NUMBERS.fullmatch(passage) is not None


class PeriodRuns:
    """For every period up to `max_period`, how many of the last tokens repeat with it."""

    def __init__(self, max_period: int) -> None:
        self._max_period = max_period
        self._num_tokens = 0
        self._last: deque[int] = deque()  # the newest token and max_period before it
        self._places: dict[int, deque[int]] = {}  # token → where it stood among them
        self._runs: dict[int, int] = {}

    def push(self, token_id: int) -> dict[int, int]:
        """Take the next token; returns {period: run}, shortest period last. Do not change it.

        A tail that repeats with period p and run r is p + r tokens long.
        """
        place = self._num_tokens
        if place > self._max_period:
            oldest = self._last.popleft()
            self._places[oldest].popleft()
            if not self._places[oldest]:
                del self._places[oldest]
        self._last.append(token_id)
        places = self._places.setdefault(token_id, deque())
        runs = self._runs
        self._runs = {place - old: runs.get(place - old, 0) + 1 for old in places}
        places.append(place)
        self._num_tokens += 1
        return self._runs


class RepetitionGuard:
    """The default guard: trips on a passage of up to 128 tokens that is there 4 times or more.

    The passage must fill `min_tokens` tokens in all, and `max_legitimate_tokens` where its text
    may well repeat. Without text (no tokenizer) every passage counts as a loop.
    """

    def __init__(
        self,
        alarm: Alarm,
        *,
        max_period: int = MAX_PERIOD,
        min_count: int = MIN_COUNT,
        min_tokens: int = MIN_TOKENS,
        max_legitimate_tokens: int = MAX_LEGITIMATE_TOKENS,
    ) -> None:
        self._alarm = alarm
        self._runs = PeriodRuns(max_period)
        self._texts: deque[str] = deque(maxlen=max_period)  # of the last tokens
        self._min_count = min_count
        self._min_tokens = min_tokens
        # Of a tail that repeats c times, all but the first passage is run: (1 - 1/c) of it.
        self._min_run = min_tokens * (min_count - 1) // min_count
        self._max_legitimate_tokens = max_legitimate_tokens

    def on_token(self, token_id: int, text: str) -> HookVerdict:
        if self._alarm.rung:
            return HookVerdict(text)
        self._texts.append(text)
        runs = self._runs.push(token_id)
        if max(runs.values(), default=0) < self._min_run:  # nearly always
            return HookVerdict(text)
        for period, run in reversed(runs.items()):
            length = period + run
            if length >= self._min_tokens and length >= self._min_count * period:
                # Text may lag behind its tokens; in a loop that only turns the passage round.
                passage = "".join(list(self._texts)[-period:])
                if length < self._max_legitimate_tokens and repeats_legitimately(passage):
                    return HookVerdict(text)
                count = length // period
                reason = f"{passage!r} ({period} tokens) {count} times in a row"
                return self._alarm.ring(text, reason)
        return HookVerdict(text)

    def on_finish(self, text: str) -> str:
        return text


class RequestedRepetition:
    """`SamplingParams.repetition_detection`: the caller's own limits, which know no exceptions.

    As in vLLM: any pattern of min_pattern_size to max_pattern_size tokens that the output ends
    with min_count times, once there are more than `min_tokens` tokens.
    """

    def __init__(self, alarm: Alarm, detection: RepetitionDetection, min_tokens: int) -> None:
        self._alarm = alarm
        self._runs = PeriodRuns(detection.max_pattern_size)
        self._detection = detection
        self._num_unarmed = min_tokens

    def on_token(self, token_id: int, text: str) -> HookVerdict:
        runs = self._runs.push(token_id)
        self._num_unarmed -= 1
        if self._num_unarmed >= 0:
            return HookVerdict(text)
        smallest, count = self._detection.min_pattern_size, self._detection.min_count
        for period, run in reversed(runs.items()):
            if period >= smallest and period + run >= count * period:
                reason = f"the last {period} tokens {count} times in a row"
                return self._alarm.ring(text, reason, "repetition_detected")
        return HookVerdict(text)

    def on_finish(self, text: str) -> str:
        return text
