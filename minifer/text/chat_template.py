"""From messages to a prompt: the Jinja template a checkpoint brings along, run in a sandbox.

The template is untrusted code from a model repository. It runs in Jinja's immutable sandbox with
the options and helpers that Hugging Face templates are written for (Hugging Face documentation,
"Writing a chat template"): trim_blocks, lstrip_blocks, loop controls, `raise_exception`,
`strftime_now`, `tojson` without HTML escapes, and `{% generation %}` blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

Message = Mapping[str, Any]

# Appended to a message that is to be continued, so that its end is found in the rendered text.
# The final blank tells a template that trims contents from one that keeps them.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """A compiled chat template. Raises `ValueError` when the source does not compile."""

    def __init__(self, source: str) -> None:
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"chat template does not compile: line {error.lineno}: {error.message}"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        messages: see `check_messages`. add_generation_prompt: end with the header of a new
        assistant message. continue_final_message: leave the last message, an assistant's, open,
        so that the model continues it. tools: JSON schemas of functions the model may call.
        variables: anything else the template reads (`bos_token`, `enable_thinking`, …).

        Raises `ValueError` in one sentence for bad messages, for both of the two flags, and for
        whatever goes wrong inside the template.
        """
        checked = check_messages(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError(
                    "continue_final_message and add_generation_prompt exclude each other: "
                    "set add_generation_prompt=False to continue the last message"
                )
            if checked[-1]["role"] != "assistant":
                raise ValueError(
                    "continue_final_message needs the last message to be the assistant's, "
                    f"got role {checked[-1]['role']!r}"
                )
            checked[-1]["content"] += _CONTINUE_TAG
        try:
            text = self._template.render(
                **variables,
                messages=checked,
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
            )
        except SecurityError as error:
            raise ValueError(f"chat template refused by the sandbox: {_line(error)}") from error
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {_line(error)}") from error
        except Exception as error:  # the template is foreign code: any error is its own
            kind = type(error).__name__
            raise ValueError(f"chat template failed with {kind}: {_line(error)}") from error
        return _open_end(text) if continue_final_message else text


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them; the originals stay as they are.

    A message has a `role` (a string) and a `content`: a string, or a list of text parts, which
    are joined with a newline as vLLM does. An assistant message with `tool_calls` may go without
    content; arguments of tool calls given as a JSON string become an object. Fields that are
    None are dropped. Raises `ValueError` naming the message by its index.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(
            "messages must be a non-empty list of messages such as "
            f'{{"role": "user", "content": "Hi"}}, got {messages!r:.60}'
        )
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(name: str, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} must be an object with role and content, got {message!r:.60}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(
            f"{name}.role must be a string such as system, user or assistant, got {role!r}"
        )
    checked = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in checked:
        checked["tool_calls"] = _tool_calls(f"{name}.tool_calls", checked["tool_calls"])
    content = message.get("content")
    if content is None and checked.get("tool_calls"):
        content = ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(
            _text_part(f"{name}.content[{i}]", part) for i, part in enumerate(content)
        )
    if not isinstance(content, str):
        raise ValueError(
            f"{name}.content must be a string or a list of text parts, got {content!r}"
        )
    checked["content"] = content
    return checked


def _text_part(name: str, part: Any) -> str:
    """The text of one part of a content list."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(
            f'{name} must be a text part, {{"type": "text", "text": "…"}}, got {part!r:.60}; '
            "models here read text only"
        )
    return str(part["text"])


def _tool_calls(name: str, calls: Any) -> list[dict[str, Any]]:
    """Tool calls of an earlier turn: APIs send arguments as JSON text, templates read objects."""
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise ValueError(f"{name} must be a list, got {calls!r:.60}")
    parsed = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{name}[{i}] needs a function with a name, got {call!r:.60}")
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{name}[{i}].function.arguments is not valid JSON: {error}"
                ) from error
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


def _open_end(text: str) -> str:
    """Cut a rendered conversation at the end of its tagged message (rule of transformers)."""
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0:
        raise ValueError(
            "continue_final_message: the chat template does not render the last message's content"
        )
    kept = text[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG
    return text[:at] if kept else text[:at].rstrip()  # this template trims contents


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's part; it renders as is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes <, >, & and ' for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _line(error: Exception) -> str:
    """An error's text on one line."""
    return " ".join(str(error).split())
