"""One start of `minifer generate`, in a process of its own, that notes when it got how far.

`python -m minifer.perf.startup_child JSON`, with {"spawned", "model", "prompt", "options"}, spawned
being the parent's `time.monotonic()`. Takes the steps of the command, and prints one JSON object as
its last line: stage → seconds, and the memory they took.
"""

from __future__ import annotations

import time

_AWAKE = time.monotonic()  # before anything else is imported

import json  # noqa: E402
import re  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402


def main(job: dict[str, Any]) -> dict[str, float]:
    """Stage → seconds, in order, `seconds` from the start to the first text, those that the
    process computed by then on all cores (`cpu_seconds`), and bytes."""
    from minifer import cli
    from minifer.cli import session

    cli._start_process()  # what a command does first
    with session.few_collections():
        from minifer.llm import LLM
        from minifer.weights import resolve

        imported = time.monotonic()
        memory = _memory()
        weights = _Stopwatch()
        for name in ("load_hf", "load_hf_quantized", "build_from_gguf"):
            setattr(resolve, name, weights.around(getattr(resolve, name)))
        llm = LLM(job["model"], **job["options"])
    built = time.monotonic()
    with llm:
        ids = session.encode_prompt(llm, job["prompt"], raw=False)
        runner: Any = llm.engine.runner
        forward = _Stopwatch()
        runner.forward = forward.around(runner.forward)
        params = llm.default_params().with_(temperature=0, max_tokens=1)
        text = "".join(piece.text for output in llm.stream(ids, params) for piece in output.outputs)
        print(text, flush=True)
        done = time.monotonic()
        found = {
            "interpreter": _AWAKE - job["spawned"],
            "imports": imported - _AWAKE,
            "tokenizer": llm.load_seconds - weights.seconds,
            "weights": weights.seconds,
            "engine": built - imported - llm.load_seconds,
            "prefill": forward.seconds,
            "first_token": done - built - forward.seconds,
            "seconds": done - job["spawned"],
            "cpu_seconds": time.process_time(),
        }
        return found | _sizes(runner, len(ids) + 1, memory)


class _Stopwatch:
    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.monotonic()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds += time.monotonic() - started

        return timed


def _memory() -> int | None:
    """Bytes this process has now; from here on Linux counts the peak anew. None elsewhere."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return None


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None  # Linux writes them all
    return int(found[1]) * 1024


def _sizes(runner: Any, num_tokens: int, before: int | None) -> dict[str, float]:
    """Bytes of weights, of the KV blocks that were written, and of the peak above `before`."""
    from minifer.weights.quantized import weight_bytes

    weights = weight_bytes(runner.model)
    pool = sum(t.nbytes for t in (*runner.kv.keys, *runner.kv.values))
    blocks = -(-num_tokens // runner.kv.block_size)
    kv = pool // runner.kv.num_blocks * blocks
    sizes = {"weight_bytes": float(weights), "kv_bytes": float(kv), "kv_pool_bytes": float(pool)}
    if before is None:
        return sizes
    peak = _status("VmHWM") - before
    return sizes | {"peak_bytes": float(peak), "memory_ratio": peak / (weights + kv)}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
