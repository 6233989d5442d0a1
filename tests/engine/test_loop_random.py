"""Random requests of a loop model: arrivals, forks, aborts, interrupts between and inside steps.

Invariants after every step, every answer compared with the same request alone, and greedy answers
of fixed depth with the slow twin.
"""

from __future__ import annotations

import random

import pytest
from fakes import check_engine, run_engine, step_checked
from loop_fakes import loop_engine, twin_tokens

from minifer.request import SamplingParams


def random_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    """Mixed depths; half of the prompts begin alike."""
    prompt = [rng.randrange(40) for _ in range(rng.choice([1, 2, 4, 7, 8, 12, 15, 25]))]
    if rng.random() < 0.5:
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, *prompt[:6]]
    wishes = {
        "temperature": rng.choice([0, 0, 0.7]),
        "max_tokens": rng.choice([1, 3, 6, 9]),
        "stop_token_ids": rng.choice([(), (7,)]),
        "logprobs": rng.choice([None, None, 2]),
        "prompt_logprobs": rng.choice([None, None, None, 1]),
        "seed": rng.randrange(2**40),
        "priority": rng.randrange(3),
        "cache_salt": rng.choice([None, None, "a"]),
        "num_loops": rng.choice([1, 1, 2, 3, 4, 8, None]),
        "exit_threshold": rng.choice([None, None, None, 0.3, 0.02]),
    }
    if wishes["temperature"] > 0 and rng.random() < 0.3:
        wishes["n"] = rng.choice([2, 3])
    return prompt, SamplingParams(**wishes)


def is_plain(params: SamplingParams) -> bool:
    return params.temperature == 0 and params.exit_threshold is None and not params.stop_token_ids


class Interrupts:
    """Raises inside of the model's forward, at a stage drawn by chance, when armed."""

    def __init__(self, runner, rng: random.Random) -> None:
        self.armed: type[BaseException] | None = None
        for name in ("_enter", "_iterate", "_leave", "forward"):
            method = getattr(runner, name)

            def call(*args, method=method):
                result = method(*args)
                if self.armed is not None and rng.random() < 0.3:
                    error, self.armed = self.armed, None
                    raise error("now")
                return result

            setattr(runner, name, call)


