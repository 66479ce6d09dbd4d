"""The client of one running rollout engine: its HTTP server for requests and weights, its control segment for the rest.

Grants and KV budgets are written to the control segment, and hold when the engine's status shows their number. Weights
are staged while steps continue. To commit them the grant is withdrawn, and every produced token is received first, so
that each carries the version that made it. Then the staged version is written between two steps. After a failed commit
steps go on only if the engine says that nothing has changed, or that the change was rolled back. After any other answer
its weights are unknown, and no step runs any more.

With tensor parallelism every rank stages its part, and a version is committed only if all ranks have staged it. A
failure of the commit itself leaves other ranks with the new version, so the weights are unknown then, whatever the
engine says.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rose.api.requests import PromptLogprob
from rose.engines.base import EngineFacts, Request, TokenEvent
from rose.errors import ContextTooLong, ModelError, RequestRefused, RoseError, Unavailable
from rose.vllm.control_segment import EngineControl, Segment, Status, open_status
from rose.vllm.patching import NOT_STAGED, UNCHANGED
from rose.vllm.seqlock_file import Torn
from rose.vllm.vllm_client import (
    GENERATE,
    REQUEST_PREFIX,
    SCORING_SUFFIX,
    URL,
    body_of,
    chunks,
    connector,
    prompt_logprobs,
    refusal,
    scoring_body_of,
)

POLL_S = 0.002  # between two reads of the status
APPLIED_S = 30.0  # the longest step of a slow device
STAGED_S = 600.0
EXIT_S = 1.0  # a dying process loses its connections first
SHARED_FACTS = [field.name for field in dataclasses.fields(EngineFacts) if field.name != "batch_invariant"]


class _LiveRequest:
    """One request. Its stream is read as it comes, whether or not anything reads its events."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[TokenEvent | RoseError] = asyncio.Queue()
        self.received = 0
        self.reader: asyncio.Task[None]


