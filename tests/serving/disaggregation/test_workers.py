"""`minifer serve --disaggregate`: real workers, real links; the answers of one engine."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet_process import Deployment, deployment, is_running, until
from live import Live, user
from live_workers import choices_of, unlike

from minifer.cli import main

P = 16
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"max_tokens": 500, "temperature": 0, "ignore_eos": True}

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs POSIX signals")


def segments() -> set[str]:
    folder = Path("/dev/shm")
    names = os.listdir(folder) if folder.is_dir() else []
    return {name for name in names if name.startswith("minifer-kv-")}


@pytest.fixture(scope="module")
def one_to_one() -> Iterator[Deployment]:
    before = segments()
    with deployment("1:1", "--num-kv-blocks", "256") as running:
        yield running
        assert running.close() == 0
        assert [line for line in running.said if "Traceback" in line] == []
    assert segments() == before


@pytest.fixture
def fleet(one_to_one: Deployment) -> Iterator[Deployment]:
    """Whole before the test and after it."""
    yield whole(one_to_one)
    whole(one_to_one)


def whole(fleet: Deployment) -> Deployment:
    until(fleet.all_healthy)
    until(lambda: not any(row["open_requests"] for row in fleet.replicas()))
    return fleet


def counted(fleet: Deployment, name: str) -> float:
    """One of the workers' `minifer:kv_transfer_…`, over all of them."""
    page = fleet.http.get("/metrics").text
    found = re.findall(rf"^minifer:kv_transfer_{name}(?:_total)?{{.*}} (\S+)$", page, re.MULTILINE)
    assert found, name
    return sum(map(float, found))


def check_same(fleet: Deployment, server: Live, route: str = COMPLETE, **body: Any) -> Any:
    """Greedy answers are one engine's; returns the response."""
    body = {"max_tokens": 9, "temperature": 0, **body}
    ours, theirs = fleet.post(route, **body), server.post(route, **body)
    assert ours.status_code == theirs.status_code == 200, ours.text
    assert choices_of(ours.json()) == choices_of(theirs.json(), approximate=True)
    return ours


def test_answers_are_those_of_one_engine(fleet: Deployment, server: Live):
    for number, length in enumerate((5, 16, 17, 90, 300)):
        tokens = counted(fleet, "tokens")
        answer = check_same(fleet, server, prompt=unlike(2000 + number, length), logprobs=1)
        assert answer.headers["x-minifer-replica"] == "decode-0"
        assert counted(fleet, "tokens") == tokens + (length - 1) // P * P
    check_same(fleet, server, CHAT, messages=user("What goes on here, and why does it?"))
    assert counted(fleet, "recomputed_tokens") == counted(fleet, "broken") == 0


def test_a_prefix_that_is_there_already_does_not_travel_again(fleet: Deployment, server: Live):
    prompt = unlike(2100, 100)
    first = check_same(fleet, server, prompt=prompt)
    until(lambda: fleet.replica(first.headers["x-minifer-replica"])["kv_is_exact"])
    sent = counted(fleet, "bytes")
    until(lambda: check_same(fleet, server, prompt=prompt).headers["x-minifer-reason"] == "prefix")
    assert counted(fleet, "bytes") == sent


def test_what_is_refused_is_refused_as_by_one_engine(fleet: Deployment, server: Live):
    for body in ({"temperature": -1}, {"nonsense": 1}, {"prompt": unlike(2200, 9000)}):
        body = {"prompt": unlike(2200, 90), **body}
        ours, theirs = fleet.post(COMPLETE, **body), server.post(COMPLETE, **body)
        assert ours.status_code == theirs.status_code == 400
        assert ours.json() == theirs.json()


def test_internal_routes_are_for_the_router_alone(fleet: Deployment):
    """The router has none; a worker wants a key that nobody else knows."""
    internal = "/internal/prefill/completions"
    assert fleet.post(internal, prompt="a").status_code == 404
    for row in fleet.replicas():
        for route in (internal, COMPLETE):
            answer = httpx.post(row["url"] + route, json={"prompt": "a"})
            assert answer.status_code == 401


def test_a_dead_prefill_worker_costs_time_and_no_answer(fleet: Deployment, server: Live):
    os.kill(fleet.replica("prefill-0")["pid"], signal.SIGKILL)
    for number in range(3):
        check_same(fleet, server, prompt=unlike(2300 + number, 90))


# -- more deaths


@pytest.mark.slow
def test_whoever_dies_the_answer_is_right(server: Live):
    with deployment("1:2", "--num-kv-blocks", "256") as fleet:
        die_over_a_prompt(fleet, server)
        die_before_the_answer(whole(fleet), server)
        tokens = counted(whole(fleet), "tokens")
        check_same(fleet, server, prompt=unlike(2400, 90))
        assert counted(fleet, "tokens") == tokens + 80
        assert fleet.close() == 0
        assert [line for line in fleet.said if "Traceback" in line] == []
    assert segments() == set()


