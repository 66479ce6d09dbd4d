"""A gateway as a process, with settings of a test's own.

python -m tests.e2e.gateway_process MODEL a.b=c ...
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from rose.config.gateway import GatewaySettings
from rose.config.load import load_settings
from rose.errors import RoseError
from rose.front.loops import loop_factory
from rose.rollout.service import run_gateway


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
