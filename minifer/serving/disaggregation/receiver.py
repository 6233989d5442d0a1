"""The decode worker's side: fetches the blocks of a prompt before its request is admitted.

What comes, in whatever order things go wrong, is a beginning of the prompt, each block of it
checked: its header must be byte for byte the one that this engine would have written for these
tokens, this model and this payload. Everything else the engine computes, as it always does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from minifer.async_llm import AsyncLLM
from minifer.engine import Engine
from minifer.kv.prefix_key import PrefixKey
from minifer.kv.tiers.block_file import BlockFormat
from minifer.request import SamplingParams
from minifer.serving.disaggregation.frames import Fields, Link, LinkError, count_of, text_of
from minifer.serving.disaggregation.handshake import ask
from minifer.serving.disaggregation.outlets import Inlet, InlineInlet, SharedInlet
from minifer.serving.disaggregation.prefill import keys_to_hand_over
from minifer.serving.disaggregation.settings import TransferSettings
from minifer.serving.disaggregation.shared_memory import open_segment
from minifer.serving.disaggregation.stats import TransferStats
from minifer.serving.disaggregation.ticket import Ticket

log = logging.getLogger("minifer.serving.disaggregation")

MAX_SLOTS = 4096


@dataclass(eq=False)
class _Wanted:
    """Of one prompt the blocks from number `held` on, and what has come of them, in order."""

    ticket: Ticket
    offer: str
    keys: Sequence[PrefixKey]
    held: int
    blocks: list[bytearray] = field(default_factory=list)

    @property
    def missing(self) -> Sequence[PrefixKey]:
        return self.keys[self.held :]

    @property
    def next(self) -> int:
        return self.held + len(self.blocks)


class BlockReceiver:
    """Belongs to one event loop; holds nothing between two calls."""

    def __init__(
        self,
        llm: AsyncLLM,
        block_format: BlockFormat,
        settings: TransferSettings,
        stats: TransferStats,
    ) -> None:
        self._llm = llm
        self._format = block_format
        self._block_size = llm.engine.config.block_size
        self._settings = settings
        self._stats = stats

    async def fetch(
        self,
        ticket: Ticket,
        prompts: Mapping[str, Sequence[int]],
        params: SamplingParams,
        resources: ExitStack,
    ) -> None:
        """Put what can be had of some prompts into the engine's DRAM tier; returns when no more
        will come.

        prompts: request id → its tokens, in the order of the ticket's offers. resources: closed
        when these requests are over, which lets go of what they did not use. Whatever goes wrong
        with the hand-over costs time and nothing else. Raises `EngineClosedError`.
        """
        if len(ticket.offers) != len(prompts):
            self._stats.refused += 1
            log.warning("a ticket for %d prompts came with %d", len(ticket.offers), len(prompts))
            return
        work = [
            self._fetch(ticket, offer, request_id, prompt, params, resources)
            for offer, (request_id, prompt) in zip(ticket.offers, prompts.items(), strict=True)
            if offer is not None
        ]
        await asyncio.gather(*work)

    async def _fetch(
        self,
        ticket: Ticket,
        offer: str,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        resources: ExitStack,
    ) -> None:
        try:
            keys = keys_to_hand_over(self._llm.engine, prompt, params)
        except ValueError:
            return  # the engine will say why it refuses this prompt
        held = await self._llm.call(lambda engine: engine.kv.count_held(keys))
        wanted = _Wanted(ticket, offer, keys, held)
        if not wanted.missing:
            return
        await self._pull_in_time(wanted)
        resources.callback(self._llm.post, lambda engine: _release(engine, request_id))
        taken = await self._llm.call(lambda engine: _take(engine, request_id, wanted))
        self._stats.tokens += taken * self._block_size
        self._stats.recomputed_tokens += (len(wanted.missing) - taken) * self._block_size

    async def _pull_in_time(self, wanted: _Wanted) -> None:
        """`_pull`, whose failures are numbers."""
        clock = asyncio.get_running_loop().time
        started = clock()
        self._stats.pulls += 1
        ticket = wanted.ticket
        try:
            async with asyncio.timeout(self._settings.timeout):
                await self._pull(wanted)
        except TimeoutError:
            self._stats.timeouts += 1
            log.warning("blocks from %s:%d did not come in time", ticket.host, ticket.port)
        except (LinkError, OSError) as error:
            self._stats.broken += 1
            log.warning("blocks from %s:%d did not come: %s", ticket.host, ticket.port, error)
        except Exception:  # a fault of ours, which must not cost the request
            self._stats.broken += 1
            log.exception("a hand-over failed")
        finally:
            count = len(wanted.blocks)
            self._stats.received.add(count, count * self._format.num_bytes, clock() - started)

    async def _pull(self, wanted: _Wanted) -> None:
        """Fetch what is missing. Raises as `Link` does."""
        settings = self._settings
        link = await Link.connect(wanted.ticket.host, wanted.ticket.port, settings.silence)
        try:
            request: Fields = {
                "offer": wanted.offer,
                "format": self._format.digest.hex(),
                "first": wanted.held,
                "transport": settings.transport,
            }
            answer = await ask(link, settings.token, request)
            if "refused" in answer:
                self._stats.refused += 1
                log.warning("the prefill worker refused: %s", text_of(answer, "refused"))
                return
            blocks, expected = answer.get("blocks"), len(wanted.keys)
            if blocks != expected:
                raise LinkError(f"the offer has {blocks!r:.20} blocks, expected {expected}")
            with ExitStack() as stack:
                inlet = await self._inlet(link, answer, stack)
                await self._receive(link, inlet, wanted)
        finally:
            link.close()

    async def _inlet(self, link: Link, answer: Fields, stack: ExitStack) -> Inlet:
        size = self._format.num_bytes
        if "segment" not in answer:
            return InlineInlet(size)
        name, slots = text_of(answer, "segment"), count_of(answer, "slots", MAX_SLOTS)
        try:
            memory = stack.enter_context(open_segment(name, slots * size))
        except (OSError, ValueError) as error:  # another machine, or container
            log.info("no shared memory with the prefill worker: %s", error)
            await link.send({"opened": False})
            return InlineInlet(size)
        await link.send({"opened": True})
        return SharedInlet(link, memory, size, slots)

    async def _receive(self, link: Link, inlet: Inlet, wanted: _Wanted) -> None:
        while True:
            fields, body = await link.receive(inlet.max_body)
            if "wait" in fields:  # it is computing
                continue
            if "end" in fields:
                return
            number = count_of(fields, "block", len(wanted.keys))
            if number != wanted.next:
                raise LinkError(f"block {number} came instead of {wanted.next}")
            header, payload = await inlet.take(fields, body)
            right = len(payload) == self._format.num_bytes
            if not right or header != self._format.header(wanted.keys[number], payload):
                self._stats.corrupt += 1
                log.warning("a block arrived that is not what it should be: computed here")
                return  # what follows a gap is of no use
            wanted.blocks.append(payload)


def _take(engine: Engine, request_id: str, wanted: _Wanted) -> int:
    if engine.kv.tiers is None:
        return 0
    keys = wanted.missing[: len(wanted.blocks)]
    return engine.kv.tiers.imports.take(request_id, keys, wanted.blocks)


def _release(engine: Engine, request_id: str) -> None:
    if engine.kv.tiers is not None:
        engine.kv.tiers.imports.release(request_id)
