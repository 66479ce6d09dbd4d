"""vLLM as a `Worker`: one rollout engine, its HTTP server for requests and weights, its desk for everything else.

Grants and KV budgets are written on the desk and done when the engine shows their number. Weights are staged while
steps go on; to commit them the gate is closed, what was made before is waited for, so that every token is told under
the version that made it, and the staged version is written in between two steps. The gate stays closed whatever is
granted meanwhile. A commit that failed is over only if the engine says that nothing has changed, or that what had was
taken back; after any other answer nobody knows what it would run on, and the gate is not opened again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from rose.engines.base import EngineFacts, Request, TokenEvent, WorkerFacts
from rose.engines.vllm.desk import Control, Sheet, Status, status_sheet
from rose.engines.vllm.mapped import Torn
from rose.engines.vllm.patching import UNCHANGED
from rose.engines.vllm.talking import GENERATE, NAMED, URL, body_of, chunks, connector, refusal
from rose.errors import ContextTooLong, ModelError, RequestRefused, RoseError, Unavailable

LOOK_S = 0.002  # between two looks at the desk
OBEYED_S = 30.0  # the longest step of a sick device
STAGED_S = 600.0
GONE_S = 1.0


class _Live:
    """One request. Its stream is read as it comes, whether or not anybody reads its events."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[TokenEvent | RoseError | None] = asyncio.Queue()
        self.received = 0
        self.is_cancelled = False
        self.reader: asyncio.Task[None]

    def end(self, how: RoseError | None) -> None:
        self.events.put_nowait(how)
        self.reader.cancel()


