"""Every refusal and failure in OpenAI's envelope, so that OpenAI's clients raise the right error.

::

    {"error": {"message": "temperature must be …", "type": "invalid_request_error",
               "param": "temperature", "code": null}}
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from minifer.async_llm import EngineClosedError

MAX_MESSAGE = 500  # characters; a refused value may be as long as the body
GONE = 499  # nginx' status for a client that has left; nobody reads it

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class APIError(Exception):
    """An answer that is not a result. Raised anywhere below a route.

    status: HTTP's. param: the field at fault. code: OpenAI's word for it, for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "…"
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def envelope(self) -> dict[str, Any]:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        return JSONResponse(self.envelope, self.status, headers=self.headers)


@contextmanager
def refusals(known_fields: Container[str] = ()) -> Iterator[None]:
    """A `ValueError` of the engine's own checks becomes a 400.

    Ours begin with the name of the parameter: where it is a field of the body, it is `param`.
    """
    try:
        yield
    except ValueError as error:
        message = " ".join(str(error).split())
        first = re.match(r"\w*", message)[0]  # type: ignore[index]  # of "stop[0] must be …" stop
        raise APIError(400, message, param=first if first in known_fields else None) from error


def as_api_error(error: Exception) -> APIError:
    """What a client is told about any exception; of one that was not expected only its kind."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):  # the router's: no such route, wrong method
        return APIError(error.status_code, error.detail, headers=error.headers)
    if isinstance(error, EngineClosedError):
        return APIError(503, str(error), code="engine_stopped")
    return APIError(500, f"internal error: {type(error).__name__}", code="internal_error")


# Answered, and that is all. Whatever else a route raises is a fault of ours: Starlette sends the
# answer and raises it once more, and uvicorn logs it.
EXPECTED = (APIError, HTTPException, EngineClosedError, ClientDisconnect)


async def on_error(request: Request, error: Exception) -> Response:
    """Starlette's exception handler."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=GONE)
    if isinstance(error, HTTPException):
        where = f"{request.method} {request.url.path}"
        allowed = (error.headers or {}).get("Allow")
        if error.status_code == 404:
            error = APIError(404, f"there is no route {where}", code="unknown_route")
        elif error.status_code == 405:
            message = f"{where} is not allowed; this route takes {allowed}"
            error = APIError(405, message, code="method_not_allowed", headers=error.headers)
    return as_api_error(error).response()
