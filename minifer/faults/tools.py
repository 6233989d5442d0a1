"""Faults between the model and its tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from minifer.engine import Engine
from minifer.faults.detectors import Message
from minifer.faults.registry import Fault, github, patched

RESULT = "18 degrees"


@contextmanager
def tool_result_dropped(engine: Engine) -> Iterator[None]:
    """The chat template's input loses every message of a tool."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None  # whoever renders a conversation has one
    render = tokenizer.render_chat

    def faulty(messages: Sequence[Message], **options: Any) -> str:
        return render([m for m in messages if m["role"] != "tool"], **options)

    with patched(tokenizer, render_chat=faulty):
        yield


def converse(
    engine: Engine, see: Callable[[Sequence[Message]], None], max_turns: int = 6
) -> list[Message]:
    """A client with one tool talks to a scripted model through the engine's real chat template.

    The model's script: look for the tool's result in the prompt; call the tool while it is not
    there. see: gets the history before every turn. Returns the whole conversation.
    """
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    messages: list[Message] = [{"role": "user", "content": "How warm is it in Paris?"}]
    for turn in range(max_turns):
        see(messages)
        prompt = tokenizer.decode(tokenizer.apply_chat_template(messages), False)
        if RESULT in prompt:
            messages.append({"role": "assistant", "content": f"It is {RESULT} in Paris."})
            break
        call = {"name": "get_weather", "arguments": {"city": "Paris"}}
        function = {**call, "arguments": json.dumps(call["arguments"])}
        said = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        tool_call = {"id": f"call-{turn}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": said, "tool_calls": [tool_call]})
        messages.append({"role": "tool", "content": RESULT, "tool_call_id": f"call-{turn}"})
    return messages


def _weather(engine: Engine) -> str:
    lines = [" ".join(m["content"].split()) for m in converse(engine, lambda messages: None)]
    return "\n".join(lines)


FAULTS = (
    Fault(
        name="tool-result-dropped",
        title="The model never sees the tool's result",
        mechanism="The prompt of the next turn is rendered without the tool's message: a template "
        "that does not know the role, an id that does not match, a filter. To the model the call "
        "has not been made, and it does the only sensible thing.",
        symptom="The same call again and again, until a budget runs out; each turn is a success "
        "for the server. Fleet-wide: a second hump in the lengths of conversations.",
        sources=(
            github("earendil-works/pi", 9637, "more than 220 equal calls in 25 minutes"),
            github("mistralai/mistral-vibe", 83, "4.5 million tokens of input"),
            github("superplanehq/superplane", 4123, "an empty result starts the loop"),
            github("HKUDS/nanobot", 3077, "the guard: name and sorted arguments, three times"),
        ),
        detectors=("tool-loop",),
        inject=tool_result_dropped,
        scene=_weather,
    ),
)
