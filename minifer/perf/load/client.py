"""One request to an OpenAI-compatible server, and when each piece of its answer arrived.

A time is taken when bytes arrive, before they are parsed; every event in those bytes gets it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from minifer.perf.load.workload import Pieces

ENDPOINTS = ("completions", "chat")
_FAILED = ("error", "abort")  # finish reasons of an answer that is none


@dataclass
class Record:
    """What happened to one request. Times in seconds of the event loop's clock.

    session, turn: which of the workload's. intended: when it should have been sent. sent: when it
    was. chunk_times: of the chunks that brought text. end: of the last thing that came. error:
    the kind of failure, None for an answer that is complete. The counts are the server's `usage`;
    None where it sent none.
    """

    session: int
    turn: int
    intended: float
    sent: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    end: float = 0.0
    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    detail: str = ""  # the failure in the server's or the transport's words


class OpenAIClient:
    """Sends requests and fills `Record`s. One for a whole run: connections are kept.

    endpoint: "completions" (prompts of token ids, or text) or "chat" (text). timeout: seconds for
    a whole request. extra: further fields of every body.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        *,
        endpoint: str,
        model: str | None = None,
        timeout: float = 600.0,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if endpoint not in ENDPOINTS:
            raise ValueError(f"endpoint must be one of {', '.join(ENDPOINTS)}, got {endpoint!r}")
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, got {timeout}")
        self.model = model
        self._http = http
        self._chat = endpoint == "chat"
        self._path = "/v1/chat/completions" if self._chat else "/v1/completions"
        self._timeout = timeout
        self._fixed: dict[str, Any] = {} if model is None else {"model": model}
        self._fixed |= {"stream": True, "stream_options": {"include_usage": True}, **(extra or {})}

    async def send(
        self, record: Record, pieces: Pieces, output_len: int, history: Sequence[Any] = ()
    ) -> None:
        """Send one request and wait for all of its answer; failures end up in `record.error`.

        history: messages that come before this one (chat).
        """
        body = {**self._fixed, "max_tokens": output_len}
        if self._chat:
            body["messages"] = [*history, user_message(pieces)]
        else:
            body["prompt"] = as_prompt(pieces)
        clock = asyncio.get_running_loop().time
        record.sent = clock()
        try:
            async with asyncio.timeout(self._timeout):
                await self._receive(record, body)
        except TimeoutError:
            record.error = "timeout"
        except httpx.ConnectError as error:
            record.error, record.detail = "no connection", str(error)
        except httpx.TransportError as error:
            record.error, record.detail = "disconnected", str(error)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            record.error, record.detail = "not understood", f"{type(error).__name__}: {error}"
        if record.error is not None:
            record.end = clock()

    async def _receive(self, record: Record, body: Mapping[str, Any]) -> None:
        clock = asyncio.get_running_loop().time
        async with self._http.stream("POST", self._path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                record.error, record.detail = f"HTTP {response.status_code}", response.text[:300]
                return
            async for data in _sse_data(response.aiter_bytes()):
                if data == "[DONE]":
                    break
                self._take(record, json.loads(data), clock())
            else:
                record.error, record.detail = "disconnected", "the stream ended before [DONE]"
        if record.error is None and record.finish_reason in (None, *_FAILED):
            record.error = f"finish_reason {record.finish_reason}"

    def _take(self, record: Record, chunk: Mapping[str, Any], now: float) -> None:
        """One event of the stream."""
        if "error" in chunk:
            record.error, record.detail = "error in the stream", json.dumps(chunk["error"])[:300]
            return
        for choice in chunk.get("choices", ()):
            text = _text_of(choice["delta"]) if self._chat else choice["text"]
            if text:
                record.chunk_times.append(now)
                record.text += text
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
            if text or choice.get("finish_reason"):
                record.end = now
        if usage := chunk.get("usage"):
            record.prompt_tokens = usage.get("prompt_tokens")
            record.output_tokens = usage.get("completion_tokens")
            details = usage.get("prompt_tokens_details") or {}
            record.cached_tokens = details.get("cached_tokens")


def _text_of(delta: Mapping[str, Any]) -> str:
    """What a reader would see: reasoning counts, the announcement of a role does not."""
    calls = (call["function"].get("arguments") for call in delta.get("tool_calls") or ())
    parts = (delta.get("reasoning_content"), delta.get("content"), *calls)
    return "".join(part for part in parts if part)


def as_prompt(pieces: Pieces) -> list[int] | str:
    """Token ids stay token ids; words become a text."""
    if pieces and isinstance(pieces[0], str):
        return " ".join(map(str, pieces))
    return [int(piece) for piece in pieces]


def user_message(pieces: Pieces) -> dict[str, str]:
    return {"role": "user", "content": " ".join(map(str, pieces))}


async def _sse_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each event (WHATWG HTML, 9.2). Lines end at LF or CRLF and nowhere else: a
    U+2028 inside a JSON string is text, whatever `str.splitlines` thinks.
    """
    pending, data = b"", []
    async for chunk in chunks:
        *lines, pending = (pending + chunk).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode())
            elif not line and data:
                yield "\n".join(data)
                data = []
