"""The pool that a trainer of another framework uses: its gateway, relay and run.

An adapter makes one `RosePool` from what its user configured, and everything else of it asks the pool for connections.
The token is read from the environment, so that it is in no configuration file that a framework logs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rose.adapters.streamed import StreamedPublisher
from rose.api.trajectories import PublishReply
from rose.client import PATIENCE_S, GatewayClient
from rose.errors import ConfigError
from rose.models.model_folder import load_model_folder
from rose.weights.publish import PublishedVersion
from rose.weights.relay.opening import relay_kind

TOKEN = "ROSE_TRAINER_TOKEN"
TURN_PATIENCE_S = math.inf  # a full pool makes turns wait; other calls notice a gateway that is away

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


def trainer_token() -> str:
    """Return the gateway's token for trainers from the environment. Raises ConfigError if it is not there."""
    token = os.environ.get(TOKEN)
    if not token:
        hint = f"set {TOKEN} to the value that the gateway has, or pass token="
        raise ConfigError("the gateway's token for trainers is not known here", hint=hint)
    return token


class RosePool:
    """The gateway, relay and run of one trainer, and the versions that it has published."""

    def __init__(
        self,
        model_folder: Path | str,
        *,
        gateway: str,
        relay: str,
        run: str,
        token: str | None = None,
        secret: bytes | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        token = token or trainer_token()
        self.folder, self.run, self.secret = load_model_folder(model_folder), run, secret
        self.relay = os.path.abspath(relay.removeprefix("file:")) if relay_kind(relay) == "folder" else relay
        self.numbers: dict[str, int] = {}  # of the versions that this trainer published, by label
        self.prefix = f"{run}/{secrets.token_hex(4)}"  # of the names of this trainer's trajectories
        self._gateway, self._token, self._patience_s = gateway, token, patience_s

    def client(self, patience_s: float | None = None) -> GatewayClient:
        return GatewayClient(self._gateway, self._token, patience_s=patience_s or self._patience_s)

    def ask(self, call: Callable[[GatewayClient], Awaitable[Result]], patience_s: float | None = None) -> Result:
        """Return what a call of the gateway returns, from code that is not asynchronous."""

        async def run() -> Result:
            async with self.client(patience_s) as client:
                return await call(client)

        with ThreadPoolExecutor(1) as thread:  # the caller's thread may run an event loop, as in a notebook
            return thread.submit(asyncio.run, run()).result()

    def publisher(self, **options: Any) -> StreamedPublisher:
        """Return the publisher of this run. A gateway that is away or a wrong token is an error before that."""
        self.ask(lambda client: client.pool())
        return StreamedPublisher(self.folder.path, self.relay, run=self.run, secret=self.secret, **options)

    async def announce(
        self, client: GatewayClient, new: PublishedVersion, label: str = "", wait_s: float = 0.0
    ) -> PublishReply:
        """Tell the gateway of a version, by its own name or another; wait so long for workers to run it."""
        name = label or new.label
        reply = await client.publish(name, relay=self.relay, run=self.run, hash=new.hash, wait_s=wait_s)
        logger.info("version %s: %s of %d bytes", name, new.kind, new.size_bytes)
        return reply


def shortage(status: Mapping[str, Any]) -> str:
    """Return in one line what a pool lacks, by the state that its gateway tells."""
    workers = [f"{member['name']} is {member['state']} {member['trouble']}".strip() for member in status["members"]]
    return f"{status['waiting_turns']} turns wait at the gateway for {'; '.join(workers) or 'a worker: there is none'}"
