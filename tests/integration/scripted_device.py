"""A device with the scripted engine, and with patience cut short.

python -m tests.integration.scripted_device MODEL a.b=c ...
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from rose.config.loading import load_settings
from rose.config.server_settings import DeviceSettings
from rose.device import device_service as service
from rose.device import engine_supervisor as supervisor
from rose.errors import RoseError


def main(model: str, *overrides: str) -> int:
    supervisor.RESTARTS = replace(supervisor.RESTARTS, pause_first_s=0.05)
    supervisor.QUERY_EVERY_S = 0.2
    supervisor.ANSWER_WITHIN_S = 1.0
    settings = load_settings(DeviceSettings, None, overrides)
    factory = "tests.integration.scripted_engine:ScriptedEngine.load"
    try:
        asyncio.run(service.serve(Path(model), settings, say=lambda what: print(what, flush=True), factory=factory))
    except RoseError as error:
        print(f"rose: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
