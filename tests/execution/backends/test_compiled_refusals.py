"""What backend="compiled" refuses before weights are read, and what it does without a compiler."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from fakes import run_engine, tiny_config, tiny_engine, tiny_model
from torch import nn

from minifer.config import EngineConfig
from minifer.engine import Engine
from minifer.execution.backends import compiled
from minifer.execution.backends.compiled import CompiledRunner, compiled_runner
from minifer.execution.reference import reference_generate
from minifer.execution.runner import ModelRunner, prepare_backend
from minifer.kernels.cpu.build import CompilerError
from minifer.llm import LLM
from minifer.request import SamplingParams
from minifer.weights.hf import config_to_hf

CONFIG = tiny_config(head_dim=16)
PROMPT = [5, 1, 33, 8, 21, 2, 9]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def saved(folder: Path, config) -> str:
    """A model folder of which only the configuration is there."""
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))
    return str(folder)


@pytest.mark.parametrize("build_engine", [LLM, Engine.from_pretrained])
@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"head_dim": 24}, {}, "head_dim that is a multiple of 16, got 24"),
        ({}, {"device": "cuda"}, "runs on a CPU, got device=cuda: use backend=.triton. or"),
        ({}, {"device": "cuda:1"}, "runs on a CPU, got device=cuda:1"),
        ({}, {"dtype": "float16"}, "needs dtype float32 or bfloat16, got float16"),
    ],
)
def test_refused_before_its_weights_are_looked_for(
    build_engine, change, options, message, tmp_path
) -> None:
    folder = saved(tmp_path, dataclasses.replace(CONFIG, **change))
    with pytest.raises(ValueError, match=message):
        build_engine(folder, backend="compiled", **{"device": "cpu", **options})


def test_a_draft_model_is_looked_at_too(tmp_path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "draft").mkdir()
    target = saved(tmp_path / "target", CONFIG)
    draft = saved(tmp_path / "draft", dataclasses.replace(CONFIG, head_dim=8))
    with pytest.raises(ValueError, match="a head_dim that is a multiple of 16, got 8"):
        LLM(target, backend="compiled", speculative_method="draft", speculative_model=draft)


def test_device_auto_beside_a_gpu(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engine = EngineConfig(saved(tmp_path, CONFIG), backend="compiled")
    with pytest.raises(
        ValueError, match='device="auto" takes the GPU that is here: use device="cpu"'
    ):
        prepare_backend(engine)


def test_a_loop_model_is_refused() -> None:
    with pytest.raises(ValueError, match="runs each layer once, and this is a loop model"):
        LLM("parcae-tiny", backend="compiled")


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="runs plain transformers, got Linear"):
        compiled_runner(nn.Linear(2, 2), CONFIG, EngineConfig(backend="compiled"), 4)
    half = copy.deepcopy(tiny_model(CONFIG)).half()
    with pytest.raises(ValueError, match="needs dtype float32 or bfloat16, got float16"):
        compiled_runner(half, CONFIG, EngineConfig(backend="compiled"), 4)


# -- without a compiler


@pytest.fixture
def no_compiler(monkeypatch):
    def load(*_):
        raise CompilerError("no g++, clang++ or c++ is here")

    monkeypatch.setattr(compiled, "load", load)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_runs() -> None:
    with pytest.warns(
        RuntimeWarning, match=r"no g\+\+, clang\+\+ or c\+\+ is here; running in torch"
    ):
        engine = tiny_engine(config=CONFIG, backend="compiled")
    assert type(engine.runner) is ModelRunner
    engine.add_request("a", PROMPT, GREEDY)
    (output,) = run_engine(engine).values()
    assert output.outputs[0].token_ids == reference_generate(tiny_model(CONFIG), PROMPT, 8)


def test_a_process_is_told_once_and_before_anything_else(tmp_path) -> None:
    """Two engines, no compiler on the path."""
    program = """
from minifer import LLM, SamplingParams
for _ in range(2):
    with LLM("minifer-tiny", backend="compiled", num_kv_blocks=16) as llm:
        (reply,) = llm.generate(["The"], SamplingParams(max_tokens=3, temperature=0))
        print(len(reply.outputs[0].token_ids))
"""
    environment = {k: v for k, v in os.environ.items() if k != "CXX"}
    environment |= {"PATH": str(tmp_path), "MINIFER_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "3\n3\n", done.stderr
    assert done.stderr.count("install a C++ compiler") == 1


def test_the_compiler_runs_before_weights_are_read(tmp_path, monkeypatch) -> None:
    """Nothing but the configuration is there: the compiler ran, then the weights were missed."""
    ran = []
    monkeypatch.setattr(compiled, "load", lambda *sizes: ran.append(sizes))
    with pytest.raises(ValueError, match=r"safetensors|weights|checkpoint"):
        LLM(saved(tmp_path, CONFIG), backend="compiled")
    assert ran == [(16, 2)]


def test_no_warning_where_all_is_well() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = tiny_engine(config=CONFIG, backend="compiled")
    assert type(engine.runner) is CompiledRunner
