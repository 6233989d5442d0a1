"""transformers' `generate`: one batch of prompts of equal length, decoded in step.

Chosen for speed: its cache, PyTorch's fused attention, greedy with nothing computed for the
output's sake. options: arguments of `from_pretrained`.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def versions() -> dict[str, str]:
    from importlib.metadata import version

    importlib.import_module("transformers")
    return {"transformers": version("transformers"), "torch": version("torch")}


class Peer:
    def __init__(self, job: dict[str, Any]) -> None:
        self._torch = torch = importlib.import_module("torch")
        self._transformers = transformers = importlib.import_module("transformers")
        torch.set_num_threads(job["threads"])
        options = {"attn_implementation": "sdpa", **job["options"]}
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(job["model"], dtype=getattr(torch, job["dtype"]), **options).eval()
        self._model.generation_config.eos_token_id = None  # nothing ends early
        self._model.generation_config.pad_token_id = 0
        self.dtype = str(self._model.dtype).replace("torch.", "")
        self.config = {**options, "threads": torch.get_num_threads()}

    def run(self, requests: list[dict[str, Any]]) -> tuple[Any, Any, Any, dict[str, Any]]:
        lengths = {(len(r["prompt"]), r["max_tokens"]) for r in requests}
        if len(lengths) != 1:
            raise ValueError("transformers' generate takes requests of one length, got several")
        ((_, count),) = lengths
        arrived: list[float] = []

        # Read where the logits of each step pass by: a choice among them and a Python call later
        # the token is there, and the next step begins.
        def clock(ids: Any, logits: Any) -> Any:
            arrived.append(time.perf_counter())
            return logits

        ids = self._torch.tensor([r["prompt"] for r in requests])
        generate: dict[str, Any] = {
            "attention_mask": self._torch.ones_like(ids),
            "do_sample": False,
            "max_new_tokens": count,
            "min_new_tokens": count,
            "use_cache": True,
            "logits_processor": self._transformers.LogitsProcessorList([clock]),
        }
        with self._torch.inference_mode():
            started = time.perf_counter()
            out = self._model.generate(ids, **generate)
        tokens = out[:, ids.shape[1] :].tolist()
        return started, [list(arrived) for _ in requests], tokens, {}
