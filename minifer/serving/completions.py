"""`POST /v1/completions`: prompts as they are, n answers each."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from minifer.serving.errors import APIError
from minifer.serving.fields import COMPLETION, read_fields, required
from minifer.serving.generation import (
    Call,
    Choice,
    Generation,
    check_stream_options,
    in_thread,
    request_name,
    shows_loops,
)
from minifer.serving.logprobs import CompletionLogprobs, prompt_logprobs
from minifer.serving.sampling import sampling_params, structured_output
from minifer.serving.streaming import DONE, event

if TYPE_CHECKING:
    from minifer.serving.app import Server

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this route
# A piece of a stream without any of these would say nothing: all its text is held back.
_NEWS = ("text", "finish_reason", "logprobs", "prompt_logprobs", "token_ids", "num_loops")


async def read_completion(server: Server, body: Mapping[str, Any]) -> tuple[Call, Generation]:
    """What a request asks for, and its prompts. Raises `APIError`."""
    fields = read_fields(body, COMPLETION)
    server.check_model(fields)
    call = _Call(server, fields)
    return call, Generation(server, call.name, await call.read_prompts(), call.params)


def prompts_of(fields: Mapping[str, Any], limit: int) -> list[str | list[int]]:
    """The prompts of a request, each text or token ids. Raises `APIError` 400 for none, or more
    than `limit`."""
    prompt = required(fields, "prompt")
    is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    prompts = [prompt] if is_one else prompt
    if not 1 <= len(prompts) <= limit:
        message = f"prompt must hold 1 to {limit} prompts, got {len(prompts)}"
        raise APIError(400, message, param="prompt")
    return prompts


class _Call:
    """One request's wishes about the form of its answer.

    echo with max_tokens 0 scores a prompt: one token is generated, because the engine gives
    nothing less, and not shown (as vLLM does).
    """

    def __init__(self, server: Server, fields: Mapping[str, Any]) -> None:
        self.server = server
        self.fields = fields
        self.name = request_name(fields)
        self.include_usage = check_stream_options(fields)
        self.shows_loops = shows_loops(server, fields)
        self.echo = bool(fields.get("echo"))
        self.logprobs: int | None = fields.get("logprobs")
        max_tokens = fields.get("max_tokens", DEFAULT_MAX_TOKENS)
        self.hidden = self.echo and max_tokens == 0
        wishes = dict(fields)
        if self.echo and self.logprobs is not None:
            wishes["prompt_logprobs"] = max(self.logprobs, fields.get("prompt_logprobs", 0))
        self.params = sampling_params(
            server.llm.engine.default_params,
            wishes,
            max_tokens=1 if self.hidden else max_tokens,
            logprobs=self.logprobs,
            structured=structured_output(fields),
            max_logprobs=server.settings.max_logprobs,
        )
        self.texts: list[str] = []

    async def read_prompts(self) -> list[list[int]]:
        """Token ids of every prompt; the texts too, where they are echoed."""
        tokenizer = self.server.tokenizer
        prompts = prompts_of(self.fields, self.server.settings.max_prompts)
        ids = [await in_thread(tokenizer.encode, p) if isinstance(p, str) else p for p in prompts]
        if self.echo:
            self.server.check_token_ids(ids, "prompt")
            self.texts = [p if isinstance(p, str) else tokenizer.decode(p, False) for p in prompts]
        return ids

    async def check(self, generation: Generation) -> None:
        """Nothing more than the engine does."""

    async def answer(self, generation: Generation) -> dict[str, Any]:
        """The whole answer."""
        shown = []
        for choice in await generation.collect():
            writer = CompletionLogprobs(self.server.token_bytes, self._length(choice.index))
            shown.append(self._form(generation, choice, writer, is_first=True))
        return self._envelope(generation, shown) | {"usage": self._usage(generation)}

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """One event for each new piece of a choice; the first of each brings the echo."""
        writers: dict[int, CompletionLogprobs] = {}
        no_usage = {"usage": None} if self.include_usage else {}
        async for p, output in generation.outputs():
            for new in output.outputs:
                piece = Choice(p * self.params.n + new.index)
                piece.add(new)
                is_first = piece.index not in writers
                if is_first:
                    start = self._length(piece.index)
                    writers[piece.index] = CompletionLogprobs(self.server.token_bytes, start)
                form = self._form(generation, piece, writers[piece.index], is_first)
                if any(form.get(key) for key in _NEWS):
                    yield event(self._envelope(generation, [form]) | no_usage)
        if self.include_usage:
            yield event(self._envelope(generation, []) | {"usage": self._usage(generation)})
        yield DONE

    def _usage(self, generation: Generation) -> dict[str, Any]:
        return generation.usage(generation.num_output_tokens if self.hidden else 0)

    def _form(
        self, generation: Generation, piece: Choice, writer: CompletionLogprobs, is_first: bool
    ) -> dict[str, Any]:
        """A choice, or a new piece of one, in OpenAI's form. is_first: it begins the choice."""
        p = piece.index // self.params.n
        if self.hidden:
            piece = Choice(piece.index, finish_reason=piece.finish_reason and "length")
        form: dict[str, Any] = {
            "index": piece.index,
            "text": (self.texts[p] if self.echo and is_first else "") + piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self.logprobs is not None:
            skip = self.params.skip_special_tokens
            form["logprobs"] = writer.add(piece.token_ids, piece.logprobs, skip)
            if self.echo and is_first:
                scored = self._echoed_logprobs(generation, p)
                form["logprobs"] = {key: scored[key] + form["logprobs"][key] for key in scored}
        if "prompt_logprobs" in self.fields and is_first:
            form["prompt_logprobs"] = prompt_logprobs(generation.prompt_logprobs[p])
        if self.fields.get("return_token_ids"):
            form["token_ids"] = piece.token_ids
            if is_first:
                form["prompt_token_ids"] = generation.prompts[p]
        if self.shows_loops:
            form["num_loops"] = piece.num_loops
        return form

    def _length(self, index: int) -> int:
        """Characters of a choice's text before what was generated."""
        return len(self.texts[index // self.params.n]) if self.echo else 0

    def _echoed_logprobs(self, generation: Generation, p: int) -> dict[str, Any]:
        """Of the prompt. Its ids may begin with a BOS that its text lacks: it begins before it."""
        ids, token_bytes = generation.prompts[p], self.server.token_bytes
        spelled = b"".join(map(token_bytes, ids)).decode(errors="replace")
        writer = CompletionLogprobs(token_bytes, len(self.texts[p]) - len(spelled))
        scored = generation.prompt_logprobs[p] or []  # shorter when the request was cut short
        return writer.add(ids, scored + [None] * (len(ids) - len(scored)))

    def _envelope(self, generation: Generation, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{generation.name}",
            "object": "text_completion",
            "created": generation.created,
            "model": self.server.model_name,
            "choices": choices,
        }
