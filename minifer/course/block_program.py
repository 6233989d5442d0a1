"""A block program, run without a GPU and without Triton, with a record of all that it touches.

    from minifer.course.block_program import simulate, tl, triton

    @triton.jit
    def double(X, OUT, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(X + at, mask=at < n, other=0.0)
        tl.store(OUT + at, 2 * x, mask=at < n)

    ran = simulate(lambda: double[(2,)](x, out, 6, BLOCK=4))
    ran.launches[0].bytes("X")                          # 24, if x has 6 float32

`triton` and `tl` are Triton's own where it is installed, so that `double[(2,)](…)` on its own runs
in Triton's interpreter, or on a GPU; elsewhere (macOS, Windows) they are stand-ins, and kernels run
here in any case. `simulate` takes the same source: it runs a function with every kernel in it, the
engine's too, exchanged for one that executes program after program on `Block`s of torch numbers.
It uses nothing of Triton but the function that was decorated.

What it sees and Triton's interpreter does not: an access outside of a tensor, by a single element;
lanes that hold anything because their mask has no `other`; two programs that touch one element of
which one writes. What it does not see: time, registers, caches, threads within a program.
"""

from __future__ import annotations

import functools
import inspect
import random
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minifer.course.block_language import AccessError, Language, Launch, cdiv, next_power_of_2
from minifer.course.block_trace import Memory, Trace
from minifer.course.block_values import Pointer
from minifer.kernels.mode import interpret_without_gpu

_KERNELS = {"JITFunction", "InterpretedFunction"}  # Triton's names of what `triton.jit` returns

# Called as watch("before" or "after", the launch's record, the kernel's function).
Watch = Callable[[str, Trace, Any], None]


@dataclass
class Simulation:
    """What a function returned, and the launches it made, in order."""

    result: Any = None
    launches: list[Trace] = field(default_factory=list)

    @property
    def trace(self) -> Trace:
        """The launch. Raises `ValueError` unless there was one and no more."""
        if len(self.launches) != 1:
            raise ValueError(f"one launch is wanted, there were {len(self.launches)}")
        return self.launches[0]


def simulate(
    function: Callable[..., Any],
    *arguments: Any,
    order: str | int = "forward",
    strict: bool = True,
    watch: Watch | None = None,
    **named: Any,
) -> Simulation:
    """Call `function(*arguments, **named)` with every kernel simulated.

    function: a plain function or a lambda; kernels and functions are looked up in the module in
    which it was written. order: in which programs run, "forward", "backward", or the seed of a
    random order; a GPU promises none. strict: see `Language`. watch: called before and after the
    programs of each launch run. Raises what a kernel raises:
    `AccessError` for an access outside of a tensor, `ValueError` for what Triton's compiler
    refuses.
    """
    simulator = _Simulator(order, strict)
    simulator.watch = watch
    done = simulator.done
    done.result = simulator.function(function)(*arguments, **named)
    return done


