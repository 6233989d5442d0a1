"""Sends the sessions of a workload, each request at its time.

Open loop (sessions with an arrival): a request is sent when it is due, however many are in flight;
users do not wait for each other. Times count from when it was *due*: a client that falls behind
must not make a slow server look fast by asking less ("coordinated omission", Gil Tene). How late
the client was is reported.

Closed loop (sessions without): at most `max_concurrency` sessions at a time; a session is due
when the one before it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from minifer.perf.load.client import OpenAIClient, Record, user_message
from minifer.perf.load.workload import Session


@dataclass
class LoadRun:
    """All requests in the order they were sent. start, end: seconds of the event loop's clock."""

    start: float
    records: list[Record] = field(default_factory=list)
    end: float = 0.0
    num_unsent: int = 0  # turns of conversations that ended early because one failed


async def generate_load(
    client: OpenAIClient, sessions: Sequence[Session], max_concurrency: int | None = None
) -> LoadRun:
    """Send everything and wait for all answers.

    Raises `ValueError` when sessions have arrivals and max_concurrency is given, or neither: a cap
    on an open loop would hide the queue it is there to show.
    """
    timed = [session for session in sessions if session.arrival is not None]
    if timed and (max_concurrency is not None or len(timed) < len(sessions)):
        raise ValueError("sessions with arrivals are an open loop: max_concurrency must be None")
    if not timed and (max_concurrency is None or max_concurrency < 1):
        raise ValueError(f"max_concurrency must be at least 1, got {max_concurrency}")
    loop = asyncio.get_running_loop()
    run = LoadRun(loop.time())
    queue = iter(enumerate(sessions))
    async with asyncio.TaskGroup() as group:
        if timed:
            ordered = sorted(queue, key=lambda item: item[1].arrival or 0.0)
            for number, session in ordered:
                due = run.start + (session.arrival or 0.0)
                await _sleep_until(due)
                group.create_task(_run_session(client, run, number, session, due))
        else:
            for _ in range(max_concurrency or 0):
                group.create_task(_run_queue(client, run, queue))
    run.end = loop.time()
    return run


async def _run_queue(
    client: OpenAIClient, run: LoadRun, queue: Iterator[tuple[int, Session]]
) -> None:
    """One closed-loop client: the next session when the last one is done."""
    for number, session in queue:
        await _run_session(client, run, number, session, asyncio.get_running_loop().time())


async def _run_session(
    client: OpenAIClient, run: LoadRun, number: int, session: Session, due: float
) -> None:
    history: list[dict[str, str]] = []
    for k, turn in enumerate(session.turns):
        await _sleep_until(due + turn.think_time)
        record = Record(number, k, due + turn.think_time)
        run.records.append(record)
        await client.send(record, turn.pieces, turn.output_len, history)
        if record.error is not None:
            run.num_unsent += len(session.turns) - k - 1
            return
        history += [user_message(turn.pieces), {"role": "assistant", "content": record.text}]
        due = record.end


async def _sleep_until(due: float) -> None:
    delay = due - asyncio.get_running_loop().time()
    if delay > 0:
        await asyncio.sleep(delay)
