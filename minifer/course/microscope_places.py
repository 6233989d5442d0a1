"""Where the engine's events come from: a static scan of the installed package.

The scan reads the text of the modules and runs none of them. It finds the calls that name an event,
`emit("kv", "kv.block_freed", …)`, and those that name one for a function that passes it on to
`emit`, like `StepTimer.lap`. Places have no line numbers: they would change with every edit.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

import minifer

_EVENT = re.compile(r"[a-z]+(\.[a-z_]+)+")
_ELSEWHERE = ("course", "faults", "simulation")  # they read events or imitate the engine's


@dataclass(frozen=True, order=True)
class Place:
    """One statement that emits. function: qualified, "BlockPool.allocate"."""

    module: str
    function: str
    statement: str

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"


@dataclass(frozen=True)
class _Wrapper:
    """A function that emits an event whose name is its parameter. place: of that statement."""

    parameter: str
    index: int  # among the arguments of a call, without self
    default: str | None
    place: Place


@cache
def event_places() -> Mapping[str, tuple[Place, ...]]:
    """Event name → the places that emit it, for every event that the engine has."""
    modules = dict(_modules())
    wrappers: dict[str, _Wrapper] = {}
    for scan in modules.values():
        wrappers |= scan.wrappers()
    places: dict[str, set[Place]] = {}
    for scan in modules.values():
        for name, place in scan.emitted(wrappers):
            places.setdefault(name, set()).add(place)
    for wrapper in wrappers.values():
        if wrapper.default is not None:
            places.setdefault(wrapper.default, set()).add(wrapper.place)
    return MappingProxyType({name: tuple(sorted(places[name])) for name in sorted(places)})


def _modules() -> Iterator[tuple[str, _Scan]]:
    root = Path(minifer.__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in _ELSEWHERE:
            continue
        text = path.read_text(encoding="utf-8")
        if "emit" in text or "lap(" in text or '"kv.' in text:
            if parts[-1] == "__init__":
                parts = parts[:-1]
            name = ".".join(("minifer", *parts))
            yield name, _Scan(name, text)


@dataclass(frozen=True)
class _Where:
    """What a call stands in."""

    scope: tuple[str, ...]  # names of classes and functions, outermost first
    function: ast.FunctionDef | None
    statement: ast.stmt


class _Scan:
    """The calls of one module, each with the function and the statement it stands in."""

    def __init__(self, module: str, text: str) -> None:
        self.module = module
        self.calls: list[tuple[ast.Call, _Where]] = []
        self._text = text
        self._walk(ast.parse(text), (), None, None)

    def _walk(
        self,
        node: ast.AST,
        scope: tuple[str, ...],
        function: ast.FunctionDef | None,
        statement: ast.stmt | None,
    ) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                inner = child if isinstance(child, ast.FunctionDef) else None
                self._walk(child, (*scope, child.name), inner, None)
                continue
            within = child if isinstance(child, ast.stmt) else statement
            if isinstance(child, ast.Call) and within is not None and _called(child):
                self.calls.append((child, _Where(scope, function, within)))
            self._walk(child, scope, function, within)

    def _place(self, where: _Where) -> Place:
        text = ast.get_source_segment(self._text, where.statement) or ""
        if isinstance(where.statement, ast.If | ast.For | ast.With):  # the call is in its head
            text = text.split(":\n", 1)[0]
        line = " ".join(text.split()).replace("( ", "(").replace(", )", ")")
        return Place(self.module, ".".join(where.scope), line)

    def wrappers(self) -> dict[str, _Wrapper]:
        """Functions that hand a parameter of theirs to `emit` as the event's name."""
        found = {}
        for call, where in self.calls:
            function = where.function
            if _called(call) != "emit" or function is None or len(call.args) < 2:
                continue
            name = call.args[1]
            arguments = [a for a in function.args.args if a.arg != "self"]
            at = [
                i
                for i, a in enumerate(arguments)
                if isinstance(name, ast.Name) and a.arg == name.id
            ]
            if at:
                defaults = function.args.defaults
                late = at[0] - (len(arguments) - len(defaults))
                default = _constant(defaults[late]) if late >= 0 else None
                parameter = arguments[at[0]].arg
                found[function.name] = _Wrapper(parameter, at[0], default, self._place(where))
        return found

    def emitted(self, wrappers: Mapping[str, _Wrapper]) -> Iterator[tuple[str, Place]]:
        """(event name, place) of every call that names an event."""
        for call, where in self.calls:
            called = _called(call)
            if called == "emit":
                named = call.args[1] if len(call.args) > 1 else None
            elif called in wrappers:
                wrapper = wrappers[called]
                keywords = {k.arg: k.value for k in call.keywords}
                at = wrapper.index
                named = call.args[at] if len(call.args) > at else keywords.get(wrapper.parameter)
            else:
                continue
            name = _constant(named)
            if name is not None:
                yield name, self._place(where)


def _called(call: ast.Call) -> str:
    """The last part of what is called: "emit" of `self._events.emit(…)`."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _constant(node: ast.AST | None) -> str | None:
    """The event's name, where it is written out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if _EVENT.fullmatch(node.value) else None
    return None
