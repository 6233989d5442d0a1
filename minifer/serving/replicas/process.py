"""A `minifer serve` in a process of its own: started, asked for its address, ended.

Its standard input is a pipe whose other end we hold. However we go, by SIGKILL too, the system
closes that end, and the child ends (`--exit-with-stdin`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence

from minifer.serving.settings import KEY_VARIABLE

_ADDRESS = re.compile(rb" at (http://\S+)$")
_LAST_WORDS = 20  # lines of standard error that are kept
_KILLED_SECONDS = 10.0  # for the system to bury a process that was killed


class ReplicaProcess:
    """One child that is up. Made by `start`. url: where it listens."""

    def __init__(self, name: str, child: asyncio.subprocess.Process) -> None:
        self.name = name
        self.url = ""
        self._child = child
        self._words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._listening = asyncio.create_task(self._listen())
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: Sequence[str],
        key: str,
        environment: Mapping[str, str] | None = None,
        timeout: float = 300.0,
    ) -> ReplicaProcess:
        """Run `minifer serve ARGUMENTS` on a free port of this machine; returns when it listens.

        key: what whoever speaks to it must send as API key. environment: added to ours. Raises
        `RuntimeError` with its last words when it ends before, or takes longer than `timeout`
        seconds. Cancelled, it leaves no process behind.
        """
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "minifer", "serve", "--host", "127.0.0.1", "--port", "0"),
            *("--exit-with-stdin", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **(environment or {}), KEY_VARIABLE: key},
            start_new_session=True,  # Ctrl-C in our terminal is for us to pass on
        )
        process = cls(name, child)
        try:
            async with asyncio.timeout(timeout):
                await process._read_address()
        except TimeoutError:
            await process.kill()
            raise RuntimeError(f"{name} did not listen within {timeout:g} seconds") from None
        except BaseException:
            await process.kill()
            raise
        return process

    async def _read_address(self) -> None:
        assert self._child.stdout is not None
        first = await self._child.stdout.readline()
        found = _ADDRESS.search(first.rstrip())
        if found is None:
            await self._child.wait()
            await self._listening
            said = " ".join(self._words) or "it said nothing"
            raise RuntimeError(f"{self.name} ended with status {self.status}: {said}")
        self.url = found[1].decode()
        self._reading = asyncio.create_task(_discard(self._child.stdout))

    async def _listen(self) -> None:
        """Its standard error is ours, with its name before each line."""
        assert self._child.stderr is not None
        while True:
            try:
                line = await self._child.stderr.readline()
            except ValueError:  # a line without end; it is thrown away
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._words.append(text)
            print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._child.returncode

    async def wait(self) -> int:
        return await self._child.wait()

    async def stop(self, patience: float) -> None:
        """Let it finish what it is doing, for some seconds; then kill it."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(patience):
                await self._child.wait()
        except TimeoutError:
            pass
        finally:
            await self.kill()

    def cut_short(self) -> None:
        """Have it end every open request at once, with `finish_reason="abort"`, and itself."""
        self._signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(0.2, self._signal, signal.SIGTERM)

    async def kill(self) -> None:
        """Make sure that it is gone. Safe to call at any time, and twice."""
        self._signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILLED_SECONDS):
                await self._child.wait()
        tasks = [task for task in (self._listening, self._reading) if task is not None]
        await asyncio.wait(tasks, timeout=1.0)  # a grandchild may hold its pipes
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._child.stdin is not None:
            self._child.stdin.close()

    def _signal(self, number: int) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(number)


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.read(4096):
        pass
