"""What a router must know of a request: how long its prompt is, and what its blocks are called.

Token ids and keys are made by the functions that a replica uses. What these refuse is no business
of the router's: the request goes to some replica, and the refusal that comes back is the answer.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from minifer.config import EngineConfig
from minifer.kv.prefix_key import extra_keys_of
from minifer.loops import LoopConfig
from minifer.postprocessing.tool_calls import check_tools
from minifer.routing.policy import RoutingRequest
from minifer.routing.publisher import prompt_digests
from minifer.serving.chat_prompt import check_messages, conversation_text
from minifer.serving.completions import prompts_of
from minifer.serving.errors import APIError, refusals
from minifer.serving.fields import CHAT, COMPLETION, read_fields, required
from minifer.serving.generation import in_thread
from minifer.text.tokenizer import Tokenizer


class PromptReader:
    """Makes a `RoutingRequest` of a body.

    config: of the engines. loop: of a loop model. max_prompts: of one completions request.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: EngineConfig,
        loop: LoopConfig | None = None,
        max_prompts: int = 64,
    ) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._loop = loop
        self._max_prompts = max_prompts

    async def read(self, body: Mapping[str, Any]) -> RoutingRequest:
        """Of a body that would be refused nothing is known, and its length is 0."""
        name = uuid.uuid4().hex  # the caller's own need not be unique among routers' requests
        try:
            fields = read_fields(body, CHAT if "messages" in body else COMPLETION)
            prompts = await self.token_ids(fields)
            keys = await in_thread(self._keys, prompts[0], fields)
        except (APIError, OverflowError):  # an id of more than 63 bits has no key
            return RoutingRequest(name, 0, (), self._config.block_size)
        user = body.get("user")
        return RoutingRequest(
            name,
            sum(map(len, prompts)),
            keys,
            self._config.block_size,
            user if isinstance(user, str) else "",
        )

    async def token_ids(self, fields: Mapping[str, Any]) -> list[list[int]]:
        """Of each prompt. Raises `APIError` 400 for what a replica would refuse, too."""
        encode = self._tokenizer.encode
        if "messages" not in fields:
            prompts = prompts_of(fields, self._max_prompts)
            return [await in_thread(encode, p) if isinstance(p, str) else p for p in prompts]
        messages = required(fields, "messages")
        check_messages(messages)
        with refusals(fields):
            tools = check_tools(fields.get("tools"))
        if fields.get("tool_choice") == "none":
            tools = []
        text = await in_thread(conversation_text, self._tokenizer, messages, tools, fields)
        return [await in_thread(encode, text, add_special_tokens=False)]

    def _keys(self, ids: Sequence[int], fields: Mapping[str, Any]) -> tuple[bytes, ...]:
        """Digests of the full blocks of a prompt; none where no cached one would be used."""
        scores = "prompt_logprobs" in fields or ("logprobs" in fields and fields.get("echo"))
        if scores or not self._config.enable_prefix_caching:
            return ()
        loops = None if self._loop is None else self._loop.depth(fields.get("num_loops"))
        policy = "full" if self._loop is None else self._loop.kv_policy
        extra = extra_keys_of(fields.get("cache_salt"), loops, policy)
        return prompt_digests(ids, self._config.block_size, extra)
