"""`python FOLDER ENGINE`: one engine in a process of its own, asked in JSON.

Uses the standard library alone, as does every script here but for the engine it asks.

The job, on standard input::

    {"probe": true}          is the engine there? answers with `versions` alone
    {"model": "/folder or file", "dtype": "bfloat16", "threads": 2, "options": {…},
     "batch": 16, "max_model_len": 4096, "max_step_tokens": 8192,
     "cells": [{"name": "…", "requests": [{"prompt": [ids], "max_tokens": 64}, …]}, …],
     "warmup_tokens": 4}

Every cell is run twice, all its requests at once: first for `warmup_tokens` a request, to compile
and to fill caches of code, then for the record. Greedy, and no token ends a request early.

The answer, on standard output (whatever the engine prints there goes to standard error)::

    {"engine": "vllm", "versions": {…}, "dtype": "…", "config": {…}, "load_seconds": 1.2,
     "compile_seconds": 0.9, "peak_rss_bytes": N,
     "cells": [{"name": "…", "started": t, "stamps": [[t, …], …], "tokens": [[ids], …] or null,
                "extra": {…}}, …]}

`started` is read just before the requests are handed over, a stamp when a token of a request is
there, both from one clock in seconds: what a speed is made of is decided elsewhere, alike for all.
`compile_seconds` is told by engines that know it, and is part of `load_seconds`.
An answer that holds {"missing": "why"} says that the engine is not installed here.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    (engine,) = sys.argv[1:]
    job = json.load(sys.stdin)
    answer = ask(engine, job)
    json.dump(answer, answer_to)
    answer_to.write("\n")
    answer_to.flush()
    os._exit(0)  # an engine's threads and helpers may not want to leave


def ask(engine: str, job: dict[str, Any]) -> dict[str, Any]:
    try:
        peer = importlib.import_module(engine.replace("-", "_") + "_peer")
        versions = peer.versions()
    except ImportError as error:
        return {"missing": str(error)}
    answer: dict[str, Any] = {"engine": engine, "versions": versions}
    if job.get("probe"):
        return answer
    started = time.perf_counter()
    running = peer.Peer(job)
    answer["load_seconds"] = time.perf_counter() - started
    if hasattr(running, "compile_seconds"):
        answer["compile_seconds"] = running.compile_seconds
    answer["cells"] = [measure(running, cell, job["warmup_tokens"]) for cell in job["cells"]]
    answer.update(dtype=running.dtype, config=running.config, peak_rss_bytes=peak_rss())
    return answer


def measure(running: Any, cell: dict[str, Any], warmup_tokens: int) -> dict[str, Any]:
    requests = cell["requests"]
    # Other prompts of the same lengths: an engine must not find these again in its cache.
    warm = [
        {"prompt": r["prompt"][::-1], "max_tokens": min(warmup_tokens, r["max_tokens"])}
        for r in requests
    ]
    running.run(warm)
    started, stamps, tokens, extra = running.run(requests)
    return {
        "name": cell["name"],
        "started": started,
        "stamps": stamps,
        "tokens": tokens,
        "extra": extra,
    }


def peak_rss() -> int | None:
    """Bytes of this process at its largest, and of its largest child; None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    own, children = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return unit * sum(resource.getrusage(who).ru_maxrss for who in (own, children))


if __name__ == "__main__":
    main()
