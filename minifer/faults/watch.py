"""An engine with detectors on it: the same calls, and every detector sees what goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from minifer.engine import Engine
from minifer.faults.detectors import Detector, Message
from minifer.outputs import RequestOutput
from minifer.request import SamplingParams

T = TypeVar("T")


class Watch:
    """Passes every call on to the engine. Requests must come through here to be seen.

    make: builds the detectors; they see the engine before a fault is injected, as they would
    be there before a release that brings one.
    """

    def __init__(self, engine: Engine, make: Sequence[Callable[[Engine], Detector]]) -> None:
        self.engine = engine
        self.detectors = [detector(engine) for detector in make]

    def add_request(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams
    ) -> None:
        """`Engine.add_request`."""
        self._guarded(lambda: self.engine.add_request(request_id, prompt, params))
        tokenizer = self.engine.tokenizer
        if isinstance(prompt, str):
            assert tokenizer is not None  # the engine has taken a text
            ids = tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        for detector in self.detectors:
            detector.on_request(request_id, ids, params)

    def abort(self, request_id: str) -> None:
        """`Engine.abort`; an exception is told to the detectors, as a server would log it."""
        try:
            output = self.engine.abort(request_id)
        except Exception as error:
            for detector in self.detectors:
                detector.on_exception(error)
        else:
            self._tell([output] if output is not None else [])

    def step(self) -> list[RequestOutput]:
        """`Engine.step`; an exception is told to the detectors and raised."""
        outputs = self._guarded(self.engine.step)
        self._tell(outputs)
        for detector in self.detectors:
            detector.on_step()
        return outputs

    def conversation(self, messages: Sequence[Message]) -> None:
        """The history that a chat request brings."""
        for detector in self.detectors:
            detector.on_conversation(messages)

    def idle(self) -> None:
        """The engine serves nobody: let the detectors use it."""
        for detector in self.detectors:
            self._guarded(detector.on_idle)

    def _tell(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            for detector in self.detectors:
                detector.on_output(output)

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            for detector in self.detectors:
                detector.on_exception(error)
            raise
