"""The gateway's process, from start-up to shutdown.

A first signal stops new requests and gives those under way `shutdown_s` to end; then, or at a second signal, they end
with an error. Workers notice that the connection is gone and forget their turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web

from rose.api.worker_messages import CONNECT_PATH
from rose.config.server_settings import GatewaySettings
from rose.errors import Unavailable
from rose.gateway import (
    fleet_routes,
    live_page,
    shard_peers,
    trainer_routes,
    turn_routes,
    vllm_control_routes,
    worker_endpoint,
)
from rose.gateway.auth import (
    ROLES,
    VARIABLES,
    GatewayEntry,
    Role,
    RoleTokens,
    check_role,
    registered_gateway,
    tokens_from_environment,
)
from rose.gateway.gateway_server import Gateway, build_gateway
from rose.gateway.trajectory_table import Forbidden
from rose.models.model_folder import load_model_folder
from rose.openai import information
from rose.openai.access import CallerCheck, brake
from rose.openai.anthropic_messages import COUNT_PATH, MESSAGES_PATH, count_tokens, error_response, is_message_path
from rose.openai.connections import mark_authenticated
from rose.openai.http_context import HttpContext
from rose.openai.http_errors import Failure, RequestHandler, shutting_down, with_failures
from rose.openai.http_server import HttpServer, InFlight, Say, Signals, connections_limit, drain, take_port
from rose.openai.loops import settle_process
from rose.openai.response_rendering import ARRIVAL
from rose.openai.responses_api import RESPONSES_PATH

logger = logging.getLogger("rose.gateway")

Handler = Callable[[Gateway, web.Request], Awaitable[web.StreamResponse]]
ContextHandler = Callable[[HttpContext, web.Request], Awaitable[web.StreamResponse]]

AGENTS: tuple[Role, ...] = ("agent", "trainer")
READERS: tuple[Role, ...] = ("agent", "trainer", "operator")
TRAINERS: tuple[Role, ...] = ("trainer",)
OPERATORS: tuple[Role, ...] = ("operator", "trainer")
OWNERS: tuple[Role, ...] = ("operator",)  # what not even a trainer may do
WORKERS: tuple[Role, ...] = ("worker",)
PUBLIC: tuple[Role, ...] = ()


@dataclass(frozen=True, slots=True)
class GatewayRoute:
    """One route and the roles that may use it; without roles it is open to every client.

    A connection that `is_lasting` stays as long as the gateway does. A route of the live page refuses requests from web
    pages of other sites, by the headers Host and Origin.
    """

    method: str
    path: str
    handler: Handler
    roles: tuple[Role, ...]
    is_lasting: bool = False
    is_of_page: bool = False


def _of_context(handler: ContextHandler) -> Handler:
    async def bound(gateway: Gateway, request: web.Request) -> web.StreamResponse:
        return await handler(gateway.context, request)

    return bound


ORDERS_PATH = "/v1/pool/orders"

SESSION_ROUTES = (
    GatewayRoute("POST", "/inference/v1/generate", turn_routes.generate, AGENTS),
    GatewayRoute("POST", "/v1/chat/completions", turn_routes.chat_completions, AGENTS),
    GatewayRoute("POST", "/v1/completions", turn_routes.completions, AGENTS),
    GatewayRoute("POST", RESPONSES_PATH, turn_routes.responses, AGENTS),
    GatewayRoute("POST", MESSAGES_PATH, turn_routes.messages, AGENTS),
    GatewayRoute("POST", COUNT_PATH, _of_context(count_tokens), AGENTS),
    GatewayRoute("POST", "/tokenize", _of_context(information.tokenize), AGENTS),
    GatewayRoute("POST", "/detokenize", _of_context(information.detokenize), AGENTS),
    GatewayRoute("GET", "/v1/models", _of_context(information.models), READERS),
    GatewayRoute("GET", "/v1/models/{model:.+}", _of_context(information.model), READERS),
)
"""The routes that a client of one session uses; each is also at `/sessions/{session}`."""

ROUTES = (
    *SESSION_ROUTES,
    *(replace(route, path=f"/sessions/{{session}}{route.path}") for route in SESSION_ROUTES),
    GatewayRoute("POST", "/v1/trajectories", trainer_routes.begin, AGENTS),
    GatewayRoute("POST", "/v1/trajectories/{trajectory}/finish", trainer_routes.finish, AGENTS),
    GatewayRoute("GET", "/v1/batches/next", trainer_routes.next_batch, TRAINERS),
    GatewayRoute("POST", "/v1/versions", trainer_routes.publish, TRAINERS),
    GatewayRoute("GET", "/v1/shard", shard_peers.shard_status, OPERATORS),
    GatewayRoute("GET", "/v1/pool", trainer_routes.pool, ROLES),
    GatewayRoute("POST", "/v1/pool/{worker}/drain", trainer_routes.drain, OPERATORS),
    GatewayRoute("POST", ORDERS_PATH, fleet_routes.give_order, OWNERS, is_of_page=True),
    GatewayRoute("GET", ORDERS_PATH, fleet_routes.orders, OPERATORS, is_of_page=True),
    GatewayRoute("GET", "/ui", live_page.show_page, PUBLIC, is_of_page=True),
    GatewayRoute("GET", "/ui/events", live_page.events, OPERATORS, is_lasting=True, is_of_page=True),
    GatewayRoute("GET", "/ui/trajectories", live_page.trajectories, OPERATORS, is_of_page=True),
    GatewayRoute("GET", "/ui/trajectories/{trajectory:.+}", live_page.trajectory, OPERATORS, is_of_page=True),
    GatewayRoute("GET", CONNECT_PATH, worker_endpoint.connect, WORKERS, is_lasting=True),
    GatewayRoute("GET", "/metrics", _of_context(information.metrics), ROLES),
    GatewayRoute("GET", "/health", _of_context(information.health), PUBLIC),
    GatewayRoute("GET", "/version", _of_context(information.version), PUBLIC),
)

VLLM_CONTROL_ROUTES = tuple(
    GatewayRoute(method, path, handler, TRAINERS)
    for method, path, handler in (
        ("POST", "/pause", vllm_control_routes.pause),
        ("POST", "/resume", vllm_control_routes.resume),
        ("GET", "/is_paused", vllm_control_routes.is_paused),
        ("GET", "/get_world_size", vllm_control_routes.world_size),
        ("GET", "/weight_info", vllm_control_routes.weight_info),
        ("GET", "/server_info", vllm_control_routes.server_info),
        ("POST", "/reset_prefix_cache", vllm_control_routes.accept),
        ("POST", "/finish_session", vllm_control_routes.finish_session),
        ("POST", "/init_weight_transfer_engine", vllm_control_routes.init_transfer),
        ("POST", "/start_weight_update", vllm_control_routes.accept),
        ("POST", "/update_weights", vllm_control_routes.update),
        ("POST", "/finish_weight_update", vllm_control_routes.finish_update),
        ("POST", "/shutdown_weight_transfer_engine", vllm_control_routes.accept),
        ("POST", "/areal_pause_generation", vllm_control_routes.pause),
        ("POST", "/areal_update_weights", vllm_control_routes.update_areal),
        ("POST", "/areal_continue_generation", vllm_control_routes.resume),
    )
)
"""The routes of a gateway with the setting `control.api`: vllm."""


def routes_of(settings: GatewaySettings) -> tuple[GatewayRoute, ...]:
    return ROUTES if settings.control.api is None else (*ROUTES, *VLLM_CONTROL_ROUTES)


def application(gateway: Gateway, tokens: RoleTokens, in_flight: InFlight) -> web.Application:
    app = web.Application(client_max_size=gateway.settings.max_body_bytes, middlewares=[_shaped])
    callers = CallerCheck(gateway.settings)
    for route in routes_of(gateway.settings):
        handler = _guarded(gateway, tokens, in_flight, route, callers if route.is_of_page else None)
        app.router.add_route(route.method, route.path, handler)
    return app


@web.middleware
async def _shaped(request: web.Request, handler: RequestHandler) -> web.StreamResponse:
    """Render errors in the API's shape, also those of aiohttp; a bug is logged and becomes a 500."""
    try:
        return await with_failures(request, handler, "gateway", logger)
    except Failure as failure:
        await brake(request, failure)
        if isinstance(failure.__cause__, web.HTTPNotFound):
            failure = Failure(404, "the gateway has no such route", code="not_found")
        elif isinstance(failure.__cause__, Forbidden):
            failure = Failure(403, str(failure.__cause__), kind="permission_error", code="not_your_trajectory")
        return error_response(failure) if is_message_path(request.path) else failure.response()


