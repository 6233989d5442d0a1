"""From `messages` and `tools` to a prompt.

A template that knows tools renders them itself. For one that does not (SmolLM2's, and the plain
ChatML of minifer-tiny) the conversation is rewritten in the form that Hermes and Qwen models are
trained on: tools in the system message, calls and results as tagged text. Otherwise `tools` would
be accepted and dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from minifer.serving.body import parse_object
from minifer.serving.errors import APIError
from minifer.text.tokenizer import Tokenizer

# Names that a template's variables must not take: what the API itself passes, and Python's own.
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "self")
_TOOL_PROMPT = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""  # the words of Qwen2.5's template, which are those of Hermes 2 Pro


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> str:
    """The prompt's text; raises `ValueError` (bad messages) or `APIError` (bad variables)."""
    for name in variables:
        if name in RESERVED or not name.isidentifier():
            message = f"chat_template_kwargs must not set {name!r:.60}"
            raise APIError(400, message, param="chat_template_kwargs")
    template = tokenizer.chat_template or ""
    if "developer" not in template:  # OpenAI's newer name of the system's role; templates drop it
        messages = [
            {**one, "role": "system"} if one.get("role") == "developer" else one for one in messages
        ]
    if "tools" not in template:
        messages, tools = spell_out_tools(messages, tools), ()
    return tokenizer.render_chat(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tools or None,
        **variables,
    )


def conversation_text(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    fields: Mapping[str, Any],
) -> str:
    """The prompt of a request with these fields. Raises as `render_prompt` does."""
    continued = fields.get("continue_final_message", False)
    return render_prompt(
        tokenizer,
        messages,
        tools,
        add_generation_prompt=fields.get("add_generation_prompt", not continued),
        continue_final_message=continued,
        variables=fields.get("chat_template_kwargs", {}),
    )


def spell_out_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The same conversation without the API's tool fields: all of it is text."""
    spelled = [_spell(message) for message in messages]
    if tools:
        text = _TOOL_PROMPT.format(tools="\n".join(map(_json, tools)))
        if spelled and spelled[0].get("role") == "system":
            first = spelled.pop(0)
            text = f"{plain_text(first.get('content'))}\n\n{text}"
        spelled.insert(0, {"role": "system", "content": text})
    return spelled


def _spell(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message.get("role") == "tool":
        content = f"<tool_response>\n{plain_text(message.get('content'))}\n</tool_response>"
        return {"role": "user", "content": content}
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.loads(function.get("arguments") or "{}")
        spelled = _json({"name": function["name"], "arguments": arguments})
        calls.append(f"<tool_call>\n{spelled}\n</tool_call>")
    text = plain_text(message.get("content"))
    return {"role": "assistant", "content": "\n".join([text, *calls] if text else calls)}


def plain_text(content: Any) -> str:
    """A message's content: a string, or text parts joined as `check_messages` does."""
    if isinstance(content, list):
        return "\n".join(part if isinstance(part, str) else part["text"] for part in content)
    return content or ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """What OpenAI asks of messages beyond what a template needs. Raises `APIError` 400."""
    for i, message in enumerate(messages):
        for name, kind in (("name", str), ("tool_call_id", str), ("tool_calls", list)):
            value = message.get(name)
            if value is not None and not isinstance(value, kind):
                _refuse(f"messages[{i}].{name}", f"a {kind.__name__}", value)
        if message.get("role") == "function" or message.get("function_call") is not None:
            rule = "one with tool_calls, or of role tool (functions are OpenAI's old form)"
            _refuse(f"messages[{i}]", rule, message)
        content = message.get("content")
        if isinstance(content, list):
            for j, part in enumerate(content):
                _check_part(f"messages[{i}].content[{j}]", part)
        for j, call in enumerate(message.get("tool_calls") or ()):
            _check_call(f"messages[{i}].tool_calls[{j}]", call)


def _check_part(path: str, part: Any) -> None:
    if isinstance(part, str):
        return
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        what = f"a part of type {kind!r:.40}" if isinstance(kind, str) else repr(part)[:60]
        _refuse(path, "a text part (models here read text only)", what)


def _check_call(path: str, call: Any) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _refuse(path, "an object with a function and its name", call)
    if not isinstance(call.get("id", ""), str):
        _refuse(f"{path}.id", "a string", call["id"])
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        _refuse(f"{path}.function.arguments", "the JSON text of an object", arguments)
    try:
        parse_object(arguments.encode())
    except APIError as error:
        message = f"{path}.function.arguments: {error.message}"
        raise APIError(400, message, param=f"{path}.function.arguments") from error


def _refuse(path: str, rule: str, value: Any) -> NoReturn:
    raise APIError(400, f"{path} must be {rule}, got {value!r:.80}", param=path)
