"""/events: what the engine does to one request, while it does it."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from live import Live, live, until, user

from minifer.serving import event_stream


class Watcher:
    """Reads /events of one request on a thread; knows when the stream has begun."""

    def __init__(self, server: Live, request_id: str) -> None:
        self.events: list[dict] = []
        self.comments: list[str] = []
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(server, request_id))
        self._thread.start()
        assert self._begun.wait(10)

    def _read(self, server: Live, request_id: str) -> None:
        url = f"/events?request_id={request_id}"
        with server.http.stream("GET", url) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            self._begun.set()
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.events.append(json.loads(line.removeprefix("data: ")))
                elif line:
                    self.comments.append(line)

    def join(self) -> list[dict]:
        self._thread.join(30)
        assert not self._thread.is_alive(), "the stream did not end"
        return self.events


def test_a_requests_life_is_told_from_admission_to_its_end(server: Live):
    watcher = Watcher(server, "watched")
    body = {"messages": user("hi"), "max_tokens": 4, "request_id": "watched", "temperature": 0}
    text = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    events = watcher.join()
    assert events[0]["name"] == "request.admitted" and events[-1]["name"] == "request.finished"
    own = [event["name"] for event in events if event["request_id"] == "watched"]
    assert own.count("token.sampled") == 4 and "kv.block_allocated" in own
    assert any(event["name"] == "step.forward" for event in events)
    assert {event["stage"] for event in events} >= {"scheduling", "kv", "prefill", "decode"}
    released = [e["data"]["text"] for e in events if e["name"] == "text.released"]
    assert "".join(released) == text


def test_others_are_not_seen_and_the_hub_leaves_the_engine(server: Live):
    watcher = Watcher(server, "mine")
    server.complete("a", max_tokens=2, request_id="other")
    server.complete("a", max_tokens=2, request_id="mine")
    events = watcher.join()
    assert {event["request_id"] for event in events} == {None, "mine"}
    until(lambda: not server.llm.engine.events)  # nobody listens, nothing is written


def test_the_stream_ends_after_the_last_of_n_sequences(server: Live):
    watcher = Watcher(server, "many")
    server.complete("a", n=3, max_tokens=6, temperature=1, request_id="many", stop=["e"])
    events = watcher.join()
    ends = [event["request_id"] for event in events if event["name"] == "request.finished"]
    assert sorted(ends) == ["many", "many#1", "many#2"]
    assert events[-1]["name"] == "request.finished"


def test_an_aborted_request_ends_the_stream(server: Live):
    watcher = Watcher(server, "gone")
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "request_id": "gone"}
    connection = server.connect("/v1/completions", **body)
    until(lambda: server.llm.engine.scheduler.running)
    connection.close()
    assert watcher.join()[-1]["data"]["finish_reason"] == "abort"


def test_a_subscriber_that_does_not_read_loses_events_and_is_told(server: Live, monkeypatch):
    monkeypatch.setattr(event_stream, "MAX_PENDING", 5)
    loop_is_blocked, go_on = threading.Event(), threading.Event()

    def block() -> None:
        loop_is_blocked.set()
        go_on.wait(10)

    watcher = Watcher(server, "slow")
    (subscriber,) = server.server.hub.subscribers
    subscriber.loop.call_soon_threadsafe(block)
    assert loop_is_blocked.wait(10)
    server.llm.post(lambda engine: engine.add_request("slow", [97], None))
    until(lambda: subscriber.ended)  # the engine was not held up
    go_on.set()
    events = watcher.join()
    assert events[-1]["name"] == "request.finished" and len(events) == 1 + 5
    assert events[0]["name"] == "events.lost" and events[0]["data"]["count"] > 0


def test_a_subscriber_that_leaves_is_forgotten(server: Live):
    connection = socket.create_connection(server._listener_address)
    connection.sendall(b"GET /events?request_id=x HTTP/1.1\r\nHost: x\r\n\r\n")
    until(lambda: server.server.hub.subscribers)
    until(lambda: server.llm.engine.events)  # attached on the engine's thread
    connection.close()
    until(lambda: not server.server.hub.subscribers)
    until(lambda: not server.llm.engine.events)


def test_asking_for_the_head_of_a_stream_does_not_keep_it_open(server: Live):
    response = server.http.head("/events", params={"request_id": "x"}, timeout=5)
    assert response.status_code == 200 and not response.content
    assert response.headers["content-type"].startswith("text/event-stream")
    until(lambda: not server.server.hub.subscribers)


def test_a_request_that_never_comes_does_not_keep_the_stream_for_ever(server: Live, monkeypatch):
    monkeypatch.setattr(event_stream, "PING_SECONDS", 0.02)
    monkeypatch.setattr(event_stream, "IDLE_SECONDS", 0.1)
    watcher = Watcher(server, "never")
    assert watcher.join() == [] and ": ping" in watcher.comments


def test_subscribers_are_bounded():
    with live(max_subscribers=1) as server:
        assert server.http.get("/events").json()["error"]["param"] == "request_id"
        watcher = Watcher(server, "one")
        assert server.http.get("/events?request_id=two").status_code == 429
        server.complete("a", max_tokens=1, request_id="one")
        watcher.join()


@pytest.mark.parametrize("request_id", ["a", "a b", "é👋"])
def test_any_request_id_can_be_watched(server: Live, request_id: str):
    watcher = Watcher(server, request_id)
    server.complete("a", max_tokens=1, request_id=request_id)
    assert watcher.join()
