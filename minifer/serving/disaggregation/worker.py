"""A worker's hand-over, behind the routes of its server.

::

    prefill worker   POST /internal/prefill/completions, /internal/prefill/chat/completions
                     the request's own body; the answer is a ticket, as soon as the engine has
                     taken the prompt
    decode worker    the ordinary routes; the ticket comes in a header, and its blocks are fetched
                     before the request is admitted

Both want the workers' token in a header. Without it the one refuses, and the other takes no ticket:
a client must not be able to make a worker connect somewhere, or compute for nobody.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from minifer.async_llm import AsyncLLM
from minifer.config import with_engine_loops
from minifer.engine import Engine
from minifer.execution.fingerprint import kv_namespace
from minifer.kv.tiers.block_file import BlockFormat
from minifer.routing.policy import Role
from minifer.serving.disaggregation.receiver import BlockReceiver
from minifer.serving.disaggregation.sender import BlockSender
from minifer.serving.disaggregation.settings import TransferSettings
from minifer.serving.disaggregation.shared_memory import sweep
from minifer.serving.disaggregation.stats import TransferCollector, TransferStats
from minifer.serving.disaggregation.ticket import TICKET_HEADER, TOKEN_HEADER, Ticket
from minifer.serving.errors import APIError, refusals
from minifer.serving.generation import Generation
from minifer.serving.streaming import DONE, EventStream, event

log = logging.getLogger("minifer.serving.disaggregation")

ROLES = (Role.PREFILL, Role.DECODE)
PREFILL_ROUTE = "/internal/prefill"  # followed by the route of the request, without its /v1
Endpoint = Callable[[Request], Awaitable[Response]]


def block_format(loaded: Any, engine: Engine) -> BlockFormat:
    """What a block's KV depends on beside its prefix, and how it lies in memory.

    loaded: the `LoadedModel` that the engine was built from.
    """
    config = with_engine_loops(loaded.config, engine.config)
    storage = engine.runner.kv  # type: ignore[attr-defined]  # a runner with tensors
    namespace = kv_namespace(loaded.model, config)
    return BlockFormat(namespace, storage.payload_dtype, storage.payload_shape)


class KVWorker:
    """One worker's part in hand-overs. Raises `ValueError` for a role or an engine that has none.

    Belongs to the server's event loop; `close` it there.
    """

    def __init__(
        self, llm: AsyncLLM, blocks: BlockFormat, role: Role, settings: TransferSettings
    ) -> None:
        if role not in ROLES:
            names = " or ".join(known.value for known in ROLES)
            raise ValueError(f"role must be {names}, got {role.value}")
        config = llm.engine.config
        if config.kv_dram_bytes is None:
            raise ValueError("kv_dram_bytes must be set for a worker: blocks pass through it")
        if role is Role.PREFILL and config.kv_write_policy != "through":
            raise ValueError(
                "kv_write_policy must be through for a prefill worker, which hands over what it "
                f"has stored, got {config.kv_write_policy}"
            )
        if removed := sweep():
            log.warning("removed what dead workers left in shared memory: %s", ", ".join(removed))
        self.role = role
        self.prefill_routes = PREFILL_ROUTE if role is Role.PREFILL else None
        self.stats = TransferStats()
        self._settings = settings
        parts = (llm, blocks, settings, self.stats)
        self.sender = BlockSender(*parts) if role is Role.PREFILL else None
        self.receiver = BlockReceiver(*parts) if role is Role.DECODE else None

    def _knows_token(self, request: Request) -> bool:
        given = request.headers.get(TOKEN_HEADER, "").encode("latin-1", errors="replace")
        return hmac.compare_digest(given, self._settings.token.encode())

    async def fetch(self, request: Request, generation: Generation, resources: ExitStack) -> None:
        """Before a generation is opened: get the blocks that its request has a ticket for."""
        text = request.headers.get(TICKET_HEADER)
        if self.receiver is None or text is None:
            return
        if not self._knows_token(request):
            raise _forbidden()
        with refusals():
            ticket = Ticket.decode(text)
        prompts = dict(zip(generation.request_ids, generation.prompts, strict=True))
        await self.receiver.fetch(ticket, prompts, generation.params, resources)

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """A route for who knows the workers' token; `APIError` 403 for all others, whose bodies
        are not read."""

        async def guarded(request: Request) -> Response:
            if not self._knows_token(request):
                raise _forbidden()
            return await endpoint(request)

        return guarded

    def collector(self, model_name: str) -> TransferCollector:
        """Of what `stats` counts, for Prometheus."""
        return TransferCollector(self.stats, model_name)

    async def prefill(
        self, request: Request, generation: Generation, resources: ExitStack
    ) -> EventStream:
        """Have a request's prompts computed; the answer's first event is the ticket for their
        blocks, and it ends when they are computed.

        resources: what the request holds, a seat for one prompt. The answer takes it over, and
        whoever leaves before its end wants no more to be computed.
        """
        assert self.sender is not None  # no other worker has this route
        await self.sender.start()
        offers: list[str | None] = []
        names: list[str] = []
        resources.callback(self.sender.offers.cancel, names)
        with refusals():
            for prompt in generation.prompts:
                offer = await self.sender.offers.add(prompt, generation.params)
                offers.append(offer)
                if offer is not None:
                    names.append(offer)
        ticket = None
        if names:
            ticket = Ticket(self._address(request), self.sender.port, tuple(offers)).encode()
        return EventStream(self._tell(ticket, names))

    async def _tell(self, ticket: str | None, names: list[str]) -> AsyncGenerator[bytes, None]:
        assert self.sender is not None
        yield event({"ticket": ticket})
        await self.sender.offers.computed(names)
        yield DONE

    def _address(self, request: Request) -> str:
        """Where a decode worker reaches us: where we listen, or if that is everywhere, where the
        router has reached us."""
        host = self._settings.host
        try:
            everywhere = ipaddress.ip_address(host).is_unspecified
        except ValueError:
            everywhere = False
        return request.url.hostname or host if everywhere else host

    async def close(self) -> None:
        if self.sender is not None:
            await self.sender.close()


def _forbidden() -> APIError:
    message = f"this is for minifer's router: {TOKEN_HEADER} must be the workers' token"
    return APIError(403, message, code="forbidden")
