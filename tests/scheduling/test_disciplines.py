"""Who is next: shortest first, levels, fair shares; and who may have to wait for how long."""

from __future__ import annotations

import math
import random

import pytest
from fakes import ScheduleDriver, make_request

from minifer.config import EngineConfig
from minifer.scheduling.disciplines import VirtualTokenCounter


def driver(policy: str, *, num_blocks: int = 200, **config) -> ScheduleDriver:
    config = {"enable_prefix_caching": False, **config}
    return ScheduleDriver(num_blocks, scheduling_policy=policy, **config)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(length)]


def order_of_first_tokens(d: ScheduleDriver) -> list[str]:
    """Names in the order in which their prompts were computed."""
    done: list[str] = []
    while d.scheduler.running or d.scheduler.waiting:
        d.step()
        done += [
            r.request_id for r in d.requests if r.num_output_tokens and r.request_id not in done
        ]
    return done


# -- shortest first


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abc"), ("sjf", "bca"), ("srpt", "bca")])
def test_the_shortest_prompt_goes_first(policy, order):
    d = driver(policy, max_num_batched_tokens=4)
    for name, length in (("a", 12), ("b", 4), ("c", 8)):
        d.add(name, range(length), 1)
    assert order_of_first_tokens(d) == list(order)


@pytest.mark.parametrize(
    ("policy", "order"), [("sjf", ["long", "short"]), ("srpt", ["short", "long"])]
)
def test_srpt_lets_a_short_prompt_overtake_one_that_has_begun(policy, order):
    d = driver(policy, max_num_batched_tokens=4)
    d.add("long", range(20), 1)
    d.step()
    d.add("short", range(8), 1)
    assert order_of_first_tokens(d) == order


def test_srpt_compares_what_is_left_and_not_what_there_was():
    d = driver("srpt", max_num_batched_tokens=4)
    d.add("long", range(20), 1)
    for _ in range(4):
        d.step()
    d.add("short", range(8), 1)  # 4 tokens of the long one are left
    assert d.tokens() == {"long": 4}


def test_srpt_decodes_before_it_prefills():
    d = driver("srpt", max_num_batched_tokens=4)
    d.add("answer", [1], 50)
    d.step()
    d.add("long", range(20), 1)
    d.step()
    d.add("short", range(6), 1)
    assert d.tokens() == {"answer": 1, "short": 3}


def test_what_is_cached_is_no_work():
    d = driver("sjf", max_num_batched_tokens=8, max_num_seqs=1, enable_prefix_caching=True)
    d.add("first", range(16), 1)
    d.run()
    d.add("new", range(100, 106), 1)
    d.add("mostly cached", [*range(16), 5, 6], 1)  # 2 tokens to compute
    assert set(d.tokens()) == {"mostly cached"}


def test_victims_are_those_with_the_most_left():
    d = driver("srpt", num_blocks=6, max_num_batched_tokens=5, prefill_ageing=0.0)
    long = d.add("long", range(20), 1)
    d.step()
    answer = d.add("answer", [1, 2, 3], 12)
    while not answer.finished:
        d.step()
    assert long.num_preemptions > 0 and answer.num_preemptions == 0
    d.run()


def waits_under_a_stream(policy: str, ageing: float, steps: int = 300) -> int:
    """A prompt of 40 tokens among short ones that keep the engine busy: its wait in steps."""
    d = driver(policy, max_num_batched_tokens=10, max_num_seqs=8, prefill_ageing=ageing)
    long = d.add("long", range(40), 1)
    for step in range(steps):
        d.add(f"short{step}", range(10), 1)
        d.step()
        if long.num_output_tokens:
            return step
    return steps


@pytest.mark.parametrize("policy", ["sjf", "srpt"])
def test_without_ageing_a_stream_of_short_prompts_starves_a_long_one(policy):
    assert waits_under_a_stream(policy, ageing=0.0) == 300


@pytest.mark.parametrize("policy", ["sjf", "srpt"])
@pytest.mark.parametrize("ageing", [0.1, 0.25, 1.0])
def test_s13_ageing_bounds_the_wait(policy, ageing):
    """Whoever comes after (W − w) / (ageing · budget) steps goes behind; then W takes W / budget.

    In the meantime the engine has done as much as came, so nobody else is left before it.
    """
    left, short, budget = 40, 10, 10
    bound = (left - short) / (ageing * budget) + left / budget + 1
    assert waits_under_a_stream(policy, ageing) <= bound + 1


