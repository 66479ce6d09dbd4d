"""The gateway from the other side: what environments and trainers call.

Every call may be made again, and is, when its answer was lost or the gateway asked for patience: turns are known by
what they ask, trajectories by their id, batches by their number. So a lost answer costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from rose.envs.play import Answer, TurnSampling, VersionSpan
from rose.errors import RequestRefused, Unavailable
from rose.rollout.trainer_routes import MSGPACK, BeginBody, Begun, FinishBody, Finished, PublishBody, Published
from rose.rollout.trajectories import Batch
from rose.rollout.turn_routes import SESSION_HEADER

PATIENCE_S = 120.0
PAUSE_S = 0.25
BATCH_POLL_S = 20.0
TRY_AGAIN = (429, 502, 503, 504)


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    logprobs: _Logprobs
    weight_versions: list[_Span]


class _Reply(msgspec.Struct):
    choices: list[_Choice]


_encoder = msgspec.json.Encoder()
_reply: msgspec.json.Decoder[_Reply] = msgspec.json.Decoder(_Reply)


class GatewayClient:
    """One per process; use it as a context manager."""

    def __init__(self, url: str, token: str, *, patience_s: float = PATIENCE_S) -> None:
        self._url, self._patience_s = url.rstrip("/"), patience_s
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._http: aiohttp.ClientSession

    async def __aenter__(self) -> GatewayClient:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()

    async def begin(self, body: BeginBody) -> Begun:
        """With an `id`, calling again is safe."""
        return msgspec.json.decode(await self._post("/v1/trajectories", _encoder.encode(body)), type=Begun)

    def trajectory(self, trajectory_id: str, priority: int = 0) -> TrajectoryTurns:
        """What plays its turns: a `Generate` of `rose.envs.play`."""
        return TrajectoryTurns(self, trajectory_id, priority)

    async def finish(self, trajectory_id: str, body: FinishBody) -> Finished:
        reply = await self._post(f"/v1/trajectories/{quote(trajectory_id, safe='')}/finish", _encoder.encode(body))
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
        return await self._post("/inference/v1/generate", _encoder.encode(body), {SESSION_HEADER: trajectory_id})

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
                    pause_s = float(reply.headers.get("Retry-After", PAUSE_S))
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


def _message(data: bytes) -> str:
    try:
        return str(msgspec.json.decode(data)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return data[:200].decode(errors="replace")
