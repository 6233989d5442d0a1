"""Many clients, mixed parameters, some that hang up: the traffic of the soak test.

Every request is made from its number alone, so that whoever wants to know what the answer should
have been can ask for it again, one by one.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

GAP = 1e-3  # logits closer than this may change places with the batch size
WORDS = [
    *("the", "list", "of", "names", "is", "a", "string", "that", "can", "be", "used", "in"),
    *("an", "expression", "when", "object", "has", "more", "than", "one", "method", "and"),
    *("class", "module", "returns", "its", "value", "to", "caller", "function", "sequence"),
]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


@dataclass
class Result:
    """What came back for one request. status: 0 when the client hung up. refused: how often the
    server was full."""

    number: int
    status: int = 0
    texts: list[str] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    error: str | None = None
    refused: int = 0


def make_body(number: int, model: str) -> tuple[str, dict[str, Any]]:
    """Route and body of request `number`. Prompts share beginnings, so that blocks are shared."""
    rng = random.Random(number)
    shared = random.Random(number % 7)
    words = [shared.choice(WORDS) for _ in range(shared.randrange(0, 40))]
    words += [rng.choice(WORDS) for _ in range(rng.randrange(1, 30))]
    body: dict[str, Any] = {"model": model, "max_tokens": rng.randrange(1, 80)}
    body["stream"] = rng.random() < 0.5
    kind = number % 10
    if kind < 6:
        body["temperature"] = 0
    else:
        body |= {"temperature": rng.choice([0.5, 0.9, 1.3]), "seed": rng.randrange(2**31)}
        body |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
    if kind == 1:
        body["stop"] = [" the", "\n\n"]
    elif kind == 2:
        body |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
    elif kind == 3:
        body |= {"min_tokens": body["max_tokens"] // 2, "ignore_eos": True}
    elif kind == 4:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "number", "schema": SCHEMA},
        }
        body["max_tokens"] = 40
    elif kind == 6:
        body["n"] = rng.randrange(2, 4)
    elif kind == 7:
        body["logit_bias"] = {str(rng.randrange(256)): -5}
    if kind in (5, 8):
        body["logprobs"] = 3
    if number % 3 == 0 and kind not in (5, 8):
        body["messages"] = [{"role": "user", "content": " ".join(words)}]
        return "/v1/chat/completions", body
    body["prompt"] = " ".join(words)
    return "/v1/completions", body


def hangs_up(number: int) -> bool:
    """One client in ten leaves before its answer is complete."""
    return number % 10 == 9


async def run(
    base_url: str, model: str, total: int, concurrency: int, first: int = 0, hang_up: bool = True
) -> list[Result]:
    """Send requests `first` … `first + total − 1`, `concurrency` at a time.

    hang_up: do some clients leave early?
    """
    numbers = iter(range(first, first + total))
    results: list[Result] = []
    limits = httpx.Limits(max_connections=concurrency + 8)
    async with httpx.AsyncClient(base_url=base_url, timeout=300, limits=limits) as client:

        async def worker() -> None:
            for number in numbers:
                results.append(await _one(client, number, model, hang_up))

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return sorted(results, key=lambda r: r.number)


async def _one(client: httpx.AsyncClient, number: int, model: str, hang_up: bool) -> Result:
    route, body = make_body(number, model)
    result, rng = Result(number), random.Random(number)
    try:
        patience = rng.uniform(0, 0.5) if hang_up and hangs_up(number) else None
        async with asyncio.timeout(patience):
            await _send(client, route, body, result)
            while result.status == 429:
                result.refused, result.error = result.refused + 1, None
                await asyncio.sleep(0.2)
                await _send(client, route, body, result)
    except TimeoutError:
        result.status = 0
    return result


async def _send(
    client: httpx.AsyncClient, route: str, body: dict[str, Any], result: Result
) -> None:
    async with client.stream("POST", route, json=body) as response:
        if response.status_code != 200:
            result.error = (await response.aread()).decode()
        elif body["stream"]:
            await _read_stream(response, body, result)
        else:
            answer = json.loads(await response.aread())
            choices = sorted(answer["choices"], key=lambda c: c["index"])
            result.texts = [
                c["message"]["content"] if "message" in c else c["text"] for c in choices
            ]
            result.finish_reasons = [c["finish_reason"] for c in choices]
        result.status = response.status_code


async def _read_stream(response: httpx.Response, body: dict[str, Any], result: Result) -> None:
    n = body.get("n", 1)
    result.texts, result.finish_reasons = [""] * n, [None] * n
    ends: Counter[int] = Counter()
    last = ""
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        last = line.removeprefix("data: ")
        if last == "[DONE]":
            break
        chunk = json.loads(last)
        if "error" in chunk:
            result.error = last
            continue
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
            result.texts[choice["index"]] += piece or ""
            if choice["finish_reason"] is not None:
                result.finish_reasons[choice["index"]] = choice["finish_reason"]
                ends[choice["index"]] += 1
    if result.error is None and (last != "[DONE]" or ends != Counter(range(n))):
        result.error = f"the stream ended with {last!r}, finish chunks {dict(ends)}"


def gap_at_divergence(address: str, number: int, model: str, other: str) -> float:
    """Alone, where the answer first differs from `other`: how far the two best logits are apart.

    0 where it is `other`, or goes on from it: then it was the company of the other run that decided
    a draw between two tokens whose logits and noise are nearly equal.
    """
    route, body = make_body(number, model)
    chat = "messages" in body
    body |= {"stream": False} | ({"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2})
    choice = httpx.post(f"{address}{route}", json=body, timeout=60).json()["choices"][0]
    if chat:
        steps = [
            (c["token"], [t["logprob"] for t in c["top_logprobs"]])
            for c in choice["logprobs"]["content"]
        ]
    else:
        lp = choice["logprobs"]
        steps = [
            (t, sorted(top.values())[-2:])
            for t, top in zip(lp["tokens"], lp["top_logprobs"], strict=True)
        ]
    if "".join(token for token, _ in steps).startswith(other):
        return 0.0
    text = ""
    for token, best in steps:
        text += token
        if not other.startswith(text):
            return max(best) - min(best)
    return math.inf
