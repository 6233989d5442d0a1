"""minifer itself, by the same rules: its engine stepped by hand in this process.

options: fields of `EngineConfig`. The answer's `extra` holds what only our own engine tells: the
seconds of each stage, the bytes a step reads, drafts and how many were right.
"""

from __future__ import annotations

import importlib
from typing import Any


def versions() -> dict[str, str]:
    from importlib.metadata import version

    importlib.import_module("minifer")
    return {"minifer": version("minifer"), "torch": version("torch")}


class Peer:
    def __init__(self, job: dict[str, Any]) -> None:
        torch = importlib.import_module("torch")
        torch.set_num_threads(job["threads"])
        session = importlib.import_module("minifer.perf.speed.session")
        self._ask = importlib.import_module("minifer.perf.speed.cells").Ask
        self._session = session.Session(job["model"], job["options"])
        traffic = self._session.traffic()
        self._traffic = None if traffic is None else traffic.to_dict()
        self.dtype = self._session.dtype
        self.config = {
            **{name: str(value) for name, value in job["options"].items()},
            "kv_bytes": self._session.kv_bytes,
            "threads": torch.get_num_threads(),
        }

    def run(self, requests: list[dict[str, Any]]) -> tuple[Any, Any, Any, dict[str, Any]]:
        run = self._session.run([self._ask(tuple(r["prompt"]), r["max_tokens"]) for r in requests])
        extra = {
            "steps": [[step.ended, list(step.seconds)] for step in run.steps],
            "cached": run.cached,
            "speculation": run.speculation,
            "traffic": self._traffic,
        }
        return run.started, run.stamps, run.tokens, extra