def _guarded(
    gateway: Gateway, tokens: RoleTokens, in_flight: InFlight, route: GatewayRoute, callers: CallerCheck | None
) -> RequestHandler:
    counts = not route.is_lasting

    async def bound(request: web.Request) -> web.StreamResponse:
        request[ARRIVAL] = time.monotonic()
        if callers is not None:
            callers.check(request)
        if route.roles:
            check_role(request, tokens, route.roles)
            mark_authenticated(request)
        if in_flight.draining:
            raise shutting_down("the gateway")
        in_flight.count += counts
        try:
            return await route.handler(gateway, request)
        finally:
            in_flight.count -= counts

    return bound


LISTENING_ON_ALL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


async def run_gateway(model: Path, settings: GatewaySettings, *, say: Say = print) -> None:
    """Run the gateway until a signal stops it. Raises ConfigError at start-up."""
    signals = Signals()
    tokens = tokens_from_environment()
    shard_peers.check_shards(settings)
    with take_port(settings) as listener:
        gateway = build_gateway(load_model_folder(model), settings)
        settle_process()
        in_flight = InFlight()
        most = connections_limit(settings.max_connections, say)
        server = HttpServer(application(gateway, tokens, in_flight), settings, "rose.gateway.http", most)
        url = _url(listener, settings)
        try:
            await server.listen(listener)
            with registered_gateway(GatewayEntry(os.getpid(), url, tokens)) as entry:
                _announce(gateway, url, entry, say)
                await _run_until(gateway, signals, tokens)
                server.stop_listening()
                await drain(in_flight, settings.shutdown_s, signals, say)
        finally:
            in_flight.draining = True
            for worker in list(gateway.core.pool):
                gateway.remove_worker(worker)
            await server.close()
            if gateway.publisher is not None:
                await gateway.publisher.close()
            gateway.core.ledger.close()


