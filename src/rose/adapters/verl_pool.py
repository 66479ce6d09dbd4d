"""The pool of one verl trainer: its settings, its turns, and the transfer of its weights. Nothing of verl is imported.

Rank 0 of verl's actor publishes weights, and agent-loop workers in other processes play turns. They share verl's
configuration and the gateway, so the name of a version has all that a worker must know: the trainer's epoch in the
relay, verl's `global_steps`, and the hash. A turn with tokens of other weights (an earlier trainer's, or those that the
gateway began with) is played again, and then demands the newest version.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from rose.adapters.rose_pool import TURN_PATIENCE_S, RosePool, trainer_token
from rose.adapters.turn_watch import TurnWatch
from rose.api.requests import TurnAnswer
from rose.api.trajectories import FinishBody
from rose.client import PATIENCE_S, GatewayClient
from rose.errors import ConfigError, RoseError, Unavailable
from rose.weights.publish import PublishedVersion

SEED_BITS = 63  # the most that a seed on the wire may have
LABEL = re.compile(r"([0-9]{1,10})\.([0-9]{1,10})-[0-9a-f]{8}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VerlSettings:
    """The settings under verl's `rollout.checkpoint_engine.engine_kwargs.rose`."""

    model: str  # the folder that the gateway was started with
    gateway: str
    relay: str
    run: str
    patience_s: float = PATIENCE_S  # with a gateway that is away
    stale_after_s: float = 1800.0  # without an ended turn, which is an error
    first_wait_s: float = 120.0  # for a worker to load the first version
    own: Mapping[str, Any] = field(default_factory=dict)  # of verl's own engine, in a mixed pool

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> VerlSettings:
        try:
            return cls(**values)
        except TypeError as error:
            hint = "set +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.rose.NAME=VALUE"
            raise ConfigError(f"verl's settings for ROSE cannot be used: {error}", hint=hint) from error


def label_of(published: PublishedVersion) -> str:
    """Return the name under which the gateway gets a version."""
    return f"{published.version.epoch}.{published.label}"


def epoch_and_step(label: str) -> tuple[int, int]:
    """Return the epoch and the `global_steps` of a version that `label_of` named; -1 for others."""
    match = LABEL.fullmatch(label)
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def turn_sampling(asked: Mapping[str, Any], prompt_tokens: int, rollout: Any) -> dict[str, Any]:
    """Return the gateway's sampling parameters for verl's, with the number of tokens that verl's vLLM server takes.

    Each call has a seed of its own: the same prompt with the same sampling would be a repeated request.
    """
    params = dict(asked)
    most = min(rollout.response_length, rollout.prompt_length + rollout.response_length - prompt_tokens)
    wanted = params.pop("max_tokens", params.pop("max_new_tokens", most))
    if rollout.max_model_len:
        wanted = min(wanted, rollout.max_model_len - prompt_tokens)
    plain = {"ignore_eos": bool(rollout.ignore_eos), "seed": secrets.randbits(SEED_BITS)}
    return plain | params | {"max_tokens": max(1, wanted), "logprobs": 1}


class VerlTurns:
    """Plays turns of verl's agent loops through the gateway. For one event loop."""

    def __init__(self, settings: VerlSettings) -> None:
        token = trainer_token()
        self._stack, self._epoch = AsyncExitStack(), -1
        self._client = GatewayClient(settings.gateway, token, patience_s=settings.patience_s)
        self._turns = GatewayClient(settings.gateway, token, patience_s=TURN_PATIENCE_S)
        self._not_open = [self._client, self._turns]
        self._watch = TurnWatch(self._client.pool, settings.stale_after_s)

    async def play(
        self, session: str, token_ids: Sequence[int], sampling: Mapping[str, Any]
    ) -> tuple[TurnAnswer, list[int]]:
        """Return the answer, and the `global_steps` of its spans. Raises RequestRefused, Unavailable."""
        while self._not_open:
            await self._stack.enter_async_context(self._not_open.pop())
        body: dict[str, Any] = {"token_ids": list(token_ids), "sampling_params": dict(sampling)}
        answer = await self._watch(self._turns.answer(session, body))
        if not self._is_own(answer):  # or it is the first turn
            newest = (await self._client.pool())["version"] or ""
            self._epoch = epoch_and_step(newest)[0]
            if not self._is_own(answer):
                answer = await self._watch(self._turns.answer(session, body | {"min_weight_version": newest}))
            if not self._is_own(answer):
                hint = "set the backend of verl's checkpoint engine to rose; a gateway has one trainer at a time"
                raise Unavailable(f"tokens are of version {answer.spans[-1].version}, not of this trainer", hint=hint)
        return answer, [epoch_and_step(span.version)[1] for span in answer.spans]

    async def end(self, sessions: Iterable[str]) -> None:
        """Let the gateway forget these sessions; otherwise it does after its `idle_s`."""
        for session in sessions:
            try:
                await self._client.finish(session, FinishBody())
            except RoseError as error:
                logger.warning("session %s stays at the gateway for its idle_s: %s", session, error.what)

    async def close(self) -> None:
        await self._stack.aclose()

    def _is_own(self, answer: TurnAnswer) -> bool:
        return self._epoch >= 0 and all(epoch_and_step(span.version)[0] == self._epoch for span in answer.spans)


class VerlWeights:
    """Publishes the weights of rank 0. Raises ConfigError, RequestRefused or Unavailable if there is no such pool."""

    def __init__(self, settings: VerlSettings, *, secret: bytes | None = None) -> None:
        where: dict[str, Any] = {"gateway": settings.gateway, "relay": settings.relay, "run": settings.run}
        self._pool = RosePool(settings.model, **where, secret=secret, patience_s=settings.patience_s)
        self.publisher = self._pool.publisher()
        self._wait_s = settings.first_wait_s  # only the first version is waited for

    async def announce(self, new: PublishedVersion) -> None:
        """Tell the gateway of a version. Raises Unavailable if workers are there and none loads the first one."""
        label, wait_s = label_of(new), self._wait_s
        async with self._pool.client() as client:
            reply = await self._pool.announce(client, new, label, wait_s)
        if wait_s and reply.behind and not reply.ready:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in reply.behind.items())
            hint = "see the logs of the workers, or raise first_wait_s"
            raise Unavailable(f"no worker loaded version {label} in {wait_s:g} s: {reasons}", hint=hint)
        self._wait_s = 0.0
