"""Debug mode (`EngineConfig.debug`): what goes wrong in memory goes wrong loudly, at once.

Most faults of a KV cache are silent: a stale or unwritten slot that attention reads by mistake
usually holds plausible numbers, and the reply stays fluent. Debug mode takes the plausibility
away, and checks what can be checked without looking at numbers:

- blocks nobody owns hold NaN, from the start and again whenever they are freed or handed out
  (`KVStorage.poison`): to read one too many makes the logits non-finite, which ends the request;
- a block of NaN lies before and after each tensor of the pool (`KVStorage.check_guard_bands`):
  a kernel that writes past its end is caught;
- every slot remembers which tokens its keys and values come from (`kv/shadow.py`), and a step may
  read only slots that hold its own request's prefix;
- reference counts, free queue and prefix index are checked after every step (`kv/invariants.py`).

A violated check is a `DebugError`. In the middle of a step it ends that step's requests with
`finish_reason="error"`; a broken pool cannot be trusted any more and raises out of `Engine.step`.
"""

from __future__ import annotations


class DebugError(AssertionError):
    """A check of the debug mode that did not hold: a fault of the engine, never of the caller."""