def die_over_a_prompt(fleet: Deployment, server: Live) -> None:
    """A prefill worker is stopped first, so that it dies in the middle of it."""
    row = fleet.replica("prefill-0")
    with asking(fleet, prompt=unlike(2410, 500)) as answers:
        os.kill(row["pid"], signal.SIGSTOP)
        until(lambda: fleet.replica("prefill-0")["open_requests"] or answers)
        os.kill(row["pid"], signal.SIGKILL)
    theirs = server.post(COMPLETE, prompt=unlike(2410, 500), **LONG)
    assert choices_of(answers[0].json()) == choices_of(theirs.json())
    until(lambda: fleet.replica("prefill-0")["pid"] not in (None, row["pid"]))


def die_before_the_answer(fleet: Deployment, server: Live) -> None:
    """A decode worker that has the blocks and has said nothing: another one gets them."""

    def busy() -> list[dict[str, Any]]:
        return [r for r in fleet.replicas() if r["role"] == "decode" and r["open_requests"]]

    with asking(fleet, prompt=unlike(2420, 90)) as answers:
        until(lambda: busy() and not fleet.replica("prefill-0")["open_requests"])
        (row,) = busy()
        os.kill(row["pid"], signal.SIGKILL)
    theirs = server.post(COMPLETE, prompt=unlike(2420, 90), **LONG)
    assert answers[0].status_code == 200
    assert choices_of(answers[0].json()) == choices_of(theirs.json())
    assert answers[0].headers["x-minifer-replica"] != row["name"]
    assert not is_running(row["pid"])


@contextmanager
def asking(fleet: Deployment, **body: Any) -> Iterator[list[httpx.Response]]:
    """A long answer in one piece, on its own thread; it is there at the end."""
    answers: list[httpx.Response] = []
    ask = threading.Thread(target=lambda: answers.append(fleet.post(COMPLETE, **body, **LONG)))
    ask.start()
    try:
        yield answers
    finally:
        ask.join(120)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_through_faults_all_answers_are_right(transport: str, server: Live):
    faults = "drop=0.05,flip=0.05,stall=0.003,seed=3"
    options = ("--kv-transport", transport, "--kv-link-faults", faults, "--num-kv-blocks", "256")
    with deployment("2:1", *options) as fleet:
        for number in range(80):
            check_same(fleet, server, prompt=unlike(3000 + number, 40 + 7 * number % 200))
        for name in ("corrupt", "broken", "tokens", "recomputed_tokens"):
            assert counted(fleet, name) > 0, name
        assert fleet.close() == 0
        assert [line for line in fleet.said if "Traceback" in line] == []
    assert segments() == set()


BAD_USAGE = {
    "--disaggregate 2": "disaggregate must be P:D such as 1:2, got '2'",
    "--disaggregate 0:1": "disaggregate must be 1 to 64 workers of each kind, got 0:1",
    "--disaggregate 1:1 --replicas 2": "--disaggregate and --replicas exclude each other",
    "--disaggregate 1:1 --role decode": "--disaggregate and --role exclude each other",
    "--disaggregate 1:1 --kv-write-policy second_touch": "--kv-write-policy must be through",
    "--disaggregate 1:1 --no-enable-prefix-caching": "needs --enable-prefix-caching",
    "--disaggregate 1:1 --tensor-parallel-size 2": "needs --tensor-parallel-size 1",
    "--disaggregate 1:1 --min-hand-over -1": "--min-hand-over must be at least 0, got -1",
    "--disaggregate 2:1 --kv-port 7000": "--kv-port must be 0 for several prefill workers",
    "--disaggregate 1:1 --kv-port 70000": "port must be in [0, 65536), got 70000",
    "--disaggregate 1:1 --kv-transfer-timeout 0": "timeout must be at least 0.01 seconds",
    "--disaggregate 1:1 --kv-link-faults drop=2": "must be chances of at most 1 together",
    "--disaggregate 1:1 --kv-link-faults no=2": "link faults are drop, flip, seed, stall",
    "--disaggregate 1:1 --router nonsense": "router must be one of",
    "--kv-transport tcp": "--kv-transport needs --disaggregate",
    "--role decode": "token must be at least 16 printable ASCII characters: set MINIFER_KV_TOKEN",
}


@pytest.mark.parametrize("options", BAD_USAGE)
def test_bad_usage_is_2_and_one_sentence(
    options: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MINIFER_KV_TOKEN", raising=False)
    assert main(["serve", "--port", "0", *options.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and BAD_USAGE[options] in error
