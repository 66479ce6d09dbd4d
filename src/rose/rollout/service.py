"""The gateway's process, from listening to leaving.

A first signal stops new requests and gives those under way `shutdown_s` to end; then, or at a second signal, they are
ended with an error. Workers notice that the connection is gone and forget their turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
from pathlib import Path

from aiohttp import web

from rose.config.gateway import GatewaySettings
from rose.errors import Unavailable
from rose.front.application import InFlight
from rose.front.connections import Doorkeeper
from rose.front.listening import BACKLOG, FAREWELL_S, KEEP_ALIVE_S, Say, Signals
from rose.front.ports import cannot_listen, take_port
from rose.models.folder import load_model_folder
from rose.rollout.application import application
from rose.rollout.gateway import Gateway, build_gateway
from rose.rollout.roles import VARIABLES, GatewayCard, shown, tokens_from_environment

GARBAGE_AFTER = 20_000  # allocations; a turn makes hundreds, and nearly all of them go without the collector
LISTENING_ON_ALL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


async def run_gateway(model: Path, settings: GatewaySettings, *, say: Say = print) -> None:
    """Until a signal stops it. Raises ConfigError at start-up."""
    signals = Signals()
    tokens = tokens_from_environment()
    with take_port(settings) as listener:
        gateway = build_gateway(load_model_folder(model), settings)
        _settle_memory()
        in_flight = InFlight()
        runner = web.AppRunner(
            application(gateway, tokens, in_flight),
            handler_cancellation=True,  # a client that leaves is noticed
            access_log=None,
            logger=_quiet_logger(),
            keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=FAREWELL_S,
        )
        await runner.setup()
        url = _url(listener)
        try:
            server = await _listen(runner, listener, settings)
            with shown(GatewayCard(os.getpid(), url, tokens)) as card:
                _welcome(gateway, url, card, say)
                await _run_until(gateway, signals)
                server.close()
                await _drain(gateway, in_flight, signals, say)
        finally:
            in_flight.draining = True
            for member in list(gateway.pool):
                gateway.lost(member)
            await runner.cleanup()
            gateway.books.ledger.close()


def _settle_memory() -> None:
    """What was loaded lives as long as the process: the collector need not look at it between turns."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER, 20, 20)


async def _listen(runner: web.AppRunner, listener: socket.socket, settings: GatewaySettings) -> asyncio.Server:
    http = runner.server
    assert http is not None
    loop = asyncio.get_running_loop()
    try:
        return await loop.create_server(
            lambda: Doorkeeper(http, settings.max_connections, settings.read_timeout_s),
            sock=listener,
            backlog=BACKLOG,
        )
    except OSError as error:
        raise cannot_listen(settings, error) from error


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


def _quiet_logger() -> logging.Logger:
    """aiohttp reports what clients do wrong with a traceback; what we do wrong, the application reports itself."""
    found = logging.getLogger("rose.gateway.http")
    found.setLevel(logging.CRITICAL)
    return found


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = LISTENING_ON_ALL.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _welcome(gateway: Gateway, url: str, card: Path, say: Say) -> None:
    say(f"the gateway for {gateway.front.model_name} is ready at {url}")
    if gateway.settings.ledger is not None:
        under_way = gateway.scheduler.waiting
        held = f"{len(gateway.trajectories)} trajectories, {under_way} turns under way"
        say(f"its ledger is {gateway.settings.ledger}: {held}")
    names = ", ".join(VARIABLES.values())
    say(f"its tokens are in {card}, or where you set them ({names})")
    say(f"try: rose serve --lend MODEL --gateway {url}")
