"""Token hooks: what may look at a sequence's tokens and text before the caller does.

Guards against repetition, safety checks that hold text back until it is judged, breakers for tool
calls: each is a hook, and a new one needs no change to the engine. The text goes through them in
order, after stop strings have taken their part::

    detokenizer → stop strings → hook 0 → hook 1 → ... → caller
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minifer.sampling_params import is_text

CONTENT_FILTER = "content_filter"  # the finish reason of a reply whose text was withheld


@dataclass(frozen=True)
class HookVerdict:
    """What a hook decides about one token.

    text: what may be released now: the text it was given, less of it (the rest is held by the
        hook), or that with text held earlier.
    finish_reason: None to go on; else the sequence ends with it, and with stop_reason. Any
        non-empty string. Where the token ends the sequence anyway ("stop", "length") that stands,
        unless the hook says "content_filter": text is missing then, and the caller must know.
    """

    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class TokenHook(Protocol):
    """Watches one sequence. It may keep state, so every sequence gets its own instances.

    A hook that raises fails its own request, and no other. It must not call the engine, which is
    in the middle of a step: what ends the sequence is the verdict.
    """

    def on_token(self, token_id: int, text: str) -> HookVerdict:
        """Called once for each sampled token, in order, also when text is "".

        text: what is about to be released; it may belong to earlier tokens too, or be only the
        part of this one's that is not held back.
        """
        ...

    def on_finish(self, text: str) -> str | HookVerdict:
        """Called once, when the sequence has ended for whatever reason.

        text: the last text, which no `on_token` has seen. Returns what is released after it all:
        held text and text that are fine. A hook that has blocked the reply returns "". One that
        blocks it only now returns a verdict with "content_filter".
        """
        ...


def check_hooks(hooks: Any) -> list[TokenHook]:
    """Raises `ValueError` for what is not a list of hooks."""
    hooks = list(hooks) if isinstance(hooks, Iterable) else [hooks]
    for hook in hooks:
        if not all(callable(getattr(hook, name, None)) for name in ("on_token", "on_finish")):
            raise ValueError(f"hooks must be objects with on_token and on_finish, got {hook!r}")
    return hooks


def copy_hooks(hooks: Sequence[TokenHook]) -> list[TokenHook]:
    """Instances for one more sequence. Raises `ValueError` for a hook that cannot be copied."""
    try:
        return copy.deepcopy(list(hooks))
    except Exception as error:
        raise ValueError(
            f"hooks of more than one sequence must be copyable (copy.deepcopy): {error}"
        ) from error


def run_hooks(hooks: Sequence[TokenHook], token_id: int, text: str) -> HookVerdict:
    """Send one token through the hooks: each sees the text that the one before let through.

    A hook that ends the sequence keeps no other from judging its text; the first reason counts,
    but for "content_filter".
    """
    verdict = HookVerdict(text)
    for hook in hooks:
        verdict = _after(verdict, hook, hook.on_token(token_id, verdict.text))
    return verdict


def finish_hooks(hooks: Sequence[TokenHook], text: str) -> HookVerdict:
    """Send the last text through the hooks; returns the last text for the caller."""
    verdict = HookVerdict(text)
    for hook in hooks:
        new = hook.on_finish(verdict.text)
        verdict = _after(verdict, hook, HookVerdict(new) if isinstance(new, str) else new)
    return verdict


def _after(verdict: HookVerdict, hook: TokenHook, new: Any) -> HookVerdict:
    """The verdict of all hooks up to `hook`. Raises `TypeError` for one that is none."""
    fine = isinstance(new, HookVerdict) and isinstance(new.text, str)
    if not fine or not (new.finish_reason is None or is_text(new.finish_reason)):
        raise TypeError(
            f"{type(hook).__name__} must return a HookVerdict with a text and a finish_reason that "
            f"is None or a non-empty string, got {new!r}"
        )
    overrules = verdict.finish_reason is None or new.finish_reason == CONTENT_FILTER
    if overrules:
        accepted: HookVerdict = new
        return accepted
    return HookVerdict(new.text, verdict.finish_reason, verdict.stop_reason)
