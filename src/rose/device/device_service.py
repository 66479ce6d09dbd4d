"""The front process of a device, from listening to leaving.

The ports are taken before the model is loaded, so that a port in use is reported at once, and opened after it, so that
no client waits for the engine. A lent device has a second front, for rollouts, in a process of its own; a device
without a serving model is a dedicated rollout worker, and has a port for rollouts only.
"""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from rose.config.server_settings import DeviceSettings, FrontSettings
from rose.device.admin_routes import LendingControls, LentContext
from rose.device.device_registry import DeviceEntry, registered_device
from rose.device.device_server import SidecarTask, answer_until, sidecar_running
from rose.device.engine_channel import EMBEDDED, start_command
from rose.device.engine_supervisor import Supervisor
from rose.device.os_process import check_device, kept_off
from rose.device.rollout_front import RolloutFront, RolloutProcess
from rose.device.transport import address_of, open_rollout_listener
from rose.errors import ConfigError
from rose.models.model_folder import load_model_folder
from rose.observe.journal import Journal
from rose.observe.metrics import Metrics
from rose.openai.access import (
    API_KEY_VARIABLE,
    OWNER_VARIABLE,
    ROLLOUT_VARIABLE,
    check_distinct,
    optional_token_from,
    token_from,
)
from rose.openai.http_context import HttpContext
from rose.openai.http_server import Say, Signals, take_port


async def serve(
    model: Path | None,
    settings: DeviceSettings,
    *,
    lend: Path | None = None,
    say: Say = print,
    factory: str = EMBEDDED,
    sidecar: SidecarTask | None = None,
) -> None:
    """Run a device until a signal stops it. Raises ConfigError at start-up, Unavailable if the engine is lost.

    The sidecar task runs in the process that answers rollouts.
    """
    with kept_off(check_device(settings.device)):
        signals = Signals()
        if model is not None and lend is not None:
            await _serve_and_lend(model, lend, settings, signals, say, sidecar)
        elif model is not None:
            await _serve_one(model, settings, settings.front, signals, say, factory)
        elif lend is not None:
            token = token_from(ROLLOUT_VARIABLE)
            await _serve_one(lend, settings, settings.rollout, signals, say, factory, token=token, sidecar=sidecar)
        else:
            raise ConfigError("there is nothing to serve", hint="name a model folder: rose serve MODEL")


async def _serve_one(
    model: Path,
    settings: DeviceSettings,
    front: FrontSettings,
    signals: Signals,
    say: Say,
    factory: str,
    *,
    token: str | None = None,
    sidecar: SidecarTask | None = None,
) -> None:
    """Serve one model on one port; with a token the device is a dedicated rollout worker."""
    with take_port(front) as listener:
        folder = load_model_folder(model)
        supervisor = Supervisor(start_command(model, settings, factory=factory), on_progress=say)
        engine, metrics = supervisor.client, Metrics()
        try:
            await signals.interrupts(supervisor.start())
            key = optional_token_from(API_KEY_VARIABLE) if token is None else None
            context = HttpContext.build(
                folder, settings.model_name, front, engine, metrics=metrics, token=token, api_key=key
            )
            engine.events.steps.subscribe(context.metrics.observe)
            entry: AbstractContextManager[None] = nullcontext()
            if token is not None:  # no command looks for devices without rollouts
                url = _url(listener, front)
                entry = registered_device(DeviceEntry(os.getpid(), "", context.model_name, "", url, "", token))
            if sidecar is not None:
                sidecar = sidecar.with_defaults(
                    model=context.model_name, kind="dedicated", max_concurrency=settings.engine.max_sequences
                )
            with entry:
                async with sidecar_running(engine, metrics, sidecar):
                    await answer_until(
                        context, engine, listener, signals, say, on_open=lambda: _welcome(context, listener, say)
                    )
        finally:
            await engine.close()


async def _serve_and_lend(
    model: Path, lend: Path, settings: DeviceSettings, signals: Signals, say: Say, sidecar: SidecarTask | None
) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(take_port(settings.front))
        rollout_port = stack.enter_context(take_port(settings.rollout))
        rollout_port.listen()
        rollout_listener = stack.enter_context(open_rollout_listener())
        folder, rollout_folder = load_model_folder(model), load_model_folder(lend)
        owner_token, rollout_token = token_from(OWNER_VARIABLE), token_from(ROLLOUT_VARIABLE)
        key = optional_token_from(API_KEY_VARIABLE)
        check_distinct({OWNER_VARIABLE: owner_token, ROLLOUT_VARIABLE: rollout_token, API_KEY_VARIABLE: key})
        journal = stack.enter_context(Journal(settings.lend.journal)) if settings.lend.journal else None
        command = start_command(model, settings, factory=EMBEDDED, lend=lend)
        supervisor = Supervisor(command, on_progress=say, listener=rollout_listener)
        engine, metrics = supervisor.client, Metrics()
        if sidecar is not None:
            sidecar = sidecar.with_defaults(
                model=rollout_folder.name, kind="borrowed", max_concurrency=settings.lend.max_sequences
            )
        rollouts: RolloutProcess | None = None
        try:
            await signals.interrupts(supervisor.start())
            rollouts = RolloutProcess(
                RolloutFront(
                    folder=str(lend),
                    name=None,
                    address=address_of(rollout_listener),
                    listener=rollout_port.fileno(),
                    token=rollout_token,
                    settings=settings.rollout,
                    requests_max=settings.lend.max_sequences + settings.lend.max_waiting,
                    sidecar=sidecar,
                )
            )
            controls = LendingControls(supervisor, owner_token, metrics, journal)
            context = LentContext.build(
                folder, settings.model_name, settings.front, engine, metrics=metrics, controls=controls, api_key=key
            )
            engine.events.steps.subscribe(context.metrics.observe)
            url, rollout_url = _url(listener, settings.front), _url(rollout_port, settings.rollout)

            def welcome() -> None:
                _welcome(context, listener, say)
                say(f"lending to {rollout_folder.name} at {rollout_url} (mode {settings.lend.chosen_mode})")
                say("try: rose lend status")

            entry = DeviceEntry(
                os.getpid(), context.model_name, rollout_folder.name, url, rollout_url, owner_token, rollout_token
            )
            with registered_device(entry):
                await answer_until(context, engine, listener, signals, say, on_open=welcome)
        finally:
            await engine.close()
            if rollouts is not None:
                await rollouts.close()


def _url(listener: socket.socket, front: FrontSettings) -> str:
    host, port = listener.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'http' if front.ssl_certfile is None else 'https'}://{reachable}:{port}"


def _welcome(context: HttpContext, listener: socket.socket, say: Say) -> None:
    url = _url(listener, context.settings)
    say(f"{context.model_name} is ready at {url}/v1")
    if context.token is not None:
        say("a rollout worker: requests need its token; `rose lend token` prints it")
        return
    if context.api_key is not None:
        say(f"requests need the key of {API_KEY_VARIABLE}: send the header `Authorization: Bearer KEY`")
    body = f'{{"model": "{context.model_name}", "prompt": "Hello", "max_tokens": 32}}'
    say(f"try: curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'")
