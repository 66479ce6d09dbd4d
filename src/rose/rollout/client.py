"""The gateway from the other side: what environments and trainers call.

Every call may be made again, and is, when its answer was lost or the gateway asked for patience: turns are known by
what they ask, trajectories by their id, batches by their number. So a lost answer costs time and nothing else.
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

from rose.bounds import TOKENS_MAX, LogProbability, TokenIds
from rose.engines.base import SPANS_MAX, Span
from rose.envs.play import Answer, TurnSampling, VersionSpan
from rose.errors import RequestRefused, Unavailable
from rose.rollout.sessions import SECRET_MARK
from rose.rollout.trainer_routes import MSGPACK, BeginBody, Begun, FinishBody, Finished, PublishBody, Published
from rose.rollout.trajectories import REMEMBERED_MAX, SECRET_BYTES, Batch
from rose.rollout.turn_routes import SESSION_HEADER

PATIENCE_S = 120.0
PAUSE_S, PAUSE_S_MAX = 0.25, 10.0
BATCH_POLL_S = 20.0
TRY_AGAIN = (429, 502, 503, 504)


class _Logprob(msgspec.Struct):
    logprob: LogProbability


class _Logprobs(msgspec.Struct):
    content: Annotated[list[_Logprob], Meta(max_length=TOKENS_MAX)]


class _Choice(msgspec.Struct):
    token_ids: TokenIds
    finish_reason: Literal["stop", "length"]
    logprobs: _Logprobs
    weight_versions: Annotated[list[Span], Meta(max_length=SPANS_MAX)]


class _Reply(msgspec.Struct):
    choices: Annotated[list[_Choice], Meta(max_length=1)]


_encoder = msgspec.json.Encoder()
_reply: msgspec.json.Decoder[_Reply] = msgspec.json.Decoder(_Reply)


class GatewayClient:
    """One per process; use it as a context manager."""

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
        """With an `id`, calling again is safe: the trajectory's secret is made here and sent again."""
        if body.secret is None and body.id is not None:
            secret = self._secrets.get(body.id) or secrets.token_urlsafe(SECRET_BYTES)
            self._remember(body.id, secret)
            body = msgspec.structs.replace(body, secret=secret)
        begun = msgspec.json.decode(await self._post("/v1/trajectories", _encoder.encode(body)), type=Begun)
        self._remember(begun.id, begun.session.removeprefix(begun.id + SECRET_MARK))
        return begun

    def session(self, trajectory_id: str) -> str:
        """The name by which another client, with an agent's token, may play the turns of this trajectory."""
        secret = self._secrets.get(trajectory_id)
        return trajectory_id if secret is None else f"{trajectory_id}{SECRET_MARK}{secret}"

    def trajectory(self, trajectory_id: str, priority: int = 0) -> TrajectoryTurns:
        """What plays its turns: a `Generate` of `rose.envs.play`."""
        return TrajectoryTurns(self, trajectory_id, priority)

    async def finish(self, trajectory_id: str, body: FinishBody) -> Finished:
        path = f"/v1/trajectories/{quote(self.session(trajectory_id), safe='')}/finish"
        reply = await self._post(path, _encoder.encode(body))
        return msgspec.json.decode(reply, type=Finished)

    async def next_batch(self, groups: int, after: int) -> Batch:
        """Waits until so many groups are complete. `after` is the last batch that was had, 0 at first."""
        path = f"/v1/batches/next?groups={groups}&after={after}&wait_s={BATCH_POLL_S:g}"
        while not (reply := await self._ask("GET", path, None, {"Accept": MSGPACK})):
            pass
        return msgspec.msgpack.decode(reply, type=Batch)

    async def publish(
        self, version: str, *, folder: str = "", relay: str = "", run: str = "", hash: str = "", wait_s: float = 0.0
    ) -> Published:
        """A new version of the weights, in a folder or in a relay; waits at most this long for workers to run it."""
        body = PublishBody(version=version, folder=folder, relay=relay, run=run, hash=hash, wait_s=wait_s)
        return msgspec.json.decode(await self._post("/v1/versions", _encoder.encode(body)), type=Published)

    async def pool(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(await self._ask("GET", "/v1/pool"))
        return found

    async def turn(self, trajectory_id: str, body: dict[str, Any]) -> bytes:
        headers = {SESSION_HEADER: self.session(trajectory_id)}
        return await self._post("/inference/v1/generate", _encoder.encode(body), headers)

    def _remember(self, trajectory_id: str, secret: str) -> None:
        self._secrets.pop(trajectory_id, None)
        self._secrets[trajectory_id] = secret
        while len(self._secrets) > REMEMBERED_MAX:
            del self._secrets[next(iter(self._secrets))]

    async def _post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
        return await self._ask("POST", path, body, headers)

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> bytes:
        """Again and again, while there is patience. Raises RequestRefused, Unavailable."""
        patience_s, url = self._patience_s, URL(self._url + path, encoded=True)
        while True:
            began_s, pause_s = time.monotonic(), PAUSE_S
            try:
                async with self._http.request(method, url, data=body, headers=headers) as reply:
                    data = await reply.read()
                    if reply.status < 300:
                        return data
                    why = f"the gateway said {reply.status}: {_message(data)}"
                    if reply.status not in TRY_AGAIN:
                        raise RequestRefused(why)
                    pause_s = _pause_s(reply.headers.get("Retry-After", ""))
                    patience_s -= time.monotonic() - began_s
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                why = f"the gateway at {self._url} cannot be reached: {error}"
            patience_s -= pause_s
            if patience_s < 0:
                raise Unavailable(why, hint="is the gateway running, and has it workers?")
            await asyncio.sleep(pause_s)


@dataclass(frozen=True, slots=True)
class TrajectoryTurns:
    client: GatewayClient
    trajectory_id: str
    priority: int = 0

    async def __call__(self, token_ids: Sequence[int], sampling: TurnSampling) -> Answer:
        wanted = {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            "seed": sampling.seed,
            "logprobs": 1,
        }
        body = {"token_ids": token_ids, "sampling_params": wanted, "priority": self.priority}
        data = await self.client.turn(self.trajectory_id, body)
        try:
            [choice] = _reply.decode(data).choices
        except (msgspec.DecodeError, ValueError) as error:
            raise Unavailable(f"the gateway's answer is unreadable: {error}") from error
        return Answer(
            choice.token_ids,
            tuple(entry.logprob for entry in choice.logprobs.content),
            tuple(VersionSpan(span.version, span.start, span.end) for span in choice.weight_versions),
            choice.finish_reason,
        )


def _pause_s(wanted: str) -> float:
    """What a reply asks for; a proxy may send a date, or nonsense."""
    try:
        return min(PAUSE_S_MAX, max(PAUSE_S, float(wanted)))
    except ValueError:
        return PAUSE_S


def _message(data: bytes) -> str:
    try:
        return str(msgspec.json.decode(data)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return data[:200].decode(errors="replace")