class _Simulator:
    """Makes copies of functions that see simulated kernels in place of Triton's."""

    def __init__(self, order: str | int, strict: bool = True) -> None:
        if order not in ("forward", "backward") and not isinstance(order, int):
            raise ValueError(f'order must be "forward", "backward" or a seed, got {order!r}')
        self.order, self.done, self.language = order, Simulation(), Language()
        self.language.strict = strict
        self.triton = _Triton(self.language)
        self._homes: dict[int, dict[str, Any]] = {}
        self.watch: Watch | None = None

    def function(self, original: Any) -> Any:
        """The function with the names of its module bound anew."""
        home = original.__globals__
        names, defaults = self._home(home), original.__defaults__ or ()
        copy = types.FunctionType(
            original.__code__,
            names,
            original.__name__,
            tuple(self._bound("", value, home) for value in defaults),
            tuple(self._cell(cell, home) for cell in original.__closure__ or ()),
        )
        copy.__kwdefaults__ = original.__kwdefaults__
        copy.__annotations__ = original.__annotations__
        return copy

    def _cell(self, cell: types.CellType, home: dict[str, Any]) -> types.CellType:
        """A variable of the function around; one that holds no kernel stays shared."""
        try:
            value = self._bound("", cell.cell_contents, home)
        except ValueError:  # not assigned yet
            return cell
        return cell if value is cell.cell_contents else types.CellType(value)

    def _home(self, names: dict[str, Any]) -> dict[str, Any]:
        if id(names) not in self._homes:
            mine = self._homes[id(names)] = dict(names)
            for name, value in names.items():
                mine[name] = self._bound(name, value, names)
        return self._homes[id(names)]

    def _bound(self, name: str, value: Any, home: dict[str, Any]) -> Any:
        if is_kernel(value):
            return _Simulated(self, value.fn)
        if isinstance(value, types.FunctionType) and value.__globals__ is home:
            return self.function(value)
        if name == "INTERPRETED":  # of minifer.kernels.compat: what our kernels work around
            return _Constant(False)
        if isinstance(value, Language):
            return self.language
        if isinstance(value, types.ModuleType | _Triton):
            stands = {"triton.language": self.language, "triton": self.triton}
            return stands.get(value.__name__, value)
        return value

    def programs(self, grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        x, y, z = grid
        places = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        if self.order == "backward":
            places.reverse()
        elif isinstance(self.order, int):
            random.Random(self.order).shuffle(places)
        return places


@dataclass(frozen=True)
class _Constant:
    """As `tl.constexpr`."""

    value: bool

    def __bool__(self) -> bool:
        return self.value


class _Simulated:
    """A kernel: launched with [grid], or called as a function by another kernel."""

    def __init__(self, simulator: _Simulator, original: Any) -> None:
        self._simulator, self.fn = simulator, original

    @functools.cached_property
    def _function(self) -> Any:
        return self._simulator.function(self.fn)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._function(*arguments, **named)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Any, /, *arguments: Any, **named: Any) -> None:
        signature = inspect.signature(self.fn)
        known = {name: value for name, value in named.items() if name in signature.parameters}
        given = signature.bind(*arguments, **known)
        given.apply_defaults()
        sides = _grid(grid(given.arguments) if callable(grid) else grid)
        trace = Trace(self.fn.__name__, sides)
        values = {name: _argument(trace, name, v) for name, v in given.arguments.items()}
        self._simulator.done.launches.append(trace)
        language, watch = self._simulator.language, self._simulator.watch or (lambda *_: None)
        watch("before", trace, self.fn)
        before, language.launch = language.launch, Launch(trace)
        try:
            for place in self._simulator.programs(sides):
                language.launch.program = place
                self._function(**values)
        finally:
            language.launch = before
        watch("after", trace, self.fn)


def is_kernel(value: Any) -> bool:
    """Whether it is what `triton.jit` returns, Triton's or the stand-in's."""
    return isinstance(value, Kernel) or type(value).__name__ in _KERNELS


def _grid(grid: Any) -> tuple[int, int, int]:
    sides = tuple(grid) if isinstance(grid, Sequence) else (grid,)
    if not 1 <= len(sides) <= 3 or any(not isinstance(side, int) or side < 0 for side in sides):
        raise ValueError(f"a grid is a tuple of one to three whole numbers, got {grid!r}")
    x, y, z = (*sides, 1, 1)[:3]
    return x, y, z


def _argument(trace: Trace, name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return getattr(value, "value", value)  # a tl.constexpr
    memory = trace.memories[name] = Memory.of(name, value)
    return Pointer(memory, torch.tensor(value.storage_offset()))


# -- where there is no Triton


class Kernel:
    """What the stand-in of `triton.jit` returns: a launch on its own is simulated, too."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        functools.update_wrapper(self, fn)  # type: ignore[arg-type]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return _Simulated(_Simulator("forward"), self.fn)[grid]


class _Triton:
    """The stand-in of the module `triton`."""

    __name__ = "triton"
    cdiv = staticmethod(cdiv)
    next_power_of_2 = staticmethod(next_power_of_2)

    def __init__(self, language: Language) -> None:
        self.language = language

    @staticmethod
    def jit(fn: Any) -> Any:
        return Kernel(fn)


def _found() -> tuple[Any, Any, str]:
    """Triton, or what stands for it, and where a plain launch runs."""
    interpret_without_gpu()
    try:
        import triton
        import triton.language

        from minifer.kernels.compat import INTERPRETED  # makes Triton's interpreter quicker
    except ImportError:
        language = Language()
        return _Triton(language), language, "record"
    return triton, triton.language, "interpreter" if INTERPRETED.value else "compiled"


# ENGINE: "interpreter" or "compiled" where there is Triton, "record" where there is none.
triton, tl, ENGINE = _found()

__all__ = ["ENGINE", "AccessError", "Kernel", "Simulation", "is_kernel", "simulate", "tl", "triton"]
