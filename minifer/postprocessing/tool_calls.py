"""Tool calls in a stream of text, as Hermes, Qwen2.5 and Qwen3 write them::

    Let me look.
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

The reader knows JSON strings: a brace or a tag inside one is text. It decides late enough never to
take back what it has said, and early enough to stream:

- text is content at once; held back is only what may still become `<tool_call>`;
- after the tag everything is held until the name is known and the object of the arguments begins.
  Up to there, whatever is no such call (other text, broken JSON, another shape) is content, the
  tag included;
- from there on it is a call, and its arguments are streamed. They end where their braces close, or
  at a `<` outside a string, which JSON does not have. So arguments that are broken or cut off
  reach the caller as the model wrote them (OpenAI's API says the same: they may not be JSON);
- what follows the arguments is the rest of the object and the end tag. Where they are missing, what
  stands there instead is content.

Every character is part of the content, of a call's name or arguments, or of the markup around
them: the tags, the object that holds name and arguments, and white space after a call that no
content follows.

The faults of others that this is made against: `{` in text (vllm-project/vllm#21544), arguments
changed by their repair (#10395), `</tool_call>` inside a string (#45167, #45310), a call without
arguments (#28806).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minifer.postprocessing.reasoning import held_back
from minifer.postprocessing.tool_call_reader import SPACE, CallReader
from minifer.structured_output import JSON_WHITESPACE, StructuredOutput

START, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """One call: the function's name, and its arguments as JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCallDelta:
    """News of call number `index`, as OpenAI streams it.

    The first delta of a call has its id and name, those after it a piece of the arguments.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


class ToolCallScanner:
    """Splits one reply into content and tool calls; see the rules at the top of the file.

    However the text is cut into chunks, the pieces of content, and those of each call's arguments,
    join to the same text. calls: those that have ended. new_id: makes the id of a call.
    """

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self.calls: list[ToolCall] = []
        self._new_id = new_id
        self._text = ""  # not judged yet
        self._call: CallReader | None = None
        self._call_id = ""  # of the announced call
        self._opening = ""  # what opened the call: its tag, after white space if a call was before
        self._after_call = False  # nothing but white space and an end tag since the last call
        self._end_tag_due = False
        self._content = ""
        self._deltas: list[ToolCallDelta] = []

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Take new text; returns the content to release now and what is new of the calls."""
        self._text += text
        while self._step():
            pass
        return self._take()

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """The reply has ended: what was held back becomes content, an open call ends."""
        while self._call is not None:
            self._give_up()
            while self._step():
                pass
        if not self._after_call or self._text.strip(SPACE):
            self._content += self._text
        self._text = ""
        return self._take()

    def _take(self) -> tuple[str, list[ToolCallDelta]]:
        result = self._content, self._deltas
        self._content, self._deltas = "", []
        return result

    def _step(self) -> bool:
        """Judge as much text as one state allows; False when more is needed."""
        if not self._text:
            return False
        if self._call is not None:
            return self._read_call(self._call)
        return self._read_after_call() if self._after_call else self._read_content()

    def _read_content(self) -> bool:
        before, tag, rest = self._text.partition(START)
        if tag:
            self._content += before
            self._open(tag, rest)
            return True
        held = held_back(self._text, START)
        self._content += self._text[: len(self._text) - held]
        self._text = self._text[len(self._text) - held :]
        return False

    def _read_after_call(self) -> bool:
        """White space, the end tag, the next call; anything else is content."""
        text = self._text.lstrip(SPACE)
        tags = (START, END) if self._end_tag_due else (START,)
        if any(len(text) < len(tag) and tag.startswith(text) for tag in tags):
            return False
        if text.startswith(START):
            space = self._text[: len(self._text) - len(text)]
            self._open(space + START, text.removeprefix(START))
        elif self._end_tag_due and text.startswith(END):
            self._text, self._end_tag_due = text.removeprefix(END), False
        else:
            self._after_call = False
        return True

    def _open(self, opening: str, rest: str) -> None:
        self._opening, self._text, self._call = opening, rest, CallReader()

    def _read_call(self, call: CallReader) -> bool:
        text, self._text = self._text, ""
        for i, character in enumerate(text):
            if not call.feed(character):
                self._text = text[i:]
                self._give_up()
                return True
            if call.ended:
                self._report(call)
                self._close(call, text[i + 1 :])
                return True
        self._report(call)
        return False

    def _report(self, call: CallReader) -> None:
        index, piece = len(self.calls), call.take()
        if call.announced and not self._call_id:
            self._call_id = self._new_id()
            self._deltas.append(ToolCallDelta(index, self._call_id, call.name, ""))
        if piece:
            self._deltas.append(ToolCallDelta(index, None, None, piece))

    def _give_up(self) -> None:
        """The call goes no further: one that was announced ends, another was only text."""
        call = self._call
        assert call is not None
        if call.announced:
            self._report(call)
            self._close(call, "".join(call.raw) + self._text)
        else:
            self._content += self._opening
            self._text = "".join(call.raw) + self._text
            self._call, self._after_call = None, False

    def _close(self, call: CallReader, rest: str) -> None:
        self.calls.append(ToolCall(self._call_id, call.name, call.arguments))
        self._call, self._call_id, self._text = None, "", rest
        self._after_call = self._end_tag_due = True


