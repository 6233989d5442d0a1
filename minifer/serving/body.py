"""From the bytes of a request to a JSON object that nothing later can choke on.

Python's `json` accepts more than JSON and more than an engine wants: NaN, numbers of a million
digits, a hundred thousand brackets, half a surrogate pair, the same key twice. All of it is
refused here, with a 400 that says what and where.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from minifer.serving.errors import APIError

MAX_DEPTH = 64  # brackets within brackets
LARGE_BODY = 64 * 1024  # bytes; takes milliseconds to parse
MAX_DIGITS = 20  # of an integer: 64 bits


async def read_json(request: Request, max_bytes: int, timeout: float) -> dict[str, Any]:
    """The JSON object in a request's body. Raises as `read_body` and `parse_object` do."""
    return await parse_body(await read_body(request, max_bytes, timeout))


async def parse_body(body: bytes) -> dict[str, Any]:
    """`parse_object`, off the event loop when it takes long."""
    if len(body) < LARGE_BODY:
        return parse_object(body)
    return await asyncio.to_thread(parse_object, body)  # others are served meanwhile


async def read_body(request: Request, max_bytes: int, timeout: float) -> bytes:
    """The bytes of a request's body, which is to be JSON.

    max_bytes: a longer body is a 413, known from its Content-Length or, when it comes in chunks,
    as soon as it is too long. timeout: seconds for the whole body, then 408. Only
    `Content-Type: application/json` is read (415): a web page can send any other type to a server
    on this machine without asking the browser for leave (CORS' "simple requests"). A
    compressed body is not read either.

    Raises `APIError`, and `ClientDisconnect` when the client goes away.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise APIError(415, f"Content-Type must be application/json, got {content_type!r}")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":  # a small body may unpack to a huge one
        raise APIError(415, f"Content-Encoding must be identity, got {encoding!r:.40}")
    try:
        async with asyncio.timeout(timeout):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise APIError(408, f"the body did not arrive within {timeout:g} seconds") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    body = bytearray()
    if not (announced.isdecimal() and int(announced) > max_bytes):
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                break
        else:
            return bytes(body)
    raise APIError(413, f"the body must be at most {max_bytes} bytes", code="body_too_large")


def parse_object(body: bytes) -> dict[str, Any]:
    """Strict JSON (RFC 8259) in UTF-8, an object at the top. Raises `APIError` 400."""
    try:
        value = json.loads(
            body.decode("utf-8"),
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
            object_pairs_hook=_object,
        )
    except UnicodeDecodeError as error:
        raise APIError(400, f"this is not UTF-8: byte {error.start}") from error
    except RecursionError:
        raise APIError(400, f"the JSON is nested too deep; the limit is {MAX_DEPTH}") from None
    except ValueError as error:  # json's own, and what the functions below refuse
        raise APIError(400, f"this is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise APIError(400, f"this must be a JSON object, got {type(value).__name__}")
    _check_tree(value)
    return value


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS or not -(2**63) <= int(text) < 2**64:
        raise ValueError(f"an integer has more than 64 bits: {text[:MAX_DIGITS]}…")
    return int(text)


def _float(text: str) -> float:
    number = float(text)
    if abs(number) == float("inf"):
        raise ValueError(f"a number is too large: {text[:MAX_DIGITS]}")
    return number


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r:.60} appears twice in one object")
    return value


def _check_tree(root: Any) -> None:
    """Depth and text of a parsed value, without recursion."""
    level = [root]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                _check_text(value)
            elif isinstance(value, dict):
                below += value.keys()
                below += value.values()
            elif isinstance(value, list):
                below += value
        level = below
        if not level:
            return
    raise APIError(400, f"the JSON is nested too deep; the limit is {MAX_DEPTH}")


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        bad = text[error.start]
        raise APIError(
            400, f"a string holds half a surrogate pair, {bad!r}: not Unicode"
        ) from error


__all__ = ["MAX_DEPTH", "ClientDisconnect", "parse_body", "parse_object", "read_body", "read_json"]
