"""A gateway as a process, with settings of a test's own.

python -m tests.integration.gateway_process MODEL a.b=c ...
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from rose.config.loading import load_settings
from rose.config.server_settings import GatewaySettings
from rose.errors import RoseError
from rose.gateway.gateway_service import run_gateway
from rose.openai.loops import loop_factory


def main(model: str, *overrides: str) -> int:
    logging.basicConfig(level=logging.WARNING)
    settings = load_settings(GatewaySettings, None, overrides)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run_gateway(Path(model), settings, say=lambda what: print(what, flush=True)))
    except RoseError as error:
        print(f"rose: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
