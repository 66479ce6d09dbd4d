"""The aiohttp application of a device: routes, and the one place where an error becomes an answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from rose.errors import RoseError
from rose.front.answering import ARRIVAL
from rose.front.callers import CallerCheck
from rose.front.context import Front
from rose.front.failures import Failure, failure_of, failure_of_http
from rose.front.routes import OPENAPI_PATH, Handler, openapi, routes_of
from rose.front.tokens import brake, check_bearer

logger = logging.getLogger("rose.front")

# What monitors ask for, and the controls, which have a token of their own.
WITHOUT_KEY = ("/health", "/version", "/metrics", "/rose/")

Next = Callable[[web.Request], Awaitable[web.StreamResponse]]


class InFlight:
    """How many requests are being answered, and whether new ones still are."""

    def __init__(self) -> None:
        self.count = 0
        self.draining = False


def application(front: Front, in_flight: InFlight) -> web.Application:
    callers = CallerCheck(front.settings)

    @web.middleware
    async def guard(request: web.Request, handler: Next) -> web.StreamResponse:
        request[ARRIVAL] = time.monotonic()
        in_flight.count += 1
        try:
            if in_flight.draining:
                raise _shutting_down()
            callers.check(request)
            if front.token is not None:
                check_bearer(request, front.token)
            elif front.api_key is not None and not request.path.startswith(WITHOUT_KEY):
                check_bearer(request, front.api_key)
            return await _answer(request, handler)
        except Failure as failure:
            await brake(request, failure)
            return failure.response()
        finally:
            in_flight.count -= 1

    app = web.Application(middlewares=[guard], client_max_size=front.settings.max_body_bytes)
    for route in routes_of(front):
        path = route.operation.path.replace("{model}", "{model:.+}")  # names may have slashes
        app.router.add_route(route.operation.method, path, _bind(front, route.handler))
    app.router.add_get(OPENAPI_PATH, _bind(front, openapi))
    return app


async def _answer(request: web.Request, handler: Next) -> web.StreamResponse:
    """Turn whatever a handler raises into a Failure; a bug is logged and becomes a 500."""
    try:
        return await handler(request)
    except RoseError as error:
        raise failure_of(error) from error
    except web.HTTPException as error:
        raise failure_of_http(error) from error
    except (Failure, ConnectionError):
        raise
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        raise Failure(500, "an error inside the device; its log says more", kind="internal_error") from error


def _bind(front: Front, handler: Handler) -> Next:
    async def bound(request: web.Request) -> web.StreamResponse:
        return await handler(front, request)

    return bound


def _shutting_down() -> Failure:
    headers = {"Retry-After": "1", "Connection": "close"}
    return Failure(
        503, "the device is shutting down", kind="service_unavailable", code="shutting_down", headers=headers
    )
