"""Bytes that are no request: a 400 that says why, and no exception on the way."""

from __future__ import annotations

import json

import pytest
from live import Live

from minifer.serving.body import MAX_DEPTH, parse_object
from minifer.serving.errors import APIError

BAD = {
    "nothing": b"",
    "no object": b"[1]",
    "cut off": b'{"a": 1',
    "two values": b"{} {}",
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": -Infinity}',
    "a number that overflows": b'{"a": 1e999}',
    "an integer of 65 bits": b'{"a": 18446744073709551616}',
    "an integer of a million digits": b'{"a": ' + b"9" * 10**6 + b"}",
    "a key twice": b'{"a": 1, "a": 1}',
    "a key twice, deep": b'{"a": [{"b": 1, "b": 2}]}',
    "half a surrogate pair": b'{"a": "\\ud83d"}',
    "half a surrogate pair as a key": b'{"\\ud83d": 1}',
    "not UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "a control character": b'{"a": "\x01"}',
    "too deep": b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
    "very deep": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep and cut off": b"[" * 100_000,
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_what_is_not_json_is_refused(body: bytes):
    with pytest.raises(APIError) as caught:
        parse_object(body)
    assert caught.value.status == 400
    json.dumps(caught.value.envelope, ensure_ascii=False).encode()  # can be sent


GOOD = {
    b"{}": {},
    b'{"a": [1, -2, 1.5e3, true, null]}': {"a": [1, -2, 1500.0, True, None]},
    b'{"a": 18446744073709551615, "b": -9223372036854775808}': {"a": 2**64 - 1, "b": -(2**63)},
    b'{"a": "\\ud83d\\udc4b"}': {"a": "👋"},
    '{"é": "👋"}'.encode(): {"é": "👋"},
}


@pytest.mark.parametrize(("body", "value"), GOOD.items())
def test_what_is_json_is_read_as_json_reads_it(body: bytes, value):
    assert parse_object(body) == value == json.loads(body)


def test_a_large_body_is_read_like_a_small_one(server: Live):
    tokens = [97] * 50_000
    body = {"tokens": tokens}
    assert server.post("/detokenize", **body).json() == {"prompt": "a" * 50_000}
    assert (
        "twice"
        in server.http.post(
            "/detokenize",
            content=b'{"tokens": [], "tokens": [' + b"97, " * 50_000 + b"97]}",
            headers={"Content-Type": "application/json"},
        ).json()["error"]["message"]
    )


def test_as_deep_as_the_limit_is_fine():
    depth = MAX_DEPTH - 2
    assert parse_object(b'{"a": ' + b"[" * depth + b"]" * depth + b"}")


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_only_json_is_read(server: Live, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = server.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]


def test_a_charset_beside_the_content_type_is_fine(server: Live):
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    body = b'{"prompt": "a", "max_tokens": 1}'
    assert server.http.post("/v1/completions", content=body, headers=headers).status_code == 200
