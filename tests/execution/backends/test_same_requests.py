"""Requests that ask for more than greedy tokens, on every back end."""

from __future__ import annotations

import pytest

from minifer import LLM, SamplingParams

PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, stop=[" a"]),
    SamplingParams(temperature=0.8, seed=3, max_tokens=4),
    SamplingParams(temperature=0, max_tokens=6, structured={"regex": "[a-c]{4}"}),
]


def answers(backend: str) -> list[tuple[str, str | None]]:
    with LLM("minifer-tiny", backend=backend, num_kv_blocks=64) as llm:
        outputs = llm.generate(["The with statement"] * len(PARAMS), PARAMS)
    return [(output.outputs[0].text, output.outputs[0].finish_reason) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "megakernel"])
def test_stop_strings_seeds_and_grammars_give_torchs_text(backend: str) -> None:
    truth = answers("torch")
    assert truth[0][1] == truth[2][1] == "stop", "a stop string and a grammar must have ended these"
    assert answers(backend) == truth
