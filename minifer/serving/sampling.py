"""From the fields of a request to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minifer.request import OutputKind, SamplingParams
from minifer.serving.errors import APIError, refusals
from minifer.serving.fields import SAMPLING
from minifer.structured_output import StructuredOutput

_FORMATS = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
# Of all strings of a field together: each character costs memory, and time before the first step.
MAX_CHARACTERS = 16_384
_SCHEMA_KEYS = {"name", "description", "schema", "strict"}


def sampling_params(
    defaults: SamplingParams,
    fields: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured: StructuredOutput | None,
    max_logprobs: int,
) -> SamplingParams:
    """`SamplingParams` of one request, on top of the model's own defaults.

    max_tokens: what the route decided. logprobs: how many a token, None for none. max_logprobs:
    the server's limit, -1 for none. Raises `APIError` 400.
    """
    values = {name: fields[name] for name in SAMPLING if name in fields}
    if "user" in fields:
        values.setdefault("tenant", fields["user"])
    values |= {"max_tokens": max_tokens, "logprobs": logprobs, "output_kind": OutputKind.DELTA}
    for name in ("logprobs", "prompt_logprobs"):
        asked = values.get(name)
        if asked is not None and max_logprobs >= 0 and not 0 <= asked <= max_logprobs:
            field = "top_logprobs" if name == "logprobs" and "top_logprobs" in fields else name
            message = f"{field} must be in [0, {max_logprobs}] on this server, got {asked}"
            raise APIError(400, message, param=field)
    for name in ("stop", "bad_words"):
        if (size := sum(map(len, values.get(name, ())))) > MAX_CHARACTERS:
            message = f"{name} must be at most {MAX_CHARACTERS} characters in all, got {size}"
            raise APIError(400, message, param=name)
    if structured is not None:
        values["structured"] = structured
    with refusals(fields):
        return defaults.with_(**values)


def structured_output(fields: Mapping[str, Any]) -> StructuredOutput | None:
    """What `response_format` (OpenAI's) or `structured_outputs` (vLLM's) asks for."""
    if "structured_outputs" in fields:
        if fields.get("response_format", {}).get("type", "text") != "text":
            raise APIError(
                400,
                "structured_outputs and response_format exclude each other",
                param="structured_outputs",
            )
        return _structured("structured_outputs", fields["structured_outputs"])
    if "response_format" not in fields:
        return None
    return _response_format(fields["response_format"])


def _structured(field: str, value: Mapping[str, Any]) -> StructuredOutput:
    try:
        return StructuredOutput.of(value)
    except ValueError as error:
        raise APIError(400, f"{field}: {error}", param=field) from error


def _response_format(form: Mapping[str, Any]) -> StructuredOutput | None:
    def refuse(message: str) -> APIError:
        return APIError(400, message, param="response_format")

    kind = form.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        names = ", ".join(_FORMATS)
        raise refuse(f"response_format.type must be one of {names}, got {kind!r:.60}")
    if unknown := sorted(form.keys() - _FORMATS[kind]):
        raise refuse(f"response_format of type {kind} has no field {unknown[0]!r:.60}")
    if kind == "text":
        return None
    if kind == "json_object":
        return _structured("response_format", {"json_object": True})
    named = form.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        raise refuse("response_format.json_schema.schema must be a JSON schema, an object")
    if unknown := sorted(named.keys() - _SCHEMA_KEYS):
        raise refuse(f"response_format.json_schema has no field {unknown[0]!r:.60}")
    return _structured("response_format", {"json": named["schema"]})
