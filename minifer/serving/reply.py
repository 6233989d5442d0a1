"""The text of a chat reply, taken apart: reasoning, content, tool calls."""

from __future__ import annotations

from typing import Any

from minifer.postprocessing.reasoning import ReasoningScanner
from minifer.postprocessing.tool_calls import ToolCallDelta, ToolCallScanner


class ReplyParser:
    """Splits one reply as it comes::

        text ─▶ ReasoningScanner ─▶ content ─▶ ToolCallScanner ─▶ content
                 └▶ reasoning_content            └▶ tool_calls

    reasoning, tools: None where the model or the request has no use for it. parallel: with False
    the reply's first call is the only one that counts; what follows it is left out.
    """

    def __init__(
        self,
        reasoning: ReasoningScanner | None = None,
        tools: ToolCallScanner | None = None,
        parallel: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel
        self.content: str | None = None
        self.reasoning_content: str | None = None
        self.calls: list[dict[str, Any]] = []  # in OpenAI's form

    def push(self, text: str, finished: bool = False) -> dict[str, Any]:
        """Take new text; returns what is new, in the form of OpenAI's `delta`.

        finished: nothing comes after it.
        """
        thought, content = "", text
        if self._reasoning is not None:
            thought, content = self._reasoning.push(text)
            if finished:
                last = self._reasoning.finish()
                thought, content = thought + last[0], content + last[1]
        deltas: list[ToolCallDelta] = []
        if self._tools is not None:
            content, deltas = self._tools.push(content)
            if finished:
                rest, more = self._tools.finish()
                content, deltas = content + rest, deltas + more
        if not self._parallel:
            if self.calls and self._tools is not None and self._tools.calls:
                content = ""
            deltas = [delta for delta in deltas if delta.index == 0]
        return self._delta(thought, content, deltas)

    def _delta(self, thought: str, content: str, deltas: list[ToolCallDelta]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if thought:
            delta["reasoning_content"] = thought
            self.reasoning_content = (self.reasoning_content or "") + thought
        if content:
            delta["content"] = content
            self.content = (self.content or "") + content
        if deltas:
            delta["tool_calls"] = [self._call(one) for one in deltas]
        return delta

    def _call(self, new: ToolCallDelta) -> dict[str, Any]:
        function: dict[str, Any] = {"arguments": new.arguments}
        if new.id is None:
            self.calls[new.index]["function"]["arguments"] += new.arguments
            return {"index": new.index, "function": function}
        function = {"name": new.name, **function}
        self.calls.append({"id": new.id, "type": "function", "function": dict(function)})
        return {"index": new.index, "id": new.id, "type": "function", "function": function}

    def message(self) -> dict[str, Any]:
        """The whole reply, in the form of OpenAI's `message`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.content is None and not self.calls:
            message["content"] = ""
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.calls:
            message["tool_calls"] = self.calls
        return message
