"""The whole benchmark on a virtual clock: result, table, picture, and what does not go together."""

from __future__ import annotations

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from virtual import FakeServer, VirtualLoop, answer

from minifer.perf.load.benchmark import ARM, ServeBenchmark, bench_serve, bench_servers
from minifer.perf.load.plot import save_plot
from minifer.perf.load.report import table
from minifer.perf.load.traces import Trace, TraceRow
from minifer.perf.load.workload import Distribution, Workload

WORKLOAD = Workload(8, Distribution.parse("4"), Distribution.parse("3"))
TRACE = Trace("minifer", (TraceRow(0.0, 4, 3), TraceRow(2.0, 5, 3)))


def bench(server: FakeServer, url: str = "http://fake/v1", **options: Any):
    options = {"source": WORKLOAD, "max_concurrency": 2, **options}
    return bench_serve(ServeBenchmark(**options), url, transport=server, loop_factory=VirtualLoop)


def steady(body: Any, number: int) -> Any:
    """First token after 0.5 s, two more 0.25 s apart: 1 s in all."""
    return answer(0.5, [0.25, 0.25], prompt=4, cached=2)


def test_two_runs_of_a_closed_loop() -> None:
    server = FakeServer(steady)
    result, runs = bench(server, runs=2, warmup=1, vocab_size=10**6, slo={"ttft": 0.5})
    values = {name: summary.values for name, summary in result.arms[ARM].items()}
    assert values["seconds"] == (4.0, 4.0)  # 8 requests of 1 s by 2 clients
    assert values["request_throughput"] == values["goodput"] == (2.0, 2.0)
    assert values["output_throughput"] == (6.0, 6.0)
    assert values["ttft_p99"] == (0.5, 0.5) and values["tpot_p50"] == (0.25, 0.25)
    assert len(server.bodies) == 17 and len(runs) == 2
    prompts = {tuple(body["prompt"]) for body in server.bodies}
    assert len(prompts) == 17  # no run finds the prompts of another in a cache


def test_servers_take_turns_and_get_the_same_sessions() -> None:
    server = FakeServer(steady)
    plan = ServeBenchmark(WORKLOAD, max_concurrency=2, runs=2, vocab_size=10**6)
    result, seen = bench_servers(
        plan,
        {"old": "http://old", "new": "http://new"},
        summarize=lambda run: {"requests": len(run.records)},
        transport=server,
        loop_factory=VirtualLoop,
    )
    hosts = [headers["host"] for headers in server.headers]
    assert hosts == ["old", "new"] + (["old"] * 8 + ["new"] * 8) * 2
    prompts = [tuple(body["prompt"]) for body in server.bodies[2:]]
    first_old, first_new, second_old, second_new = (prompts[8 * i : 8 * i + 8] for i in range(4))
    assert first_old == first_new and second_old == second_new
    assert not set(first_old) & set(second_old)
    assert result.ratios["new"]["requests"].median == 1 and len(seen["new"]) == 2
    assert list(result.details["runs"]) == ["old", "new"]


def test_the_json_holds_machine_settings_seeds_and_every_request(tmp_path: Path) -> None:
    result, _ = bench(FakeServer(steady), api_key="secret", seed=3)
    result.write(tmp_path / "out.json")
    text = (tmp_path / "out.json").read_text()
    assert "secret" not in text
    data = json.loads(text)
    assert data["name"] == "serve" and data["machine"]["cores"] and data["versions"]["python"]
    assert data["settings"]["server"] == "http://fake/v1" and data["settings"]["seed"] == 3
    assert data["settings"]["workload"]["num_prompts"] == 8
    assert data["arms"][ARM]["ttft_p50"]["unit"] == "s"
    (run,) = data["details"]["runs"]
    assert (run["seed"], run["failures"], run["unsent_turns"]) == (3, {}, 0)
    assert len(run["requests"]) == 8
    assert run["requests"][2] == {
        "session": 2,
        "turn": 0,
        "due": 1.0,
        "sent": 1.0,
        "ttft": 0.5,
        "tpot": 0.25,
        "itl": [0.25, 0.25],
        "e2e": 1.0,
        "prompt_tokens": 4,
        "output_tokens": 3,
        "cached_tokens": 2,
        "finish_reason": "length",
        "error": None,
        "detail": None,
    }


def test_the_json_is_strict_and_names_the_model_the_server_has(tmp_path: Path) -> None:
    result, _ = bench(FakeServer(steady), max_concurrency=None, request_rate=math.inf)
    result.write(tmp_path / "out.json")

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    data = json.loads((tmp_path / "out.json").read_text(), parse_constant=refuse)
    assert (data["settings"]["request_rate"], data["settings"]["model"]) == ("inf", "toy")


