"""`AsyncLLM`: one engine on one thread, any number of asyncio callers.

::

    event loop(s)                     engine thread
    open(prompts) ── command ───────▶ between two steps: admit, abort, look at the engine
    OutputStream  ◀── outputs ─────── after a step: one wake-up a loop, for all its streams
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from minifer.engine import Engine
from minifer.llm import Prompt
from minifer.outputs import RequestOutput
from minifer.postprocessing.hooks import TokenHook, copy_hooks
from minifer.request import OutputKind, SamplingParams
from minifer.sampling_params import as_params

log = logging.getLogger("minifer.async_llm")

T = TypeVar("T")
_Item = RequestOutput | BaseException | None  # None: the requests have been admitted


class EngineClosedError(RuntimeError):
    """The engine was closed, or died, before the request was finished."""


class OutputStream:
    """The outputs of requests that were opened together, in the order they are made.

    An async iterator that ends when all of them are finished. Belongs to the event loop that
    opened it. `close` aborts what is still running; call it (it may be called twice) when the
    iteration is left early.
    """

    def __init__(self, llm: AsyncLLM, request_ids: Sequence[str]) -> None:
        self.request_ids = tuple(request_ids)
        self.loop = asyncio.get_running_loop()
        self._llm = llm
        self._open = set(request_ids)
        self._inbox: asyncio.Queue[_Item] = asyncio.Queue()

    def put(self, item: _Item) -> None:
        """Called on the stream's own loop."""
        self._inbox.put_nowait(item)

    async def admitted(self) -> None:
        """Wait until the engine has taken the requests; raises what it refuses them with."""
        await self._next()

    async def _next(self) -> RequestOutput | None:
        item = await self._inbox.get()
        if isinstance(item, BaseException):
            self._open.clear()
            raise item
        return item

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._open:
            raise StopAsyncIteration
        output = await self._next()
        assert output is not None  # comes first, and once
        if output.finished:
            self._open.discard(output.request_id)
        return output

    def close(self) -> None:
        """Abort the requests that are not finished; their outputs are no longer delivered."""
        still_open, self._open = self._open, set()
        if still_open:
            self._llm.leave(self, still_open)


