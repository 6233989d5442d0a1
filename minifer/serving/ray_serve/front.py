"""The way to Ray's replicas: every request is a call through a handle of the deployment's."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from minifer.routing.policy import RoutingRequest
from minifer.serving.errors import APIError
from minifer.serving.front.errand import REPLICA_HEADER
from minifer.serving.front.forward import answer_of
from minifer.serving.front.prompt import PromptReader
from minifer.serving.front.routes import Front
from minifer.serving.ray_serve.call import ABORT, Call
from minifer.serving.ray_serve.errand import RayErrand
from minifer.serving.ray_serve.metrics import RayMetrics
from minifer.serving.ray_serve.settings import RaySettings
from minifer.serving.settings import ServerSettings

log = logging.getLogger("minifer.serving.ray")

_JSON = [(b"content-type", b"application/json")]


class RayFront(Front):
    """Before the replicas of one deployment, as many as there may be.

    handle: of the replicas' streaming method. app_name: what Ray calls the application.
    """

    metrics: RayMetrics

    def __init__(
        self,
        handle: DeploymentHandle,
        app_name: str,
        reader: PromptReader,
        settings: ServerSettings,
        ray_settings: RaySettings,
    ) -> None:
        super().__init__(reader, settings, RayMetrics(), ray_settings.max_replicas)
        self.handle = handle
        self.app_name = app_name
        self.ray_settings = ray_settings
        self._aborting: asyncio.Task[Any] | None = None

    async def generate(self, path: str, body: bytes, asked: RoutingRequest) -> Response:
        return await self._answer(Call(asked, "POST", path, headers=_JSON, body=body))

    async def ask(self, path: str, body: bytes | None = None) -> Response:
        if body is None:
            return await self._answer(_get(path))
        return await self._answer(Call(_nothing(), "POST", path, headers=_JSON, body=body))

    async def ask_all(self, path: str) -> dict[str, Response | APIError]:
        """The first one that is asked knows who the others are."""
        first = _get(path)
        try:
            answer = await self._answer(first)
        except APIError:
            self.metrics.num_replicas.set(0)
            raise
        others = [name for name in first.replicas if name != _replica_of(answer)]
        answers = await asyncio.gather(
            *(self._answer(_get(path, name)) for name in others), return_exceptions=True
        )
        said: dict[str, Response | APIError] = {_replica_of(answer): answer}
        for name, other in zip(others, answers, strict=True):
            if not isinstance(other, (Response, APIError)):
                raise other
            said[name] = other
        self.metrics.num_replicas.set(len(first.replicas))
        return said

    async def _answer(self, call: Call) -> Response:
        """What a replica answers. Raises `APIError` when none does."""
        return await answer_of(RayErrand(self.handle, call, self.ray_settings, self.metrics))

    async def health(self) -> Response:
        """One that answers for all: Ray asks each of them by itself."""
        return await self.ask("/health")

    async def states(self) -> dict[str, Any]:
        """How many replicas are in which state, and what Ray says of them."""
        status = await asyncio.to_thread(serve.status)
        application = status.applications.get(self.app_name)
        if application is None:
            raise APIError(503, f"Ray knows no application {self.app_name}", code="no_replica")
        (deployment,) = application.deployments.values()
        return {
            "application": self.app_name,
            "status": deployment.status.value,
            "message": deployment.message or None,
            "replicas": dict(deployment.replica_states),
        }

    async def events(self, request: Request) -> Response:
        raise APIError(
            404,
            "a request's events are not served with --ray: which replica will get it is not known "
            "before it comes",
            code="unknown_route",
        )

    def abort_all(self) -> None:
        self._aborting = asyncio.create_task(self._abort_all())

    async def _abort_all(self) -> None:
        try:
            await self.ask_all(ABORT)
        except APIError as error:
            log.warning("open requests could not be aborted: %s", error)


def _nothing() -> RoutingRequest:
    """What a router gets to see of a call without a prompt."""
    return RoutingRequest(uuid.uuid4().hex, 0)


def _get(path: str, only: str | None = None) -> Call:
    return Call(_nothing(), path=path, only=only)


def _replica_of(answer: Response) -> str:
    return answer.headers[REPLICA_HEADER]