@pytest.mark.parametrize("policy", ["sjf", "srpt"])
@pytest.mark.parametrize(("answered", "order"), [(90, ["short", "long"]), (110, ["long", "short"])])
def test_steps_that_decode_alone_age_by_what_they_compute(policy, answered, order):
    """A tenth of what is computed is forgiven, and the prompts differ by 10 tokens."""
    d = driver(policy, max_num_seqs=1, max_num_batched_tokens=100, prefill_ageing=0.1)
    d.add("answer", [1], 120)
    d.step()
    d.add("long", range(50), 1)
    for _ in range(answered):
        d.step()
    d.add("short", range(40), 1)
    assert order_of_first_tokens(d)[1:] == order


def test_the_rank_of_those_who_wait_never_changes():
    """left + ageing · arrived orders them as left − ageing · waited does, at any moment."""
    rng = random.Random(3)
    d = driver("sjf", max_num_seqs=1, max_num_batched_tokens=8, prefill_ageing=0.25)
    d.add("runs", [1], 199)
    for step in range(60):
        d.add(f"r{step}", prompt(rng, rng.randrange(1, 80)), 1)
        d.step()
    waiting = list(d.scheduler.waiting)
    now = d.scheduler._work

    def aged(request):
        return request.num_tokens - 0.25 * (now - request.arrival_work), request.arrival

    by_hand = sorted(waiting, key=aged)
    assert [r.request_id for r in waiting] == [r.request_id for r in by_hand]


# -- skip-join MLFQ


def levels(d: ScheduleDriver, *requests) -> list[int]:
    return [d.scheduler.waiting._turns[r].level for r in requests]


def test_a_request_joins_the_level_whose_quantum_covers_its_prompt():
    d = driver("mlfq", mlfq_quantum=4)
    joined = [d.add(str(n), range(n), 1) for n in (1, 4, 5, 8, 9, 16, 17)]
    assert levels(d, *joined) == [0, 0, 1, 1, 2, 2, 3]


def test_who_has_used_a_quantum_up_falls_to_the_next_level():
    d = driver("mlfq", mlfq_quantum=4)
    request = d.add("a", [1, 2], 40)
    seen = []
    while not request.finished:
        d.step()
        seen.append(levels(d, request)[0])
    # 2 tokens of the prompt, then one a step: 4 are used up after 3 steps, 8 more after 11, 16 …
    assert seen.index(1) == 2 and seen.index(2) == 10 and seen.index(3) == 26


def test_short_answers_are_not_held_up_by_long_ones():
    """With one seat, which a long answer holds; nobody knows which answer is short."""
    ends = {}
    for policy in ("fcfs", "mlfq"):
        d = driver(policy, max_num_seqs=1, mlfq_quantum=4)
        d.add("long", [1, 2], 100)
        for _ in range(10):
            d.step()
        short = d.add("short", [3, 4], 2)
        ends[policy] = 0
        while not short.finished:
            d.step()
            ends[policy] += 1
        d.run()
    assert ends == {"fcfs": 92, "mlfq": 2}


def test_a_place_taken_is_given_back_in_the_end():
    d = driver("mlfq", max_num_seqs=1, mlfq_quantum=4)
    long = d.add("long", [1, 2], 60)
    for i in range(20):
        d.step()
        if i % 4 == 0:
            d.add(f"short{i}", [i, i], 2)
    d.run()
    assert long.num_preemptions > 0 and long.num_output_tokens == 60
    assert all(r.num_output_tokens == r.params.max_tokens for r in d.requests)


def waits_behind_newcomers(starvation_steps: int | None) -> int:
    d = driver("mlfq", max_num_seqs=1, mlfq_quantum=4, mlfq_starvation_steps=starvation_steps)
    long = d.add("long", range(20), 1)
    d.add("begins", [1], 3)
    for step in range(400):
        d.add(f"new{step}", [1, 2], 1)  # one step each: there is always one before it
        d.step()
        if long.finished:
            return step
    return 400


def test_whoever_waits_for_long_is_lifted_to_the_first_level():
    assert waits_behind_newcomers(None) == 400, "documented: without lifting it may starve"
    # lifted after 40 to 50 steps; then those who came before it in the first level, one step each
    assert waits_behind_newcomers(40) <= 50 + 50 + 2


def test_what_a_preemption_makes_it_compute_again_is_not_charged():
    d = driver("mlfq", max_num_seqs=1, mlfq_quantum=8)
    request = d.add("a", range(6), 20)
    d.step()
    left = d.scheduler.waiting._turns[request].left
    d.scheduler._preempt(request, d.scheduler.schedule())
    d.step()  # six tokens and the one after: it has had six of these
    assert d.scheduler.waiting._turns[request].left == left - 1


