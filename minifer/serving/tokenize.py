"""`POST /tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from minifer.postprocessing.tool_calls import check_tools
from minifer.serving.chat_prompt import check_messages, conversation_text
from minifer.serving.errors import APIError, refusals
from minifer.serving.fields import BOOLEAN, INTEGERS, OBJECT, OBJECTS, STRING, read_fields, required
from minifer.serving.generation import in_thread

if TYPE_CHECKING:
    from minifer.serving.app import Server

_TEXT = {
    "model": STRING,
    "prompt": STRING,
    "add_special_tokens": BOOLEAN,
    "return_token_strs": BOOLEAN,
}
_CHAT = {
    "model": STRING,
    "messages": OBJECTS,
    "tools": OBJECTS,
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
    "add_special_tokens": BOOLEAN,
    "chat_template_kwargs": OBJECT,
    "return_token_strs": BOOLEAN,
}
_DETOKENIZE = {"model": STRING, "tokens": INTEGERS}


async def tokenize(server: Server, body: Mapping[str, Any]) -> Response:
    """A prompt, or a conversation as the model sees it → its token ids and their number."""
    is_chat = "messages" in body
    if is_chat and "prompt" in body:
        raise APIError(400, "prompt and messages exclude each other", param="prompt")
    fields = read_fields(body, _CHAT if is_chat else _TEXT)
    server.check_model(fields)
    tokenizer = server.tokenizer
    text = await _render(server, fields) if is_chat else required(fields, "prompt")
    # A template writes special tokens itself.
    special = fields.get("add_special_tokens", not is_chat)
    ids: list[int] = await in_thread(tokenizer.encode, text, add_special_tokens=special)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": server.llm.engine.limits.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if fields.get("return_token_strs"):
        answer["token_strs"] = [tokenizer.id_to_token(i) for i in ids]
    return JSONResponse(answer)


async def _render(server: Server, fields: Mapping[str, Any]) -> str:
    messages = required(fields, "messages")
    check_messages(messages)
    with refusals(fields):
        tools = check_tools(fields.get("tools"))
    text: str = await in_thread(conversation_text, server.tokenizer, messages, tools, fields)
    return text


async def detokenize(server: Server, body: Mapping[str, Any]) -> Response:
    """Token ids → their text, special tokens included."""
    fields = read_fields(body, _DETOKENIZE)
    server.check_model(fields)
    ids = required(fields, "tokens")
    server.check_token_ids([ids], "tokens")
    text = await in_thread(server.tokenizer.decode, ids, skip_special_tokens=False)
    return JSONResponse({"prompt": text})
