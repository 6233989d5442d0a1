"""Is the server well? A question that costs nothing, and one that costs a token."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from minifer.canary import THRESHOLD, Canary, CanaryReport
from minifer.engine import Engine
from minifer.request import SamplingParams
from minifer.serving.errors import APIError
from minifer.serving.streaming import unless_gone

if TYPE_CHECKING:
    from minifer.serving.app import Server

HEALTH_SECONDS = 30.0  # for one token, and for the canaries


def stored_canary(engine: Engine) -> Canary | None:
    """The canaries that `/health_generate` asks in debug mode, where there are some."""
    if not engine.config.debug:
        return None
    try:
        return Canary.of(engine)
    except ValueError:
        return None


def _server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


async def health(request: Request) -> Response:
    """Is the engine's thread alive? Costs nothing, so it may be asked every second."""
    if not _server(request).llm.is_alive:
        raise APIError(503, "the engine has stopped", code="engine_stopped")
    return JSONResponse({"status": "ok"})


async def health_generate(request: Request) -> Response:
    """Can the engine still generate? Runs one token through all five stages.

    In debug mode also: does the model still say what it is known to say? See `minifer/canary.py`.
    """
    server, start = _server(request), time.perf_counter()
    with server.open_requests.seat():
        work = _generate(server)
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                alarms = await unless_gone(request.receive, work)
        except TimeoutError:
            message = f"no token within {HEALTH_SECONDS:g} seconds"
            raise APIError(503, message, code="engine_stalled") from None
    if alarms:
        raise APIError(503, f"the engine fails: {'; '.join(alarms)}", code="engine_fails")
    return JSONResponse({"status": "ok", "seconds": time.perf_counter() - start})


async def _generate(server: Server) -> list[str]:
    """Run one token, and the canaries if there are some; what is wrong comes back."""
    name = f"health-{uuid.uuid4().hex}"
    params = SamplingParams(temperature=0, max_tokens=1, cache_salt=name)  # hits no cached prefix
    output = await server.llm.complete([0], params, request_id=name)
    if output.outputs[0].finish_reason == "error":
        return [str(output.outputs[0].stop_reason)]
    if server.canary is None:
        return []
    readings = []
    for run in ("cold", "hit"):
        asked = [server.llm.complete(ids, p) for ids, p in server.canary.requests(name)]
        readings += server.canary.read(run, await asyncio.gather(*asked))
    return CanaryReport(tuple(readings), THRESHOLD).alarms
