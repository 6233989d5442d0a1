"""What an answer may not do while it is graded: a list of audited events and a few limits.

The threat model is a mistake or a lazy cheat. Python cannot lock Python in: somebody who attacks
the grader gets out of here, and an examination belongs in a container. What is stopped:

| what | how |
|---|---|
| network, subprocesses, fork, signals to others | the event is refused to everybody |
| reading `solutions/` and the tests | refused while a frame of the answer is on the stack |
| reading or importing the engine, /proc | refused when the answer is who asks |
| walking the stack, `gc`, `ctypes`, threads | refused when the answer is who asks |
| writing outside the working folder | refused to everybody |
| CPU time, memory, size of files | the operating system's limits |
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from minifer.course.grading.trust import Trust, engine_folders, outwards

# Packages an answer may not import: the answers, and the ways around this file.
_BLOCKED = """
    minifer solutions exercises importlib imp ctypes _ctypes cffi gc inspect traceback subprocess
    socket multiprocessing pytest _pytest pluggy builtins runpy pkgutil zipimport pdb bdb code
    faulthandler resource _posixsubprocess
"""
BLOCKED = frozenset(_BLOCKED.split())
_FOR_ALL = {
    "network": "socket.__new__ socket.connect socket.bind socket.getaddrinfo socket.sendto",
    "a process of its own": "subprocess.Popen os.system os.exec os.posix_spawn os.spawn os.fork"
    " os.forkpty os.startfile pty.spawn",
    "a signal to a process": "os.kill os.killpg signal.pthread_kill",
}
_FOR_ANSWER = {
    "the grader's memory": "gc.get_objects gc.get_referrers gc.get_referents sys._current_frames"
    " sys._current_exceptions ctypes.dlopen ctypes.dlsym ctypes.dlsym/handle ctypes.cdata"
    " ctypes.cdata/buffer ctypes.call_function ctypes.string_at ctypes.addressof mmap.__new__",
    "tracing": "sys.settrace sys.setprofile sys.monitoring.register_callback",
    "limits": "resource.setrlimit resource.prlimit",
    "a thread": "thread",
}
_WRITES = "os.remove os.rename os.rmdir os.mkdir os.link os.symlink os.truncate os.chmod"
_FRAMES = "tb_frame gi_frame cr_frame ag_frame f_back f_locals f_globals"
_CODE = "__code__ __defaults__ __kwdefaults__"
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class BlockedError(PermissionError):
    """An answer did what answers may not do; the message says what."""


class Sandbox:
    """trust: tells frames apart. protected: the book's folders that hold answers and tests.

    open_to: modules of minifer that this answer may use. blocked: what was refused, in order.
    """

    def __init__(self, trust: Trust, protected: Iterable[Path], open_to: Iterable[str]) -> None:
        self.trust, self.open_to = trust, tuple(open_to)
        self.answers = tuple(str(folder.resolve()) + os.sep for folder in protected)
        self.private = (*engine_folders(), "/proc/")
        self.home = os.path.realpath(os.getcwd()) + os.sep
        self.blocked: list[str] = []
        self._busy = False
        self._rules: dict[str, Callable[[str, tuple[Any, ...], FrameType], str | None]] = {
            "import": self._import,
            "open": self._open,
            "os.listdir": self._list,
            "os.scandir": self._list,
            "sys._getframe": self._stack,
            "object.__getattr__": self._attribute,
            "object.__setattr__": self._attribute,
            **dict.fromkeys(_WRITES.split(), self._write),
        }
        for what, events in _FOR_ALL.items():
            self._rules |= dict.fromkeys(events.split(), self._refuse(what, everybody=True))
        for what, events in _FOR_ANSWER.items():
            self._rules |= dict.fromkeys(events.split(), self._refuse(what, everybody=False))

    def close(self) -> None:
        """From here on; there is no way back in this process."""
        _disable_exits()
        self._guard_threads()
        sys.addaudithook(self._hook)

    def _guard_threads(self) -> None:
        """Starting one is not an audited event in every version of Python."""
        for module in (sys.modules["_thread"], sys.modules["threading"]):
            for name in list(vars(module)):
                if name.lstrip("_") in ("start_new_thread", "start_new", "start_joinable_thread"):
                    setattr(module, name, self._guarded_start(getattr(module, name)))

    def _guarded_start(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._hook("thread", (), sys._getframe(1))
            return start(*args, **kwargs)

        return guarded

    def _hook(self, event: str, args: tuple[Any, ...], frame: FrameType | None = None) -> None:
        rule = self._rules.get(event)
        if rule is None or self._busy:
            return
        self._busy = True
        try:
            reason = rule(event, args, frame or sys._getframe(1))
        finally:
            self._busy = False
        if reason:
            self._note(reason, frame or sys._getframe(1))
            raise BlockedError(f"an answer may not use {reason}")

    def _note(self, reason: str, frame: FrameType) -> None:
        """What the answer itself asked for; libraries try many things."""
        self._busy = True
        try:
            if reason not in self.blocked and len(self.blocked) < 20 and self._asks(frame):
                self.blocked.append(reason)
        finally:
            self._busy = False

    def _asks(self, frame: FrameType) -> bool:
        """Whether the answer is who asks: the standard library asks for its caller."""
        who = self.trust.responsible(frame)
        return who is not None and not self.trust.frame(who)

    def _refuse(self, what: str, *, everybody: bool) -> Callable[..., str | None]:
        def rule(event: str, args: tuple[Any, ...], frame: FrameType) -> str | None:
            return f"{what} ({event})" if everybody or self._asks(frame) else None

        return rule

    def _import(self, event: str, args: tuple[Any, ...], frame: FrameType) -> str | None:
        name = str(args[0])
        if name.split(".")[0] not in BLOCKED or may_import(name, self.open_to):
            return None
        return f"the module {name}" if self._asks(frame) else None

    def _open(self, event: str, args: tuple[Any, ...], frame: FrameType) -> str | None:
        path, mode, flags = args
        if isinstance(path, int) or path is None:
            return None
        writes = any(c in "wax+" for c in mode) if mode else bool((flags or 0) & _WRITING)
        if writes and (reason := self._write(event, args, frame)):
            return reason
        return self._list(event, args, frame)

    def _list(self, event: str, args: tuple[Any, ...], frame: FrameType) -> str | None:
        """Files with answers are closed to whatever an answer calls; the rest, and the names in a
        folder, to the answer itself: libraries look through folders when they import."""
        path = _absolute(args[0])
        if path.startswith(self.answers) and not path.endswith(os.sep):
            inside = any(not self.trust.frame(caller) for caller in outwards(frame))
            return f"the file {path}" if inside else None
        closed = path.startswith((*self.private, *self.answers))
        return f"the file {path}" if closed and self._asks(frame) else None

    def _write(self, event: str, args: tuple[Any, ...], frame: FrameType) -> str | None:
        paths = [_absolute(arg) for arg in args[:2] if isinstance(arg, (str, bytes, os.PathLike))]
        if event == "open":
            paths = paths[:1]
        outside = [p for p in paths if not (p + os.sep).startswith(self.home) and p != os.devnull]
        return f"the file {outside[0]} for writing" if outside else None

    def _stack(self, event: str, args: tuple[Any, ...], frame: FrameType) -> str | None:
        """A namedtuple asks for its caller's module; whoever walks the stack asks by himself."""
        for caller in outwards(frame):
            name = os.path.basename(caller.f_code.co_filename)
            if name not in ("inspect.py", "traceback.py"):
                return None if self.trust.frame(caller) else "the stack (sys._getframe)"
        return None

    def _attribute(self, event: str, args: tuple[Any, ...], frame: FrameType) -> str | None:
        name = args[1]
        wanted = name in _CODE.split() if event == "object.__setattr__" else name in _FRAMES.split()
        return f"the attribute {name}" if wanted and not self.trust.frame(frame) else None


