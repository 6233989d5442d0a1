"""Methods of an object that must not be called from within each other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class Exclusive(Protocol):
    """An object that knows whether one of its methods is running."""

    _working: bool


S = TypeVar("S", bound=Exclusive)
P = ParamSpec("P")
T = TypeVar("T")


def one_at_a_time(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Refuse a call from within another one: from a hook or an event sink, or a second thread."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._working:
            raise RuntimeError(
                f"{method.__name__} was called while the engine works: a hook or an event sink "
                "must not call it (a hook ends its sequence by its verdict), nor a second thread"
            )
        self._working = True
        try:
            return method(self, *args, **kwargs)
        finally:
            self._working = False

    return call