class VllmWorker:
    """One running rollout engine. When it dies, iterators and calls end with `Unavailable`."""

    def __init__(self, socket: Path, desk: Path, control: Sheet[Control], is_running: Callable[[], bool]) -> None:
        self._is_running = is_running
        self._sheet, self._desk = control, desk
        self._status_sheet: Sheet[Status] | None = None
        self._control = Control()
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector(socket))
        self._live: dict[str, _Live] = {}
        self._version = ""
        self._staged: str | None = None
        self._is_swapping = False
        self._is_closed = False
        self._obeyed_s = time.monotonic()
        self.is_seeded = True  # whether the engine can take a request's seed
        self._still_s = 0.0
        self.swap_s: float | None = None  # how long the engine stood still for the last commit

    @classmethod
    async def attach(
        cls, socket: Path, desk: Path, control: Sheet[Control], is_running: Callable[[], bool]
    ) -> VllmWorker:
        """Return a worker for an engine whose server answers."""
        worker = cls(socket, desk, control, is_running)
        worker._status_sheet = status_sheet(desk)
        worker._version = worker.status().version
        return worker

    # Requests

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        self._check(request)
        live = self._live[request.request_id] = _Live()
        live.reader = asyncio.create_task(self._read(request, live))
        try:
            while (event := await live.events.get()) is not None and not live.is_cancelled:
                if isinstance(event, RoseError):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            live.reader.cancel()
            if self._live.get(request.request_id) is live:
                del self._live[request.request_id]

    async def _read(self, request: Request, live: _Live) -> None:
        try:
            async with self._post(
                GENERATE, body_of(request, salt=request.tenant, is_seeded=self.is_seeded)
            ) as response:
                if response.status != 200:
                    raise await refusal(response)
                async for chunk in chunks(response):
                    cached = None
                    if chunk.token_ids and not live.received:
                        cached = self._cached_tokens(request.request_id)
                    live.received += len(chunk.token_ids)
                    made, reason = (request.request_id, chunk.token_ids, chunk.logprobs), chunk.finish_reason
                    live.events.put_nowait(TokenEvent(*made, self._version, reason, chunk.top_logprobs, cached))
                    if reason is not None:
                        return
            raise Unavailable("the rollout engine ended a stream without saying why")
        except Exception as error:  # whoever reads the events must learn of it, whatever it is
            gone = Unavailable(f"the rollout engine said what nobody understands: {error!r}")
            live.events.put_nowait(error if isinstance(error, RoseError) else gone)

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

    def _cached_tokens(self, name: str) -> int:
        return self.status().live.get(NAMED + name, (0, 0))[0]

    async def evict(self, request_id: str) -> None:
        self._check_alive()
        if request_id in self._live:
            await self._call("/abort_requests", {"request_ids": [NAMED + request_id]})

    async def cancel(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            live.is_cancelled = True
            live.end(None)

    # The desk

    async def grant(self, tokens: int, sequences: int, until_s: float) -> None:
        await self.want(tokens=tokens, sequences=sequences, until_s=until_s)

    async def kv_budget(self, budget_bytes: int) -> None:
        await self.want(kv_bytes=budget_bytes)

    def wish(self, **changes: Any) -> int:
        """Write what is wanted from now on; the number says when it is done."""
        self._check_alive()
        self._control = msgspec.structs.replace(self._control, **changes)
        shown = msgspec.structs.replace(self._control, tokens=0) if self._is_swapping else self._control
        return self._sheet.write(shown)

    async def want(self, **changes: Any) -> None:
        """And wait until it is so."""
        number = self.wish(**changes)
        await self._until(lambda status: status.done >= number, OBEYED_S, "obey")

    @property
    def behind_s(self) -> float:
        """For how long the engine has not obeyed the newest word; 0 if it has. Raises Unavailable."""
        if self.status().done >= self._sheet.number:
            self._obeyed_s = time.monotonic()
        return time.monotonic() - self._obeyed_s

    def status(self) -> Status:
        """Raises Unavailable without an engine."""
        self._check_alive()
        assert self._status_sheet is not None
        while True:
            with suppress(Torn):
                _, status = self._status_sheet.read()
                assert status is not None
                return status

    async def facts(self) -> WorkerFacts:
        status = self.status()
        is_open = status.gate_open and time.monotonic() < status.until_s
        return WorkerFacts(engine_facts(status), is_open, self._staged)

    async def _until(self, holds: Callable[[Status], bool], limit_s: float, what: str) -> Status:
        deadline_s = time.monotonic() + limit_s
        while not holds(status := self.status()):
            if time.monotonic() > deadline_s:
                raise Unavailable(f"the rollout engine did not {what} within {limit_s:g} s: {status.why}")
            await asyncio.sleep(LOOK_S)
        return status

    # Weights

    async def stage(self, version: str, source: str) -> None:
        found = await self._ask_worker("stage_weights", [version, source])
        deadline_s = time.monotonic() + STAGED_S
        while found["busy"] and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01)
            found = await self._ask_worker("staged_weights", [])
        if found["failure"] or found["busy"]:
            raise ModelError(found["failure"] or f"version `{version}` was not read within {STAGED_S:g} s")
        self._staged = version

    async def commit(self, version: str) -> None:
        if self._staged != version:
            raise RequestRefused(f"version `{version}` is not staged", hint="stage it first")
        await self._call("/start_weight_update", None)
        self._staged = None
        try:
            await self._write(version)
        except RoseError as error:
            if not any(words in error.what for words in UNCHANGED):
                raise Unavailable(f"it is not known which weights the rollout engine has: {error.what}") from error
            await self._reopen()
            raise ModelError(error.what) from error
        self._version = version
        await self._reopen()

    async def _write(self, version: str) -> None:
        """What was staged, behind a closed gate."""
        await self._stand_still()
        await self._call("/update_weights", {"update_info": {"version": version}})
        await self._call("/finish_weight_update", {"weight_version": version})

    async def _stand_still(self) -> None:
        """No step is under way, and every token that was made has come in."""
        self._is_swapping = True
        await self.want()
        self._still_s = time.monotonic()
        await self._all_told()

    async def _reopen(self) -> None:
        self._is_swapping = False
        number = self.wish()
        self.swap_s = time.monotonic() - self._still_s
        await self._until(lambda status: status.done >= number, OBEYED_S, "obey")

    async def _all_told(self) -> None:
        """Every token that was made before has come in."""
        made = self.status().live
        expected = {name.removeprefix(NAMED): tokens for name, (_, tokens) in made.items()}
        deadline_s = time.monotonic() + OBEYED_S
        while any(live.received < expected.get(name, 0) for name, live in self._live.items()):
            if time.monotonic() > deadline_s:
                raise Unavailable("tokens that were made before a swap did not come in")
            await asyncio.sleep(LOOK_S)

    async def _ask_worker(self, method: str, arguments: list[str]) -> dict[str, Any]:
        found = await self._call("/collective_rpc", {"method": method, "args": arguments})
        result: dict[str, Any] = found["results"][0]
        return result

    # Talking

    @asynccontextmanager
    async def _post(self, path: str, body: dict[str, Any] | None) -> AsyncIterator[aiohttp.ClientResponse]:
        self._check_alive()
        try:
            async with self._http.post(URL + path, json=body) as response:
                yield response
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            await self._until_gone()
            raise Unavailable(f"the rollout engine is gone: {error}") from error

    async def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        async with self._post(path, body) as response:
            if response.status != 200:
                raise await refusal(response)
            found: dict[str, Any] = await response.json()
            return found

    async def _until_gone(self) -> None:
        """A dying process loses its connections first; whoever is told of one finds the other true as well."""
        deadline_s = time.monotonic() + GONE_S
        while self._is_running() and not self._is_closed and time.monotonic() < deadline_s:
            await asyncio.sleep(LOOK_S)

    def _check_alive(self) -> None:
        if self._is_closed or not self._is_running():
            raise Unavailable("the rollout engine is gone")

    async def close(self) -> None:
        self._is_closed = True
        for live in self._live.values():
            live.end(Unavailable("the worker was closed"))
        await self._http.close()


def engine_facts(status: Status) -> EngineFacts:
    return EngineFacts(
        version=status.version,
        running=status.running,
        waiting=status.waiting,
        kv_blocks_limit=status.kv_blocks_limit,
        kv_blocks_used=status.kv_blocks_used,
        kv_blocks_cached=status.kv_blocks_cached,
        block_tokens=status.block_tokens,
        block_bytes=status.block_bytes,
        max_context_tokens=status.max_context_tokens,
        prefix_query_tokens=status.prefix_query_tokens,
        prefix_hit_tokens=status.prefix_hit_tokens,
        preemptions=status.preemptions,
        steps=status.steps,
        prompt_tokens=status.prompt_tokens,
        generated_tokens=status.generated_tokens,
        batch_invariant=False,
    )
