"""/metrics, read by Prometheus' own parser."""

from __future__ import annotations

import pytest
from live import Live, live, until, user
from prometheus_client.parser import text_string_to_metric_families

from minifer.events import ListSink


def scrape(server: Live) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name, values of the labels but the model's) → value."""
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "minifer-tiny"
            samples[sample.name.removeprefix("minifer:"), tuple(labels.values())] = sample.value
    return samples


@pytest.fixture
def fresh():
    with live() as server:
        yield server


def test_counts_are_those_of_the_requests(fresh: Live):
    fresh.complete("a" * 40, max_tokens=6, ignore_eos=True)
    fresh.complete("a" * 40, max_tokens=6, n=2, temperature=1, ignore_eos=True)
    fresh.complete("b", max_tokens=9, stop_token_ids=list(range(256)))
    fresh.wait_until_idle()
    seen = scrape(fresh)
    assert seen["prompt_tokens_total", ()] == 40 + 40 + 1
    assert seen["generation_tokens_total", ()] == 6 + 12 + 1
    assert seen["request_success_total", ("length",)] == 3
    assert seen["request_success_total", ("stop",)] == 1
    assert seen["prefix_cache_queries_total", ()] == 81
    assert seen["prefix_cache_hits_total", ()] == 32
    assert seen["num_requests_running", ()] == seen["num_requests_waiting", ()] == 0
    assert seen["kv_cache_usage_perc", ()] == 0
    assert seen["request_params_n_sum", ()] == 1 + 2 + 1
    assert seen["request_params_max_tokens_sum", ()] == 6 + 6 + 9
    assert seen["request_prompt_tokens_sum", ()] == 81
    assert seen["request_generation_tokens_sum", ()] == 19
    computed = 40 + 5 + (40 - 32) + 2 * 5 + 1
    assert seen["iteration_tokens_total_sum", ()] == computed
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
    ):
        assert seen[f"{name}_count", ()] == 3
    assert seen["inter_token_latency_seconds_count", ()] == 5 + 5
    assert seen["request_time_per_output_token_seconds_count", ()] == 2


def test_counters_are_there_before_they_count():
    """Prometheus' rate() does not see a counter that begins with its first event."""
    with live() as server:
        seen = scrape(server)
    assert seen["prompt_tokens_total", ()] == seen["generation_tokens_total", ()] == 0
    assert {seen["request_success_total", (r,)] for r in ("stop", "length", "abort", "error")} == {
        0
    }
    assert seen["time_to_first_token_seconds_count", ()] == 0


def test_running_and_waiting_are_seen_from_outside():
    with live({"max_num_seqs": 1}) as server:
        body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}
        connections = [server.connect("/v1/completions", **body) for _ in range(3)]
        until(lambda: server.llm.engine.num_unfinished_requests == 3)
        until(lambda: scrape(server)["num_requests_running", ()] == 1)
        seen = scrape(server)
        assert seen["num_requests_waiting", ()] == 2 and seen["kv_cache_usage_perc", ()] > 0
        for connection in connections:
            connection.close()
        server.wait_until_idle()
        until(lambda: scrape(server)["request_success_total", ("abort",)] == 3)


def test_tiers_report_what_they_moved(tmp_path):
    tiers = {"num_kv_blocks": 8, "kv_dram_bytes": 10**8, "kv_load_policy": "always"}
    with live(tiers) as server:
        for prompt in ("a" * 100, "b" * 100, "a" * 100):
            server.complete(prompt, max_tokens=2)
        seen = scrape(server)
        assert seen["kv_offload_blocks_total", ("store", "dram")] >= 12
        assert seen["kv_offload_bytes_total", ("load", "dram")] > 0
        assert seen["external_prefix_cache_hits_total", ()] >= 16
        assert (
            seen["external_prefix_cache_queries_total", ()]
            >= seen["external_prefix_cache_hits_total", ()]
        )


def test_guards_are_counted(server: Live):
    """A conversation that calls one tool for ever: reported, and refused where guards stop."""
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    turn = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "no"},
    ]
    body = {"messages": user("hi") + turn * 4, "max_tokens": 1}
    sink = ListSink()
    server.llm.post(lambda engine: engine.events.sinks.append(sink))
    assert server.post("/v1/chat/completions", request_id="loop", **body).status_code == 200
    server.llm.post(lambda engine: engine.events.sinks.remove(sink))
    (alarm,) = [e for e in sink.events if e.name == "guard.tripped"]
    assert (alarm.request_id, alarm.data["guard"]) == ("loop", "tool_loop")
    assert scrape(server)["guard_trips_total", ("tool_loop",)] >= 1
    with live({"guards": "stop"}) as strict:
        error = strict.refusal("/v1/chat/completions", **body)
        assert error["code"] == "tool_call_loop" and "f was called" in error["message"]


def test_drafts_are_counted_under_vllms_names(fresh: Live):
    prompt = "the with statement and the with statement and the with statement and "
    assert not any(name.startswith("spec_decode") for name, _ in scrape(fresh))
    plain = fresh.complete(prompt, max_tokens=40, ignore_eos=True)
    with live({"speculative_method": "ngram"}) as drafting:
        answer = drafting.complete(prompt, max_tokens=40, ignore_eos=True)
        assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
        drafting.wait_until_idle()
        seen = scrape(drafting)
        stats = drafting.llm.engine.speculation_stats
    assert 0 < stats.num_accepted_tokens == seen["spec_decode_num_accepted_tokens_total", ()]
    assert stats.num_draft_tokens == seen["spec_decode_num_draft_tokens_total", ()]
    assert stats.num_drafts == seen["spec_decode_num_drafts_total", ()]
    by_place = "spec_decode_num_accepted_tokens_per_pos_total"
    places = [seen[by_place, (str(i),)] for i in range(4)]
    assert places == stats.num_accepted_tokens_per_pos
    assert sum(places) == stats.num_accepted_tokens
    assert seen["generation_tokens_total", ()] == 40


def test_two_servers_do_not_share_a_registry(fresh: Live, server: Live):
    server.complete("a", max_tokens=1)
    assert scrape(fresh)["generation_tokens_total", ()] == 0
