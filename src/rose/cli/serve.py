"""`rose serve`: a device, serving one model over HTTP until it is stopped."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

SUMMARY = "serve a model over HTTP with an OpenAI-compatible interface"

# Flags that are shorter names of settings.
FLAGS = {
    "device": "device",
    "host": "front.host",
    "port": "front.port",
    "name": "model_name",
    "kv_memory_mb": "engine.kv_memory_mb",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="a Hugging Face model folder")
    parser.add_argument("--device", metavar="cpu:N", help="cores the engine is pinned to: cpu:0, cpu:0-1 (cpu:0)")
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="TCP port; 0 takes a free one (8000)")
    parser.add_argument("--name", help="the name clients use for the model (the folder's)")
    parser.add_argument("--kv-memory-mb", type=int, metavar="N", help="memory for keys and values, in MiB (512)")
    parser.add_argument("--settings", type=Path, metavar="FILE", help="a YAML file of settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", dest="overrides", help="one setting; may be repeated"
    )


def run(arguments: argparse.Namespace) -> int:
    import asyncio
    import logging

    from rose.config.device import DeviceSettings
    from rose.config.load import load_settings
    from rose.config.text import as_override
    from rose.front.service import serve

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    given = {key: getattr(arguments, flag) for flag, key in FLAGS.items()}
    flags = [as_override(key, value) for key, value in given.items() if value is not None]
    settings = load_settings(DeviceSettings, arguments.settings, [*arguments.overrides, *flags])
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve(arguments.model, settings, say=_say))
    return 0


def _say(what: str) -> None:
    """For whoever watches; a device goes on when nobody does any more."""
    with contextlib.suppress(OSError):
        print(what, flush=True)


def _loop_factory() -> Callable[[], AbstractEventLoop] | None:
    """uvloop's loop if it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