# -- fair shares


class Services:
    """What each tenant has had, counted from outside: prompts when they begin, answers as they
    come, weighted as VTC does."""

    def __init__(self, d: ScheduleDriver) -> None:
        self.d = d
        self.begun: set[str] = set()
        self.had: dict[str, int] = {}

    def step(self) -> None:
        before = {r.request_id: r.num_output_tokens for r in self.d.requests}
        plan = self.d.step()
        for entry in plan.scheduled:
            request = entry.request
            if request.request_id not in self.begun:
                self.begun.add(request.request_id)
                self.add(request, VirtualTokenCounter.W_IN * request.num_prompt_tokens)
        for request in self.d.requests:
            new = request.num_output_tokens - before[request.request_id]
            self.add(request, VirtualTokenCounter.W_OUT * new)

    def add(self, request, service: int) -> None:
        tenant = request.params.tenant
        self.had[tenant] = self.had.get(tenant, 0) + service


def widest_gap(policy: str) -> tuple[int, int]:
    """Two tenants that always have something waiting, one with long requests and many of them.

    Returns the largest difference of service between any two moments, and the paper's bound.
    """
    d = driver(policy, num_blocks=40, max_num_seqs=6, max_num_batched_tokens=16)
    services, rng = Services(d), random.Random(5)
    shapes = {"greedy": (24, 30, 6), "modest": (4, 6, 3)}  # prompt, answer, always waiting
    differences, count = [0], 0
    for _ in range(1500):
        for tenant, (size, answer, waiting) in shapes.items():
            missing = waiting - sum(r.params.tenant == tenant for r in d.scheduler.waiting)
            for _ in range(missing):
                count += 1
                d.add(f"{tenant}{count}", prompt(rng, size), answer, tenant=tenant)
        services.step()
        differences.append(services.had.get("greedy", 0) - services.had.get("modest", 0))
        d.requests = [r for r in d.requests if not r.finished]
    longest, most = 24, d.kv.capacity
    bound = 2 * max(VirtualTokenCounter.W_IN * longest, VirtualTokenCounter.W_OUT * most)
    return max(differences) - min(differences), bound


def test_s12_fair_shares_stay_within_the_papers_bound_and_first_come_does_not():
    gap, bound = widest_gap("vtc")
    assert gap <= bound
    gap, bound = widest_gap("fcfs")
    assert gap > 2 * bound


def test_who_was_away_has_no_credit():
    d = driver("vtc", max_num_seqs=1)
    policy = d.scheduler.waiting
    for i in range(6):
        d.add(f"a{i}", range(10), 1, tenant="a")
    for _ in range(4):
        d.step()
    late = d.add("b0", range(10), 1, tenant="b")
    # "a" has been served four times; "b" is lifted to it, and goes first only once
    d.add("b1", range(10), 1, tenant="b")
    assert policy.counters == {"a": 4 * (10 + 2), "b": 4 * (10 + 2)}
    firsts = order_of_first_tokens(d)[4:]
    assert late.finished and firsts == ["a4", "b0", "a5", "b1"]


def test_a_tenant_that_comes_to_an_empty_queue_is_lifted_to_the_last_one_there():
    d = driver("vtc", max_num_seqs=1)
    d.add("a0", range(10), 5, tenant="a")
    d.step()
    d.add("b0", range(10), 1, tenant="b")
    assert d.scheduler.waiting.counters["b"] == 10 + 2


def test_inside_of_a_tenant_it_is_first_come_first_served():
    d = driver("vtc", max_num_seqs=1)
    for i in range(3):
        d.add(f"a{i}", range(30 - 9 * i), 1, tenant="a")
    assert order_of_first_tokens(d) == ["a0", "a1", "a2"]


@pytest.mark.parametrize(("policy", "waited"), [("fcfs", 205), ("vtc", 5)])
def test_a_flood_of_one_tenant_does_not_hold_up_another(policy, waited):
    """One seat, 40 requests of five steps each before the one of another tenant."""
    d = driver(policy, max_num_seqs=1)
    for i in range(41):
        d.add(f"flood{i}", range(10), 5, tenant="flood")
    d.step()
    one = d.add("one", range(10), 1, tenant="modest")
    steps = 0
    while not one.num_output_tokens:
        d.step()
        steps += 1
    assert steps == waited


def test_idle_tenants_are_forgotten():
    d = driver("vtc", max_num_seqs=1)
    d.scheduler.waiting.MOST_IDLE = 10
    for i in range(200):
        d.add(f"r{i}", [1], 1, tenant=f"t{i}")
        d.step()
    assert len(d.scheduler.waiting.counters) <= 12


