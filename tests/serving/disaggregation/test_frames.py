"""Messages over a connection, and who may send them."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest

from minifer.serving.disaggregation import handshake
from minifer.serving.disaggregation.frames import MAX_FIELDS, Link, LinkError, count_of, text_of

TOKEN = "a token for tests"
Side = Callable[[Link], Awaitable[None]]


def talk(server: Side, client: Side, patience: float = 10.0) -> None:
    """Run both sides of a connection; the first exception of either comes out."""

    async def main() -> None:
        served: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            link = Link(reader, writer, patience)
            try:
                await server(link)
                served.set_result(None)
            except Exception as error:
                served.set_exception(error)
            finally:
                link.close()

        listening = socket.create_server(("127.0.0.1", 0))
        listener = await asyncio.start_server(accept, sock=listening)
        link = await Link.connect(*listener.sockets[0].getsockname()[:2], patience)
        try:
            await asyncio.wait_for(asyncio.gather(client(link), served), 30)
        finally:
            link.close()
            listener.close()

    asyncio.run(main())


async def leave(link: Link) -> None:
    link.close()


def raw(*parts: bytes) -> Side:
    async def send(link: Link) -> None:
        link._writer.write(b"".join(parts))
        await link.until_closed()

    return send


async def receive(link: Link) -> None:
    await link.receive(max_body=100)


def test_a_message_arrives_as_it_was_sent():
    body = bytes(range(256)) * 3

    async def echo(link: Link) -> None:
        for _ in range(2):
            fields, body = await link.receive(max_body=1000)
            await link.send({"was": fields}, body[:5], body[5:])

    async def ask(link: Link) -> None:
        for fields in ({"a": 1, "b": "ä"}, {}):
            await link.send(fields, memoryview(body)[:500], bytearray(body[500:]))
            assert await link.receive(max_body=1000) == ({"was": fields}, body)

    talk(echo, ask)


def test_small_messages_do_not_wait_for_each_others_acknowledgement():
    """asyncio alone leaves Nagle's algorithm on in what such a socket accepts."""

    async def check(link: Link) -> None:
        connection = link._writer.get_extra_info("socket")
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    talk(check, check)


@pytest.mark.parametrize(
    "head",
    [struct.pack("!IQ", 2, 2**60), struct.pack("!IQ", MAX_FIELDS + 1, 0), b"GET / HTTP/1.1\r\n"],
)
def test_a_message_that_is_too_long_is_refused_before_it_is_read(head):
    with pytest.raises(LinkError, match="must have at most"):
        talk(receive, raw(head))


@pytest.mark.parametrize("text", [b"{", b"[1]", b"\xff\xfe", b"[" * 50_000])
def test_fields_must_be_a_json_object(text):
    with pytest.raises(LinkError, match=r"no JSON|no object"):
        talk(receive, raw(struct.pack("!IQ", len(text), 0), text))


def test_whoever_leaves_in_the_middle_of_a_message_ends_the_link():
    async def half(link: Link) -> None:
        link._writer.write(struct.pack("!IQ", 100, 0) + b"{")
        await link._writer.drain()
        link.close()

    with pytest.raises(LinkError):
        talk(receive, half)


def test_silence_ends_a_wait():
    async def wait(link: Link) -> None:
        await asyncio.sleep(10)

    async def ask(link: Link) -> None:
        await link.receive()

    with pytest.raises(TimeoutError):
        talk(wait, ask, patience=0.05)


def test_a_receiver_that_does_not_read_ends_the_sender():
    async def send(link: Link) -> None:
        while True:
            await link.send({}, bytes(1 << 20))

    async def sleep(link: Link) -> None:
        link._reader._transport.pause_reading()
        await asyncio.sleep(10)

    with pytest.raises(TimeoutError):
        talk(send, sleep, patience=0.2)


def test_fields_are_checked_when_they_are_read():
    fields = {"n": 3, "flag": True, "name": "x"}
    assert count_of(fields, "n", 4) == 3 and text_of(fields, "name") == "x"
    for name, limit in (("n", 3), ("flag", 3), ("name", 3), ("missing", 3)):
        with pytest.raises(LinkError, match=f"{name} must be"):
            count_of(fields, name, limit)
    with pytest.raises(LinkError, match="n must be a string"):
        text_of(fields, "n")


# -- the token


async def serve(link: Link, token: str = TOKEN) -> None:
    request, reply = await handshake.listen(link, token)
    await reply({"you said": request})


async def pull(link: Link, token: str = TOKEN) -> None:
    assert await handshake.ask(link, token, {"x": [1]}) == {"you said": {"x": [1]}}


def test_with_one_token_both_understand_each_other():
    talk(serve, pull)


def test_who_does_not_know_the_token_is_not_heard():
    with pytest.raises(handshake.NotAuthenticatedError):
        talk(serve, lambda link: pull(link, "another token, a long one"))


def test_an_answer_without_the_token_is_not_believed():
    """Somebody else may sit on the port of a worker that has died."""

    async def impostor(link: Link) -> None:
        await link.send({"nonce": "0"})
        await link.receive()
        await link.send({"message": {"blocks": 3}, "proof": "0" * 64})

    with pytest.raises(handshake.NotAuthenticatedError):
        talk(impostor, pull)


def test_a_request_cannot_be_changed_or_said_again():
    heard: list[dict] = []

    async def overhear(link: Link) -> None:
        await link.send({"nonce": "0"})
        heard.append((await link.receive())[0])
        await link.send(heard[0])

    with pytest.raises(handshake.NotAuthenticatedError):
        talk(overhear, pull)
    assert TOKEN not in json.dumps(heard)

    for change in ({}, {"message": {"x": [2]}}):  # the sender's nonce is another one this time

        async def replay(link: Link, change: dict = change) -> None:
            await link.receive()
            await link.send(heard[0] | change)
            await link.until_closed()

        with pytest.raises(handshake.NotAuthenticatedError):
            talk(serve, replay)
