"""What a guard that has seen enough does about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minifer.postprocessing.hooks import HookVerdict

Report = Callable[[str, str], None]  # (guard, reason); a plain function: hooks are deep-copied


@dataclass
class Alarm:
    """Rings once a sequence: tells `report`, and with the action "stop" ends the reply.

    guard: the name under which alarms are counted. finish_reason: of a reply that is ended.
    """

    guard: str
    finish_reason: str
    action: str
    report: Report
    rung: bool = False

    def ring(self, text: str, reason: str, stop_reason: str | None = None) -> HookVerdict:
        """The verdict on the token that tripped the guard; its text is released."""
        self.rung = True
        self.report(self.guard, reason)
        if self.action != "stop":
            return HookVerdict(text)
        return HookVerdict(text, self.finish_reason, stop_reason or reason)
