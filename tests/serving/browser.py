"""A real browser in a test: headless Chromium, driven over the DevTools protocol by a pipe.

With `--remote-debugging-pipe` Chromium reads commands from file descriptor 3 and writes answers to
4, JSON ended by a zero byte (chromedevtools.github.io/devtools-protocol): no package is needed.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. `errors` collects what a user would find in the console; `requests` every URL."""

    def __init__(
        self,
        chromium: str,
        profile: Path,
        *,
        size: tuple[int, int] = (1280, 860),
        dark: bool = False,
        scale: float = 1.0,
    ) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self._buffer = b""
        width, height = size
        arguments = [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-extensions", "--remote-debugging-pipe",
            f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        self._pid, self._to, self._from = _spawn(arguments)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    # -- the protocol

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; what comes in between is noted."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while (message := self._read(20.0)).get("id") != self._number:
            self._note(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        result: dict[str, Any] = message["result"]
        return result

    def _read(self, timeout: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], timeout)
            data = os.read(self._from, 1 << 16) if ready else b""
            if not data:
                raise RuntimeError("the browser does not answer")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    # -- what a user does

    def open(self, url: str) -> None:
        self._loaded = False
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._note(self._read(20.0))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, which must be JSON."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(json.dumps(done["exceptionDetails"]))
        return done["result"].get("value")

    def wait_for(self, expression: str, timeout: float = 60.0) -> Any:
        """Until an expression is true; its value."""
        deadline = time.monotonic() + timeout
        while not (value := self.evaluate(expression)):
            if time.monotonic() > deadline:
                text = self.evaluate("document.body.innerText")
                raise AssertionError(f"{expression} is never true: {text}\n{self.errors}")
            time.sleep(0.02)
        return value

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key with its Windows key code, such as "Enter", 13, "\\r"."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **down, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path) -> None:
        image = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(image["data"]))

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        os.close(self._to)
        os.close(self._from)
        os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)


def _spawn(arguments: list[str]) -> tuple[int, int, int]:
    """(pid, where to write commands, where to read answers)."""
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    # Above 4, so that making 3 does not overwrite what becomes 4.
    source = fcntl.fcntl(read_commands, fcntl.F_DUPFD_CLOEXEC, 10)
    sink = fcntl.fcntl(write_answers, fcntl.F_DUPFD_CLOEXEC, 10)
    nowhere = (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)
    actions = [(os.POSIX_SPAWN_DUP2, source, 3), (os.POSIX_SPAWN_DUP2, sink, 4), nowhere]
    pid = os.posix_spawn(arguments[0], arguments, os.environ, file_actions=actions)
    for descriptor in (read_commands, write_answers, source, sink):
        os.close(descriptor)
    return pid, write_commands, read_answers
