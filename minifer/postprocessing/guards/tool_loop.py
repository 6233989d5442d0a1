"""Tool-call loops: the same call with the same arguments and the same answer, again and again.

A lost tool result, a garbled parser or a weak model: the model never sees that its call was
answered, and asks again. Public cases ran to 220 identical calls in 25 minutes
(earendil-works/pi#9637), 4.49 million prompt tokens (mistralai/mistral-vibe#83), or began with an
empty `[]` as the result (superplanehq/superplane#4123). Three in a row is the limit others settled
on (HKUDS/nanobot#3077; the `doom_loop` permission of opencode, anomalyco/opencode#28596).

Two rules, neither of which trips on the name alone:

1. `limit` calls in a row with equal name, arguments (as JSON values: the order of keys and spaces
   do not count) and result;
2. 2 · `limit` calls in a row with equal name and result whose arguments differ only a little.

A call whose result changes makes progress: polling for a job to end is no loop while its answers
differ. Tools that are asked until they say something new go on the allow-list.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_COMPARED = 400  # characters of arguments that are compared for likeness
ALIKE = 0.85  # share of matching characters from which arguments are nearly equal


class ToolLoopDetector:
    """Watches the calls of one conversation, in order.

    limit: calls in a row that are a loop, at least 2. allow: names of tools that may be called
    alike without end; their calls are not counted, and do not interrupt a loop either.
    Raises `ValueError` for a bad limit.
    """

    def __init__(self, limit: int = 3, allow: Iterable[str] = ()) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 2:
            raise ValueError(f"limit must be an integer of at least 2, got {limit!r}")
        self._limit = limit
        self._allow = frozenset([allow] if isinstance(allow, str) else allow)
        self.reset()

    def reset(self) -> None:
        """Forget the calls so far: somebody has stepped in."""
        self._last: tuple[str, str, str] | None = None  # name, arguments, result
        self._num_equal = 0
        self._num_alike = 0

    def observe(self, name: str, arguments: Any, result: Any = None) -> str | None:
        """Take one call; returns why it is a loop, or None.

        arguments: JSON text or a value. result: what the tool answered; None while it is not
        known, which counts as an answer that does not change.
        """
        if name in self._allow:
            return None
        call = (name, canonical(arguments), canonical(result))
        same = self._last is not None and (call[0], call[2]) == (self._last[0], self._last[2])
        equal = self._last == call
        alike = same and (equal or _alike(call[1], self._last[1]))  # type: ignore[index]
        self._num_equal = self._num_equal + 1 if equal else 1
        self._num_alike = self._num_alike + 1 if alike else 1
        self._last = call
        if self._num_equal >= self._limit:
            return f"{name} was called {self._num_equal} times in a row with {_short(call[1])}"
        if self._num_alike >= 2 * self._limit:
            return (
                f"{name} was called {self._num_alike} times in a row with nearly the same "
                f"arguments and the same result, the last ones {_short(call[1])}"
            )
        return None


def tool_loop(
    messages: Sequence[Mapping[str, Any]], limit: int = 3, allow: Iterable[str] = ()
) -> str | None:
    """Does this conversation end in a loop of tool calls? Returns why, or None.

    messages: of the OpenAI chat API, checked elsewhere; results are found by `tool_call_id`. A
    message of the user ends a loop, and so does any other call after it: what is past is no reason
    to refuse.
    """
    results = {
        str(message.get("tool_call_id")): message.get("content")
        for message in messages
        if message.get("role") == "tool"
    }
    detector, reason = ToolLoopDetector(limit, allow), None
    for message in messages:
        if message.get("role") == "user":
            detector.reset()
            reason = None
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            result = results.get(str(call.get("id")))
            reason = detector.observe(str(function.get("name")), function.get("arguments"), result)
    return reason


def canonical(value: Any) -> str:
    """One spelling of a JSON value, given as text or as a value; other text as it is, trimmed."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value.strip()
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=repr)


def _alike(left: str, right: str) -> bool:
    left, right = left[:MAX_COMPARED], right[:MAX_COMPARED]
    return difflib.SequenceMatcher(None, left, right, autojunk=False).ratio() >= ALIKE


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "…"
