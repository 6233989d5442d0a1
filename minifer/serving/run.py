"""One process that serves: a socket, an engine, uvicorn, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
from starlette.applications import Starlette

from minifer.async_llm import AsyncLLM
from minifer.serving.app import create_app
from minifer.serving.limits import OpenRequests
from minifer.serving.settings import ServerSettings

if TYPE_CHECKING:
    from minifer.serving.disaggregation.worker import KVWorker

CLOSING_SECONDS = 2  # for answers that were cut short to reach their clients
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """A socket with an address of its own that nobody can reach yet. port: 0 takes a free one.

    Bound before the model is loaded, so that a port in use is known at once. Raises
    `RuntimeError` saying what is wrong and what to do.
    """
    with _explained(host, port):
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    return listener


def listen(listener: socket.socket) -> None:
    """Let clients in; raises as `bind` does: another server may have been quicker meanwhile."""
    with _explained(*listener.getsockname()[:2]):
        listener.listen(128)


@contextlib.contextmanager
def _explained(host: str, port: int) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RuntimeError(
            f"cannot listen on {host} port {port}: {reason}; choose another with --host and --port"
        ) from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def end_with_stdin(patience: float) -> None:
    """End this process, as SIGTERM does, when whoever holds our standard input is gone.

    patience: seconds for that, then it is ended the hard way.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience + 2 * CLOSING_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="minifer-stdin", daemon=True).start()


def is_public(host: str) -> bool:
    """Can other machines reach a server on this host?"""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def run(
    llm: AsyncLLM,
    settings: ServerSettings,
    listener: socket.socket,
    worker: KVWorker | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish; the engine stays open.

    First signal: no new requests; open ones may go on for `settings.shutdown_timeout` seconds;
    what is left then ends with `finish_reason="abort"`. A second signal does that at once.
    """
    app = create_app(llm, settings, worker)
    server = GracefulServer(uvicorn_config(app), app.state.server)
    asyncio.run(server.serve(sockets=[listener]))


def uvicorn_config(app: Starlette) -> uvicorn.Config:
    """How our applications are served."""
    # log_config: Python's own default, warnings and errors to stderr.
    config = uvicorn.Config(
        app, lifespan="on", log_config=None, access_log=False, server_header=False, ws="none"
    )
    config.timeout_graceful_shutdown = CLOSING_SECONDS
    return config


class Served(Protocol):
    """What stands behind an application: `app.Server`, or a router of several."""

    settings: ServerSettings
    open_requests: OpenRequests

    @property
    def num_watchers(self) -> int:
        """Clients of `/events`, which may stay for as long as they like."""
        ...

    def close_watchers(self) -> None: ...

    def abort_all(self) -> None:
        """End every open request, with `finish_reason="abort"`."""
        ...


class GracefulServer(uvicorn.Server):
    """uvicorn's server, which knows what our requests are."""

    def __init__(self, config: uvicorn.Config, server: Served) -> None:
        super().__init__(config)
        self._server = server

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Unlike uvicorn's, does not raise the signal again in the end: we end with status 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        server = self._server
        server.open_requests.drain()
        server.close_watchers()
        for listener in self.servers:
            listener.close()  # no new connections
        await self._wait(lambda: server.open_requests.count, server.settings.shutdown_timeout)
        if server.open_requests.count:
            server.abort_all()
        self.force_exit = False  # the answers that this ends are on their way
        await self._wait(self._num_served, CLOSING_SECONDS)
        if self._num_served():  # clients that do not read
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        await super().shutdown(sockets)

    def _num_served(self) -> int:
        """Requests and watchers, and answers that are not sent yet."""
        transports = [connection.transport for connection in self.server_state.connections]
        unsent = sum(transport.get_write_buffer_size() > 0 for transport in transports)
        return self._server.open_requests.count + self._server.num_watchers + unsent

    async def _wait(self, busy: Callable[[], int], seconds: float) -> None:
        """Until nobody is served any more, at most some seconds, or a second signal."""
        deadline = time.monotonic() + seconds
        while busy() and not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
