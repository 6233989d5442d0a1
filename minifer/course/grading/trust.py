"""Whose code is this? Frames of the grader, the engine and libraries are told from an answer's."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import minifer

_STDLIB = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")
)
_SITE = tuple(os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib"))


def engine_folders() -> tuple[str, ...]:
    """Folders that hold minifer's own source, installed or in a clone."""
    package = Path(minifer.__file__).resolve().parent
    beside = [package.parent / name for name in ("kernels", "parcae")]
    return tuple(str(folder) + os.sep for folder in (package, *beside) if folder.is_dir())


class Trust:
    """What is trusted is what lies in a known folder; an answer, and what it compiles, does not.

    tests: the test file, trusted with its folder. answer: the learner's file, never trusted,
    wherever it lies.
    """

    def __init__(self, tests: Path, answer: Path | None = None) -> None:
        self.tests = str(tests.resolve())
        self.test_folder = os.path.dirname(self.tests) + os.sep
        self._answer = str(answer.resolve()) if answer else None
        self._folders = (
            *_STDLIB,
            *(folder + os.sep for folder in _SITE),
            *engine_folders(),
            self.test_folder,
        )
        self._known: dict[str, bool] = {}

    def file(self, name: str) -> bool:
        """Whether code of this file name is trusted; `<string>` and its like are not."""
        known = self._known.get(name)
        if known is None:
            known = name.startswith("<frozen ")
            if not known and not name.startswith("<"):
                path = os.path.realpath(name)
                known = path.startswith(self._folders) and path != self._answer
            self._known[name] = known
        return known

    def frame(self, frame: FrameType) -> bool:
        """Code made by `exec` is as trusted as the module whose globals it has."""
        name = frame.f_code.co_filename
        if self.file(name):
            return True
        if not name.startswith("<"):
            return False
        home = sys.modules.get(frame.f_globals.get("__name__", ""))
        file = getattr(home, "__file__", None)
        return (
            home is not None
            and home.__dict__ is frame.f_globals
            and bool(file)
            and self.file(str(file))
        )

    def is_test(self, name: str) -> bool:
        return os.path.realpath(name).startswith(self.test_folder)

    def responsible(self, frame: FrameType | None) -> FrameType | None:
        """The first frame, outwards, that is not the standard library's."""
        for candidate in outwards(frame):
            if not is_stdlib(candidate.f_code.co_filename):
                return candidate
        return None


def is_stdlib(name: str) -> bool:
    if name.startswith("<frozen "):
        return True
    return name.startswith(_STDLIB) and not name.startswith(_SITE)


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back
