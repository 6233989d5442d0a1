"""The prefill worker's side: computes prompts, and gives their blocks to whoever fetches them.

::

    offer(prompt)        the request is admitted; the name of the offer goes to the router
    a connection         blocks are sent as the steps finish them, the rest when they are there
    the lease ends       nobody has fetched it for so long: it is forgotten

An offer holds no memory but the names of its blocks. These lie in the engine's DRAM tier, as any
others do, and a block that was thrown out before it was fetched is computed by whoever wanted it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from minifer.async_llm import AsyncLLM, EngineClosedError, OutputStream
from minifer.engine import Engine
from minifer.kv.prefix_key import PrefixKey
from minifer.kv.tiers.block_file import BlockFormat
from minifer.kv.tiers.dram import Payload
from minifer.request import SamplingParams
from minifer.serving.disaggregation.frames import (
    STREAM_LIMIT,
    Fields,
    Link,
    LinkError,
    count_of,
    text_of,
)
from minifer.serving.disaggregation.handshake import Reply, listen
from minifer.serving.disaggregation.link_faults import Fault
from minifer.serving.disaggregation.outlets import InlineOutlet, Outlet, SharedOutlet
from minifer.serving.disaggregation.prefill import keys_to_hand_over, prefill_params
from minifer.serving.disaggregation.settings import TransferSettings
from minifer.serving.disaggregation.shared_memory import Segment
from minifer.serving.disaggregation.stats import TransferStats

log = logging.getLogger("minifer.serving.disaggregation")

GREETING_SECONDS = 5.0  # for somebody who connects to say what they want
CLOSING_SECONDS = 2.0  # for links in the middle of something when the worker ends
MAX_LINKS = 1024
POLL_SECONDS = 0.002  # between two looks for blocks, where no step makes the look wait
READ_AHEAD = 4  # blocks taken from the engine at a time


@dataclass(eq=False)
class Offer:
    """One prompt. computing: its request's task; what is not there when it is over never comes."""

    name: str
    keys: list[PrefixKey]
    computing: asyncio.Task[None]
    links: int = 0
    lease: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class _Pull:
    """What one connection wants: the blocks of an offer from number `first` on."""

    offer: Offer
    first: int
    outlet: Outlet
    resources: ExitStack = field(default_factory=ExitStack)


