"""Ranks as processes: they compute, they are killed, they hang, their parent dies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import run_engine
from rank_threads import two_ranks

from minifer import LLM, SamplingParams
from minifer.engine import Engine
from minifer.execution.parallel.ranks import Ranks

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPT = "The for statement"

# No `if __name__ == "__main__"`: a rank is no copy of the program that starts it.
SCRIPT = """
import os, sys, time
from minifer import LLM, SamplingParams
llm = LLM("minifer-tiny", device="cpu", dtype="float32", tensor_parallel_size=2, num_kv_blocks=32)
(output,) = llm.generate("The for statement", SamplingParams(temperature=0, max_tokens=8))
fork = os.fork() if len(sys.argv) > 1 else None
if fork == 0:
    time.sleep(600)
print(output.outputs[0].token_ids, llm.engine.runner.ranks.pids[0], fork, sep=";", flush=True)
sys.stdin.read()
"""


def tokens_of_one_rank() -> list[int]:
    with LLM("minifer-tiny", device="cpu", dtype="float32", num_kv_blocks=32) as llm:
        return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


def ranks_of(engine: Engine) -> Ranks:
    found: Ranks = engine.runner.ranks
    return found


def is_gone(pid: int) -> bool:
    """Ended, buried or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def wait_until(happened: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@needs_proc
def test_a_killed_rank_ends_the_open_requests_and_leaves_nothing_behind() -> None:
    with two_ranks() as engine:
        (pid,) = ranks_of(engine).pids
        engine.add_request("before", PROMPT, GREEDY)
        assert run_engine(engine)["before"].outputs[0].token_ids == tokens_of_one_rank()
        for name in ("a", "b"):
            engine.add_request(name, PROMPT, SamplingParams(temperature=0, max_tokens=900))
        engine.step()
        assert engine.runner.lost is None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: engine.runner.lost)  # without a step: a health check may ask
        outputs = run_engine(engine)
        engine.add_request("late", PROMPT, GREEDY)
        outputs |= run_engine(engine)
        assert engine.runner.lost is not None
    assert len(outputs) == 3
    for output in outputs.values():
        assert output.outputs[0].finish_reason == "error"
        assert "rank 1 of 2 was killed by signal 9" in str(output.outputs[0].stop_reason)
    assert is_gone(pid)


@needs_proc
def test_ranks_share_the_cores_and_closing_the_engine_ends_them() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        engine = two_ranks()
        (pid,) = ranks_of(engine).pids
        assert torch.get_num_threads() == min(5, max(1, len(os.sched_getaffinity(0)) // 2))
        assert not is_gone(pid)
        assert os.getpgid(pid) != os.getpgid(0)  # a terminal's Ctrl-C is not for it
        engine.close()
        assert is_gone(pid)
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)


@needs_proc
@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up_and_killed() -> None:
    with two_ranks(distributed_timeout_seconds=1.0) as engine:
        (pid,) = ranks_of(engine).pids
        engine.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=900))
        engine.step()
        os.kill(pid, signal.SIGSTOP)
        reason = run_engine(engine)["a"].outputs[0].stop_reason
    assert "rank 0 of 2 failed with RuntimeError: the other ranks do not answer: Timed out" in str(
        reason
    )
    assert is_gone(pid)


@needs_proc
@pytest.mark.parametrize("forks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_in_a_plain_script_and_when_that_is_killed_its_rank_ends(forks: bool) -> None:
    """Also where a fork of the script lives on, and with it the script's end of the socket."""
    command = [sys.executable, "-c", SCRIPT, *["forks"] * forks]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    fork = "None"
    try:
        tokens, pid, fork = process.stdout.readline().strip().split(";")
        process.kill()
        process.wait()
        assert tokens == str(tokens_of_one_rank())
        wait_until(lambda: is_gone(int(pid)))
    finally:
        if fork != "None":
            os.kill(int(fork), signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@needs_proc
@pytest.mark.slow
def test_a_rank_dropped_without_close_ends() -> None:
    engine = two_ranks()
    (pid,) = ranks_of(engine).pids
    del engine
    gc.collect()
    wait_until(lambda: is_gone(pid))


@pytest.mark.slow
def test_smollm2_on_three_ranks_says_what_it_says_on_one(pulled_model: Path) -> None:
    messages = [{"role": "user", "content": "Name three colours, and what each is like."}]
    params = SamplingParams(temperature=0, max_tokens=48)
    texts = []
    for size in (1, 3):
        options: dict[str, Any] = {"tensor_parallel_size": size, "max_prefill_chunk": 16}
        with LLM(str(pulled_model), device="cpu", dtype="float32", **options) as llm:
            texts.append(llm.chat(messages, params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_triton_kernels_run_on_each_rank() -> None:
    options: dict[str, Any] = {"num_kv_blocks": 16, "backend": "triton", "device": "cpu"}
    params = SamplingParams(temperature=0, max_tokens=2)
    texts = []
    for size in (1, 2):
        with LLM("minifer-tiny", dtype="float32", tensor_parallel_size=size, **options) as llm:
            texts.append(llm.generate(PROMPT, params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]
