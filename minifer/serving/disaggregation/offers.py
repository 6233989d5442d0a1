"""Prompts that a prefill worker computes for others.

::

    add(prompt)          the request is admitted; the offer's name goes to the router
    fetching(offer)      somebody fetches its blocks, which may still be computed
    the lease ends       nobody has, for so long: it is forgotten

An offer holds no memory but the names of its blocks. These lie in the engine's DRAM tier, as any
others do, and a block that was thrown out before it was fetched is computed by whoever wanted it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from minifer.async_llm import AsyncLLM, EngineClosedError, OutputStream
from minifer.kv.prefix_key import PrefixKey
from minifer.request import SamplingParams
from minifer.serving.disaggregation.prefill import keys_to_hand_over, prefill_params
from minifer.serving.disaggregation.stats import TransferStats


@dataclass(eq=False)
class Offer:
    """One prompt. computing: its request's task; what is not there when it is over never comes.
    links: connections that fetch it."""

    name: str
    keys: list[PrefixKey]
    computing: asyncio.Task[None]
    links: int = 0
    lease: asyncio.TimerHandle | None = None


class Offers:
    """All that can be fetched. lease: seconds that an offer waits for somebody."""

    def __init__(self, llm: AsyncLLM, lease: float, stats: TransferStats) -> None:
        self._llm = llm
        self._lease = lease
        self._stats = stats
        self._offers: dict[str, Offer] = {}

    def __len__(self) -> int:
        return len(self._offers)

    def __iter__(self) -> Iterator[Offer]:
        return iter(self._offers.values())

    def get(self, name: str) -> Offer | None:
        return self._offers.get(name)

    async def add(self, prompt: Sequence[int], params: SamplingParams) -> str | None:
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

    @contextlib.contextmanager
    def fetching(self, offer: Offer) -> Iterator[None]:
        """While somebody fetches it, it stays; its lease begins anew when the last one has."""
        offer.links += 1
        if offer.lease is not None:
            offer.lease.cancel()
        try:
            yield
        finally:
            offer.links -= 1
            if offer.links == 0 and offer.name in self._offers:
                self._begin_lease(offer)

    def close(self) -> None:
        """Forget all of them, and compute none any further."""
        for offer in list(self._offers.values()):
            if offer.lease is not None:
                offer.lease.cancel()
            self._forget(offer)

    def _begin_lease(self, offer: Offer) -> None:
        loop = asyncio.get_running_loop()
        offer.lease = loop.call_later(self._lease, self._forget, offer)

    def _forget(self, offer: Offer) -> None:
        self._offers.pop(offer.name, None)
        offer.computing.cancel()


async def _exhaust(stream: OutputStream) -> None:
    """A prompt that could not be computed is one whose blocks do not come: no more is said."""
    with contextlib.suppress(EngineClosedError):
        async for _ in stream:
            pass