class BlockSender:
    """Belongs to one event loop. `start` it, `close` it."""

    def __init__(
        self,
        llm: AsyncLLM,
        block_format: BlockFormat,
        settings: TransferSettings,
        stats: TransferStats,
    ) -> None:
        self._llm = llm
        self._format = block_format
        self._settings = settings
        self._stats = stats
        self._server: asyncio.Server | None = None
        self._offers: dict[str, Offer] = {}
        self._links: set[asyncio.Task[None]] = set()

    @property
    def num_offers(self) -> int:
        return len(self._offers)

    async def start(self) -> int:
        """Wait for connections; returns the port. Twice is once. Raises `OSError`."""
        if self._server is None:
            self._server = await asyncio.start_server(
                self._connected, self._settings.host, self._settings.port, limit=STREAM_LIMIT
            )
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    # -- offers

    async def offer(self, prompt: Sequence[int], params: SamplingParams) -> str | None:
        """Have a prompt computed; returns the name to fetch its blocks by, as soon as the engine
        has taken it. None: nothing of it can be handed over, and nothing is computed.

        Raises `ValueError` for what the engine refuses, `EngineClosedError`.
        """
        keys = keys_to_hand_over(self._llm.engine, prompt, params)
        if not keys:
            return None
        name = secrets.token_hex(16)
        asked = prefill_params(params)
        stream = await self._llm.open([prompt], asked, request_ids=[f"prefill-{name}"])
        self._stats.prefills += 1
        computing = asyncio.create_task(_exhaust(stream))
        computing.add_done_callback(lambda _: stream.close())
        offer = self._offers[name] = Offer(name, keys, computing)
        self._begin_lease(offer)
        return name

    async def computed(self, names: Iterable[str]) -> None:
        """Wait until these offers are computed, or have been given up."""
        tasks = {self._offers[name].computing for name in names if name in self._offers}
        if tasks:
            await asyncio.wait(tasks)

    def cancel(self, names: Iterable[str]) -> None:
        """Compute no further. What is there can still be fetched."""
        for name in names:
            if name in self._offers:
                self._offers[name].computing.cancel()

    def _begin_lease(self, offer: Offer) -> None:
        loop = asyncio.get_running_loop()
        offer.lease = loop.call_later(self._settings.lease, self._forget, offer)

    def _forget(self, offer: Offer) -> None:
        """Nobody has fetched it for so long: nobody will."""
        self._offers.pop(offer.name, None)
        offer.computing.cancel()

    # -- connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer, self._settings.silence)
        task = asyncio.current_task()
        assert task is not None
        if len(self._links) >= MAX_LINKS:
            link.close()
            return
        self._links.add(task)
        try:
            await self._serve(link)
        except TimeoutError:
            self._stats.timeouts += 1
        except LinkError as error:  # the other side has left, or is none of ours
            self._stats.broken += 1
            log.debug("a link ended: %s", error)
        except EngineClosedError as error:
            log.debug("a link ended: %s", error)
        finally:
            self._links.discard(task)
            link.close()

    async def _serve(self, link: Link) -> None:
        async with asyncio.timeout(GREETING_SECONDS):
            request, reply = await listen(link, self._settings.token)
            pull = await self._begin(link, request, reply)
        if pull is None:
            return
        offer = pull.offer
        offer.links += 1
        if offer.lease is not None:
            offer.lease.cancel()
        try:
            with pull.resources:
                await self._send_blocks(link, pull)
            await link.until_closed()
        finally:
            offer.links -= 1
            if offer.links == 0 and offer.name in self._offers:
                self._begin_lease(offer)

    async def _begin(self, link: Link, request: Fields, reply: Reply) -> _Pull | None:
        """Agree on what is sent, and how. None: there was a reason not to, and it was said."""
        offer = self._offers.get(text_of(request, "offer"))
        reason = None
        if request.get("format") != self._format.digest.hex():
            reason = "another model, dtype or block size"  # whose KV would be wrong
        elif offer is None:
            reason = "no such offer"
        if reason is not None or offer is None:
            self._stats.refused += 1
            await reply({"refused": reason})
            await link.until_closed()
            return None
        first = count_of(request, "first", len(offer.keys) + 1)
        self._stats.pulls += 1
        pull = _Pull(offer, first, InlineOutlet(link))
        answer: Fields = {"blocks": len(offer.keys)}
        if request.get("transport") == "shm" and self._settings.transport == "shm":
            await self._share(link, pull, reply, answer)
        else:
            await reply(answer)
        return pull

    async def _share(self, link: Link, pull: _Pull, reply: Reply, answer: Fields) -> None:
        """Offer a segment. Where it cannot be had or opened, blocks go through the stream."""
        slots = min(self._settings.window, max(1, len(pull.offer.keys) - pull.first))
        with ExitStack() as stack:
            try:
                segment = stack.enter_context(Segment(slots * self._format.num_bytes))
            except OSError as error:
                log.warning("no shared memory, blocks go through the connection: %s", error)
                await reply(answer)
                return
            await reply({**answer, "segment": segment.name, "slots": slots})
            opened, _ = await link.receive()
            segment.take_name_away()
            if opened.get("opened") is True:
                pull.outlet = SharedOutlet(link, segment, self._format.num_bytes, slots)
                pull.resources = stack.pop_all()

    # -- blocks

    async def _send_blocks(self, link: Link, pull: _Pull) -> None:
        """All there are, and all that are still computed; then say that it is over."""
        keys, number = pull.offer.keys, pull.first
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            while number < len(keys):
                over = pull.offer.computing.done()  # asked first: then what is missing is missing
                payloads = await self._read(link, keys[number : number + READ_AHEAD])
                for payload in payloads:
                    await self._put(pull.outlet, number, keys[number], payload)
                    number += 1
                if not payloads:
                    if over:
                        break
                    await self._show_life(link)
                    await asyncio.sleep(POLL_SECONDS)
        finally:
            count = number - pull.first
            self._stats.sent.add(count, count * self._format.num_bytes, clock() - started)
        await link.send({"end": True})

    async def _read(self, link: Link, keys: Sequence[PrefixKey]) -> list[Payload]:
        """What is there of these blocks, in their order.

        The engine looks between two steps, so a busy one makes this wait for what it computes.
        """

        def export(engine: Engine) -> list[Payload]:
            return [] if engine.kv.tiers is None else engine.kv.tiers.export(keys)

        reading = asyncio.ensure_future(self._llm.call(export))
        try:
            while not (await asyncio.wait({reading}, timeout=self._settings.silence / 4))[0]:
                await self._show_life(link)
            return reading.result()
        finally:
            reading.cancel()

    async def _show_life(self, link: Link) -> None:
        """The receiver gives up after `silence` seconds; and where it has left, we notice."""
        silent = asyncio.get_running_loop().time() - link.last_sent
        if silent >= self._settings.silence / 4:
            await link.send({"wait": True})

    async def _put(self, outlet: Outlet, number: int, key: PrefixKey, payload: Payload) -> None:
        header = self._format.header(key, payload)
        faults = self._settings.faults
        fault = None if faults is None else faults.draw()
        if faults is not None and fault is Fault.FLIP:
            payload = bytearray(payload)
            faults.flip_a_bit(payload)
        elif fault is Fault.DROP:
            raise LinkError("dropped on purpose")
        elif fault is Fault.STALL:
            await asyncio.sleep(2 * self._settings.timeout)
            raise LinkError("stalled on purpose")
        await outlet.put(number, header, payload)

    # -- the end

    async def close(self) -> None:
        """No new connections; those open may end within a moment. Prompts are computed no
        further."""
        if self._server is not None:
            self._server.close()
        if self._links:
            await asyncio.wait(self._links, timeout=CLOSING_SECONDS)
        for offer in list(self._offers.values()):
            if offer.lease is not None:
                offer.lease.cancel()
            self._forget(offer)
        tasks = [*self._links]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _exhaust(stream: OutputStream) -> None:
    """A prompt that could not be computed is one whose blocks do not come: no more is said."""
    with contextlib.suppress(EngineClosedError):
        async for _ in stream:
            pass
