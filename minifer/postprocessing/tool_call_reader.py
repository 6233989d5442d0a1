"""The object of one tool call, read character by character; `tool_calls.py` says by which rules.

Each part of the grammar is a generator that is sent characters: plain recursive descent, which can
wait anywhere for the next chunk of the stream.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

SPACE = " \t\r\n"  # what JSON calls white space
_ARGUMENTS = ("arguments", "parameters")  # Hermes and Qwen, Llama 3


class _NoCall(Exception):  # noqa: N818 - it is a verdict
    """This is not, or no longer, the object of a call."""


# A part of the grammar: is sent characters, and returns the first that it does not use.
_Reader = Generator[None, str, str]


class CallReader:
    """Reads the object of one call, character by character.

    announced: this is a call, and nothing can change that. ended: its last brace was read.
    raw: what was read and may turn out to be text: all of it; once this is a call, what came after
    the arguments.
    """

    def __init__(self) -> None:
        self.name = ""
        self.announced = False
        self.ended = False
        self.raw: list[str] = []
        self._arguments: list[str] = []
        self._num_taken = 0
        self._streaming = False
        self._held_arguments: str | None = None
        self._reader = self._read()
        next(self._reader)

    @property
    def arguments(self) -> str:
        return "".join(self._arguments)

    def take(self) -> str:
        """What is new of the arguments since the last call."""
        piece = "".join(self._arguments[self._num_taken :])
        self._num_taken = len(self._arguments)
        return piece

    def feed(self, character: str) -> bool:
        """Take one character; False when it cannot belong to a call (it is not taken then)."""
        try:
            self._reader.send(character)
        except StopIteration:
            self.ended = True
        except _NoCall:
            return False
        (self._arguments if self._streaming else self.raw).append(character)
        return True

    def _read(self) -> _Reader:
        """The whole object. Every value is checked once it is complete, but what is streamed."""
        c = yield from _skip_space((yield))
        _check(c == "{")
        c = yield from _skip_space((yield))
        while c != "}":
            _check(c == '"')
            key_starts = len(self.raw)
            c = yield from _read_string(c)
            key = _json(self.raw[key_starts:])
            c = yield from _skip_space(c)
            _check(c == ":")
            c = yield from _skip_space((yield))
            c = yield from self._read_member(key, c)
            c = yield from _skip_space(c)
            if c == ",":
                c = yield from _skip_space((yield))
                _check(c == '"')
            else:
                _check(c == "}")
        if not self.announced:
            self._settle()
        return ""

    def _read_member(self, key: Any, c: str) -> _Reader:
        known = bool(self.name) and self._held_arguments is None and not self.announced
        if known and key in _ARGUMENTS and c == "{":
            self._announce()
            self._streaming = True
            c = yield from _read_container(c)
            self._streaming = False
            return c
        starts = len(self.raw)
        c = yield from _read_value(c)
        value = _json(self.raw[starts:])
        if key == "name" and not self.name:
            _check(isinstance(value, str) and value != "")
            self.name = value
        elif key in _ARGUMENTS and self._held_arguments is None:
            self._held_arguments = _arguments_text(value, "".join(self.raw[starts:]))
        return c

    def _settle(self) -> None:
        """The object is complete and its arguments were not streamed."""
        _check(self.name != "")
        self._arguments = list(self._held_arguments or "{}")
        self._announce()

    def _announce(self) -> None:
        self.announced, self.raw = True, []


def _arguments_text(value: Any, text: str) -> str:
    """JSON text of arguments that came before the name, or as a string, or as null."""
    if isinstance(value, str):
        value, text = _json(value), value
    _check(value is None or isinstance(value, dict))
    return "{}" if value is None else text


def _check(holds: bool) -> None:
    if not holds:
        raise _NoCall


def _json(text: str | list[str]) -> Any:
    try:
        return json.loads("".join(text))
    except (ValueError, RecursionError):
        raise _NoCall from None


def _skip_space(c: str) -> _Reader:
    while c in SPACE:
        c = yield
    return c


def _read_string(c: str) -> _Reader:
    """c: the opening quote."""
    c = yield
    while c != '"':
        if c == "\\":
            yield
        c = yield
    return (yield)


def _read_container(c: str) -> _Reader:
    """An object or array, c being its first brace: up to where as many have closed as opened."""
    depth = 0
    while True:
        if c == '"':
            c = yield from _read_string(c)
            continue
        _check(c != "<")
        depth += (c in "{[") - (c in "}]")
        c = yield
        if depth == 0:
            return c


def _read_value(c: str) -> _Reader:
    if c == '"':
        return (yield from _read_string(c))
    if c in "{[":
        return (yield from _read_container(c))
    while c not in ",}" + SPACE:
        _check(c != "<")
        c = yield
    return c