@pytest.mark.parametrize("policy", ["fcfs", "vtc", "mlfq", "sjf", "srpt"])
def test_no_discipline_leaves_budget_unused_while_somebody_waits(policy):
    rng = random.Random(1)
    d = driver(policy, max_num_batched_tokens=8, max_num_seqs=50)
    for i in range(12):
        tenant = rng.choice("ab")
        d.add(str(i), prompt(rng, rng.randrange(1, 30)), rng.randrange(1, 6), tenant=tenant)
    work = sum(r.num_prompt_tokens + r.params.max_tokens - 1 for r in d.requests)
    steps = d.run()
    assert sum(sum(step.values()) for step in steps) == work
    full = [sum(step.values()) == 8 for step in steps]
    last = full.index(False) if False in full else len(full)
    assert all(full[:last]) and not any(full[last:])


# -- whole prompts


def whole(num_blocks: int = 100, **config) -> ScheduleDriver:
    return driver("fcfs", num_blocks=num_blocks, enable_chunked_prefill=False, **config)


def test_whole_prompts_go_before_any_decode():
    d = whole(max_num_batched_tokens=10)
    d.add("a", range(6), 5)
    assert d.tokens() == {"a": 6}
    d.add("b", range(7), 5)
    d.add("c", range(4), 5)
    assert d.tokens() == {"b": 7}, "nobody is cut, and nobody is overtaken"
    assert d.tokens() == {"c": 4}
    assert d.tokens() == {"a": 1, "b": 1, "c": 1}
    d.run()


def test_several_prompts_share_a_step_up_to_the_budget():
    d = whole(max_num_batched_tokens=10)
    for name, length in (("a", 3), ("b", 4), ("c", 3), ("d", 1)):
        d.add(name, range(length), 1)
    assert d.tokens() == {"a": 3, "b": 4, "c": 3}
    assert d.tokens() == {"d": 1}


def test_a_prompt_above_the_budget_goes_alone():
    d = whole(max_num_batched_tokens=10)
    d.add("a", range(3), 2)
    d.add("long", range(25), 2)
    assert d.tokens() == {"a": 3}
    assert d.tokens() == {"long": 25}
    assert d.tokens() == {"a": 1, "long": 1}


@pytest.mark.parametrize(("chunked", "longest"), [(True, 1), (False, 31)])
def test_a_stream_of_prompts_stalls_those_who_decode_unless_prompts_are_cut(chunked, longest):
    """Steps between two tokens of an answer, while 30 prompts come one a step."""
    d = driver("fcfs", max_num_batched_tokens=10, enable_chunked_prefill=chunked)
    answer, tokens, gaps = d.add("answer", [1], 60), 0, [0]
    for step in range(60):
        if 5 <= step < 35:
            d.add(f"prompt{step}", range(8), 1)
        d.step()
        gaps[-1] += 1
        if answer.num_output_tokens > tokens:
            tokens = answer.num_output_tokens
            gaps.append(0)
    assert max(gaps) == longest


def test_a_preempted_request_comes_back_whole():
    d = whole(num_blocks=4, max_num_batched_tokens=6)
    for name in "ab":
        d.add(name, [ord(name)] * 3, 8)
    steps = d.run()
    assert sum(r.num_preemptions for r in d.requests) > 0
    assert [step for step in steps if set(step.values()) - {1, 3}], "it computed more than a prompt"
    assert all(r.num_output_tokens == 8 for r in d.requests)


def test_chunks_need_chunked_prefill():
    with pytest.raises(ValueError, match="max_prefill_chunk needs enable_chunked_prefill=True"):
        EngineConfig(max_prefill_chunk=5, enable_chunked_prefill=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_ageing": -0.1}, "prefill_ageing must be at least 0"),
        ({"prefill_ageing": math.nan}, "prefill_ageing must be at least 0"),
        ({"prefill_ageing": True}, "prefill_ageing must be at least 0"),
        ({"mlfq_quantum": 0}, "mlfq_quantum must be an integer of at least 1"),
        ({"mlfq_starvation_steps": 0}, "mlfq_starvation_steps must be an integer of at least 1"),
        ({"enable_chunked_prefill": 1}, "enable_chunked_prefill must be True or False"),
        ({"scheduling_policy": "sjfx"}, "scheduling_policy must be one of fcfs"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_a_tenant_is_text():
    assert make_request("a", [1], tenant="acme").params.tenant == "acme"
    for wrong in (None, 5, b"a", "\ud800"):
        with pytest.raises(ValueError, match="tenant must be a string"):
            make_request("a", [1], tenant=wrong)
