"""How the front says no: every answer that is not a success has OpenAI's shape.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

`Failure` is raised anywhere under a handler and becomes such an answer in one place. Errors of ROSE's own tree are
translated here: a request at fault is a 4xx, a world at fault is a 503 with Retry-After.
"""

from __future__ import annotations

import math

import msgspec
from aiohttp import web

from rose.errors import ContextTooLong, QueueFull, RequestRefused, RoseError, Unavailable

INVALID_REQUEST = "invalid_request_error"


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """What every error looks like."""

    error: ErrorDetail


class Failure(Exception):
    """An answer that is not a success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(ErrorDetail(message, kind, param, code))
        self.headers = headers or {}

    def encode(self) -> bytes:
        try:
            return msgspec.json.encode(self.body)
        except UnicodeEncodeError:  # it quotes bytes of a header or an address that are no text
            detail = self.body.error
            message, param = (_text_of(part) for part in (detail.message, detail.param or ""))
            return msgspec.json.encode(ErrorBody(ErrorDetail(message, detail.type, param or None, detail.code)))

    def response(self) -> web.Response:
        found = web.Response(
            status=self.status, body=self.encode(), content_type="application/json", headers=self.headers
        )
        if self.headers.get("Connection") == "close":
            found.force_close()  # the header alone would leave the connection open
        return found


def _text_of(quoted: str) -> str:
    return quoted.encode(errors="replace").decode()


def bad_request(message: str, *, param: str | None = None, code: str | None = "invalid_value") -> Failure:
    return Failure(400, message, param=param, code=code)


def failure_of(error: RoseError) -> Failure:
    """The answer an error of ours stands for."""
    message = f"{error.what} ({error.hint})" if error.hint else error.what
    match error:
        case ContextTooLong():
            return bad_request(message, param="max_tokens", code="context_length_exceeded")
        case QueueFull():
            headers = _retry_after(error.retry_after_s)
            return Failure(429, message, kind="rate_limit_error", code="queue_full", headers=headers)
        case RequestRefused():
            return bad_request(message)
        case Unavailable():
            headers = _retry_after(error.retry_after_s)
            return Failure(503, message, kind="service_unavailable", code="engine_unavailable", headers=headers)
    return Failure(503, message, kind="service_unavailable", headers=_retry_after(1.0))


def failure_of_http(error: web.HTTPException) -> Failure:
    """What aiohttp raises by itself (unknown route, wrong method, too large), in our shape.

    The request holds the error, and its traceback the request: without the traceback both are freed at once.
    """
    error.__traceback__ = None
    headers = {name: error.headers[name] for name in ("Allow", "Location") if name in error.headers}
    code = error.reason.lower().replace(" ", "_")
    return Failure(error.status, _http_message(error), code=code, headers=headers)


def _http_message(error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{error.method} is not allowed here; use {', '.join(sorted(error.allowed_methods))}"
    if isinstance(error, web.HTTPNotFound):
        return "there is no such route; GET /openapi.json lists them"
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return f"the body is too large: {error.text}"
    return error.text or error.reason


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
