"""The one place that knows the inside of Triton's interpreter, 3.6 … 3.9: it has no public hooks.

`launch` runs a kernel as `kernel[(programs,)](…)` would, but tells somebody of every load, store
and atomic before it happens, and leaves to that somebody when each program runs.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from minifer.kernels.compat import INTERPRETED, TRITON_VERSION

_LOAD, _STORE, _ATOMIC = "create_masked_load", "create_masked_store", "create_atomic_rmw"
_UNKNOWN = tuple(f"create_atomic_{what}" for what in ("cas", "load", "store", "poll"))
_alone = threading.Lock()  # the interpreter has one builder, which is exchanged during a launch


class Watcher(Protocol):
    """Who is told. addresses: what the mask lets through, flat."""

    def run(self, body: Callable[[], None], resume: Callable[[int], None]) -> None:
        """Call body() once a program, in any thread, one at a time; `resume(program)` whenever
        another one goes on."""

    def load(self, addresses: np.ndarray) -> None: ...

    def store(self, addresses: np.ndarray) -> None: ...

    def atomic(
        self,
        addresses: np.ndarray,
        acquire: bool,
        release: bool,
        act: Callable[[], tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Call act() once: it returns the values before and after; NaN after if not known."""


def unsupported() -> str | None:
    """Why the co-simulator cannot run in this process; None where it can."""
    if not INTERPRETED.value:
        return "triton was imported without TRITON_INTERPRET=1"
    try:
        from triton.runtime import interpreter

        builder = interpreter.interpreter_builder
        missing = [name for name in (_LOAD, _STORE, _ATOMIC) if not hasattr(builder, name)]
        needed = ("GridExecutor", "_patch_lang")
        missing += [name for name in needed if not hasattr(interpreter, name)]
        missing += [] if hasattr(interpreter.InterpretedFunction, "rewrite") else ["rewrite"]
    except (ImportError, AttributeError) as error:
        missing = [str(error)]
    if missing:
        version = ".".join(map(str, TRITON_VERSION))
        return f"the interpreter of triton {version} has no {', '.join(missing)}"
    return None


def launch(
    kernel: Any,
    num_programs: int,
    args: Sequence[Any],
    options: Mapping[str, Any],
    watcher: Watcher,
) -> None:
    """The interpreter converts the arguments and calls the kernel's body once; that call becomes
    one of each program. Raises what the kernel raises, and `RuntimeError` while another launch of
    this process is watched."""
    if not _alone.acquire(blocking=False):
        raise RuntimeError("the co-simulator watches one launch at a time: wait for the other")
    try:
        _launch(kernel, num_programs, args, options, watcher)
    finally:
        _alone.release()


def _launch(
    kernel: Any,
    num_programs: int,
    args: Sequence[Any],
    options: Mapping[str, Any],
    watcher: Watcher,
) -> None:
    from triton.runtime import interpreter

    builder, body = interpreter.interpreter_builder, kernel.rewrite()
    make_language_ours, done = interpreter._patch_lang, set[int]()

    def once(function: Any) -> Any:
        # The interpreter does this at every call of a device function; it takes half of its time.
        space = id(function.__globals__)
        if space in done:
            return None
        done.add(space)
        return make_language_ours(function)

    def programs(**arguments: Any) -> None:
        builder.set_grid_dim(num_programs, 1, 1)
        watcher.run(lambda: body(**arguments), lambda i: builder.set_grid_idx(i, 0, 0))

    hooks = _hooks(builder, watcher)
    try:
        vars(builder).update(hooks)
        interpreter._patch_lang = once
        interpreter.GridExecutor(_Body(body, programs), kernel.arg_names, (1,))(*args, **options)
    finally:
        interpreter._patch_lang = make_language_ours
        for name in hooks:
            vars(builder).pop(name, None)


def _hooks(builder: Any, watcher: Watcher) -> dict[str, Callable[..., Any]]:
    """Instead of the builder's methods: tell first, then do."""
    old = {name: getattr(builder, name) for name in (_LOAD, _STORE, _ATOMIC)}

    def load(pointers: Any, mask: Any, *rest: Any) -> Any:
        watcher.load(_masked(pointers, pointers, mask))
        return old[_LOAD](pointers, mask, *rest)

    def store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watcher.store(_masked(pointers, pointers, mask))
        return old[_STORE](pointers, value, mask, *rest)

    def atomic(op: Any, pointers: Any, value: Any, mask: Any, *order: Any) -> Any:
        results = []

        def act() -> tuple[np.ndarray, np.ndarray]:
            results.append(old[_ATOMIC](op, pointers, value, mask, *order))
            before, added = (_masked(x, pointers, mask) for x in (results[0], value))
            is_sum = str(op).upper().endswith("ADD")
            return before, before + added if is_sum else np.full(before.shape, np.nan)

        semantics = str(order[0]).upper()
        acquire, release = "ACQUIRE" in semantics, "RELEASE" in semantics
        watcher.atomic(_masked(pointers, pointers, mask), acquire, release, act)
        return results[0]

    def unknown(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("the co-simulator knows no atomics but read-modify-write")

    hooks: dict[str, Callable[..., Any]] = {_LOAD: load, _STORE: store, _ATOMIC: atomic}
    return {**hooks, **{name: unknown for name in _UNKNOWN if hasattr(builder, name)}}


class _Body:
    """A kernel's body for the interpreter, which asks it for its signature and its globals."""

    def __init__(self, body: Callable[..., None], call: Callable[..., None]) -> None:
        self.__name__ = body.__name__
        self.__globals__ = body.__globals__
        self.__annotations__ = dict(body.__annotations__)
        self.__signature__ = inspect.signature(body)
        self._call = call

    def __call__(self, **arguments: Any) -> None:
        self._call(**arguments)


def _masked(values: Any, pointers: Any, mask: Any) -> np.ndarray:
    """Where the mask lets through: the values that belong to the pointers, flat."""
    shape = pointers.data.shape
    flat = np.ravel(np.broadcast_to(values.data, shape))
    if mask is None:
        return flat
    return flat[np.ravel(np.broadcast_to(mask.data, shape)).astype(bool)]
