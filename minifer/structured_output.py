"""What a reply must look like. `execution/grammar.py` makes sure that it does.

This file only says what was asked for; whether a schema or a grammar compiles is found out when
the request is admitted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIELDS = ("json", "json_object", "regex", "choice", "grammar")
# Between two tokens of JSON: readable, but no endless run of blanks (vllm-project/vllm#38696,
# #44619), which a model that likes them would never leave.
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}"


@dataclass(frozen=True)
class StructuredOutput:
    """The form of a reply: exactly one of these. Names are vLLM's (`StructuredOutputsParams`).

    json: a JSON schema, as an object or as JSON text; the reply is JSON that it accepts.
    json_object: True: the reply is any JSON object.
    regex: a regular expression that the whole reply matches (the syntax of Rust's `regex` crate:
        no look-around, no back-references).
    choice: a list of texts; the reply is one of them.
    grammar: a context-free grammar in llguidance's variant of Lark.

    Raises `ValueError` naming the field, its value and the rule.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in FIELDS if getattr(self, name) is not None]
        if len(given) != 1:
            names = ", ".join(given) or "none"
            raise ValueError(f"structured needs exactly one of {', '.join(FIELDS)}; got {names}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.json_object is not None and self.json_object is not True:
            raise ValueError(
                f"structured.json_object must be True or left out, got {self.json_object!r}"
            )
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(f"structured.{name}", getattr(self, name))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choice(self.choice))

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in FIELDS if getattr(self, name) is not None)

    @classmethod
    def of(cls, value: Any) -> StructuredOutput:
        """From a mapping of its fields, or one of its kind; raises `ValueError` for another."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or not set(value) <= set(FIELDS):
            raise ValueError(
                "structured must be a StructuredOutput or a mapping with one of "
                f"{', '.join(FIELDS)}, got {value!r}"
            )
        return cls(**value)


def _check_text(name: str, value: Any) -> None:
    whole = isinstance(value, str) and value.encode(errors="ignore").decode() == value
    if not whole or not value:
        raise ValueError(f"{name} must be a non-empty string of valid Unicode, got {value!r}")


def _schema(value: Any) -> str:
    """JSON text of a schema."""
    rule = "structured.json must be a JSON schema: an object, or the JSON text of one"
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, Mapping):
            raise ValueError(f"{rule}; got {value!r}")
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        if str(error).startswith(rule):
            raise
        raise ValueError(f"{rule}: {error}") from error


def _choice(values: Any) -> tuple[str, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
        raise ValueError(f"structured.choice must be a non-empty list of texts, got {values!r}")
    for i, value in enumerate(values):
        _check_text(f"structured.choice[{i}]", value)
    return tuple(values)
