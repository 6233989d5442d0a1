"""What the pictures of routing and disaggregation say: two worlds that agree, and sums by hand."""

from __future__ import annotations

import pytest

from minifer.course.pictures import disaggregation as apart
from minifer.course.pictures import routing_data as fleet
from minifer.course.pictures.routing import replica_gantt
from minifer.execution.reference import reference_generate, reference_logits

POLICIES = ("round_robin", "least_load", "prefix_affinity", "prefix_affinity:load_factor=inf")


@pytest.mark.parametrize("policy", POLICIES)
def test_real_engines_do_what_the_simulator_says(policy: str) -> None:
    """Chats whose turns come one after the other: the same replicas, tokens and steps.

    A prefix that nobody holds goes where its name hashes to, and simulated blocks have other names:
    without a bound two chats may share a replica in one world and not in the other.
    """
    traffic = fleet.chats(turns=3)
    real, model = fleet.serve_live(traffic, policy), fleet.serve_simulated(traffic, policy)
    if not policy.endswith("inf"):
        assert real.together == model.together
        assert real.ttft == model.ttft
    assert real.computed == model.computed < sum(len(ask.prompt) for ask in traffic)


def test_every_answer_is_the_slow_twins() -> None:
    real = fleet.serve_live(fleet.rush(3, wanted=4), "round_robin")
    for ask in fleet.rush(3, wanted=4):
        truth = reference_generate(fleet.tiny().model, list(ask.prompt), ask.wanted)
        assert real.answers[ask.name] == truth


def test_work_is_every_token_once() -> None:
    traffic = fleet.rush(6)
    real = fleet.serve_live(traffic, "prefix_affinity")
    prefill = sum(w.num_tokens for w in real.work if w.kind == "prefill")
    assert prefill == real.computed
    decoded = [w for w in real.work if w.kind == "decode"]
    assert len(decoded) == sum(ask.wanted - 1 for ask in traffic)
    for step in {w.step for w in real.work}:
        places = [(w.replica, w.lane) for w in real.work if w.step == step]
        assert len(places) == len(set(places))


def test_only_real_engines_have_a_timeline() -> None:
    simulated = fleet.serve_simulated(fleet.rush(2), "round_robin")
    with pytest.raises(ValueError, match="real engines"):
        replica_gantt({"simulated": simulated}, title="nothing")


def test_a_whole_prompt_stops_those_who_decode_for_as_long_as_it_takes() -> None:
    runs = apart.stalls()
    prefill = apart.STEPS.seconds([(apart.LONG, apart.LONG)])
    decode = apart.STEPS.seconds([(1, 300)] * 4)
    assert prefill < runs["whole prompts"].pause < prefill + 2.1 * decode
    assert runs["two nodes"].pause == pytest.approx(decode, rel=0.1)
    assert [run.num_nodes for run in runs.values()] == [1, 1, 2]
    pauses = [run.pause for run in runs.values()]
    assert pauses[0] > pauses[1] > pauses[2]
    assert all(len(run.tokens) == apart.ANSWER for run in runs.values())


def test_the_second_token_of_the_long_prompt_waits_for_its_kv() -> None:
    """8,192 tokens of 327,680 bytes at 10 GB/s are 0.268 s."""
    second = []
    for link in (1e15, 10e9):
        records = apart.interference(link)["two nodes"].requests
        second.append(next(r for r in records if r.request_id == "long").token_times[1])
    decode = apart.STEPS.seconds([(1, apart.LONG)] * 5)
    assert second[1] - second[0] == pytest.approx(8192 * 327_680 / 10e9, abs=decode)


def test_a_prefill_at_half_the_peak() -> None:
    from minifer.course.shapes import LLAMA_8B
    from minifer.perf.devices import DEVICES

    h100 = DEVICES["H100-SXM"]
    one = apart.recompute_seconds(LLAMA_8B, h100, 1024)
    assert one == pytest.approx(2 * 6.98e9 * 1024 / (0.5 * 989e12), rel=0.03)  # 2 FLOPs a weight
    assert apart.recompute_seconds(LLAMA_8B, h100, 1024, chips=8) == pytest.approx(one / 8)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_logits_of_one(size: int) -> None:
    prompt = list(b"The import statement")
    whole = reference_logits(fleet.tiny().model, prompt)[-1]
    assert float((apart.logits_of_ranks(size, prompt) - whole).abs().max()) < 1e-4


def test_goodput_counts_what_keeps_the_limits() -> None:
    from minifer.simulation.steps.times import FixedSteps

    workload = apart.single_prompts(4.0, 40, 1)
    fast, slow = (
        apart.carried(workload, apart.four_replicas("round_robin", FixedSteps(step)))
        for step in (0.01, 0.2)
    )
    assert fast.goodput == pytest.approx(fast.offered)
    assert slow.goodput == 0.0  # each token takes 0.2 s
    assert fast.hit_rate == 0.0
