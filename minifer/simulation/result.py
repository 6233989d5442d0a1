"""What a simulated run leaves behind: one record a request, one a node."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise

from minifer.routing.policy import Role


@dataclass(slots=True)
class RequestRecord:
    """The life of one request; times are seconds on the simulation's clock, None if never.

    arrived: when it came. admitted: the first step that worked on it began. first_token, end: of
    its first and last token; for one that was rejected `end` is when it was told so.
    token_times: of each token, `first_token` included.
    prompt_len, output_len: tokens it came with and asked for. cached_len: of the prompt, found on
    the node that prefilled it; loaded_len: fetched from stores. path: nodes it was on, in order.
    rejected: why it was refused, "" if it was not. num_preemptions: on all nodes.
    """

    request_id: str
    arrived: float
    prompt_len: int
    output_len: int
    tenant: str = ""
    session: int = 0
    turn: int = 0
    admitted: float | None = None
    first_token: float | None = None
    end: float | None = None
    token_times: array[float] = field(default_factory=lambda: array("d"))
    cached_len: int = 0
    loaded_len: int = 0
    num_preemptions: int = 0
    path: tuple[str, ...] = ()
    rejected: str = ""

    @property
    def finished(self) -> bool:
        """Did it get all its tokens?"""
        return self.end is not None and not self.rejected

    @property
    def reused_len(self) -> int:
        """Prompt tokens that were not computed: a small share makes a request cold."""
        return self.cached_len + self.loaded_len

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that worked on it."""
        return None if self.admitted is None else self.admitted - self.arrived

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def e2e(self) -> float | None:
        """Seconds from arrival to the last token; None unless it finished."""
        return self.end - self.arrived if self.end is not None and self.finished else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between successive tokens (ITL)."""
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def max_gap(self) -> float | None:
        """The longest of `gaps`; None with fewer than two tokens."""
        return max(self.gaps, default=None)

    @property
    def tpot(self) -> float | None:
        """Mean seconds a token after the first; None with fewer than two."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


@dataclass(slots=True)
class NodeRecord:
    """What one node did.

    busy_seconds: in steps, loads included. load_seconds: of these, steps that waited for a store.
    prefill_tokens, decode_tokens: computed; a preempted request's tokens count again.
    mean_kv_usage: share of its KV blocks in use, over time; peak_kv_usage: the most.
    num_evictions: cached blocks that were overwritten.
    """

    name: str
    role: Role
    num_steps: int = 0
    busy_seconds: float = 0.0
    load_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    num_preemptions: int = 0
    num_evictions: int = 0
    mean_kv_usage: float = 0.0
    peak_kv_usage: float = 0.0


@dataclass(slots=True)
class SimulationResult:
    """requests: in order of arrival. nodes: as they were given. seconds: when the last thing
    happened, or the horizon. stopped: a horizon or a `stop` ended it before the work was done."""

    requests: list[RequestRecord]
    nodes: list[NodeRecord]
    seconds: float
    stopped: bool = False

    @property
    def finished(self) -> list[RequestRecord]:
        return [record for record in self.requests if record.finished]

    @property
    def rejected(self) -> list[RequestRecord]:
        return [record for record in self.requests if record.rejected]

    def utilisation(self, node: str) -> float:
        """Share of the run that a node spent in steps. Raises `ValueError` for an unknown one."""
        for record in self.nodes:
            if record.name == node:
                return record.busy_seconds / self.seconds if self.seconds else 0.0
        names = ", ".join(record.name for record in self.nodes)
        raise ValueError(f"node must be one of {names}, got {node!r}")
