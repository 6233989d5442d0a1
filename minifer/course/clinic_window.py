"""An engine seen from outside: what a user and an operator see of it, and nothing else.

All windows look alike; whether the engine behind one has a fault shows in what it does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from minifer.course import example
from minifer.course.clinic_parts import PARTS, Part
from minifer.engine import Engine
from minifer.execution.reference import reference_logits
from minifer.faults import registry
from minifer.faults.matrix import build_engine
from minifer.faults.registry import Fault, patched
from minifer.sampling_params import SamplingParams
from minifer.weights.resolve import LoadedModel

_LOUD = 1e4  # logit of a scripted token

_ids = itertools.count()


@dataclass(frozen=True)
class Reply:
    """One reply. text: as it was streamed, put together. tokens: those of the reply.

    logprobs: natural log-probability of each token when it was drawn. num_cached: tokens of the
    prompt that were found in the prefix cache. num_preemptions: times the request lost its blocks.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    num_cached: int
    num_preemptions: int


@dataclass(frozen=True, eq=False)
class Window:
    """An engine, as seen from outside. Greedy, and no end token ends a reply.

    block_size, num_blocks: P tokens a block, N blocks in the pool.
    ask(*prompts, max_tokens=8, stop=(), says=None, salt=None): serve the prompts in one batch;
        a `Reply` each. says: the text that the model is made to say, whatever it would rather;
        the reply ends with it, and max_tokens is ignored.
    oracle(prompt, tokens): the log-probability of each token after the prompt, by the slow twin:
        same weights, no cache, no batch, no fault.
    """

    name: str
    block_size: int
    num_blocks: int
    ask: Callable[..., list[Reply]]
    oracle: Callable[[str, Sequence[int]], list[float]]

    def __repr__(self) -> str:
        return f"<{self.name}: {self.num_blocks} blocks of {self.block_size} tokens>"


def window(
    fault: str | None = None,
    *,
    name: str = "an engine",
    loaded: LoadedModel | None = None,
    block_size: int = 16,
    num_blocks: int = 16,
    part: tuple[str, Part] | None = None,
) -> Window:
    """An engine with a fault of the registry, or without one.

    loaded: its model; minifer-tiny in float32 by default. part: (a name of `PARTS`, a function) to
    put in place of the engine's own. Raises `ValueError` for an unknown fault or part.
    """
    if part is not None and part[0] not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part[0]!r}")
    loaded = loaded or example.tiny()
    engine = build_engine(loaded, block_size=block_size, num_kv_blocks=num_blocks)
    room = _engine_room(engine, registry.get(fault) if fault is not None else None, part)
    next(room)
    send, encode, model = room.send, loaded.tokenizer.encode, loaded.model

    def ask(
        *prompts: str,
        max_tokens: int = 8,
        stop: Sequence[str] = (),
        says: str | None = None,
        salt: str | None = None,
    ) -> list[Reply]:
        _must_be_texts(prompts)
        script = list(encode(says)) if says else []
        params = SamplingParams(
            temperature=0,
            max_tokens=len(script) or max_tokens,
            ignore_eos=True,
            logprobs=0,
            stop=list(stop) or None,
            cache_salt=salt,
        )
        replies = send((prompts, params, script))
        if isinstance(replies, Exception):
            raise replies
        return replies

    def oracle(prompt: str, tokens: Sequence[int]) -> list[float]:
        ids = [*encode(prompt), *tokens]
        first = len(ids) - len(tokens)
        rows = reference_logits(model, ids[:-1])[first - 1 :].log_softmax(-1)
        scores: list[float] = rows[range(len(tokens)), list(tokens)].tolist()
        return scores

    return Window(name, block_size, num_blocks, ask, oracle)


_Call = tuple[Sequence[str], SamplingParams, Sequence[int]]


def _engine_room(
    engine: Engine, disease: Fault | None, part: tuple[str, Part] | None
) -> Generator[list[Reply] | Exception, _Call, None]:
    """Serves what it is sent. A generator keeps its variables where only its frame leads to, and
    frames are closed to answers in the grader; of a closure any function tells."""
    answer: list[Reply] | Exception = []
    while True:
        prompts, params, script = yield answer
        try:
            with _as_it_is(engine, disease, part), _scripted(engine, script):
                answer = _serve(engine, prompts, params)
        except Exception as error:
            answer = error


@contextmanager
def _as_it_is(
    engine: Engine, disease: Fault | None, part: tuple[str, Part] | None
) -> Iterator[None]:
    """The engine with its fault, and with the new part where that belongs."""
    plug = PARTS[part[0]].plug(engine, part[1]) if part else nullcontext()
    ill = disease.inject(engine) if disease else nullcontext()
    first, second = (plug, ill) if part and PARTS[part[0]].inside else (ill, plug)
    with first, second:
        yield


def _serve(engine: Engine, prompts: Sequence[str], params: SamplingParams) -> list[Reply]:
    names = [f"ask-{next(_ids)}" for _ in prompts]
    for request_id, prompt in zip(names, prompts, strict=True):
        engine.add_request(request_id, prompt, params)
    last: dict[str, Any] = {}
    while engine.has_unfinished_requests:
        last |= {output.request_id: output for output in engine.step()}
    return [_reply(last[request_id]) for request_id in names]


def _must_be_texts(prompts: Sequence[Any]) -> None:
    bad = [prompt for prompt in prompts if not isinstance(prompt, str) or not prompt]
    if bad or not prompts:
        raise ValueError(f"prompts must be texts that are not empty, got {bad or 'none'}")


def _scripted(engine: Engine, script: Sequence[int]) -> AbstractContextManager[None]:
    """Every request is made to say the script."""
    if not script:
        return nullcontext()
    runner: Any = engine.runner
    forward = runner.forward

    def loud(step: Any) -> Any:
        logits = forward(step).clone()
        for entry, row in step.sampled:
            place = entry.request.num_output_tokens
            if place < len(script):
                logits[row, script[place]] = _LOUD
        return logits

    return patched(runner, forward=loud)


def _reply(output: Any) -> Reply:
    answer = output.outputs[0]
    if answer.finish_reason == "error":
        raise RuntimeError(f"the engine ended a request with an error: {answer.stop_reason}")
    tokens = list(answer.token_ids)
    scores = [next(iter(row.values())).logprob for row in answer.logprobs or ()][: len(tokens)]
    return Reply(
        answer.text, tokens, scores, output.num_cached_tokens, output.metrics.num_preemptions
    )