async def _run_until(gateway: Gateway, signals: Signals, tokens: RoleTokens) -> None:
    async def tick() -> None:
        await asyncio.gather(gateway.tick_for_ever(), shard_peers.exchange_loads(gateway, tokens.operator))

    ticking = asyncio.create_task(tick())
    try:
        await asyncio.wait([ticking, signals.first], return_when=asyncio.FIRST_COMPLETED)
        if ticking.done():
            raise Unavailable("the gateway's clock stopped") from ticking.exception()
    finally:
        ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking


def _url(listener: socket.socket, settings: GatewaySettings) -> str:
    host, port = listener.getsockname()[:2]
    host = LISTENING_ON_ALL.get(host, host)
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _announce(gateway: Gateway, url: str, entry: Path, say: Say) -> None:
    say(f"the gateway for {gateway.context.model_name} is ready at {url}")
    if gateway.settings.ledger is not None:
        under_way = gateway.core.scheduler.waiting
        held = f"{len(gateway.core.trajectories)} trajectories, {under_way} turns under way"
        say(f"its ledger is {gateway.settings.ledger}: {held}")
    if gateway.settings.control.api is not None:
        source = gateway.settings.control.folder or "none: versions are published by the trainer"
        say(f"its control routes are those of {gateway.settings.control.api}; folders of weights: {source}")
    names = ", ".join(VARIABLES.values())
    say(f"its tokens are in {entry}, or where you set them ({names})")
    say(f"the live page is {url}/ui; its token: rose pool token --gateway {url}")
    say(f"try: rose serve --lend MODEL --gateway {url}")