class VllmEngine:
    """One running rollout engine. When it dies, iterators and calls end with `Unavailable`."""

    def __init__(
        self,
        socket: Path,
        folder: Path,
        control: Segment[EngineControl],
        is_running: Callable[[], bool],
        *,
        is_seeded: bool = True,
    ) -> None:
        """Connect to an engine whose server answers. `is_seeded`: whether it can take a request's seed."""
        self._is_running, self._is_seeded = is_running, is_seeded
        self._control_segment, self._status_segment = control, open_status(folder)
        self._control = EngineControl()
        self._live: dict[str, _LiveRequest] = {}
        self._staged: str | None = None
        self._ranks = 1  # as the last answer of the workers showed
        self._is_swapping = self._is_closed = False
        self._applied_s = self._paused_s = time.monotonic()
        self.swap_s: float | None = None  # how long the engine stood still for the last commit
        self._version = self.status().version
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector(socket))

    # Requests

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Yield the events of a request to its end. Raises RoseError."""
        self._check(request)
        live = self._live[request.request_id] = _LiveRequest()
        live.reader = asyncio.create_task(self._read(request, live))
        try:
            while True:
                event = await live.events.get()
                if isinstance(event, RoseError):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            live.reader.cancel()
            if self._live.get(request.request_id) is live:
                del self._live[request.request_id]

    def _check(self, request: Request) -> None:
        self._check_alive()
        if request.request_id in self._live:
            raise RequestRefused(f"request `{request.request_id}` is already here")
        if not request.prompt_ids:
            raise RequestRefused("the prompt is empty")
        if self._control.kv_bytes == 0:
            raise Unavailable("this worker has no KV memory now", hint="place the request elsewhere")
        tokens, most = len(request.prompt_ids) + request.sampling.max_tokens, self.status().max_context_tokens
        if tokens > most:
            raise ContextTooLong(f"prompt and answer may take {tokens} tokens, and the context has {most}")

    async def _read(self, request: Request, live: _LiveRequest) -> None:
        name, body = request.request_id, body_of(request, salt=request.tenant, is_seeded=self._is_seeded)
        try:
            scores, version = await self._score(request), self._version
            if scores is None:
                live.events.put_nowait(TokenEvent(name, (), (), version, "abort"))
                return
            async with self._post(GENERATE, body) as response:
                if response.status != 200:
                    raise await refusal(response)
                async for chunk in chunks(response):
                    cached = None
                    if chunk.token_ids and not live.received:
                        cached = self.status().live.get(self._inner_name(name), (0, 0))[0]
                        if scores and version != self._version:
                            raise Unavailable("new weights came while the prompt's log-probabilities were computed")
                    live.received += len(chunk.token_ids)
                    made, reason = (name, chunk.token_ids, chunk.logprobs), chunk.finish_reason
                    event = TokenEvent(*made, self._version, reason, chunk.top_logprobs, cached)
                    if scores and chunk.token_ids:
                        event, scores = msgspec.structs.replace(event, prompt_logprobs=scores), ()
                    live.events.put_nowait(event)
                    if reason is not None:
                        return
            raise Unavailable("the rollout engine ended a stream without a reason")
        except Exception as error:  # the reader of the events must receive any error
            unexpected = Unavailable(f"unexpected response from the rollout engine: {error!r}")
            live.events.put_nowait(error if isinstance(error, RoseError) else unexpected)

    async def _score(self, request: Request) -> tuple[PromptLogprob, ...] | None:
        """Return the log-probabilities of the prompt, if they were asked for and no token has brought them.

        None means that the request was aborted.
        """
        if request.sampling.prompt_logprobs is None or request.partial.token_ids:
            return ()
        async with self._post(GENERATE, scoring_body_of(request, salt=request.tenant)) as response:
            if response.status != 200:
                raise await refusal(response)
            return prompt_logprobs(await response.read(), request)

    def _inner_name(self, request_id: str) -> str:
        """Return the name of a request inside the engine."""
        return REQUEST_PREFIX + request_id

    async def evict(self, request_id: str) -> None:
        """Abort a request; its stream ends with the tokens so far."""
        self._check_alive()
        if request_id in self._live:
            name = self._inner_name(request_id)
            await self._call("/abort_requests", {"request_ids": [name, name + SCORING_SUFFIX]})

    # Control and status

    def write_control(self, **changes: Any) -> int:
        """Change the desired state. Return the number that the status shows once the engine applies it."""
        self._check_alive()
        self._control = msgspec.structs.replace(self._control, **changes)
        paused = msgspec.structs.replace(self._control, tokens=0)
        return self._control_segment.write(paused if self._is_swapping else self._control)

    async def apply_control(self, **changes: Any) -> None:
        """Change the desired state, and wait until the engine applies it."""
        await self._until_applied(self.write_control(**changes))

    async def _until_applied(self, number: int) -> None:
        deadline_s = time.monotonic() + APPLIED_S
        while (status := self.status()).done < number:
            if time.monotonic() > deadline_s:
                raise Unavailable(f"the rollout engine did not obey within {APPLIED_S:g} s: {status.why}")
            await asyncio.sleep(POLL_S)

    @property
    def unapplied_s(self) -> float:
        """Return for how long the engine has not applied the newest control; 0 if it has. Raises Unavailable."""
        if self.status().done >= self._control_segment.number:
            self._applied_s = time.monotonic()
        return time.monotonic() - self._applied_s

    def status(self) -> Status:
        """Return the engine's newest status. Raises Unavailable without an engine."""
        self._check_alive()
        while True:
            with suppress(Torn):
                _, status = self._status_segment.read()
                assert status is not None
                return status

    # Weights

    async def stage(self, version: str, source: str) -> None:
        """Read a folder's weights and compare them with the running ones. Raises ModelError."""
        progress = await self._call_worker("stage_weights", [version, source])
        deadline_s = time.monotonic() + STAGED_S
        while progress["busy"] and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
            progress = await self._call_worker("staged_weights", [])
        if progress["failure"] or progress["busy"]:
            raise ModelError(progress["failure"] or f"version `{version}` was not read within {STAGED_S:g} s")
        self._staged = version

    async def commit(self, version: str) -> None:
        """Write the staged version while no step runs. Raises ModelError if nothing changed, else Unavailable."""
        if self._staged != version:
            raise RequestRefused(f"version `{version}` is not staged", hint="stage it first")
        if self._ranks > 1 and (await self._call_worker("staged_weights", []))["version"] != version:
            self._staged = None
            raise ModelError(f"version `{version}` {NOT_STAGED} on every rank")
        await self._call("/start_weight_update", None)
        self._staged = None
        try:
            await self._pause()
            await self._call("/update_weights", {"update_info": {"version": version}})
            await self._call("/finish_weight_update", {"weight_version": version})
        except RoseError as error:
            if self._ranks > 1 or not any(words in error.what for words in UNCHANGED):
                raise Unavailable(f"it is not known which weights the rollout engine has: {error.what}") from error
            await self._resume()
            raise ModelError(error.what) from error
        self._version = version
        await self._resume()

    async def _pause(self) -> None:
        """Wait until no step runs and every produced token has arrived."""
        self._is_swapping = True
        await self.apply_control()
        self._paused_s = time.monotonic()
        made = self.status().live
        while any(live.received < made.get(self._inner_name(name), (0, 0))[1] for name, live in self._live.items()):
            if time.monotonic() > self._paused_s + APPLIED_S:
                raise Unavailable("tokens that were made before a swap did not arrive")
            await asyncio.sleep(POLL_S)

    async def _resume(self) -> None:
        self._is_swapping = False
        number = self.write_control()
        self.swap_s = time.monotonic() - self._paused_s
        await self._until_applied(number)

    # HTTP

    async def _call_worker(self, method: str, arguments: list[str]) -> dict[str, Any]:
        """Call a method of staging on every rank. Return their progress as one."""
        response = await self._call("/collective_rpc", {"method": method, "args": arguments})
        results: list[dict[str, Any]] = response["results"]
        self._ranks, versions = len(results), {result["version"] for result in results}
        return {
            "busy": any(result["busy"] for result in results),
            "failure": next((result["failure"] for result in results if result["failure"]), ""),
            "version": versions.pop() if len(versions) == 1 else None,
        }

    async def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        async with self._post(path, body) as response:
            if response.status != 200:
                raise await refusal(response)
            result: dict[str, Any] = await response.json()
            return result

    @asynccontextmanager
    async def _post(self, path: str, body: dict[str, Any] | None) -> AsyncIterator[aiohttp.ClientResponse]:
        self._check_alive()
        try:
            async with self._http.post(URL + path, json=body) as response:
                yield response
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            deadline_s = time.monotonic() + EXIT_S
            while self._is_running() and not self._is_closed and time.monotonic() < deadline_s:
                await asyncio.sleep(POLL_S)
            raise Unavailable(f"the rollout engine is gone: {error}") from error

    def _check_alive(self) -> None:
        if self._is_closed or not self._is_running():
            raise Unavailable("the rollout engine is gone")

    async def close(self) -> None:
        """End every request and disconnect."""
        self._is_closed = True
        for live in self._live.values():
            live.events.put_nowait(Unavailable("the worker was closed"))
            live.reader.cancel()
        await self._http.close()


def engine_facts(status: Status) -> EngineFacts:
    """Return the facts of an engine that its status has, by the same names."""
    return EngineFacts(**{name: getattr(status, name) for name in SHARED_FACTS}, batch_invariant=False)
