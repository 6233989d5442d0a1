"""The fields a route takes, as JSON types; everything else in a body is a 400 that names it.

A field that is accepted and then dropped is the bug users of inference servers report most. So
every field of a body is one of three: in the route's table (and then it is honoured), in
`WITHOUT_EFFECT` (it could not change the answer if we tried), or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minifer.serving.errors import APIError


@dataclass(frozen=True)
class Kind:
    """A JSON type: in words, for the message, and as a test."""

    words: str
    matches: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


BOOLEAN = Kind("true or false", lambda v: isinstance(v, bool))
INTEGER = Kind("an integer", _is_int)
NUMBER = Kind("a number", lambda v: _is_int(v) or isinstance(v, float))
STRING = Kind("a string", _is_str)
STRINGS = Kind("a list of strings", _list_of(_is_str))
STRING_OR_STRINGS = Kind(
    "a string or a list of strings", lambda v: _is_str(v) or STRINGS.matches(v)
)
INTEGERS = Kind("a list of integers", _list_of(_is_int))
OBJECT = Kind("an object", _is_dict)
OBJECTS = Kind("a list of objects", _list_of(_is_dict))
STRING_OR_OBJECT = Kind("a string or an object", lambda v: _is_str(v) or _is_dict(v))
PROMPT = Kind(
    "a string, a list of strings, a list of token ids, or a list of such lists",
    lambda v: (
        _is_str(v) or STRINGS.matches(v) or INTEGERS.matches(v) or _list_of(INTEGERS.matches)(v)
    ),
)

# Fields of `SamplingParams` under their own names; it checks their values itself.
SAMPLING: Mapping[str, Kind] = {
    "temperature": NUMBER,
    "top_k": INTEGER,
    "top_p": NUMBER,
    "min_p": NUMBER,
    "repetition_penalty": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "logit_bias": OBJECT,
    "allowed_token_ids": INTEGERS,
    "bad_words": STRINGS,
    "seed": INTEGER,
    "n": INTEGER,
    "stop": STRING_OR_STRINGS,
    "stop_token_ids": INTEGERS,
    "include_stop_str_in_output": BOOLEAN,
    "ignore_eos": BOOLEAN,
    "max_tokens": INTEGER,
    "min_tokens": INTEGER,
    "prompt_logprobs": INTEGER,
    "skip_special_tokens": BOOLEAN,
    "detokenize": BOOLEAN,
    "priority": INTEGER,
    "tenant": STRING,
    "cache_salt": STRING,
    "repetition_detection": OBJECT,
    "num_loops": INTEGER,
    "exit_threshold": NUMBER,
}
# Of both POST routes.
COMMON: Mapping[str, Kind] = {
    **SAMPLING,
    "model": STRING,
    "user": STRING,  # OpenAI's name for a tenant
    "stream": BOOLEAN,
    "stream_options": OBJECT,
    "response_format": OBJECT,
    "structured_outputs": OBJECT,
    "request_id": STRING,
    "return_token_ids": BOOLEAN,
}
COMPLETION: Mapping[str, Kind] = {
    **COMMON,
    "prompt": PROMPT,
    "logprobs": INTEGER,
    "echo": BOOLEAN,
}
CHAT: Mapping[str, Kind] = {
    **COMMON,
    "messages": OBJECTS,
    "max_completion_tokens": INTEGER,
    "logprobs": BOOLEAN,
    "top_logprobs": INTEGER,
    "tools": OBJECTS,
    "tool_choice": STRING_OR_OBJECT,
    "parallel_tool_calls": BOOLEAN,
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
    "chat_template_kwargs": OBJECT,
}
# What a client may say about itself or about OpenAI's service; no answer depends on it.
# name → the values that are taken, None for any.
WITHOUT_EFFECT: Mapping[str, tuple[Any, ...] | None] = {
    "safety_identifier": None,  # an end user's name, for OpenAI's abuse reports
    "metadata": None,  # labels of stored answers; nothing is stored here
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prompt_cache_key": None,  # a routing hint; prefixes are found by their tokens here
    "modalities": (["text"],),
}
# OpenAI's and vLLM's fields whose refusal deserves a way out.
REFUSED: Mapping[str, str] = {
    "best_of": "ask for n answers and choose by their logprobs",
    "suffix": "put the whole context into the prompt",
    "functions": "send tools",
    "function_call": "send tool_choice",
    "reasoning_effort": "say how the template is to think in chat_template_kwargs",
    "chat_template": "templates from the network are not run; the model's own is",
    "audio": "models here write text only",
    "guided_json": "send structured_outputs",
    "guided_regex": "send structured_outputs",
    "guided_choice": "send structured_outputs",
    "guided_grammar": "send structured_outputs",
}


def read_fields(body: Mapping[str, Any], table: Mapping[str, Kind]) -> dict[str, Any]:
    """The fields that were given, each of its JSON type; null is the same as not given.

    Raises `APIError` 400 naming the first field that is unknown, refused or of a wrong type.
    """
    fields = {}
    for name, value in body.items():
        if name in table:
            if value is not None:
                fields[name] = _checked(name, value, table[name])
        elif name in WITHOUT_EFFECT:
            allowed = WITHOUT_EFFECT[name]
            if value is not None and allowed is not None and value not in allowed:
                words = " or ".join(map(repr, allowed))
                raise APIError(400, f"{name} must be {words}, got {value!r:.60}", param=name)
        elif name not in REFUSED or value is not None:
            hint = f": {REFUSED[name]}" if name in REFUSED else ""
            message = f"{name!r:.80} is not a field that this route implements{hint}"
            raise APIError(400, message, param=name[:80], code="unknown_field")
    return fields


def _checked(name: str, value: Any, kind: Kind) -> Any:
    if not kind.matches(value):
        raise APIError(400, f"{name} must be {kind.words}, got {value!r:.60}", param=name)
    return value


def required(fields: Mapping[str, Any], name: str) -> Any:
    """A field that must be there."""
    if name not in fields:
        raise APIError(400, f"{name} is missing", param=name, code="missing_field")
    return fields[name]
