"""The engine's side of one call: its prompts are opened together, their outputs merged."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from minifer.execution.sampler import UNDRAWABLE
from minifer.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from minifer.request import SamplingParams
from minifer.sampling_params import is_text
from minifer.serving.errors import APIError, refusals
from minifer.serving.metrics import RequestTimer

if TYPE_CHECKING:
    from minifer.serving.app import Server

MAX_REQUEST_ID = 128  # characters


@dataclass
class Choice:
    """One of the answers to a call, as far as it has come."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_loops: list[int] = field(default_factory=list)  # of each token, where the model loops
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, new: CompletionOutput) -> None:
        self.text += new.text
        self.token_ids += new.token_ids
        self.logprobs += new.logprobs or ()
        self.num_loops += new.num_loops or ()
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason


class Call(Protocol):
    """A request that has been read: what it wants, and how its answer looks."""

    fields: Mapping[str, Any]

    async def check(self, generation: Generation) -> None:
        """What is not the engine's to check. Raises `APIError`."""
        ...

    def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]: ...

    async def answer(self, generation: Generation) -> dict[str, Any]: ...


class Generation:
    """The requests of one call, from their admission on.

    prompts: token ids of each. Choice number p · n + i is answer i to prompt p.
    """

    def __init__(
        self, server: Server, name: str, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> None:
        self.server = server
        self.name = name
        self.created = int(time.time())
        self.prompts = [list(prompt) for prompt in prompts]
        self.params = params
        self.request_ids = [name]
        if len(prompts) > 1:
            self.request_ids = [f"{name}-{p}" for p in range(len(prompts))]
        self.prompt_logprobs: list[list[TokenLogprobs | None] | None] = [None] * len(prompts)
        self.num_cached_tokens = [0] * len(prompts)
        self.num_output_tokens = 0

    async def open(self, stack: ExitStack, fields: Mapping[str, Any]) -> None:
        """Have the engine take all prompts, or none; closing the stack aborts what is running.

        fields: of the request, to name the one at fault. Raises `APIError` 400 with the engine's
        refusal, 429 for more prompts than there is room.
        """
        stack.enter_context(self.server.open_requests.seat(len(self.prompts) - 1))
        ids = self.request_ids
        self._index = {request_id: p for p, request_id in enumerate(ids)}
        try:
            with refusals(fields):
                if self.params.structured is not None:  # not on the engine's thread: it takes long
                    grammars = self.server.llm.engine.grammars
                    await asyncio.to_thread(grammars.compile, self.params.structured)
                stream = await self.server.llm.open(self.prompts, self.params, request_ids=ids)
        except APIError as error:
            self._name_field(error, fields)
            raise
        self._stream = stream
        stack.callback(self._stream.close)
        metrics = self.server.metrics
        self._timers = [RequestTimer(metrics, len(p), self.params) for p in self.prompts]
        for timer in self._timers:
            stack.callback(timer.close)

    def _name_field(self, error: APIError, fields: Mapping[str, Any]) -> None:
        """The engine knows parameters, the caller fields. `context_length_exceeded` is OpenAI's
        code for a refusal because of length: agents look for it, and shorten."""
        if error.message.startswith("structured"):
            forms = ("structured_outputs", "response_format", "tools")
            error.param = next((name for name in forms if name in fields), None)
            return
        longest, limits = max(map(len, self.prompts)), self.server.llm.engine.limits
        if error.message.startswith(("the prompt", "prompt_token_ids")):
            error.param = "messages" if "messages" in fields else "prompt"
        if longest <= limits.max_prompt_len:
            if longest + (self.params.max_tokens or 1) <= limits.max_model_len:
                return
            names = ("max_completion_tokens", "max_tokens")
            error.param = next((name for name in names if name in fields), "max_tokens")
        error.code = "context_length_exceeded"

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(number of the prompt, what is new), until all are finished.

        Raises `APIError` when one of them fails: 400 where the request's own rules leave nothing
        to draw from, 500 for the engine's faults.
        """
        async for output in self._stream:
            p = self._index[output.request_id]
            self._timers[p].observe(output)
            self.num_cached_tokens[p] = output.num_cached_tokens
            self.prompt_logprobs[p] = output.prompt_logprobs
            for new in output.outputs:
                self.num_output_tokens += len(new.token_ids)
                if new.finish_reason == "error":
                    raise _failure(str(new.stop_reason))
            yield p, output

    async def collect(self) -> list[Choice]:
        """All answers, complete."""
        n = self.params.n
        choices = [Choice(index) for index in range(n * len(self.prompts))]
        async for p, output in self.outputs():
            for new in output.outputs:
                choices[p * n + new.index].add(new)
        return choices

    def usage(self, hidden_tokens: int = 0) -> dict[str, Any]:
        """Prompt tokens count once a prompt, whatever n is. A token that ended an answer (end
        token, stop id, the last of a stop string) was generated and counts, once."""
        prompt = sum(map(len, self.prompts))
        completion = self.num_output_tokens - hidden_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.num_cached_tokens)},
        }


def _failure(reason: str) -> APIError:
    # A grammar may compile and be too large further on; a token it forbids is the engine's fault.
    too_large = reason.startswith("ValueError: structured.") and "satisfy" not in reason
    if reason in UNDRAWABLE or too_large:
        reason = reason.removeprefix("ValueError: ")
        return APIError(400, f"this request cannot be answered: {reason}", code="undrawable")
    return APIError(500, f"the engine failed on this request: {reason}", code="request_failed")


def shows_loops(server: Server, fields: Mapping[str, Any]) -> bool:
    """Do its choices say how many loops each token took? Where depth or token ids are asked for."""
    asked = any(fields.get(name) for name in ("num_loops", "return_token_ids"))
    looped = server.llm.engine.limits.loop is not None
    return looped and (asked or "exit_threshold" in fields)


def request_name(fields: Mapping[str, Any]) -> str:
    """The caller's `request_id`, or a new one."""
    if "request_id" not in fields:
        return uuid.uuid4().hex
    name: str = fields["request_id"]
    if not is_text(name) or len(name) > MAX_REQUEST_ID or not name.isprintable():
        rule = f"1 to {MAX_REQUEST_ID} printable characters"
        raise APIError(400, f"request_id must be {rule}, got {name!r:.60}", param="request_id")
    return name


def check_stream_options(fields: Mapping[str, Any]) -> bool:
    """Does a stream end with its usage? `{}` is valid and asks for nothing."""
    if "stream_options" not in fields:
        return False
    options = fields["stream_options"]
    if not fields.get("stream"):
        message = "stream_options needs stream: true"
        raise APIError(400, message, param="stream_options")
    for name, value in options.items():
        if name == "include_obfuscation" and value is False:
            continue  # OpenAI's padding against traffic analysis; there is none here
        if name != "include_usage" or not isinstance(value, bool):
            message = f"stream_options takes include_usage: true or false, got {name!r:.40}"
            raise APIError(400, f"{message}: {value!r:.40}", param="stream_options")
    return bool(options.get("include_usage", False))


async def in_thread(function: Any, *arguments: Any, **options: Any) -> Any:
    """Tokenise or render off the event loop; a `ValueError` is the caller's fault."""
    with refusals(("messages", "prompt", "tools", "continue_final_message")):
        return await asyncio.to_thread(function, *arguments, **options)
