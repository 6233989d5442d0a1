"""The router's side: a prefill worker is asked to compute the prompt, a decode worker to answer.

::

    choose the decode worker ─▶ is there much to compute?  no ─▶ it computes the prompt itself
                                        │ yes
    choose the prefill worker ─▶ POST /internal/prefill/… ─▶ ticket ─▶ along with the request

A prefill worker that is dead, full or silent costs a request `ask_timeout` seconds at most: then
it goes on without a ticket.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import httpx

from minifer.routing.policy import NoReplicaError, Role
from minifer.serving.disaggregation.ticket import TICKET_HEADER, TOKEN_HEADER
from minifer.serving.disaggregation.worker import PREFILL_ROUTE
from minifer.serving.front import sse
from minifer.serving.front.errand import ELSEWHERE
from minifer.serving.replicas.fleet import FleetErrand
from minifer.serving.replicas.replica import Replica


class _BusyError(Exception):
    """The prefill worker is full, or going down."""


class PrefillStage:
    """To be a `Fleet`'s `before`: gets the ticket that a request takes to its decode worker.

    token: the workers'. min_tokens: where the decode worker has fewer tokens than that to compute,
    it does so at once, and no hand-over is paid for. ask_timeout: seconds that a prefill worker
    may take to admit a prompt.
    """

    def __init__(self, token: str, *, min_tokens: int = 0, ask_timeout: float = 10.0) -> None:
        self._token = token
        self._min_tokens = min_tokens
        self._timeout = ask_timeout

    async def __call__(self, errand: FleetErrand) -> Mapping[str, str]:
        """Headers for the decode worker, which has been chosen. When it dies and another one is
        chosen, a ticket is asked for once more: by then the prompt is in somebody's cache."""
        ticket = await self._ticket(errand)
        return {} if ticket is None else {TICKET_HEADER: ticket, TOKEN_HEADER: self._token}

    async def _ticket(self, errand: FleetErrand) -> str | None:
        """From one prefill worker after the other, until one has taken the prompt."""
        count, supervisor = errand.fleet.metrics.count, errand.fleet.supervisor
        assert errand.decision is not None
        new = errand.asked.num_tokens - errand.decision.cached_tokens
        if new < max(self._min_tokens, errand.asked.block_size + 1):
            count("hand_overs", "local")
            return None
        tried: set[Replica] = set()
        while workers := {r for r in supervisor.available if r.role is Role.PREFILL} - tried:
            with ExitStack() as held:
                try:
                    replica = _choose(errand, workers, held)
                except NoReplicaError:  # a policy need not take any
                    break
                tried.add(replica)
                try:
                    ticket = await self._ask(errand, replica, held)
                except (httpx.TransportError, TimeoutError, RuntimeError):  # nobody listens there
                    supervisor.suspect(replica)
                    count("hand_overs", "lost")
                except _BusyError:
                    count("hand_overs", "busy")
                else:
                    count("hand_overs", "refused" if ticket is None else "begun")
                    if ticket is not None:
                        errand.first_token()  # the decode worker has no prompt to compute
                    return ticket
        count("hand_overs", "no_worker")
        return None

    async def _ask(self, errand: FleetErrand, replica: Replica, held: ExitStack) -> str | None:
        """Raises `httpx.TransportError`, `TimeoutError`, `_BusyError`.

        The worker's answer begins with the ticket and ends when the prompt is computed. What it
        holds here is held until then, or until the decode worker is left: the client may be gone,
        and then the prompt is computed no further.
        """
        http = errand.fleet.http
        request = http.build_request(
            "POST",
            replica.url + PREFILL_ROUTE + errand.path.removeprefix("/v1"),
            content=errand.body,
            headers={
                **errand.fleet.headers,
                "Content-Type": "application/json",
                TOKEN_HEADER: self._token,
            },
        )
        answer: httpx.Response | None = None
        try:
            async with asyncio.timeout(self._timeout):
                answer = await http.send(request, stream=True)
                if answer.status_code in ELSEWHERE:
                    raise _BusyError
                if answer.status_code != 200:  # the decode worker will refuse it too, and say why
                    return None
                events = sse.whole_events(answer.aiter_raw())
                ticket = _ticket_in(await anext(events, b""))
            following = asyncio.create_task(_follow(answer, events, held.pop_all()))
            errand.when_left(following.cancel)
            answer = None  # the task closes it
            await asyncio.sleep(0)  # a task that is cancelled before it begins closes nothing
            return ticket
        finally:
            if answer is not None:
                await answer.aclose()


def _choose(errand: FleetErrand, workers: set[Replica], held: ExitStack) -> Replica:
    """One of the workers, which counts as loaded with this prompt for as long as it is held."""
    fleet, names = errand.fleet, {replica.name: replica for replica in workers}
    others = {state.name for state in fleet.router.tracker.replicas()} - names.keys()
    assignment = fleet.router.route(errand.asked, exclude=others)
    replica = names[assignment.replica]
    held.callback(fleet.router.tracker.finished, assignment)
    held.enter_context(replica.serving())
    held.callback(fleet.supervisor.notify)
    return replica


def _ticket_in(events: bytes) -> str | None:
    """Raises `httpx.ReadError` for an answer that has none."""
    with suppress(ValueError, IndexError):
        said: Any = sse.data_of(sse.split(events)[0])
        if isinstance(said, dict) and isinstance(said.get("ticket", 0), str | None):
            ticket: str | None = said["ticket"]
            return ticket
    raise httpx.ReadError("the prefill worker's answer has no ticket")


async def _follow(answer: httpx.Response, events: AsyncIterator[bytes], held: ExitStack) -> None:
    """Until the prompt is computed; if it never is, the decode worker notices by itself."""
    with held:
        try:
            with suppress(httpx.TransportError):
                async for _ in events:
                    pass
        finally:
            await answer.aclose()
