"""The gateway, relay and run of one slime job, as one of its processes uses them.

The process that plays rollouts has thousands of turns under way. A full pool makes them wait without end, so every
`LOOK_S` one of them asks for the state of the pool, for all. That notices a gateway that is away, and a pool in which
nothing ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rose.adapters.group_players import Prompt, prompt_ids
from rose.adapters.rose_pool import TURN_PATIENCE_S, RosePool, shortage
from rose.adapters.streamed import StreamedPublisher
from rose.api.requests import TurnAnswer, TurnSampling
from rose.api.trajectories import BeginBody, FinishBody
from rose.client import GatewayClient
from rose.errors import ConfigError, ModelError, Unavailable
from rose.models.files import read_object
from rose.models.tensors import INDEX, open_tensors

LOOK_S = 30.0  # between two looks at the pool while turns wait
STALE_AFTER_S = 600.0  # without an ended turn; longer than long turns take
MODE = "--update-weight-mode full --update-weight-transport disk"
_VERSION_FOLDER = re.compile(r"weight_v(\d{1,10})")  # that slime writes for each version

logger = logging.getLogger(__name__)


class SlimePool:
    """Plays single turns, and publishes the folders that slime writes."""

    def __init__(self, model: str, *, gateway: str, relay: str, run: str, patience_s: float) -> None:
        self._pool = RosePool(model, gateway=gateway, relay=relay, run=run, patience_s=patience_s)
        self._publisher: StreamedPublisher | None = None
        self._numbers = itertools.count()
        self._under_way = 0
        self._ended_s = self._looked_s = 0.0

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a text as slime encodes it, or of a conversation by the chat template."""
        tokenizer = self._pool.folder.tokenizer
        if isinstance(prompt, str):
            return tokenizer.encode(prompt, add_special_tokens=False)
        return prompt_ids(tokenizer, prompt)

    def text(self, token_ids: Sequence[int], *, is_special_shown: bool) -> str:
        return self._pool.folder.tokenizer.decode(token_ids, skip_special_tokens=not is_special_shown)

    async def turn(self, token_ids: Sequence[int], sampling: TurnSampling) -> TurnAnswer:
        """Return the answer of one turn. Raises Unavailable if the gateway stays away, or no turn ends for long."""
        name = f"{self._pool.prefix}/{next(self._numbers)}"
        if not self._under_way:
            self._ended_s = self._looked_s = time.monotonic()
        self._under_way += 1
        try:
            async with self._pool.client() as client, self._pool.client(TURN_PATIENCE_S) as turns:
                await client.begin(BeginBody(id=name))
                playing = asyncio.ensure_future(turns.trajectory(name)(token_ids, sampling))
                try:
                    while not (await asyncio.wait([playing], timeout=LOOK_S))[0]:
                        await self._look(client)
                    answer = playing.result()
                finally:
                    playing.cancel()
                self._ended_s = time.monotonic()
                await client.finish(name, FinishBody())
        finally:
            self._under_way -= 1
        return answer

    async def _look(self, client: GatewayClient) -> None:
        """Ask for the state of the pool, unless another turn of this process has just done so."""
        if time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        lack = shortage(await client.pool())
        if time.monotonic() - self._ended_s > STALE_AFTER_S:
            raise Unavailable(f"no turn has ended for {STALE_AFTER_S:g} s: {lack}", hint="start workers of the gateway")
        logger.info(lack)

    def publish(self, folder: Path) -> None:
        """Put the weights of a folder into the relay, and tell the gateway."""
        number, pool = version_of_folder(folder), self._pool
        if self._publisher is None:
            pool.ask(lambda client: client.pool())  # a wrong token or address is an error before anything is encoded
            self._publisher = StreamedPublisher(pool.folder.path, pool.relay, run=pool.run, secret=pool.secret)
        new = self._publisher.publish(number, _tensors(folder))
        pool.ask(lambda client: client.publish(new.label, relay=pool.relay, run=pool.run, hash=new.hash))
        logger.info("version %s: %s of %d bytes", new.label, new.kind, new.size_bytes)


def version_of_folder(folder: Path) -> int:
    """Return slime's number of the version in a folder. Raises ConfigError if it does not hold whole weights."""
    if not folder.is_dir():
        raise ModelError(f"the folder {folder} of slime's weights is not there", hint="rank 0 must be able to read it")
    match, index = _VERSION_FOLDER.fullmatch(folder.name), folder / INDEX
    metadata = read_object(index).get("metadata") if index.exists() else None
    if match is None or (isinstance(metadata, dict) and "delta_encoding" in metadata):
        raise ConfigError(
            f"{folder} does not hold whole weights", hint=f"start slime with {MODE}; miles has no such mode"
        )
    return int(match[1])


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a folder, which stay in their files until they are encoded."""
    tensors = open_tensors(folder)
    for name in tensors.names():
        yield name, tensors.bits16(name) if tensors.dtype(name) == "BF16" else tensors.float32(name)
