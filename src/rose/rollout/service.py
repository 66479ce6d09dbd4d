"""The gateway's process, from listening to leaving.

A first signal stops new requests and gives those under way `shutdown_s` to end; then, or at a second signal, they are
ended with an error. Workers notice that the connection is gone and forget their turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

from rose.config.gateway import GatewaySettings
from rose.errors import Unavailable
from rose.front.application import InFlight
from rose.front.connections import HttpServer
from rose.front.listening import Say, Signals
from rose.front.loops import settle_process
from rose.front.ports import connections_limit, take_port
from rose.models.folder import load_model_folder
from rose.rollout.application import application
from rose.rollout.gateway import Gateway, build_gateway
from rose.rollout.roles import VARIABLES, GatewayCard, shown, tokens_from_environment

LISTENING_ON_ALL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


async def run_gateway(model: Path, settings: GatewaySettings, *, say: Say = print) -> None:
    """Until a signal stops it. Raises ConfigError at start-up."""
    signals = Signals()
    tokens = tokens_from_environment()
    with take_port(settings) as listener:
        gateway = build_gateway(load_model_folder(model), settings)
        settle_process()
        in_flight = InFlight()
        most = connections_limit(settings.max_connections, say)
        server = HttpServer(application(gateway, tokens, in_flight), settings, "rose.gateway.http", most)
        url = _url(listener, settings)
        try:
            await server.listen(listener)
            with shown(GatewayCard(os.getpid(), url, tokens)) as card:
                _welcome(gateway, url, card, say)
                await _run_until(gateway, signals)
                server.stop_listening()
                await _drain(gateway, in_flight, signals, say)
        finally:
            in_flight.draining = True
            for member in list(gateway.pool):
                gateway.lost(member)
            await server.close()
            gateway.books.ledger.close()


async def _run_until(gateway: Gateway, signals: Signals) -> None:
    ticking = asyncio.create_task(gateway.tick_for_ever())
    try:
        await asyncio.wait([ticking, signals.first], return_when=asyncio.FIRST_COMPLETED)
        if ticking.done():
            raise Unavailable("the gateway's clock stopped") from ticking.exception()
    finally:
        ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking


async def _drain(gateway: Gateway, in_flight: InFlight, signals: Signals, say: Say) -> None:
    in_flight.draining = True
    limit_s = gateway.settings.shutdown_s
    if in_flight.count:
        say(f"stopping: {in_flight.count} requests have {limit_s:g} s to end; stop again to end them now")
    deadline_s = asyncio.get_running_loop().time() + limit_s
    while in_flight.count and not signals.second.done() and asyncio.get_running_loop().time() < deadline_s:
        await asyncio.wait([signals.second], timeout=0.05)


def _url(listener: socket.socket, settings: GatewaySettings) -> str:
    host, port = listener.getsockname()[:2]
    host = LISTENING_ON_ALL.get(host, host)
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _welcome(gateway: Gateway, url: str, card: Path, say: Say) -> None:
    say(f"the gateway for {gateway.front.model_name} is ready at {url}")
    if gateway.settings.ledger is not None:
        under_way = gateway.scheduler.waiting
        held = f"{len(gateway.trajectories)} trajectories, {under_way} turns under way"
        say(f"its ledger is {gateway.settings.ledger}: {held}")
    names = ", ".join(VARIABLES.values())
    say(f"its tokens are in {card}, or where you set them ({names})")
    say(f"try: rose serve --lend MODEL --gateway {url}")
