"""What a simulated workload is made of: requests with lengths, and blocks by name.

No texts and no token ids: a prompt is so many tokens, and its full blocks have names. Two prompts
that begin with the same names begin with the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 512  # tokens a name stands for, as in Mooncake's traces


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    time: seconds, when it arrives; of a later turn of a conversation: seconds after the end of
    the turn before. prompt_len, output_len: tokens; it ends after exactly `output_len`.
    block_names: of the prompt's full blocks of `BLOCK` tokens, first to last, equal names for equal
    prefixes; () says that it shares nothing. stored_len: leading prompt tokens that the cluster's
    store holds by assumption, for studies that do not simulate how they came there.
    """

    request_id: str
    time: float
    prompt_len: int
    output_len: int
    block_names: tuple[int, ...] = ()
    stored_len: int = 0
    tenant: str = ""
    session: int = 0
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of one user: each next one comes when the answer before it is over (closed loop)."""

    turns: tuple[Arrival, ...]


Workload = Sequence[Arrival | Conversation]
