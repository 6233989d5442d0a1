"""A Llama decode step as one graph of torch.compile: what Inductor makes of a CPU, at its best.

The step (`torch_compile_step.py`) is written for Inductor: one graph for each batch and length of
KV, all shapes fixed, weights frozen as constants (which allows other layouts), products chosen by
timing PyTorch's against Inductor's C++ template, K and V one tensor a layer (a view of a larger one
is copied whole at every write), all requests at one position, the greedy choice inside. Guards are
not looked at again once the graph is there. Prompts are computed without compilation.

Graphs are made before the first request, and `compile_seconds` is the time of that. Inductor's
cache on disk is empty then, unless TORCHINDUCTOR_CACHE_DIR names one to keep.

options: attributes of `torch._inductor.config`, and `quantize`: "none", or "file" for the codes
that `minifer pull` keeps: 4 bits as they are, 8 bits quantised again, a scale a row, for that is
what torch multiplies by.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SPAN = 64  # lengths of KV are multiples of it
SETTINGS = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP,ATEN",
    "cpp_wrapper": True,
}


def versions() -> dict[str, str]:
    from importlib.metadata import version

    importlib.import_module("torch")
    importlib.import_module("safetensors.torch")
    return {"torch": version("torch"), "compiler": compiler()}


def compiler() -> str:
    """What the C++ compiler that Inductor would take calls itself. Raises `ImportError`."""
    exc = importlib.import_module("torch._inductor.exc")
    builder = importlib.import_module("torch._inductor.cpp_builder")
    try:
        command = builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        wanted = os.environ.get("CXX", "g++")
        raise ImportError(f"torch.compile needs a C++ compiler, and {wanted} is none") from None
    said = subprocess.run([command, "--version"], capture_output=True, text=True).stdout
    return said.partition("\n")[0]


class Peer:
    def __init__(self, job: dict[str, Any]) -> None:
        self._torch = torch = importlib.import_module("torch")
        torch.set_num_threads(job["threads"])
        self.dtype, options = job["dtype"], {**SETTINGS, **job["options"]}
        quantize = options.pop("quantize", "none")
        inductor = importlib.import_module("torch._inductor.config")
        for name, value in options.items():
            if not hasattr(inductor, name):
                raise ValueError("torch._inductor.config has no " + repr(name))
            setattr(inductor, name, value)
        step = importlib.import_module("torch_compile_step")
        self._step = step.Decoder(Path(job["model"]), getattr(torch, job["dtype"]), quantize)
        self._graphs: dict[tuple[int, int], tuple[Any, list[Any], list[Any]]] = {}
        started = time.perf_counter()
        with an_empty_cache():
            for cell in job["cells"]:
                batch, length = shape(cell["requests"])
                self._compile(batch, -(-length // SPAN) * SPAN)
        self.compile_seconds = time.perf_counter() - started
        self.config = {
            **options,
            "quantize": quantize,
            "graphs": ["{} x {}".format(*key) for key in sorted(self._graphs)],
            "threads": torch.get_num_threads(),
        }

    def _compile(self, B: int, S: int) -> None:
        """The graph of B requests, and K and V of S positions that are its own."""
        if (B, S) in self._graphs:
            return
        torch = self._torch
        torch._dynamo.config.recompile_limit = 8 + len(self._graphs)  # a graph is not a failure
        keys, values = self._step.cache(B, S), self._step.cache(B, S)
        step = torch.compile(self._step, fullgraph=True, dynamic=False)
        with torch.inference_mode():
            token, position = torch.tensor([0] * B), torch.tensor([0])
            for _ in range(3):  # compiled, then guarded for what it returned itself
                token = step(token, position, keys, values)
        self._graphs[B, S] = step, keys, values

    def run(self, requests: list[dict[str, Any]]) -> tuple[Any, Any, Any, dict[str, Any]]:
        torch = self._torch
        batch, length = shape(requests)
        fits = [(B, S) for B, S in self._graphs if batch == B and length <= S]
        step, keys, values = self._graphs[min(fits)]
        ids = torch.tensor([r["prompt"] for r in requests])
        tokens: list[list[int]] = []
        arrived: list[float] = []
        unguarded = torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)
        with torch.inference_mode(), unguarded:
            positions = [torch.tensor([at]) for at in range(ids.shape[1], length - 1)]
            started = time.perf_counter()
            token = self._step.prompts(ids, keys, values)
            tokens.append(token.tolist())
            arrived.append(time.perf_counter())
            for position in positions:
                token = step(token, position, keys, values)
                tokens.append(token.tolist())
                arrived.append(time.perf_counter())
        replies = [list(reply) for reply in zip(*tokens, strict=True)]
        return started, [list(arrived) for _ in requests], replies, {}


def shape(requests: list[dict[str, Any]]) -> tuple[int, int]:
    """Batch, and the tokens of each request with its answer."""
    lengths = {(len(r["prompt"]), r["max_tokens"]) for r in requests}
    if len(lengths) != 1:
        raise ValueError("a graph of torch.compile takes requests of one length, got several")
    return len(requests), sum(lengths.pop())


@contextmanager
def an_empty_cache() -> Iterator[None]:
    """Inductor's cache on disk: empty, gone afterwards; or the one that somebody named."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    if name in os.environ:
        yield
        return
    os.environ[name] = folder = tempfile.mkdtemp(prefix="torch-compile-")
    try:
        yield
    finally:
        del os.environ[name]
        shutil.rmtree(folder, ignore_errors=True)