class AsyncLLM:
    """For servers: `async for output in llm.generate(...)`; cancelling it aborts the request.

    The engine lives on its own thread and takes commands from a queue between two steps, so
    nobody else touches it. Build it with `AsyncLLM(model, **EngineConfig fields)`, or give it an
    engine, which it closes in the end. Use it as a context manager (plain or async), or call
    `close`. Raises `ValueError` for an engine together with options.

    on_step: called on the engine's thread after every step with the number of tokens it computed.
    """

    def __init__(
        self, model: str = "default", *, engine: Engine | None = None, **options: Any
    ) -> None:
        if engine is not None and options:
            raise ValueError(f"options must come without an engine, got {', '.join(options)}")
        self.engine = engine if engine is not None else Engine.from_pretrained(model, **options)
        self.on_step: Callable[[int], None] | None = None
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, OutputStream] = {}  # touched by the engine's thread only
        self._names = itertools.count()
        self._closed = False
        self._closing = threading.Lock()  # no command may enter the queue after the last one
        self._thread = threading.Thread(target=self._run, name="minifer-engine", daemon=True)
        self._thread.start()

    # -- for the callers

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        hooks: Sequence[TokenHook] = (),
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come, of the kind `params.output_kind` asks for.

        For a conversation give it the ids of `engine.tokenizer.apply_chat_template(messages)`.

        Raises `ValueError` when the request is refused, `EngineClosedError` (a `RuntimeError`)
        when the engine is closed before the request is finished.
        """
        names = None if request_id is None else [request_id]
        stream = await self.open([prompt], params, request_ids=names, hooks=hooks)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def complete(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """The finished output of one request."""
        params = self.engine.default_params if params is None else as_params(params)
        params = params.with_(output_kind=OutputKind.FINAL_ONLY)
        async for output in self.generate(prompt, params, **options):
            last = output
        return last

    async def open(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        hooks: Sequence[TokenHook] = (),
    ) -> OutputStream:
        """Admit several prompts at once, all or none; returns when the engine has taken them.

        request_ids: one a prompt; None makes some up. Whoever leaves the stream early closes it;
        cancelled before it returns, nothing stays behind. Raises as `generate` does.
        """
        if request_ids is None:
            request_ids = [f"request-{next(self._names)}" for _ in prompts]
        stream = OutputStream(self, request_ids)
        self._submit(lambda: self._admit(stream, prompts, params, hooks))
        try:
            await stream.admitted()
        except BaseException:
            stream.close()
            raise
        return stream

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function on the engine's thread, between two steps, and return its result."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def tell(result: T | None, error: Exception | None) -> None:
            if answer.done():  # the caller was cancelled
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        def command() -> None:
            result, error = None, None
            try:
                result = function(self.engine)
            except Exception as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its callers gone
                loop.call_soon_threadsafe(tell, result, error)

        self._submit(command)
        return await answer

    def post(self, function: Callable[[Engine], object]) -> None:
        """The same without waiting: an exception is logged, a closed engine ignored."""

        def command() -> None:
            try:
                function(self.engine)
            except Exception:
                log.exception("a function posted to the engine's thread failed")

        self._submit(command, or_raise=False)

    def abort_all(self) -> None:
        """End every open request: its caller gets a last output with `finish_reason="abort"`."""
        self._submit(self._abort_all, or_raise=False)

    def leave(self, stream: OutputStream, request_ids: Iterable[str]) -> None:
        """Abort requests of a stream that nobody reads any more."""
        ids = list(request_ids)
        self._submit(lambda: self._abort(stream, ids), or_raise=False)

    @property
    def is_alive(self) -> bool:
        """Does the engine take requests, with all of its processes there?"""
        runner = getattr(self.engine, "runner", None)  # which `close` drops meanwhile
        complete = getattr(runner, "lost", None) is None
        return self._thread.is_alive() and not self._closed and complete

    def _submit(self, command: Callable[[], None], or_raise: bool = True) -> None:
        with self._closing:
            if not self._closed:
                self._commands.put(command)
                return
        if or_raise:
            raise EngineClosedError("the engine is closed")

    # -- on the engine's thread

    def _admit(
        self,
        stream: OutputStream,
        prompts: Sequence[Prompt],
        params: SamplingParams | None,
        hooks: Sequence[TokenHook],
    ) -> None:
        admitted: list[str] = []
        try:
            for request_id, prompt in zip(stream.request_ids, prompts, strict=True):
                own = hooks if len(prompts) == 1 else copy_hooks(hooks)
                self.engine.add_request(request_id, prompt, params, hooks=own)
                admitted.append(request_id)
        except Exception as error:
            for request_id in admitted:
                self.engine.abort(request_id)
            self._deliver([(stream, error)])
        else:
            self._streams.update((request_id, stream) for request_id in admitted)
            self._deliver([(stream, None)])

    def _abort(self, stream: OutputStream, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            # A refused duplicate must not abort the request that owns the id.
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]
                self.engine.abort(request_id)

    def _abort_all(self) -> None:
        outputs = (self.engine.abort(request_id) for request_id in list(self._streams))
        self._hand_out([output for output in outputs if output is not None])

    def _run(self) -> None:
        farewell = EngineClosedError("the engine was closed before this request was finished")
        try:
            while self._obey():
                outputs = self.engine.step()
                if self.on_step is not None:  # before anybody can know that the step is over
                    self.on_step(self.engine.num_step_tokens)
                self._hand_out(outputs)
        except BaseException as error:  # nobody may wait for a thread that is gone
            farewell = EngineClosedError(f"the engine stopped: {type(error).__name__}: {error}")
            with self._closing:
                self._closed = True
            while not self._commands.empty():  # whoever asked meanwhile is told too
                if (command := self._commands.get()) is not None:
                    command()
            raise
        finally:
            streams = set(self._streams.values())
            self._streams.clear()
            self._deliver([(stream, farewell) for stream in streams])
            self.engine.close()

    def _hand_out(self, outputs: Iterable[RequestOutput]) -> None:
        """Each output to its stream; a request that is finished has none any more."""
        items: list[tuple[OutputStream, _Item]] = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if output.finished:
                self._streams.pop(output.request_id, None)
            if stream is not None:
                items.append((stream, output))
        self._deliver(items)

    def _deliver(self, items: Iterable[tuple[OutputStream, _Item]]) -> None:
        """One wake-up for each event loop, whatever the number of its streams."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, _Item]]] = {}
        for stream, item in items:
            by_loop.setdefault(stream.loop, []).append((stream, item))
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:  # the loop is closed, and its callers gone
                for stream, _ in batch:
                    self._abort(stream, stream.request_ids)

    def _obey(self) -> bool:
        """Carry out the waiting commands, sleeping while there is no work; False to stop."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_unfinished_requests)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    # -- the end

    def close(self) -> None:
        """Stop the thread after its current step; open requests raise `EngineClosedError`."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        self._thread.join()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)


def _put_all(batch: Iterable[tuple[OutputStream, _Item]]) -> None:
    for stream, item in batch:
        stream.put(item)
