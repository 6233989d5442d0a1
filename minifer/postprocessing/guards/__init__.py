"""What watches a reply while it is written: loops, drifting scripts, words that must not pass.

Each guard is a `TokenHook`. Guards that cost next to nothing run by default and say what they saw;
`EngineConfig.guards` decides whether they also end the reply:

| guard | trips on | `finish_reason` with "stop" |
|---|---|---|
| repetition | a tail that says the same over and over | "repetition" |
| language_drift | writing in a script that nobody asked for | "language_drift" |

`SafetyHook` (words and patterns that must not pass) and `tool_loop` (a conversation that calls one
tool for ever) are for whoever builds the request.
"""

from __future__ import annotations

from collections.abc import Callable

from minifer.postprocessing.guards.alarm import Alarm, Report
from minifer.postprocessing.guards.repetition import RepetitionGuard, RequestedRepetition
from minifer.postprocessing.guards.script_drift import ScriptDriftGuard
from minifer.postprocessing.hooks import TokenHook
from minifer.sampling_params import SamplingParams


def default_guards(
    action: str, prompt_text: Callable[[], str] | None, report: Report
) -> list[TokenHook]:
    """The guards of one sequence.

    action: "report", "stop", or "off" for none. prompt_text: gives the text that the reply
    continues, asked for only when it matters; None where there is no text, and then only guards
    that look at tokens run. report: told (guard, reason) when one trips.
    """
    if action == "off":
        return []
    guards: list[TokenHook] = [RepetitionGuard(Alarm("repetition", "repetition", action, report))]
    if prompt_text is not None:
        alarm = Alarm("language_drift", "language_drift", action, report)
        guards.append(ScriptDriftGuard(alarm, prompt_text))
    return guards


def requested_guards(params: SamplingParams, report: Report) -> list[TokenHook]:
    """The guards that a request itself asks for: they stop it whatever the engine's setting."""
    if params.repetition_detection is None:
        return []
    alarm = Alarm("repetition", "repetition", "stop", report)
    return [RequestedRepetition(alarm, params.repetition_detection, params.min_tokens)]
