"""`AsyncLLM`: one engine on one thread, any number of asyncio callers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any

from minifer.engine import Engine
from minifer.llm import Prompt
from minifer.outputs import RequestOutput
from minifer.postprocessing.hooks import TokenHook
from minifer.request import OutputKind, SamplingParams
from minifer.sampling_params import as_params

_Mailbox = Callable[[RequestOutput | BaseException], None]


class AsyncLLM:
    """For servers: `async for output in llm.generate(...)`; cancelling it aborts the request.

    The engine lives on its own thread and takes commands from a queue between two steps, so
    nobody else touches it. Build it with `AsyncLLM(model, **EngineConfig fields)`, or give it an
    engine, which it closes in the end. Use it as a context manager (plain or async), or call
    `close`. Raises `ValueError` for an engine together with options.
    """

    def __init__(
        self, model: str = "default", *, engine: Engine | None = None, **options: Any
    ) -> None:
        if engine is not None and options:
            raise ValueError(f"options must come without an engine, got {', '.join(options)}")
        self.engine = engine if engine is not None else Engine.from_pretrained(model, **options)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._mailboxes: dict[str, _Mailbox] = {}  # touched by the engine's thread only
        self._names = itertools.count()
        self._closed = False
        self._closing = threading.Lock()  # no command may enter the queue after the last one
        self._thread = threading.Thread(target=self._run, name="minifer-engine", daemon=True)
        self._thread.start()

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

        Raises `ValueError` when the request is refused, `RuntimeError` when the engine is closed
        before the request is finished.
        """
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()
        name = request_id if request_id is not None else f"request-{next(self._names)}"

        def deliver(item: RequestOutput | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its callers gone
                loop.call_soon_threadsafe(inbox.put_nowait, item)

        finished = False
        self._submit(lambda: self._admit(name, prompt, params, hooks, deliver))
        try:
            while not finished:
                item = await inbox.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:  # the caller went away
                self._submit(lambda: self._abort(name, deliver), or_raise=False)

    async def complete(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """The finished output of one request."""
        params = self.engine.default_params if params is None else as_params(params)
        params = params.with_(output_kind=OutputKind.FINAL_ONLY)
        async for output in self.generate(prompt, params, **options):
            last = output
        return last

    def _submit(self, command: Callable[[], None], or_raise: bool = True) -> None:
        with self._closing:
            if not self._closed:
                self._commands.put(command)
                return
        if or_raise:
            raise RuntimeError("the engine is closed")

    # -- on the engine's thread

    def _admit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        hooks: Sequence[TokenHook],
        deliver: _Mailbox,
    ) -> None:
        try:
            self.engine.add_request(request_id, prompt, params, hooks=hooks)
        except Exception as error:
            deliver(error)
        else:
            self._mailboxes[request_id] = deliver

    def _abort(self, request_id: str, deliver: _Mailbox) -> None:
        # A refused duplicate must not abort the request that owns the id.
        if self._mailboxes.get(request_id) is deliver:
            del self._mailboxes[request_id]
            self.engine.abort(request_id)

    def _run(self) -> None:
        farewell = RuntimeError("the engine was closed before this request was finished")
        try:
            while self._obey():
                for output in self.engine.step():
                    self._deliver(output)
        except BaseException as error:  # nobody may wait for a thread that is gone
            farewell = RuntimeError(f"the engine stopped: {type(error).__name__}: {error}")
            with self._closing:
                self._closed = True
            while not self._commands.empty():  # whoever asked meanwhile is told too
                if (command := self._commands.get()) is not None:
                    command()
            raise
        finally:
            for deliver in self._mailboxes.values():
                deliver(farewell)
            self._mailboxes.clear()
            self.engine.close()

    def _deliver(self, output: RequestOutput) -> None:
        deliver = self._mailboxes.get(output.request_id)
        if output.finished:
            self._mailboxes.pop(output.request_id, None)
        if deliver is not None:
            deliver(output)

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
        """Stop the thread after its current step; open requests raise `RuntimeError`."""
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
