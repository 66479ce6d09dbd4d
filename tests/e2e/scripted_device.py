"""A device with the scripted engine, and with patience cut short.

python -m tests.e2e.scripted_device MODEL a.b=c ...
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rose.config.device import DeviceSettings
from rose.config.load import load_settings
from rose.errors import RoseError
from rose.front import service, supervisor


def main(model: str, *overrides: str) -> int:
    supervisor.PAUSE_FIRST_S = 0.05
    supervisor.QUESTION_EVERY_S = 0.2
    supervisor.ANSWER_WITHIN_S = 1.0
    settings = load_settings(DeviceSettings, None, overrides)
    factory = "tests.e2e.scripted_engine:ScriptedEngine.load"
    try:
        asyncio.run(service.serve(Path(model), settings, say=lambda what: print(what, flush=True), factory=factory))
    except RoseError as error:
        print(f"rose: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
