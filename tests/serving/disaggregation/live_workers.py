"""A prefill and a decode worker with their routes in this process; we are their router."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from live import Live

from minifer.async_llm import AsyncLLM
from minifer.config import EngineConfig
from minifer.engine import Engine
from minifer.routing.policy import Role
from minifer.serving.disaggregation.settings import TransferSettings
from minifer.serving.disaggregation.ticket import TICKET_HEADER, TOKEN_HEADER
from minifer.serving.disaggregation.worker import KVWorker, block_format
from minifer.weights.resolve import LoadedModel, load_model

TOKEN = "a token for tests"
KEY = {TOKEN_HEADER: TOKEN}


class LiveWorkers:
    def __init__(self, prefill: Live, decode: Live) -> None:
        self.prefill, self.decode = prefill, decode

    @property
    def sent(self) -> Any:
        return self.prefill.server.worker.stats

    @property
    def received(self) -> Any:
        return self.decode.server.worker.stats

    def ticket(self, route: str, body: dict[str, Any], wait: bool = False) -> str | None:
        """From the prefill worker. wait: until the prompts are computed."""
        path = "/internal/prefill" + route.removeprefix("/v1")
        with self.prefill.http.stream("POST", path, json=body, headers=KEY) as answer:
            assert answer.status_code == 200, answer.read()
            lines = answer.iter_lines()
            ticket: str | None = json.loads(next(lines).removeprefix("data: "))["ticket"]
            if wait:
                assert [line for line in lines if line] == ["data: [DONE]"]
                return ticket
            # Whoever leaves stops the computation: the answer is read to its end elsewhere.
            self._reply = self.post(route, body, ticket)
            assert [line for line in lines if line] == ["data: [DONE]"]
        return ticket

    def ask(self, route: str, body: dict[str, Any]) -> httpx.Response:
        """As a router does: the ticket from the one, the answer from the other."""
        self.ticket(route, body)
        return self._reply

    def post(self, route: str, body: dict[str, Any], ticket: str | None) -> httpx.Response:
        headers = {} if ticket is None else KEY | {TICKET_HEADER: ticket}
        return self.decode.http.post(route, json=body, headers=headers)

    def wait_until_idle(self) -> None:
        for server in (self.prefill, self.decode):
            server.wait_until_idle()
            tiers = server.llm.engine.kv.tiers
            assert len(tiers.imports) == 0
            assert not any(block.pinned for block in tiers.dram)


def start(loaded: LoadedModel, role: Role, options: dict[str, Any], settings: Any) -> Live:
    base = {"model": "minifer-tiny", "num_kv_blocks": 256, "kv_dram_bytes": 1 << 26}
    config = EngineConfig(**{**base, "kv_load_policy": "always", **options})
    llm = AsyncLLM(engine=Engine.from_loaded(loaded, config))
    worker = KVWorker(llm, block_format(loaded, llm.engine), role, settings)
    return Live(llm, worker, served_model_name="minifer-tiny")


@contextmanager
def live_workers(
    decode: dict[str, Any] | None = None, prefill: dict[str, Any] | None = None, **settings: Any
) -> Iterator[LiveWorkers]:
    """decode, prefill: `EngineConfig` options. settings: of the transfer."""
    loaded = load_model("minifer-tiny")
    transfer = TransferSettings(TOKEN, **settings)
    first = start(loaded, Role.PREFILL, prefill or {}, transfer)
    try:
        second = start(loaded, Role.DECODE, decode or {}, transfer)
        try:
            yield LiveWorkers(first, second)
        finally:
            second.close()
    finally:
        first.close()


def unlike(number: int, length: int) -> str:
    """A text of so many bytes, which are tokens here, that no other test begins with."""
    words = f"{number} is the number of this text, and this is how it goes on. "
    return (words * (length // len(words) + 1))[:length]


def choices_of(answer: dict[str, Any], approximate: bool = False) -> list[dict[str, Any]]:
    """All there is of an answer but what is new every time.

    approximate: log-probabilities may differ in the last bits, because one engine computed the
    prompt in one piece and the other only its end.
    """
    for choice in answer["choices"]:
        for call in (choice.get("message") or {}).get("tool_calls") or ():
            call.pop("id")
    near = (lambda n: pytest.approx(float(n), abs=1e-4)) if approximate else float
    return json.loads(json.dumps(answer["choices"]), parse_float=near)
