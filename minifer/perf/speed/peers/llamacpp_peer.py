"""llama.cpp through its server, which the package `xllamacpp` runs inside the process.

Chosen for speed: the job's threads for prompts and for decoding, flash attention (faster here, and
the choice of its own `auto`), the file mapped, a slot a request, no cached prompts. Requests reach
the server one after the other, so their prompts are not computed in one step. options: attributes
of `CommonParams`, and `flash_attn`: true or false.
"""

from __future__ import annotations

import importlib
import threading
import time
from typing import Any


def versions() -> dict[str, str]:
    from importlib.metadata import version

    importlib.import_module("xllamacpp")
    return {"xllamacpp": version("xllamacpp")}


class Peer:
    dtype = "as in the file"

    def __init__(self, job: dict[str, Any]) -> None:
        module = importlib.import_module("xllamacpp")
        params = module.CommonParams()
        params.model.path = job["model"]
        params.n_parallel = job["batch"]
        params.n_ctx = job["batch"] * job["max_model_len"]  # it is divided among the slots
        params.n_batch = max(params.n_batch, job["max_step_tokens"])
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
        params.verbosity = -1
        options = {"flash_attn": True, **job["options"]}
        kinds = module.llama_flash_attn_type
        names = {True: "ENABLED", False: "DISABLED"}
        params.flash_attn_type = getattr(
            kinds, "LLAMA_FLASH_ATTN_TYPE_" + names[options.pop("flash_attn")]
        )
        for name, value in options.items():
            if not hasattr(params, name):
                raise ValueError("options of llamacpp have no " + repr(name))
            setattr(params, name, value)
        self._server = module.Server(params)
        shown = ("n_parallel", "n_ctx", "n_batch", "n_ubatch", "cache_type_k", "cache_type_v")
        self.config = {name: str(getattr(params, name)) for name in shown}
        self.config.update(job["options"], flash_attn=str(params.flash_attn_type))

    def run(self, requests: list[dict[str, Any]]) -> tuple[Any, Any, Any, dict[str, Any]]:
        stamps: list[list[float]] = [[] for _ in requests]
        failed: list[Exception] = []

        def ask(i: int, request: dict[str, Any]) -> None:
            def arrived(_: object) -> bool:
                stamps[i].append(time.perf_counter())
                return False

            body = {
                "prompt": request["prompt"],
                "n_predict": request["max_tokens"],
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "cache_prompt": False,
            }
            try:
                self._server.handle_completions(body, arrived)
            except Exception as error:
                failed.append(error)

        threads = [
            threading.Thread(target=ask, args=(i, request)) for i, request in enumerate(requests)
        ]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        for own in stamps:
            own.pop()  # the last piece says how it ended, and brings no token
        return started, stamps, None, {}
