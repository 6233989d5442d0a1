"""Whole engines and whole rungs: our back ends against torch's."""

from __future__ import annotations

import pytest
import torch

from minifer.llm import LLM
from minifer.perf.gpu.bandwidth import Bandwidth
from minifer.perf.gpu.cell import Cell
from minifer.perf.gpu.climb import climb
from minifer.perf.gpu.ladder import Ladder
from minifer.perf.gpu.rungs import RUNGS
from minifer.sampling_params import SamplingParams

PROMPTS = ["import", "The assignment statement", "A"]


def greedy(
    device: torch.device, backend: str, prompts: list[str], num_tokens: int
) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    options = {"num_kv_blocks": 16, "block_size": 16}
    with LLM(
        "minifer-tiny", device=str(device), dtype="float32", backend=backend, **options
    ) as llm:
        return [out.outputs[0].token_ids for out in llm.generate(prompts, params)]


@pytest.mark.parametrize("backend", ["triton", "megakernel"])
def test_greedy_text_equals_torch(device: torch.device, backend: str) -> None:
    asked = (PROMPTS, 32) if device.type == "cuda" else (PROMPTS[:1], 2)
    expected = greedy(torch.device("cpu"), "torch", *asked)
    assert len(expected[0]) == asked[1]
    assert greedy(device, backend, *asked) == expected


@pytest.mark.parametrize("rung", ["triton", "triton-graph", "triton-pdl", "mega", "mega-epoch"])
def test_error_is_no_worse_than_eagers(device: torch.device, rung: str) -> None:
    """The fidelity gate: the rms of what a bfloat16 step is off against float32."""
    if RUNGS[rung].impossible(device):
        pytest.skip("needs CUDA graphs")
    on_gpu = device.type == "cuda"
    cell = Cell("smollm2-135m", 4, 300) if on_gpu else Cell("minifer-tiny", 1, 20, layers=1)
    ladder = Ladder({"seed": 1, "probes": 8 if on_gpu else 1}, Bandwidth(1.0, 1.0))
    climb(ladder, [cell], [RUNGS["eager"], RUNGS[rung]], device, 60.0, lambda text: None)
    row = next(row for row in ladder.cells[0]["rows"] if row["rung"] == rung)
    assert row["status"] == "ok", row["reason"]
    assert row["error"]["fidelity"], row["error"]
