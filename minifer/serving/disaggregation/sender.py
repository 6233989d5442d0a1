"""The prefill worker's side: gives the blocks of what it has computed to whoever fetches them.

::

    receiver                            sender
             ─── which offer, from ───▶          another model, no such offer: refused
                 which block on
             ◀── a segment, or none ──
             ◀── block 3, block 4 …  ──          as the steps finish them
             ◀── the end ─────────────           all there will ever be
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from minifer.async_llm import AsyncLLM, EngineClosedError
from minifer.engine import Engine
from minifer.kv.prefix_key import PrefixKey
from minifer.kv.tiers.block_file import BlockFormat
from minifer.kv.tiers.dram import Payload
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
from minifer.serving.disaggregation.offers import Offer, Offers
from minifer.serving.disaggregation.outlets import InlineOutlet, Outlet, SharedOutlet
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
class _Pull:
    """What one connection wants: the blocks of an offer from number `first` on."""

    offer: Offer
    first: int
    outlet: Outlet
    resources: ExitStack = field(default_factory=ExitStack)


class BlockSender:
    """Belongs to one event loop. `start` it, `close` it. port: where it can be reached.

    Raises `RuntimeError` when it cannot listen there.
    """

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
        self.offers = Offers(llm, settings.lease, stats)
        self._socket = _listen(settings.host, settings.port)
        self.port: int = self._socket.getsockname()[1]
        self._starting: asyncio.Future[asyncio.Server] | None = None
        self._links: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Let decode workers in. Twice is once."""
        if self._starting is None:
            starting = asyncio.start_server(self._connected, sock=self._socket, limit=STREAM_LIMIT)
            self._starting = asyncio.ensure_future(starting)
        await asyncio.shield(self._starting)

    # -- connections

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Not a coroutine: of one that is cancelled, asyncio before 3.12 prints a traceback."""
        link = Link(reader, writer, self._settings.silence)
        if len(self._links) >= MAX_LINKS:
            link.close()
            return
        task = asyncio.create_task(self._serve_safely(link))
        self._links.add(task)
        task.add_done_callback(self._links.discard)
        task.add_done_callback(lambda _: link.close())

    async def _serve_safely(self, link: Link) -> None:
        try:
            await self._serve(link)
        except TimeoutError:
            self._stats.timeouts += 1
        except LinkError as error:  # the other side has left, or is none of ours
            self._stats.broken += 1
            log.debug("a link ended: %s", error)
        except EngineClosedError as error:
            log.debug("a link ended: %s", error)
        except Exception:  # a fault of ours; the decode worker computes what did not come
            self._stats.broken += 1
            log.exception("a link failed")

    async def _serve(self, link: Link) -> None:
        async with asyncio.timeout(GREETING_SECONDS):
            request, reply = await listen(link, self._settings.token)
            pull = await self._begin(link, request, reply)
        if pull is None:
            return
        with self.offers.fetching(pull.offer), pull.resources:
            await self._send_blocks(link, pull)
            await link.until_closed()

    async def _begin(self, link: Link, request: Fields, reply: Reply) -> _Pull | None:
        """Agree on what is sent, and how. None: there was a reason not to, and it was said."""
        offer = self.offers.get(text_of(request, "offer"))
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
                    await self._put(link, pull.outlet, number, keys[number], payload)
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

    async def _put(
        self, link: Link, outlet: Outlet, number: int, key: PrefixKey, payload: Payload
    ) -> None:
        header = self._format.header(key, payload)
        faults = self._settings.faults
        fault = None if faults is None else faults.draw()
        if faults is not None and fault is Fault.FLIP:
            payload = bytearray(payload)
            faults.flip_a_bit(payload)
        elif fault is Fault.DROP:
            raise LinkError("dropped on purpose")
        elif fault is Fault.STALL:
            while not link.is_closed:
                await link.until_closed()
            raise LinkError("stalled on purpose")
        await outlet.put(number, header, payload)

    # -- the end

    async def close(self) -> None:
        """No new connections; those open may end within a moment. Prompts are computed no
        further."""
        if self._starting is not None:
            (await self._starting).close()
        self._socket.close()
        if self._links:
            await asyncio.wait(self._links, timeout=CLOSING_SECONDS)
        self.offers.close()
        tasks = [*self._links]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise RuntimeError(
            f"cannot wait for decode workers on {host} port {port}: {error.strerror or error}; "
            "choose another with --kv-host and --kv-port"
        ) from error
