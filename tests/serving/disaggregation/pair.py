"""A prefill and a decode engine on a random model, and the link between them, in one event loop."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

from fakes import check_engine, tiny_config, tiny_engine, tiny_model

from minifer.async_llm import AsyncLLM
from minifer.kv.tiers.block_file import BlockFormat
from minifer.outputs import RequestOutput
from minifer.request import SamplingParams
from minifer.serving.disaggregation.receiver import BlockReceiver
from minifer.serving.disaggregation.sender import BlockSender
from minifer.serving.disaggregation.settings import TransferSettings
from minifer.serving.disaggregation.stats import TransferStats
from minifer.serving.disaggregation.ticket import Ticket
from minifer.serving.disaggregation.worker import block_format

TOKEN = "a token for tests"
P = 4  # tokens a block
GREEDY = SamplingParams(max_tokens=8, temperature=0)
SETTINGS = TransferSettings(token=TOKEN, timeout=20.0, silence=10.0)


class Pair:
    """Both workers, without their servers."""

    def __init__(self, prefill: AsyncLLM, decode: AsyncLLM, **parts: Any) -> None:
        """parts: `settings` and `format` of one side where they are not those of both, as
        `sender_settings`, `receiver_format` and so on."""
        own = block_format(SimpleNamespace(model=tiny_model(), config=tiny_config()), decode.engine)
        self.format: BlockFormat = own
        settings = parts.get("settings", SETTINGS)
        self.prefill, self.decode = prefill, decode
        self.sent, self.received = TransferStats(), TransferStats()
        self.sender = BlockSender(
            prefill,
            parts.get("sender_format", own),
            parts.get("sender_settings", settings),
            self.sent,
        )
        self.receiver = BlockReceiver(
            decode,
            parts.get("receiver_format", own),
            parts.get("receiver_settings", settings),
            self.received,
        )
        self._count = 0

    async def ticket(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Ticket:
        await asyncio.gather(self.sender.start(), self.sender.start())
        offers = [await self.sender.offers.add(prompt, params) for prompt in prompts]
        return Ticket("127.0.0.1", self.sender.port, tuple(offers))

    async def ask(
        self,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        ticket: Ticket | None = None,
    ) -> RequestOutput:
        """What the decode worker answers to a prompt whose blocks it fetches first."""
        self._count += 1
        name = f"request-{self._count}"
        ticket = ticket if ticket is not None else await self.ticket([prompt], params)
        with ExitStack() as resources:
            await self.receiver.fetch(ticket, {name: prompt}, params, resources)
            return await self.decode.complete(list(prompt), params, request_id=name)


@asynccontextmanager
async def pair(
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **parts: Any
) -> AsyncIterator[Pair]:
    """prefill, decode: options of their engines. At the end nothing may be left of a hand-over."""
    options: dict[str, Any] = {"kv_dram_bytes": 1 << 20, "kv_load_policy": "always"}
    engines = [tiny_engine(**{**options, **(own or {})}) for own in (prefill, decode)]
    async with AsyncLLM(engine=engines[0]) as first, AsyncLLM(engine=engines[1]) as second:
        both = Pair(first, second, **parts)
        try:
            yield both
        finally:
            await both.sender.close()
        for llm in (first, second):
            left = await llm.call(_left)
            assert left == (0, []), left


def _left(engine: Any) -> tuple[int, list[Any]]:
    """After all is over: requests that something is pinned for, and pinned blocks."""
    check_engine(engine)
    tiers = engine.kv.tiers
    return len(tiers.imports), [block for block in tiers.dram if block.pinned]


async def alone(prompt: Sequence[int], params: SamplingParams = GREEDY) -> RequestOutput:
    """What a single engine answers."""
    async with AsyncLLM(engine=tiny_engine(enable_prefix_caching=False)) as llm:
        return await llm.complete(list(prompt), params)


def answer_of(output: RequestOutput) -> list[dict[str, Any]]:
    """All that a caller sees of an answer."""
    return [dataclasses.asdict(one) for one in output.outputs]


async def alone_again(prompt: Sequence[int], params: SamplingParams = GREEDY) -> RequestOutput:
    """The same where it has the prompt's blocks from before: it computes what a decode worker
    does, to the last bit."""
    async with AsyncLLM(engine=tiny_engine()) as llm:
        await llm.complete(list(prompt), params)
        return await llm.complete(list(prompt), params)


def tokens_of(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(one.token_ids, one.finish_reason, one.stop_reason) for one in output.outputs]
