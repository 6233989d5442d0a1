"""What the faults' scenes are made of: ask an engine something, write down what came out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minifer.outputs import RequestOutput
from minifer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minifer.engine import Engine

# Questions in the manner of what minifer-tiny was trained on: Python's manual.
QUESTIONS = (
    "The for statement is used to",
    "A class definition defines a class object",
    "Strings are immutable sequences of",
)
# A beginning that users share, as a system prompt is shared: four blocks of 16 tokens.
SHARED = "The standard types of Python are described in this section.     "
OTHER = "The class library of Python are described in this section.      "
assert len(SHARED) == len(OTHER) == 64

_names = itertools.count()


def ask(
    engine: Engine, *prompts: str | Sequence[int], max_tokens: int = 48, **params: Any
) -> list[RequestOutput]:
    """All prompts in one batch, greedy if nothing else is said; the final outputs in order."""
    fields = {"temperature": 0, "max_tokens": max_tokens, **params}
    ids = [f"scene-{next(_names)}" for _ in prompts]
    for request_id, prompt in zip(ids, prompts, strict=True):
        engine.add_request(request_id, prompt, SamplingParams(**fields))
    outputs = finish(engine)
    return [outputs[request_id] for request_id in ids]


def finish(engine: Engine) -> dict[str, RequestOutput]:
    """Step until nobody is left; the last output of every request."""
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        last |= {output.request_id: output for output in engine.step()}
    return last


def written(output: RequestOutput) -> str:
    """The reply of each sequence as one line, or why there is none."""
    lines = []
    for answer in output.outputs:
        text = repr(answer.text)
        if answer.finish_reason == "error":
            text += f"  [error: {answer.stop_reason}]"
        lines.append(text)
    return "\n".join(lines)
