"""The same engine on a GPU: `pytest -m gpu`. The CPU is the truth."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fakes import run_engine, tiny_config, tiny_model

from minifer.config import EngineConfig
from minifer.engine import Engine
from minifer.execution.logprobs import exact_topk
from minifer.execution.noise import vocabulary_noise
from minifer.models.registry import build_model
from minifer.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = "cuda"
PROMPTS = [[1, 2, 3], list(range(20)), [7] * 9, list(range(12))]


def answers(device: str, params: SamplingParams) -> list[list[int]]:
    model = build_model(tiny_config(), torch.float32, device)
    model.load_state_dict(tiny_model().state_dict())
    loaded = SimpleNamespace(
        model=model, config=tiny_config(), tokenizer=None, eos_token_ids=(), generation_defaults={}
    )
    config = EngineConfig(block_size=4, num_kv_blocks=12, max_num_batched_tokens=16)
    engine = Engine.from_loaded(loaded, config)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, params)
    last = run_engine(engine)
    return [last[str(i)].outputs[0].token_ids for i in range(len(PROMPTS))]


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_tokens_equal_those_of_the_cpu(temperature):
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=9, top_p=0.95)
    assert answers(DEVICE, params) == answers("cpu", params)


def test_noise_and_top_k_equal_those_of_the_cpu():
    here = vocabulary_noise([1, 2**63], [0, 7], 1000, torch.device("cpu"))
    there = vocabulary_noise([1, 2**63], [0, 7], 1000, torch.device(DEVICE))
    torch.testing.assert_close(there.cpu(), here, rtol=1e-6, atol=0)
    values = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])
    assert exact_topk(values.to(DEVICE), 2)[1].tolist() == exact_topk(values, 2)[1].tolist()
