"""Error responses: every response that is not a success has OpenAI's shape.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

`Failure` is raised anywhere under a handler and becomes such a response in one place. Errors of ROSE's own tree are
translated here: a fault of the request is a 4xx, a fault of the world is a 503 with Retry-After.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from rose.errors import ContextTooLong, QueueFull, RequestRefused, RoseError, Unavailable, VersionUnavailable

INVALID_REQUEST = "invalid_request_error"

RequestHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of every error response. A demand for weights that do not run is answered with the newest version."""

    error: ErrorDetail
    weight_version: str | None = None


class Failure(Exception):
    """A response that is not a success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        weight_version: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(ErrorDetail(message, kind, param, code), weight_version)
        self.headers = headers or {}

    def encode(self) -> bytes:
        try:
            return msgspec.json.encode(self.body)
        except UnicodeEncodeError:  # it quotes bytes of a header or an address that are no text
            detail = self.body.error
            message, param = (part.encode(errors="replace").decode() for part in (detail.message, detail.param or ""))
            return msgspec.json.encode(ErrorBody(ErrorDetail(message, detail.type, param or None, detail.code)))

    def response(self) -> web.Response:
        body = self.encode()
        response = web.Response(status=self.status, body=body, content_type="application/json", headers=self.headers)
        if self.headers.get("Connection") == "close":
            response.force_close()  # the header alone would leave the connection open
        return response


def bad_request(message: str, *, param: str | None = None, code: str | None = "invalid_value") -> Failure:
    return Failure(400, message, param=param, code=code)


def shutting_down(what: str) -> Failure:
    """Return the response to requests that come after the first signal to `what`."""
    headers = {"Retry-After": "1", "Connection": "close"}
    return Failure(503, f"{what} is shutting down", kind="service_unavailable", code="shutting_down", headers=headers)


def failure_of(error: RoseError) -> Failure:
    """Return the response that an error of our own tree stands for."""
    message = f"{error.what} ({error.hint})" if error.hint else error.what
    match error:
        case ContextTooLong():
            return bad_request(message, param="max_tokens", code="context_length_exceeded")
        case QueueFull():
            headers = _retry_after(error.retry_after_s)
            return Failure(429, message, kind="rate_limit_error", code="queue_full", headers=headers)
        case VersionUnavailable():
            return Failure(409, message, code="version_unavailable", weight_version=error.newest)
        case RequestRefused():
            return bad_request(message)
        case Unavailable():
            headers = _retry_after(error.retry_after_s)
            return Failure(503, message, kind="service_unavailable", code="engine_unavailable", headers=headers)
    return Failure(503, message, kind="service_unavailable", headers=_retry_after(1.0))


def failure_of_http(error: web.HTTPException) -> Failure:
    """Return what aiohttp raises by itself (unknown route, wrong method, too large) in our shape.

    The request holds the error, and its traceback the request: without the traceback both are freed at once.
    """
    error.__traceback__ = None
    headers = {name: error.headers[name] for name in ("Allow", "Location") if name in error.headers}
    message = error.text or error.reason
    if isinstance(error, web.HTTPMethodNotAllowed):
        message = f"{error.method} is not allowed here; use {', '.join(sorted(error.allowed_methods))}"
    elif isinstance(error, web.HTTPNotFound):
        message = "there is no such route; GET /openapi.json lists them"
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        message = f"the body is too large: {error.text}"
    return Failure(error.status, message, code=error.reason.lower().replace(" ", "_"), headers=headers)


async def with_failures(
    request: web.Request, handler: RequestHandler, what: str, logger: logging.Logger
) -> web.StreamResponse:
    """Run a handler and raise whatever it raises as a Failure; a bug is logged and becomes a 500."""
    try:
        return await handler(request)
    except RoseError as error:
        raise failure_of(error) from error
    except web.HTTPException as error:
        raise failure_of_http(error) from error
    except (Failure, ConnectionError):
        raise
    except Exception as error:
        resource = request.match_info.route.resource  # its pattern: a path may hold the secret of a session
        logger.exception("%s %s failed", request.method, resource.canonical if resource is not None else "")
        raise Failure(500, f"an error inside the {what}; its log says more", kind="internal_error") from error


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
