"""One part of the report measured anew, the others as they were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEASURED = ("test_time", "isoflop", "depth_task")
_CALL = ("command", "started", "versions", "machine", "seeds", "quick", "trainings", "seconds")


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`old` with the parts of `new` in the place of its own.

    Both are results of `study` with the `command` that made them. What describes a call stays the
    old one's; each measured part that is new says under `measured` which call it is from, and one
    that was merged before keeps saying so.

    Raises `ValueError` if a command is missing, or one of the two is a quick run.
    """
    for name, data in (("old", old), ("new", new)):
        if "command" not in data:
            raise ValueError(f"{name} must say the command that made it, and has no 'command'")
        if data["quick"]:
            raise ValueError(f"{name} must not be a quick run: its numbers mean nothing")
    call = {key: new[key] for key in (*_CALL, "cpu_seconds")}
    merged = dict(old)
    for part in (*MEASURED, "training"):
        if part in new:
            merged[part] = new[part] | ({"measured": call} if part in MEASURED else {})
    return merged