def may_import(name: str, open_to: Iterable[str]) -> bool:
    """Whether a module of minifer is open to an answer: listed, below or above one that is."""
    return any(name == good or name.startswith(good + ".") or good.startswith(name + ".")
               for good in open_to)  # fmt: skip


def guard_modules(trust: Trust, open_to: Iterable[str]) -> None:
    """Modules of minifer keep what they hold from an answer, however it got hold of them."""

    class Guarded(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            if not trust.frame(sys._getframe(1)) and name not in ("__path__", "__spec__"):
                mine = ModuleType.__getattribute__(self, "__name__")
                if not may_import(f"{mine}.{name}", open_to):
                    raise BlockedError(
                        f"an answer may not use the module {mine}: write it yourself"
                    )
            return ModuleType.__getattribute__(self, name)

        def __setattr__(self, name: str, value: Any) -> None:
            if not trust.frame(sys._getframe(1)):
                raise BlockedError("an answer may not change the engine or the grader")
            ModuleType.__setattr__(self, name, value)

    for name, module in list(sys.modules.items()):
        inside = name == "minifer" or name.startswith("minifer.") or trust.is_test(_file(module))
        listed = any(name == good or name.startswith(good + ".") for good in open_to)
        if inside and not listed and type(module) is ModuleType:
            module.__class__ = Guarded


def _file(module: ModuleType) -> str:
    return str(getattr(module, "__file__", None) or "")


def limit(cpu_seconds: float, memory_bytes: int, file_bytes: int = 64 << 20) -> None:
    """The operating system's limits. Both count from what the process has used by now."""
    try:
        import resource
    except ImportError:  # Windows has none; the parent's clock still counts
        return
    status = Path("/proc/self/statm")
    used = int(status.read_text().split()[0]) * resource.getpagesize() if status.exists() else 0
    seconds = max(1, round(time.process_time() + cpu_seconds))
    limits = [
        (resource.RLIMIT_CPU, seconds, seconds + 1),  # SIGXCPU can be ignored, SIGKILL cannot
        (resource.RLIMIT_AS, used + memory_bytes, used + memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes, file_bytes),
        (resource.RLIMIT_CORE, 0, 0),
    ]
    for kind, soft, hard in limits:
        try:
            resource.setrlimit(kind, (soft, hard))
        except (ValueError, OSError):  # macOS has no limit of the address space
            continue


def _disable_exits() -> None:
    """What would end the process without a word, or read a file without an audit event."""
    import torch

    def refuse(name: str) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            raise BlockedError(f"an answer may not use {name}")

        return refused

    posix = sys.modules.get("posix") or sys.modules.get("nt")
    for module, name in [
        (os, "_exit"), (os, "abort"), (posix, "_exit"), (posix, "abort"),
        (signal, "raise_signal"), (sys.modules["_signal"], "raise_signal"),
        (torch, "from_file"), (torch.UntypedStorage, "from_file"),
    ]:  # fmt: skip
        setattr(module, name, refuse(name))


def _absolute(path: Any) -> str:
    """The path as the system sees it, links followed; a folder's contents begin with its name."""
    path = os.path.realpath(os.fsdecode(path)) if path is not None else os.path.realpath(".")
    return path + os.sep if os.path.isdir(path) else path