def test_prompts_are_drawn_from_what_tokenize_gives_or_below_a_vocabulary_size() -> None:
    server = FakeServer(steady)
    bench(server, model=None)
    assert {token for body in server.bodies for token in body["prompt"]} == {5, 7, 11}
    assert {body["model"] for body in server.bodies} == {"toy"}
    assert server.paths[:2] == ["/v1/models", "/tokenize"]
    other = FakeServer(steady)
    bench(other, model="mine", vocab_size=3, api_key="secret", extra={"ignore_eos": True})
    assert {token for body in other.bodies for token in body["prompt"]} == {0, 1, 2}
    assert {body["model"] for body in other.bodies} == {"mine"}
    assert all(body["ignore_eos"] for body in other.bodies)
    assert set(other.paths) == {"/v1/completions"}
    assert {headers["authorization"] for headers in other.headers} == {"Bearer secret"}


def test_an_open_loop_and_a_trace_send_at_their_times() -> None:
    server = FakeServer(steady)
    result, _ = bench(
        server, max_concurrency=None, request_rate=2.0, burstiness=float("inf"), warmup=0
    )
    assert server.arrived == [i / 2 for i in range(8)]
    assert result.arms[ARM]["max_in_flight"].median == 2
    replayed = FakeServer(steady)
    result, _ = bench(replayed, source=TRACE, max_concurrency=None, speed_up=4.0, warmup=0)
    assert replayed.arrived == [0.0, 0.5]
    assert [len(body["prompt"]) for body in replayed.bodies] == [4, 5]
    assert result.settings["trace"] == {
        "format": "minifer",
        "requests": 2,
        "num_failed": 0,
        "num_unsorted": 0,
        "num_too_long": 0,
        "hash_block": 512,
    }


def test_an_open_loop_has_as_many_connections_as_it_needs() -> None:
    """Over real sockets: httpx allows 100 by default. The server waits for all 130 to be there."""
    count, everybody = 130, threading.Barrier(130, timeout=20)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            everybody.wait()
            body = b"".join(data for _, data in answer(0, [0]))
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 256

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        workload = Workload(count, Distribution.parse("4"), Distribution.parse("2"))
        options = ServeBenchmark(
            workload, request_rate=math.inf, warmup=0, model="toy", vocab_size=9, timeout=30.0
        )
        result, _ = bench_serve(options, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert result.arms[ARM]["completed"].median == count


def test_the_table_says_what_happened() -> None:
    def script(body: Any, number: int) -> Any:
        if number == 4:
            return httpx.Response(429, text="busy")
        return answer(0.5 if number < 8 else 1.0, [0.25, 0.25], prompt=4, cached=2)

    result, runs = bench(FakeServer(script), warmup=0, slo={"ttft": 0.5})
    text = table(result, runs, {"ttft": 0.5})
    assert "requests     7 completed, 1 failed in 4.00 s; at most 2 in flight" in text
    assert "tokens       28 of prompts, 21 generated, 1 in a chunk" in text
    assert "prefix cache 50.0% of the prompt tokens" in text
    assert "goodput      1.75 requests/s; 87.5% met ttft ≤ 0.5 s" in text
    lines = text.splitlines()
    assert lines[lines.index("") + 1].split() == ["mean", "p50", "p90", "p99", "max"]
    assert ["TTFT", *["500.0"] * 5, "ms"] in [line.split() for line in lines]
    assert "note: 1 failed: HTTP 429 busy" in text
    assert "could not keep up" not in text


def test_nothing_completed_is_an_error_with_the_servers_words() -> None:
    server = FakeServer(lambda body, number: httpx.Response(400, text="too long"))
    with pytest.raises(RuntimeError, match=r"none of 8 requests .*: HTTP 400 \(8\) too long"):
        bench(server)


def test_a_server_that_is_not_there_is_an_error() -> None:
    class Nobody(FakeServer):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("refused")

    with pytest.raises(RuntimeError, match="no answer from http://fake: refused"):
        bench(Nobody(steady))


def test_without_tokenize_a_vocabulary_size_is_asked_for() -> None:
    class Bare(FakeServer):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/tokenize":
                return httpx.Response(404)
            return await super().handle_async_request(request)

    with pytest.raises(ValueError, match="the server has no /tokenize: give vocab_size"):
        bench(Bare(steady))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_rate": 1.0}, "exclude each other"),
        ({"max_concurrency": None}, "exclude each other"),
        ({"source": TRACE}, "a trace says when requests come"),
        ({"source": TRACE, "max_concurrency": None, "request_rate": 1.0}, "a trace says when"),
        ({"endpoint": "x"}, "endpoint must be one of completions, chat, got 'x'"),
        ({"runs": 0}, "runs must be at least 1, got 0"),
        ({"warmup": -1}, "warmup must be at least 0, got -1"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        (
            {"source": Workload(1, *[Distribution.parse("4")] * 2, turns=2)},
            "turns above 1 need the endpoint chat",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServeBenchmark(**{"source": WORKLOAD, "max_concurrency": 2, **options})


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_run_can_be_drawn(kind: str, tmp_path: Path) -> None:
    def script(body: Any, number: int) -> Any:
        return httpx.Response(429) if number == 4 else steady(body, number)

    _, runs = bench(FakeServer(script))
    path = tmp_path / f"plot.{kind}"
    save_plot(path, runs[0], title="A test", slo={"ttft": 0.5, "e2e": 2.0})
    assert path.stat().st_size > 10_000
    if kind == "svg":
        assert "<svg" in path.read_text()
