"""The front process of a device, from listening to leaving.

The ports are taken before the model is loaded, so that a port in use is said at once, and opened after it, so that
nobody is let in to wait. A device that is lent has a second front, for rollouts, in a process of its own; a device
without a serving model is a dedicated rollout worker, whose only door is the rollouts'.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rose.config.device import DeviceSettings, FrontSettings
from rose.coserve.channel import EMBEDDED, start_command
from rose.coserve.device import check_device, kept_off
from rose.coserve.door import address_of, open_door
from rose.errors import ConfigError
from rose.front.building import build_front
from rose.front.companion import Companion, accompanied
from rose.front.context import Front
from rose.front.devices import DeviceCard, shown
from rose.front.lending import LendingDesk
from rose.front.listening import Say, Signals, answer_until
from rose.front.ports import take_port
from rose.front.rollouts import RolloutFront, RolloutProcess
from rose.front.supervisor import Supervisor
from rose.front.tokens import (
    API_KEY_VARIABLE,
    OWNER_VARIABLE,
    ROLLOUT_VARIABLE,
    api_key_from_environment,
    check_distinct,
    token_from,
)
from rose.models.folder import load_model_folder
from rose.observe.journal import Journal
from rose.observe.metrics import Metrics


async def serve(
    model: Path | None,
    settings: DeviceSettings,
    *,
    lend: Path | None = None,
    say: Say = print,
    factory: str = EMBEDDED,
    companion: Companion | None = None,
) -> None:
    """Run a device until a signal stops it. Raises ConfigError at start-up, Unavailable if the engine is lost.

    A `companion` runs beside the rollouts' door, in its process.
    """
    with kept_off(check_device(settings.device)):
        await _serve_any(model, settings, lend, say, factory, companion)


async def _serve_any(
    model: Path | None,
    settings: DeviceSettings,
    lend: Path | None,
    say: Say,
    factory: str,
    companion: Companion | None,
) -> None:
    signals = Signals()
    if model is not None and lend is not None:
        await _serve_and_lend(model, lend, settings, signals, say, companion)
    elif model is not None:
        await _serve(model, settings, settings.front, signals, say, factory)
    elif lend is not None:
        token = token_from(ROLLOUT_VARIABLE)
        await _serve(lend, settings, settings.rollout, signals, say, factory, token=token, companion=companion)
    else:
        raise ConfigError("there is nothing to serve", hint="name a model folder: rose serve MODEL")


async def _serve(
    model: Path,
    settings: DeviceSettings,
    door: FrontSettings,
    signals: Signals,
    say: Say,
    factory: str,
    *,
    token: str | None = None,
    companion: Companion | None = None,
) -> None:
    """One model at one door; with a token it is a dedicated rollout worker."""
    with take_port(door) as listener:
        folder = load_model_folder(model)
        engine = Supervisor(start_command(model, settings, factory=factory, gated=False), on_progress=say)
        try:
            await signals.interrupts(engine.start())
            figures = Metrics()
            key = api_key_from_environment() if token is None else None
            front = build_front(folder, settings.model_name, door, engine, metrics=figures, token=token, api_key=key)
            engine.on_step = front.metrics.observe
            if companion is not None:
                seats = settings.engine.max_sequences
                companion = companion.told(model=front.model_name, kind="dedicated", seats=seats)
            with _card(front, None, ("", _url(listener, door)), token):
                async with accompanied(engine, figures, companion):
                    await answer_until(front, listener, signals, say, on_open=lambda: _welcome(front, listener, say))
        finally:
            await engine.close()


async def _serve_and_lend(
    model: Path, lend: Path, settings: DeviceSettings, signals: Signals, say: Say, companion: Companion | None
) -> None:
    with ExitStack() as held:
        listener = held.enter_context(take_port(settings.front))
        rollout_listener = held.enter_context(take_port(settings.rollout))
        rollout_listener.listen()
        door = held.enter_context(open_door())
        folder, rollout_folder = load_model_folder(model), load_model_folder(lend)
        owner_token, rollout_token, key = _tokens()
        journal = held.enter_context(Journal(settings.lend.journal)) if settings.lend.journal else None
        command = start_command(model, settings, factory=EMBEDDED, gated=False, lend=lend)
        engine = Supervisor(command, on_progress=say, door=door)
        if companion is not None:
            seats = settings.lend.max_sequences
            companion = companion.told(model=rollout_folder.name, kind="borrowed", seats=seats)
        told = RolloutFront(
            folder=str(lend),
            name=None,
            address=address_of(door),
            listener=rollout_listener.fileno(),
            token=rollout_token,
            settings=settings.rollout,
            requests_max=settings.lend.max_sequences + settings.lend.max_waiting,
            companion=companion,
        )
        rollouts: RolloutProcess | None = None
        try:
            await signals.interrupts(engine.start())
            rollouts = RolloutProcess(told)
            figures = Metrics()
            desk = LendingDesk(engine, owner_token, figures, journal)
            front = build_front(
                folder, settings.model_name, settings.front, engine, metrics=figures, desk=desk, api_key=key
            )
            engine.on_step = front.metrics.observe

            def welcome() -> None:
                _welcome(front, listener, say)
                url = _url(rollout_listener, settings.rollout)
                say(f"lending to {rollout_folder.name} at {url} (mode {settings.lend.mode})")
                say("try: rose lend status")

            urls = _url(listener, settings.front), _url(rollout_listener, settings.rollout)
            with _card(front, rollout_folder.name, urls, rollout_token):
                await answer_until(front, listener, signals, say, on_open=welcome)
        finally:
            await engine.close()
            if rollouts is not None:
                await rollouts.close()


def _tokens() -> tuple[str, str, str | None]:
    """The owner's token, that of rollouts, and the key of the serving port. Raises ConfigError if two are equal."""
    owner, rollout, key = token_from(OWNER_VARIABLE), token_from(ROLLOUT_VARIABLE), api_key_from_environment()
    check_distinct({OWNER_VARIABLE: owner, ROLLOUT_VARIABLE: rollout, API_KEY_VARIABLE: key})
    return owner, rollout, key


@contextmanager
def _card(front: Front, rollout_model: str | None, urls: tuple[str, str], token: str | None) -> Iterator[None]:
    """Only devices with rollouts have a registry entry: no command looks for the others."""
    if token is None:
        yield
        return
    card = DeviceCard(
        process_id=os.getpid(),
        model=front.model_name if rollout_model is not None else "",
        rollout_model=rollout_model or front.model_name,
        url=urls[0],
        rollout_url=urls[1],
        owner_token=front.desk.token if front.desk is not None else "",
        rollout_token=token,
    )
    with shown(card):
        yield


def _url(listener: socket.socket, door: FrontSettings) -> str:
    host, port = listener.getsockname()[:2]
    shown_host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'http' if door.ssl_certfile is None else 'https'}://{shown_host}:{port}"


def _welcome(front: Front, listener: socket.socket, say: Say) -> None:
    url = _url(listener, front.settings)
    say(f"{front.model_name} is ready at {url}/v1")
    if front.token is not None:
        say("a rollout worker: requests need its token; `rose lend token` prints it")
        return
    if front.api_key is not None:
        say(f"requests need the key of {API_KEY_VARIABLE}: send the header `Authorization: Bearer KEY`")
    body = f'{{"model": "{front.model_name}", "prompt": "Hello", "max_tokens": 32}}'
    say(f"try: curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'")
