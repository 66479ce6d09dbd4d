"""The aiohttp application of the gateway: routes, who may use them, and errors in one shape."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from rose.errors import RoseError
from rose.front import information
from rose.front.answering import ARRIVAL
from rose.front.application import InFlight
from rose.front.connections import mark_authenticated
from rose.front.context import Front
from rose.front.failures import Failure, failure_of, failure_of_http
from rose.front.tokens import brake
from rose.rollout import joining, trainer_routes, turn_routes
from rose.rollout.gateway import Gateway
from rose.rollout.messages import CONNECT_PATH
from rose.rollout.roles import ROLES, Role, Tokens, check_role
from rose.rollout.trajectories import Forbidden

logger = logging.getLogger("rose.gateway")

Handler = Callable[[Gateway, web.Request], Awaitable[web.StreamResponse]]
FrontHandler = Callable[[Front, web.Request], Awaitable[web.StreamResponse]]
Next = Callable[[web.Request], Awaitable[web.StreamResponse]]

AGENTS: tuple[Role, ...] = ("agent", "trainer")
LOOKERS: tuple[Role, ...] = ("agent", "trainer", "operator")
TRAINERS: tuple[Role, ...] = ("trainer",)
OPERATORS: tuple[Role, ...] = ("operator", "trainer")
WORKERS: tuple[Role, ...] = ("worker",)
EVERYBODY: tuple[Role, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """Without roles it is open to everybody."""

    method: str
    path: str
    handler: Handler
    roles: tuple[Role, ...]


def _of_front(handler: FrontHandler) -> Handler:
    async def bound(gateway: Gateway, request: web.Request) -> web.StreamResponse:
        return await handler(gateway.front, request)

    return bound


ROUTES = (
    Route("POST", "/inference/v1/generate", turn_routes.generate, AGENTS),
    Route("POST", "/v1/chat/completions", turn_routes.chat_completions, AGENTS),
    Route("POST", "/v1/completions", turn_routes.completions, AGENTS),
    Route("POST", "/tokenize", _of_front(information.tokenize), AGENTS),
    Route("POST", "/detokenize", _of_front(information.detokenize), AGENTS),
    Route("GET", "/v1/models", _of_front(information.models), LOOKERS),
    Route("GET", "/v1/models/{model:.+}", _of_front(information.model), LOOKERS),
    Route("POST", "/v1/trajectories", trainer_routes.begin, AGENTS),
    Route("POST", "/v1/trajectories/{trajectory}/finish", trainer_routes.finish, AGENTS),
    Route("GET", "/v1/batches/next", trainer_routes.next_batch, TRAINERS),
    Route("POST", "/v1/versions", trainer_routes.publish, TRAINERS),
    Route("GET", "/v1/pool", trainer_routes.pool, ROLES),
    Route("POST", "/v1/pool/{member}/drain", trainer_routes.drain, OPERATORS),
    Route("GET", CONNECT_PATH, joining.connect, WORKERS),
    Route("GET", "/metrics", _of_front(information.metrics), ROLES),
    Route("GET", "/health", _of_front(information.health), EVERYBODY),
    Route("GET", "/version", _of_front(information.version), EVERYBODY),
)


def application(gateway: Gateway, tokens: Tokens, in_flight: InFlight) -> web.Application:
    app = web.Application(client_max_size=gateway.settings.max_body_bytes, middlewares=[_shaped])
    for route in ROUTES:
        app.router.add_route(route.method, route.path, _guarded(gateway, tokens, in_flight, route))
    return app


@web.middleware
async def _shaped(request: web.Request, handler: Next) -> web.StreamResponse:
    """Errors in OpenAI's shape, also those that aiohttp finds itself; a bug is logged and becomes a 500."""
    try:
        return await handler(request)
    except Failure as failure:
        await brake(request, failure)
        return failure.response()
    except Forbidden as error:
        return Failure(403, str(error), kind="permission_error", code="not_your_trajectory").response()
    except RoseError as error:
        return failure_of(error).response()
    except web.HTTPException as error:
        shaped = failure_of_http(error)
        if error.status == 404:
            shaped = Failure(404, "the gateway has no such route", code="not_found")
        return shaped.response()
    except ConnectionError:
        raise
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return Failure(500, "an error inside the gateway; its log says more", kind="internal_error").response()


def _guarded(gateway: Gateway, tokens: Tokens, in_flight: InFlight, route: Route) -> Next:
    is_worker = route.roles == WORKERS  # workers stay as long as the gateway does

    async def bound(request: web.Request) -> web.StreamResponse:
        request[ARRIVAL] = time.monotonic()
        if route.roles:
            check_role(request, tokens, route.roles)
            mark_authenticated(request)
        if in_flight.draining:
            headers = {"Retry-After": "1", "Connection": "close"}
            message = "the gateway is shutting down"
            raise Failure(503, message, kind="service_unavailable", code="shutting_down", headers=headers)
        in_flight.count += not is_worker
        try:
            return await route.handler(gateway, request)
        finally:
            in_flight.count -= not is_worker

    return bound