# -- the tools of a request

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """The `tools` of a chat request as OpenAI defines them; [] for None.

    Raises `ValueError` naming the path of what is wrong.
    """
    if tools is None:
        return []
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise ValueError(f"tools must be a list of tools, got {tools!r:.60}")
    checked = [_check_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in checked]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"tools[{i}].function.name must be unique, {name!r} is there twice")
    return checked


def _check_tool(path: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise ValueError(
            f'{path} must be an object of type "function", {{"type": "function", "function": '
            f'{{"name": …, "parameters": …}}}}, got {tool!r:.60}'
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ValueError(f"{path}.function must be an object, got {function!r:.60}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{path}.function.name must be 1 to 64 of a-z, A-Z, 0-9, _ and -, got {name!r:.80}"
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise ValueError(f"{path}.function.description must be a string, got {description!r:.60}")
    parameters = function.get("parameters")
    if parameters is not None and (
        not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object"
    ):
        raise ValueError(
            f'{path}.function.parameters must be a JSON schema of type "object", '
            f"got {parameters!r:.60}"
        )
    return {**tool, "function": dict(function)}


def tool_choice_constraint(
    tools: Any, tool_choice: Any, parallel: bool = True, reply: StructuredOutput | None = None
) -> StructuredOutput | None:
    """What the reply must look like, or None where the model is free.

    tool_choice: "none" and "auto" (also None) leave it free; "required" asks for at least one call
    of any tool, more with `parallel`; {"type": "function", "function": {"name": …}} for one call
    of this tool. reply: the form of a reply that calls no tool. With "auto" and JSON the model has
    the choice between the two; a regex, choice or grammar is taken to say it all. The form holds
    from the reply's first token, so there is no reasoning before.

    Raises `ValueError` for bad tools, another choice, one that names no tool, or a `reply` beside
    a call that must be made.
    """
    checked = {tool["function"]["name"]: tool["function"] for tool in check_tools(tools)}
    free = tool_choice is None or tool_choice == "auto"
    if tool_choice == "none" or (free and (reply is None or not checked)):
        return reply
    if reply is not None and not free:
        raise ValueError("tool_choice makes the model call, and another field says what it writes")
    if reply is not None and reply.kind not in ("json", "json_object"):
        return reply
    name = None if free else _chosen_name(tool_choice)
    if name is not None and name not in checked:
        raise ValueError(f"tool_choice must name one of tools, got {name!r}")
    if not checked:
        raise ValueError('tool_choice "required" needs tools, got none')
    functions = list(checked.values()) if name is None else [checked[name]]
    more = ' ("\\n" call)*' if parallel and name is None else ""
    rules = [f"start: {'reply | ' if reply else ''}call{more}"]
    if reply is not None:
        schema = {"type": "object"} if reply.json is None else json.loads(str(reply.json))
        rules.append(f"reply: %json {_json_rule(schema)}")
    rules.append(f'call: "{START}\\n" object "\\n{END}"')
    rules.append("object: " + " | ".join(f"tool_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        begin = json.dumps(f'{{"name": "{function["name"]}", "arguments": ')
        schema = function.get("parameters") or _NO_PARAMETERS
        rules.append(f'tool_{i}: {begin} %json {_json_rule(schema)} "}}"')
    return StructuredOutput(grammar="\n".join(rules) + "\n")


def _json_rule(schema: Mapping[str, Any]) -> str:
    """A schema as it stands in a grammar."""
    return json.dumps({"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, **schema})


def _chosen_name(tool_choice: Any) -> str | None:
    """The tool that is asked for by name; None for "required"."""
    if tool_choice == "required":
        return None
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or tool_choice.get("type") != "function":
        raise ValueError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": '
            f'{{"name": …}}}}, got {tool_choice!r:.80}'
        )
    return name
