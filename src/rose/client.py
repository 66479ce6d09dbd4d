"""The gateway's client, for environments and trainers.

The client repeats a call whose response was lost, or that the gateway asked it to repeat. The gateway recognises a turn
by its prompt, a trajectory by its id and a batch by its number, so a repeated call has no second effect.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import quote

import aiohttp
import msgspec
from msgspec import Meta
from yarl import URL

from rose.api.requests import SESSION_HEADER, SPANS_MAX, TurnAnswer, TurnSampling, VersionSpan
from rose.api.trajectories import (
    MSGPACK,
    SECRET_BYTES,
    SECRET_MARK,
    Batch,
    BeginBody,
    Begun,
    FinishBody,
    Finished,
    PublishBody,
    PublishReply,
    ShardStatus,
)
from rose.bounds import TOKENS_MAX, LogProbability, TokenIds
from rose.errors import RequestRefused, Unavailable

PATIENCE_S = 120.0  # a gateway that restarts is back well within this time
SECRETS_MAX = 10_000  # trajectories begun here whose secret is kept
PAUSE_S, PAUSE_S_MAX = 0.25, 10.0  # between two attempts
BATCH_POLL_S = 20.0  # shorter than the time-outs of usual proxies
RETRIED_STATUSES = (429, 502, 503, 504)


class _TurnLogprob(msgspec.Struct):
    logprob: LogProbability


class _TurnLogprobs(msgspec.Struct):
    content: Annotated[list[_TurnLogprob], Meta(max_length=TOKENS_MAX)]


class _TurnChoice(msgspec.Struct):
    token_ids: TokenIds
    finish_reason: Literal["stop", "length"]
    logprobs: _TurnLogprobs
    weight_versions: Annotated[list[VersionSpan], Meta(max_length=SPANS_MAX)]


class _TurnReply(msgspec.Struct):
    choices: Annotated[list[_TurnChoice], Meta(max_length=1)]


_encoder = msgspec.json.Encoder()
_turn_decoder: msgspec.json.Decoder[_TurnReply] = msgspec.json.Decoder(_TurnReply)


class GatewayClient:
    """A connection to a gateway, with the token of an agent or a trainer. Use it as an asynchronous context manager."""

    def __init__(self, url: str, token: str, *, patience_s: float = PATIENCE_S) -> None:
        self._url, self._patience_s = url.rstrip("/"), patience_s
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._secrets: dict[str, str] = {}  # of trajectories that were begun here, oldest first
        self._http: aiohttp.ClientSession

    async def __aenter__(self) -> GatewayClient:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()

    async def begin(self, body: BeginBody) -> Begun:
        """Begin a trajectory. With an `id`, repeating the call is safe."""
        if body.secret is None and body.id is not None:
            secret = self._secrets.get(body.id) or secrets.token_urlsafe(SECRET_BYTES)
            self._remember(body.id, secret)
            body = msgspec.structs.replace(body, secret=secret)
        begun = msgspec.json.decode(await self._ask("POST", "/v1/trajectories", _encoder.encode(body)), type=Begun)
        self._remember(begun.id, begun.session.removeprefix(begun.id + SECRET_MARK))
        return begun

    def session(self, trajectory_id: str) -> str:
        """Return the name under which another client, with an agent's token, may play turns of this trajectory."""
        secret = self._secrets.get(trajectory_id)
        return trajectory_id if secret is None else f"{trajectory_id}{SECRET_MARK}{secret}"

    def trajectory(self, trajectory_id: str, priority: int = 0) -> TrajectoryTurns:
        """Return a callable that plays turns of this trajectory, for `rose.play`."""
        return TrajectoryTurns(self, trajectory_id, priority)

    async def finish(self, trajectory_id: str, body: FinishBody) -> Finished:
        """End a trajectory with its reward."""
        path = f"/v1/trajectories/{quote(self.session(trajectory_id), safe='')}/finish"
        reply = await self._ask("POST", path, _encoder.encode(body))
        return msgspec.json.decode(reply, type=Finished)

    async def next_batch(self, groups: int, after: int) -> Batch:
        """Return the batch after number `after` (0 at first); wait until so many groups are complete (0: do not)."""
        path = f"/v1/batches/next?groups={groups}&after={after}&wait_s={BATCH_POLL_S:g}"
        while not (reply := await self._ask("GET", path, None, {"Accept": MSGPACK})):
            pass
        return msgspec.msgpack.decode(reply, type=Batch)

    async def publish(
        self, version: str, *, folder: str = "", relay: str = "", run: str = "", hash: str = "", wait_s: float = 0.0
    ) -> PublishReply:
        """Publish a version of the weights, in a folder or a relay; wait up to `wait_s` for workers to run it."""
        body = PublishBody(version=version, folder=folder, relay=relay, run=run, hash=hash, wait_s=wait_s)
        reply = await self._ask("POST", "/v1/versions", _encoder.encode(body))
        return msgspec.json.decode(reply, type=PublishReply)

    async def pool(self) -> dict[str, Any]:
        """Return the state of all workers."""
        pool: dict[str, Any] = msgspec.json.decode(await self._ask("GET", "/v1/pool"))
        return pool

    async def shard_status(self, at_least: int = 0) -> ShardStatus:
        """Return what this gateway has for batches; wait a while until it has at least so many complete groups."""
        path = f"/v1/shard?at_least={at_least}&wait_s={BATCH_POLL_S:g}"
        return msgspec.json.decode(await self._ask("GET", path), type=ShardStatus)

    def has_begun(self, trajectory_id: str) -> bool:
        """Return whether this trajectory was begun by this client, and not too many others since."""
        return trajectory_id in self._secrets

    async def turn(self, trajectory_id: str, body: dict[str, Any]) -> bytes:
        """Play one turn with a body of the generate route, and return the response."""
        headers = {SESSION_HEADER: self.session(trajectory_id)}
        return await self._ask("POST", "/inference/v1/generate", _encoder.encode(body), headers)

    async def answer(self, trajectory_id: str, body: dict[str, Any]) -> TurnAnswer:
        """Play one turn as `turn` does, and return what was sampled. The body must ask for `logprobs`."""
        data = await self.turn(trajectory_id, body)
        try:
            [choice] = _turn_decoder.decode(data).choices
        except (msgspec.DecodeError, ValueError) as error:
            raise Unavailable(f"the gateway's response is unreadable: {error}") from error
        return TurnAnswer(
            choice.token_ids,
            tuple(entry.logprob for entry in choice.logprobs.content),
            tuple(choice.weight_versions),
            choice.finish_reason,
        )

    def _remember(self, trajectory_id: str, secret: str) -> None:
        self._secrets.pop(trajectory_id, None)
        self._secrets[trajectory_id] = secret
        while len(self._secrets) > SECRETS_MAX:
            del self._secrets[next(iter(self._secrets))]

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> bytes:
        """Send a request, again if necessary for up to `patience_s`. Raise RequestRefused, Unavailable."""
        patience_s, url = self._patience_s, URL(self._url + path, encoded=True)
        while True:
            began_s, pause_s = time.monotonic(), PAUSE_S
            try:
                async with self._http.request(method, url, data=body, headers=headers) as reply:
                    data = await reply.read()
                    if reply.status < 300:
                        return data
                    why = f"the gateway answered {reply.status}: {_message(data)}"
                    if reply.status not in RETRIED_STATUSES:
                        raise RequestRefused(why)
                    pause_s = _pause_s(reply.headers.get("Retry-After", ""))
                    patience_s -= time.monotonic() - began_s
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                why = f"the gateway at {self._url} cannot be reached: {error}"
            patience_s -= pause_s
            if patience_s < 0:
                raise Unavailable(why, hint="check that the gateway is running and has workers")
            await asyncio.sleep(pause_s)


@dataclass(frozen=True, slots=True)
class TrajectoryTurns:
    """A callable that plays turns of one trajectory, for `rose.play`."""

    client: GatewayClient
    trajectory_id: str
    priority: int = 0

    async def __call__(self, token_ids: Sequence[int], sampling: TurnSampling) -> TurnAnswer:
        params = {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            "seed": sampling.seed,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "logprobs": 1,
        }
        body = {"token_ids": token_ids, "sampling_params": params, "priority": self.priority}
        return await self.client.answer(self.trajectory_id, body)


def _pause_s(wanted: str) -> float:
    """Return the pause that a reply asks for; a proxy may send a date, or nonsense."""
    try:
        return min(PAUSE_S_MAX, max(PAUSE_S, float(wanted)))
    except ValueError:
        return PAUSE_S


def _message(data: bytes) -> str:
    try:
        return str(msgspec.json.decode(data)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return data[:200].decode(errors="replace")
