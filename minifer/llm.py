"""`LLM`: what most readers call first. Prompts in, text out."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from tqdm import tqdm

from minifer.assembly import load
from minifer.config import EngineConfig
from minifer.engine import Engine
from minifer.events import EventSink
from minifer.execution.runner import prepare_backend
from minifer.outputs import RequestOutput
from minifer.postprocessing.hooks import TokenHook, copy_hooks
from minifer.request import OutputKind, SamplingParams
from minifer.sampling_params import as_params

if TYPE_CHECKING:
    from minifer.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class ScoreOutput:
    """How likely a model finds a text: log-probabilities of its tokens after the first.

    token_logprobs[i] belongs to token_ids[i + 1]; natural logarithm.
    """

    token_ids: list[int]
    token_logprobs: list[float]

    @property
    def total(self) -> float:
        return sum(self.token_logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability; `nan` for a single token."""
        if not self.token_logprobs:
            return math.nan
        return math.exp(-self.total / len(self.token_logprobs))


class LLM:
    """A model and its engine.

    ::

        with LLM("minifer-tiny") as llm:
            (answer,) = llm.generate("The for statement", SamplingParams(max_tokens=32))
            print(answer.outputs[0].text)

    model: "default" (what `minifer pull` fetched, else minifer-tiny), "minifer-tiny", a folder in
        Hugging Face format, a GGUF file, or a hub id.
    options: fields of `EngineConfig`. sinks: receive every event (`minifer.events`).

    Raises `ValueError` for an unknown option or a model that cannot be run. Not thread-safe.
    """

    def __init__(
        self, model: str = "default", *, sinks: Sequence[EventSink] = (), **options: Any
    ) -> None:
        config = EngineConfig.from_kwargs(model=model, **options)
        prepare_backend(config)
        start = time.perf_counter()
        loaded = load(config)
        self.load_seconds = time.perf_counter() - start
        self.notice = loaded.notice
        self.generation_defaults = loaded.generation_defaults
        self.engine = Engine.from_loaded(loaded, config, sinks=sinks)
        self.model_config = loaded.config
        self._names = itertools.count()
        self._inbox: dict[str, list[RequestOutput]] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ValueError("this model came without a tokenizer: give token ids")
        return tokenizer

    def default_params(self) -> SamplingParams:
        """What the model's `generation_config.json` suggests, on top of our defaults."""
        return self.engine.default_params

    # -- generate

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        hooks: Sequence[TokenHook] = (),
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Continue one prompt or several, all in one batch; results in the order of the prompts.

        A prompt (text or token ids) is taken as it is: no chat template is applied, and an
        instruction-tuned model asked a bare question may end at once. Use `chat` for questions.

        params: one for all, one a prompt, or None for `default_params()`.
        hooks: copied for each sequence where there are several.
        Raises `ValueError` when a request is refused; then none of them has run.
        """
        batch = _as_batch(prompts)
        per_prompt = self._params(params, len(batch))
        final = [replace(p, output_kind=OutputKind.FINAL_ONLY) for p in per_prompt]
        ids: list[str] = []
        try:
            for prompt, sampling in zip(batch, final, strict=True):
                own = hooks if len(batch) == 1 else copy_hooks(hooks)
                ids.append(self._add(prompt, sampling, own))
            bar = tqdm(ids, unit="request", disable=not use_tqdm)
            return [self._next(request_id)[-1] for request_id in bar]
        finally:
            self._forget(ids)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template.

        messages: [{"role": "user", "content": "…"}, …]. Raises `ValueError` when the model has no
        template or it refuses the messages.
        """
        if not isinstance(messages, (list, tuple)) or not messages:
            raise ValueError(f"messages must be a list of at least one message, got {messages!r}")
        conversations = cast(
            "Sequence[Sequence[Message]]",
            [messages] if isinstance(messages[0], Mapping) else messages,
        )
        prompts = [
            self.tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, params, **options)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        hooks: Sequence[TokenHook] = (),
    ) -> Generator[RequestOutput, None, None]:
        """Continue one prompt and hand out each piece as it comes.

        For a conversation give it the ids of `tokenizer.apply_chat_template(messages)`.

        By default each output holds what is new (`OutputKind.DELTA`); a `params.output_kind` other
        than CUMULATIVE is kept. Closing the iterator aborts the request; closing the engine makes
        it raise `RuntimeError`.
        """
        (sampling,) = self._params(params, 1)
        if params is None or params.output_kind is OutputKind.CUMULATIVE:
            sampling = replace(sampling, output_kind=OutputKind.DELTA)
        stream = self._stream(self._add(prompt, sampling, hooks))
        next(stream)  # a generator that never ran would ignore that it is closed
        return cast("Generator[RequestOutput, None, None]", stream)

    def _stream(self, request_id: str) -> Generator[RequestOutput | None, None, None]:
        try:
            yield None
            finished = False
            while not finished:
                for output in self._next(request_id):
                    finished = output.finished
                    yield output
        finally:
            self._forget([request_id])

    def score(self, prompts: Prompt | Sequence[Prompt]) -> list[ScoreOutput]:
        """Log-probability of every token of a text given those before it.

        The last position of the model's context is needed for the draw that follows the text, so
        a text may have at most `max_model_len − 1` tokens.
        """
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        results = []
        for output in self.generate(prompts, params):
            if output.outputs[0].finish_reason == "error":
                raise ValueError(f"the text cannot be scored: {output.outputs[0].stop_reason}")
            ids = output.prompt_token_ids
            positions = output.prompt_logprobs or []
            logprobs = [
                scored[token].logprob
                for token, scored in zip(ids[1:], positions[1:], strict=True)
                if scored is not None
            ]
            results.append(ScoreOutput(ids, logprobs))
        return results

    # -- underneath

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            return [self.default_params()] * count
        if not isinstance(params, (list, tuple)):
            return [as_params(params)] * count
        if len(params) != count:
            raise ValueError(f"params must hold one entry a prompt ({count}), got {len(params)}")
        return [as_params(entry) for entry in params]

    def _add(self, prompt: Prompt, params: SamplingParams, hooks: Sequence[TokenHook]) -> str:
        request_id = f"request-{next(self._names)}"
        self.engine.add_request(request_id, prompt, params, hooks=hooks)
        self._inbox[request_id] = []
        return request_id

    def _next(self, request_id: str) -> list[RequestOutput]:
        """What came for a request since it was last asked; steps until there is something.

        Several streams may take turns: what a step brings for others waits in their inbox.
        """
        while not self._inbox[request_id]:
            if not self.engine.has_unfinished_requests:
                raise RuntimeError("the engine was closed before this request was finished")
            for output in self.engine.step():
                if output.request_id in self._inbox:
                    self._inbox[output.request_id].append(output)
        outputs, self._inbox[request_id] = self._inbox[request_id], []
        return outputs

    def _forget(self, ids: Iterable[str]) -> None:
        """Abort what is still running of these requests, and drop what nobody will read."""
        for request_id in ids:
            self.engine.abort(request_id)
            self._inbox.pop(request_id, None)

    def close(self) -> None:
        """Abort what is running and release the model's memory."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text or ids) or a list of them → a list."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]  # admission says what is wrong with it
    items = list(prompts)
    if items and all(isinstance(item, (int, Integral)) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]
