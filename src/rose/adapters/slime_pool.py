"""The gateway, relay and run of one slime job, as one of its processes uses them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rose.adapters.group_players import Prompt, prompt_ids
from rose.adapters.rose_pool import TURN_PATIENCE_S, RosePool
from rose.adapters.streamed import StreamedPublisher
from rose.adapters.turn_watch import TurnWatch
from rose.api.requests import TurnAnswer, TurnSampling
from rose.api.trajectories import BeginBody, FinishBody
from rose.errors import ConfigError, ModelError
from rose.models.files import read_object
from rose.models.tensors import INDEX, open_tensors

STALE_AFTER_S = 600.0  # without an ended turn; longer than long turns take
MODE = "--update-weight-mode full --update-weight-transport disk"
_VERSION_FOLDER = re.compile(r"weight_v(\d{1,10})")  # that slime writes for each version


class SlimePool:
    """Plays single turns, and publishes the folders that slime writes."""

    def __init__(self, model: str, *, gateway: str, relay: str, run: str, patience_s: float) -> None:
        self._pool = RosePool(model, gateway=gateway, relay=relay, run=run, patience_s=patience_s)
        self._publisher: StreamedPublisher | None = None
        self._numbers = itertools.count()
        self._watch = TurnWatch(self._status, STALE_AFTER_S)

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
        async with self._pool.client() as client, self._pool.client(TURN_PATIENCE_S) as turns:
            await client.begin(BeginBody(id=name))
            answer = await self._watch(turns.trajectory(name)(token_ids, sampling))
            await client.finish(name, FinishBody())
        return answer

    async def _status(self) -> dict[str, Any]:
        async with self._pool.client() as client:  # a look is for all turns, and their clients may end before it
            return await client.pool()

    def publish(self, folder: Path) -> None:
        """Put the weights of a folder into the relay, and tell the gateway."""
        number, pool = version_of_folder(folder), self._pool
        if self._publisher is None:
            self._publisher = pool.publisher()
        new = self._publisher.publish(number, _tensors(folder))
        pool.ask(lambda client: pool.announce(client, new))


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