class Workload:
    """Random requests against one engine; what became of each is checked at the end."""

    def __init__(self, seed: object, num_requests: int, **options) -> None:
        self.rng = random.Random(f"{seed}")
        self.options = options
        self.num_requests = num_requests
        self.engine = loop_engine(**options)
        self.faults = Interrupts(self.engine.runner, self.rng)
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.answers: dict[str, object] = {}
        self.cut: set[str] = set()
        self.suspended_forks = self.suspended_aborts = self.interrupts = 0

    def run(self) -> None:
        rng, engine = self.rng, self.engine
        while len(self.asked) < self.num_requests or engine.has_unfinished_requests:
            if len(self.asked) < self.num_requests and rng.random() < 0.6:
                self.ask()
            open_requests = list(engine._requests.values())
            if open_requests and rng.random() < 0.1:
                self.abort(rng.choice(open_requests))
            if open_requests and rng.random() < 0.1:
                self.fork(rng.choice(open_requests))
            if rng.random() < 0.02:
                self.faults.armed = rng.choice([KeyboardInterrupt, RuntimeError])
            self.step()
        check_engine(engine)

    def ask(self) -> None:
        name = str(len(self.asked))
        self.asked[name] = random_request(self.rng)
        self.engine.add_request(name, *self.asked[name])

    def abort(self, request) -> None:
        if request.group.request_id not in self.engine._requests:
            return
        self.suspended_aborts += request.suspended is not None
        name = request.group.request_id
        self.answers[name] = self.engine.abort(name)
        self.cut.add(name)
        check_engine(self.engine)

    def fork(self, request) -> None:
        parent = request.group.request_id
        if parent not in self.engine._requests or request.params.n > 1:
            return
        self.suspended_forks += request.suspended is not None
        name = f"{len(self.asked)}"
        prompt, params = self.asked[parent]
        if params.temperature > 0:
            return  # the branch draws for itself from where it begins
        self.asked[name] = prompt, params
        self.engine.fork(parent, name, seed=params.seed)
        check_engine(self.engine)

    def step(self) -> None:
        try:
            outputs = step_checked(self.engine)
        except KeyboardInterrupt:
            self.interrupts += 1
            check_engine(self.engine)
            return
        for output in outputs:
            if output.finished:
                self.answers[output.request_id] = output
                if any(o.finish_reason == "error" for o in output.outputs):
                    self.interrupts += 1
                    self.cut.add(output.request_id)

    def check(self) -> None:
        assert self.answers.keys() == self.asked.keys()
        roomy = {k: v for k, v in self.options.items() if k in ("loop_kv_policy",)}
        roomy["enable_prefix_caching"] = self.options.get("enable_prefix_caching", True)
        known: dict[object, object] = {}
        for name, (prompt, params) in self.asked.items():
            key = (tuple(prompt), params)
            if repr(key) not in known:
                alone = loop_engine(**roomy, max_num_seqs=3)
                alone.add_request("x", prompt, params)
                known[repr(key)] = run_engine(alone)["x"]
            self.compare(name, self.answers[name], known[repr(key)])
            if is_plain(params) and name not in self.cut:
                policy = self.options.get("loop_kv_policy", "full")
                expected = twin_tokens(prompt, params.num_loops or 8, params.max_tokens, policy)
                assert self.answers[name].outputs[0].token_ids == expected

    def compare(self, name: str, got, truth) -> None:
        for output in got.outputs:
            expected = truth.outputs[output.index]
            count = len(output.token_ids)
            assert output.token_ids == expected.token_ids[:count], name
            assert output.num_loops == expected.num_loops[:count], name
            if name not in self.cut:
                assert output.token_ids == expected.token_ids
                assert output.finish_reason == expected.finish_reason
            for a, b in zip(output.logprobs or (), expected.logprobs or (), strict=False):
                for token in a:
                    assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)
        if name not in self.cut:
            assert len(got.outputs) == len(truth.outputs)
            assert (got.prompt_logprobs is None) == (truth.prompt_logprobs is None)
            for a, b in zip(got.prompt_logprobs or (), truth.prompt_logprobs or (), strict=True):
                for token in a or ():
                    assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)


SMALL = {
    "num_kv_blocks": 14,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 16,
    "max_prefill_chunk": 9,
}
CASES = [
    {**SMALL},
    {
        **SMALL,
        "loop_batching": "continuous",
        "prefix_index": "radix",
        "scheduling_policy": "priority",
    },
    {**SMALL, "loop_kv_policy": "first-2", "scheduling_policy": "lpm"},
    {**SMALL, "loop_batching": "lockstep", "block_size": 3},
    {**SMALL, "kv_dram_bytes": 1 << 19, "kv_load_policy": "always"},
    {
        **SMALL,
        "max_num_batched_tokens": 25,
        "loop_kv_policy": "cyclic-2",
        "enable_prefix_caching": False,
    },
]


def name(options: dict) -> str:
    return ",".join(f"{k}={v}" for k, v in options.items() if k not in SMALL) or "default"


def check_workload(seed: object, num_requests: int, options: dict) -> Workload:
    load = Workload(seed, num_requests, **options)
    load.run()
    load.check()
    return load


@pytest.mark.parametrize("options", CASES, ids=name)
def test_random_requests(options):
    check_workload(3, 7, options)


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES, ids=name)
def test_many_random_requests(options):
    """Everything that is meant to collide does."""
    loads = [check_workload(seed, 30, options) for seed in range(6)]
    assert sum(load.engine.scheduler.num_preemptions for load in loads) > 10
    assert sum(load.interrupts for load in loads) > 3
    if options.get("loop_batching") != "lockstep":  # where nobody is suspended
        assert sum(load.suspended_forks for load in loads) >= 2
        assert sum(load.suspended_aborts for load in loads) >= 2
