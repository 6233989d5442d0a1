"""`POST /v1/chat/completions`: a conversation, n replies, tool calls, reasoning."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from minifer.outputs import CompletionOutput
from minifer.postprocessing.guards.tool_loop import tool_loop
from minifer.postprocessing.reasoning import ReasoningScanner, starts_inside
from minifer.postprocessing.tool_calls import ToolCallScanner, check_tools, tool_choice_constraint
from minifer.serving.chat_prompt import check_messages, conversation_text, plain_text
from minifer.serving.errors import APIError, refusals
from minifer.serving.fields import CHAT, read_fields, required
from minifer.serving.generation import (
    Call,
    Choice,
    Generation,
    check_stream_options,
    in_thread,
    request_name,
    shows_loops,
)
from minifer.serving.logprobs import chat_logprobs, prompt_logprobs
from minifer.serving.reply import ReplyParser
from minifer.serving.sampling import sampling_params, structured_output
from minifer.serving.streaming import DONE, event
from minifer.structured_output import StructuredOutput

if TYPE_CHECKING:
    from minifer.engine import Engine
    from minifer.serving.app import Server

# A piece of a stream without any of these would say nothing: all its text is held back.
_NEWS = ("delta", "finish_reason", "logprobs", "token_ids", "num_loops")


async def read_chat(server: Server, body: Mapping[str, Any]) -> tuple[Call, Generation]:
    """What a request asks for, and its prompt. Raises `APIError`."""
    fields = read_fields(body, CHAT)
    server.check_model(fields)
    call = _Call(server, fields)
    return call, Generation(server, call.name, [await call.read_prompt()], call.params)


class _Call:
    """One request's wishes about the form of its answer."""

    def __init__(self, server: Server, fields: Mapping[str, Any]) -> None:
        self.server = server
        self.fields = fields
        self.name = request_name(fields)
        self.include_usage = check_stream_options(fields)
        self.shows_loops = shows_loops(server, fields)
        self.messages: list[dict[str, Any]] = required(fields, "messages")
        check_messages(self.messages)
        structured = self._read_tools(structured_output(fields))
        self.top_logprobs = self._read_logprobs()
        self.params = sampling_params(
            server.llm.engine.default_params,
            fields,
            max_tokens=self._read_max_tokens(),
            logprobs=self.top_logprobs,
            structured=structured,
            max_logprobs=server.settings.max_logprobs,
        )
        if server.hides_tags and "skip_special_tokens" not in fields:
            self.params = self.params.with_(
                skip_special_tokens=not (self.tools or server.writes_reasoning)
            )
        self.inside = False  # does the reply begin within reasoning?

    def _read_tools(self, structured: StructuredOutput | None) -> StructuredOutput | None:
        """Checks the tools; returns the form the reply must have, theirs included."""
        fields = self.fields
        with refusals(fields):
            self.tools = check_tools(fields.get("tools"))
            choice = fields.get("tool_choice", "auto")
            self.parallel = fields.get("parallel_tool_calls", True)
            for name in ("tool_choice", "parallel_tool_calls"):
                if name in fields and not self.tools and fields[name] != "none":
                    raise APIError(400, f"{name} needs tools", param=name)
            form = tool_choice_constraint(self.tools, choice, self.parallel, structured)
        if choice == "none":
            self.tools = []
        return form

    def _read_logprobs(self) -> int | None:
        k: int = self.fields.get("top_logprobs", 0)
        if self.fields.get("logprobs"):
            return k
        if "top_logprobs" in self.fields and k:
            raise APIError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return None

    def _read_max_tokens(self) -> int | None:
        """As many as fit unless the request says otherwise; OpenAI has two names for it."""
        names = ("max_tokens", "max_completion_tokens")
        given = {self.fields[name] for name in names if name in self.fields}
        for name in names:
            if (value := self.fields.get(name, 1)) < 1:
                message = f"{name} must be an integer of at least 1, got {value}"
                raise APIError(400, message, param=name)
        if len(given) > 1:
            raise APIError(
                400,
                "max_tokens and max_completion_tokens are two names of one limit; they differ",
                param="max_completion_tokens",
            )
        return given.pop() if given else None

    async def check(self, generation: Generation) -> None:
        """Does the conversation call one tool for ever? What then is `EngineConfig.guards`'.

        One that is too long is about to be refused anyway.
        """
        engine, num_tokens = self.server.llm.engine, len(generation.prompts[0])
        action, fits = engine.config.guards, num_tokens <= engine.limits.max_prompt_len
        reason = tool_loop(self.messages) if fits and action != "off" else None
        if reason is None:
            return

        def trip(engine: Engine) -> None:
            engine.postprocessor.guards.trip("tool_loop", reason, action, self.name)

        await self.server.llm.call(trip)
        if action == "stop":
            raise APIError(
                400, f"tool-call loop: {reason}", param="messages", code="tool_call_loop"
            )

    async def read_prompt(self) -> list[int]:
        """Token ids of the conversation. The template writes BOS itself: none is added."""
        fields, tokenizer = self.fields, self.server.tokenizer
        text: str = await in_thread(conversation_text, tokenizer, self.messages, self.tools, fields)
        if self.server.writes_reasoning:
            continued = fields.get("continue_final_message", False)
            last = plain_text(self.messages[-1].get("content")) if continued else ""
            self.inside = starts_inside(text, last)
        ids: list[int] = await in_thread(tokenizer.encode, text, add_special_tokens=False)
        return ids

    def _parser(self) -> ReplyParser:
        # A form holds from the reply's first character on: it leaves no room for reasoning.
        inside = self.inside and self.params.structured is None
        reasoning = ReasoningScanner(inside) if self.server.writes_reasoning else None
        return ReplyParser(reasoning, ToolCallScanner() if self.tools else None, self.parallel)

    async def answer(self, generation: Generation) -> dict[str, Any]:
        """The whole answer."""
        choices = []
        for choice in await generation.collect():
            parser = self._parser()
            parser.push(choice.text, finished=True)
            shown = self._form(choice, {"message": parser.message()}, parser)
            choices.append(shown)
        whole = self._envelope(generation, choices, "chat.completion")
        return whole | self._prompt_part(generation) | {"usage": generation.usage()}

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The role of each choice, at once; then one event for each new piece."""
        parsers = [self._parser() for _ in range(self.params.n)]
        no_usage = {"usage": None} if self.include_usage else {}

        def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
            return event(
                self._envelope(generation, choices, "chat.completion.chunk") | no_usage | more
            )

        for index in range(self.params.n):
            delta = {"role": "assistant", "content": ""}
            yield chunk([self._form(Choice(index), {"delta": delta}, parsers[index])])
        prompt_part: dict[str, Any] | None = None
        async for _, output in generation.outputs():
            for new in output.outputs:
                form = self._piece(new, parsers[new.index])
                more = {}
                if prompt_part is None:
                    more = prompt_part = self._prompt_part(generation)
                if more or any(form.get(key) for key in _NEWS):
                    yield chunk([form], **more)
        if self.include_usage:
            yield chunk([], usage=generation.usage())
        yield DONE

    def _piece(self, new: CompletionOutput, parser: ReplyParser) -> dict[str, Any]:
        piece = Choice(new.index)
        piece.add(new)
        delta = parser.push(new.text, new.finish_reason is not None)
        return self._form(piece, {"delta": delta}, parser)

    def _form(self, piece: Choice, part: dict[str, Any], parser: ReplyParser) -> dict[str, Any]:
        """A choice, or a new piece of one, in OpenAI's form. part: its message or delta."""
        logprobs = None
        if self.top_logprobs is not None and piece.token_ids:
            logprobs = chat_logprobs(
                piece.token_ids, piece.logprobs, self.top_logprobs, self.server.token_bytes
            )
        reason = piece.finish_reason
        if reason == "stop" and parser.calls:
            reason = "tool_calls"
        form = {
            "index": piece.index,
            **part,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": piece.stop_reason,
        }
        if self.fields.get("return_token_ids"):
            form["token_ids"] = piece.token_ids
        if self.shows_loops:
            form["num_loops"] = piece.num_loops
        return form

    def _prompt_part(self, generation: Generation) -> dict[str, Any]:
        """vLLM's fields about the prompt, where they were asked for."""
        part: dict[str, Any] = {}
        if "prompt_logprobs" in self.fields:
            part["prompt_logprobs"] = prompt_logprobs(generation.prompt_logprobs[0])
        if self.fields.get("return_token_ids"):
            part["prompt_token_ids"] = generation.prompts[0]
        return part

    def _envelope(
        self, generation: Generation, choices: list[dict[str, Any]], kind: str
    ) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{generation.name}",
            "object": kind,
            "created": generation.created,
            "model": self.server.model_name,
            "choices": choices,
        }
