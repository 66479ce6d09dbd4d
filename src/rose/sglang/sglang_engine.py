"""The client of one running rollout engine on SGLang: its server for requests and weights, its segment for the rest.

Grants, budgets and the status are shared with `rose.vllm.vllm_engine`. Weights come by SGLang's own
`/update_weights_from_disk`. A staged folder is compared with the model's tensors by name and shape first, because
SGLang ignores a tensor that is missing. To commit, the grant is withdrawn and every produced token is received, so that
each carries the version that made it; then SGLang is paused, which it demands, and reads the folder. It takes back
nothing: after a failed commit the weights are unknown, and no step runs any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rose.engines.base import Request, TokenEvent
from rose.errors import ModelError, RequestRefused, RoseError, Unavailable
from rose.models.tensors import open_tensors
from rose.sglang.sglang_client import generate_body, sglang_chunks
from rose.vllm.control_segment import EngineControl, Segment
from rose.vllm.vllm_client import refusal
from rose.vllm.vllm_engine import APPLIED_S, VllmEngine

GENERATE_PATH, ABORT_PATH = "/generate", "/abort_request"
ABORT_AGAIN_S = 0.02  # a request is read within milliseconds
UPDATE_S_MAX = 600.0  # to read the weights of a large model


class SglangEngine(VllmEngine):
    """One running rollout engine. When it dies, iterators and calls end with `Unavailable`."""

    def __init__(
        self,
        socket: Path,
        folder: Path,
        control: Segment[EngineControl],
        is_running: Callable[[], bool],
        model: Path,
        vocabulary: int,
    ) -> None:
        """Connect to an engine whose server answers; it was started with this model folder."""
        super().__init__(socket, folder, control, is_running)
        self._model, self._vocabulary = model, vocabulary
        self._staged_folder = ""
        self._names: dict[str, str] = {}
        self._named = 0

    # Requests

    def _check(self, request: Request) -> None:
        super()._check(request)
        if request.sampling.prompt_logprobs is not None:
            raise RequestRefused("log-probabilities of a prompt are not computed by a rollout engine on SGLang")
        largest = max(*request.prompt_ids, *request.partial.token_ids, 0)
        if largest >= self._vocabulary:  # SGLang does not check, and dies of it
            raise RequestRefused(f"token {largest} is out of vocabulary; the model has {self._vocabulary} tokens")

    def _inner_name(self, request_id: str) -> str:
        return self._names.get(request_id, "")

    async def _read(self, request: Request, live: Any) -> None:
        self._named += 1
        name = self._names[request.request_id] = f"rose-{self._named:015d}"
        try:
            async with self._post(GENERATE_PATH, generate_body(request, name)) as response:
                if response.status != 200:
                    raise await refusal(response)
                async for message in sglang_chunks(response):
                    chunk = message.chunk
                    cached = message.cached_tokens if chunk.token_ids and not live.received else None
                    live.received += len(chunk.token_ids)
                    made, reason = (request.request_id, chunk.token_ids, chunk.logprobs), chunk.finish_reason
                    live.events.put_nowait(TokenEvent(*made, self._version, reason, chunk.top_logprobs, cached))
                    if reason is not None:
                        return
            raise Unavailable("the rollout engine ended a stream without a reason")
        except Exception as error:  # the reader of the events must receive any error
            unexpected = Unavailable(f"unexpected response from the rollout engine: {error!r}")
            live.events.put_nowait(error if isinstance(error, RoseError) else unexpected)
        finally:
            if self._names.get(request.request_id) == name:
                del self._names[request.request_id]

    async def evict(self, request_id: str) -> None:
        """Abort a request; its stream ends with the tokens so far."""
        self._check_alive()
        name, deadline_s = self._names.get(request_id), time.monotonic() + APPLIED_S
        while name is not None and self._names.get(request_id) == name and time.monotonic() < deadline_s:
            await self._command(ABORT_PATH, {"rid": name})  # ignored before SGLang has read the request
            await asyncio.sleep(ABORT_AGAIN_S)

    # Weights

    async def stage(self, version: str, source: str) -> None:
        """Compare a folder's tensors with the model's by name and shape. Raises ModelError."""
        self._check_alive()
        await asyncio.to_thread(check_same_tensors, self._model, Path(source), version)
        self._staged, self._staged_folder = version, source

    async def commit(self, version: str) -> None:
        """Let SGLang read the staged folder while no step runs. Raises Unavailable if the weights are then unknown."""
        if self._staged != version:
            raise RequestRefused(f"version `{version}` is not staged", hint="stage it first")
        self._staged = None
        update = {"model_path": self._staged_folder, "weight_version": version, "flush_cache": False}
        try:
            await self._pause()
            async with asyncio.timeout(UPDATE_S_MAX):
                await self._command("/pause_generation", {"mode": "in_place"})
                await self._command("/update_weights_from_disk", update)
                await self._command("/continue_generation", {})
        except (RoseError, TimeoutError) as error:
            what = error.what if isinstance(error, RoseError) else f"no answer within {UPDATE_S_MAX:g} s"
            raise Unavailable(f"it is not known which weights the rollout engine has: {what}") from error
        self._version = version
        await self._resume()

    async def _command(self, path: str, body: dict[str, Any]) -> None:
        async with self._post(path, body) as response:
            if response.status != 200:
                raise await refusal(response)

    @property
    def unapplied_s(self) -> float:
        """Return for how long the engine has not applied the newest control; while it reads weights it cannot."""
        if self._is_swapping:
            self._applied_s = time.monotonic()
            self._check_alive()
            return 0.0
        return super().unapplied_s


def check_same_tensors(model: Path, folder: Path, version: str) -> None:
    """Raise ModelError unless a folder has exactly the tensors of a model."""
    ours, new = open_tensors(model), open_tensors(folder)
    known, names = set(ours.names()), set(new.names())
    if known != names:
        raise ModelError(f"version `{version}` lacks or adds tensors, for example `{min(known ^ names)}`")
    for name in sorted(names):
        if ours.shape(name) != new.shape(name):
            raise ModelError(f"`{name}` of version `{version}` has shape {new.shape(name)}, not {ours.shape(name)}")
