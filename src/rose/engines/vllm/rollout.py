"""The rollout side's schedulers: vLLM's own behind a gate, within a KV budget, with a prefix cache per weight version.

Before every step the gate says how many tokens and sequences may run; vLLM then plans its step within that, and a step
of nothing still tells what ended. Requests that a small step left out come first in the next. One step is under way at
a time, also under asynchronous scheduling, so that the end of a step is a moment at which the device is free.

Who no longer fits into the KV budget is evicted: newest first, answered with "abort" and everything so far. Blocks are
salted with the weight version and the number of swaps so far, and whoever has computed nothing at a swap is salted
anew: what was computed under old weights is never found under new ones.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from rose.core.facts import RolloutView
from rose.engines.vllm import parking
from rose.engines.vllm.balloon import Balloon
from rose.engines.vllm.desk import DESK_VARIABLE, State, Status, control_sheet, status_sheet
from rose.engines.vllm.gate import Gate
from rose.engines.vllm.publishing import features_of
from rose.engines.vllm.serving import kv_block_bytes
from rose.engines.vllm.support import check_chunked, check_scheduling
from rose.errors import ConfigError

logger = logging.getLogger("vllm.rose")
parking.install()

WAITING_SHOWN = 64
TELL_S = 0.1  # an engine that stands still says how it is no more often than this
ASK_S = 0.25  # with rollouts waiting or a dry run, however little was shown: grants begin and end by time too
ATTEND_S = 0.5  # without any: serving's steps are learnt from all the same, and the board keeps 512


class _Gated:
    """Mixed in before one of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        folder = _desk_folder()
        super().__init__(*args, **kwargs)
        config = self.scheduler_config  # type: ignore[attr-defined]
        is_async, name = isinstance(self, AsyncScheduler), type(self).__name__
        check_scheduling(name, is_async=is_async, wants_async=bool(config.async_scheduling))
        check_chunked(bool(config.enable_chunked_prefill))
        self._full: tuple[int, int] = (self.max_num_scheduled_tokens, self.max_num_active_reqs)  # type: ignore[has-type]
        self._gate = Gate(control_sheet(folder), step_tokens=self._full[0], sequences=self._full[1])
        self._balloon = Balloon(self.kv_cache_manager.block_pool)  # type: ignore[attr-defined]
        self._block_bytes = kv_block_bytes(self.kv_cache_config)  # type: ignore[attr-defined]
        self._sheet = status_sheet(folder, create=True)
        self._status = Status(os.getpid())
        self._core: Any = None
        self._is_parked = threading.Event()
        self._kv_bytes: int | None = None
        self._evicted: list[Any] = []  # whose clients are not told yet
        self._is_stepping = False
        self._version, self._swaps = "", 0
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._live: dict[str, tuple[int, int]] = {}
        self._cached: tuple[tuple[int, ...], int] = ((), 0)
        self._told_s = self._attended_s = 0.0
        self._tell("idle")

    def attach(self, core: Any) -> None:
        """By the engine that this is the scheduler of, every time before it may sleep."""
        if self._core is core:
            return
        self._core = core
        for is_due in (self._is_word_due, self._is_news_due):
            parking.Alarm(core, self._is_parked, is_due).start()

    # Parking

    def has_requests(self) -> bool:
        """Whether the engine should step: not behind a closed gate, unless somebody must be told something."""
        if self._is_stepping:
            return False
        if self._has_errand():
            return True
        if not super().has_requests():  # type: ignore[misc]
            self._attend()
            return self._has_errand() or self._parked("idle")
        if self._has_work() and self._is_open():
            return True
        self._gate.refit_if_due()
        return self._has_errand() or self._parked("parked")

    def _is_open(self) -> bool:
        """By the moment of asking: what time the answer took is the step's own, and `schedule` asks again."""
        asked_s = time.monotonic()
        return self._gate.ask(self._rollouts()).is_open(asked_s)

    def _is_word_due(self) -> bool:
        return self._gate.wait_for_word(ATTEND_S)

    def _is_news_due(self) -> bool:
        is_keen = self._is_keen()
        self._gate.wait_for_news(ASK_S, is_keen=is_keen)
        return is_keen or time.monotonic() - self._attended_s >= ATTEND_S

    def _parked(self, state: State) -> bool:
        self._is_parked.set()
        is_news = state != self._status.state or self._gate.control_number != self._status.done
        if is_news or time.monotonic() - self._told_s > TELL_S:  # the agent may wait for its word to be done
            self._tell(state)
        return False

    def _has_work(self) -> bool:
        return bool(self.running or self.waiting or self.kv_holding_waiting)  # type: ignore[attr-defined, has-type]

    def _is_keen(self) -> bool:
        return self._gate.is_keen(has_work=self._has_work())

    def _has_errand(self) -> bool:
        """Ends to be told, or a KV budget to be taken."""
        return bool(self.finished_req_ids or self._evicted) or self._kv_bytes != self._gate.control.kv_bytes  # type: ignore[attr-defined]

    def _attend(self) -> None:
        now_s = time.monotonic()
        if now_s - self._attended_s >= ATTEND_S or self._gate.has_word or self._is_keen():
            self._attended_s = now_s
            self._gate.attend()
            self._gate.ask(self._rollouts())

    # Stepping

    def schedule(self, throttle_prefills: bool = False) -> Any:
        began_s = time.monotonic()
        self._notice_swap()
        grant = self._gate.ask(self._rollouts())
        self._keep_budget()
        is_open = grant.is_open(began_s) and not self._is_stepping
        output = self._limited(grant.tokens if is_open else 0, grant.sequences, throttle_prefills)
        counts, requests = output.num_scheduled_tokens, self.requests  # type: ignore[attr-defined]
        if counts:
            self._is_parked.clear()
            self._is_stepping = True
            self._gate.began(features_of(counts, requests), began_s)
            self._count_scheduled(output, requests)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if scheduler_output.num_scheduled_tokens:
            self._is_stepping = False
            self._gate.ended()
            self._counts["steps"] += 1
            for one in [one for each in outputs.values() for one in each.outputs]:
                self._made(one.request_id, len(one.new_token_ids))
        self._answer_evicted(outputs)
        self._tell("running" if scheduler_output.num_scheduled_tokens else "parked")
        return outputs

    def _made(self, name: str, tokens: int) -> None:
        self._counts["generated_tokens"] += tokens
        cached, before = self._live.get(name, (0, 0))
        self._live[name] = (cached, before + tokens)

    def _limited(self, tokens: int, sequences: int, throttle_prefills: bool) -> Any:
        """vLLM's own step within these; its loops end when the budget is used up, and see no more requests."""
        full_tokens, full_active = self._full
        hidden = self.running[sequences:] if tokens else []  # type: ignore[has-type]
        self.running = self.running[:sequences] if hidden else self.running  # type: ignore[has-type]
        self.max_num_scheduled_tokens = min(full_tokens, tokens)
        self.max_num_active_reqs = min(full_active - len(hidden), sequences)
        try:
            output = super().schedule(throttle_prefills)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens, self.max_num_active_reqs = full_tokens, full_active
            self.running = self.running + hidden
        counts = output.num_scheduled_tokens
        if 0 < len(counts) < len(self.running):
            self.running.sort(key=lambda request: request.request_id in counts)  # left out now, first next time
        return output

    def _rollouts(self) -> RolloutView:
        running, queues = self.running, (self.kv_holding_waiting, self.waiting)  # type: ignore[attr-defined]
        waiting = (request for queue in queues for request in islice(getattr(queue, "_heap", queue), WAITING_SHOWN))
        return rollout_view(running, waiting)

    # Requests

    def add_request(self, request: Any) -> None:
        self._notice_swap()
        self._salt(request)
        super().add_request(request)  # type: ignore[misc]
        self._gate.obey()
        if self._blocks_of(request) > self._blocks_max():
            self._evict(request)

    def _blocks_max(self) -> int:
        """By the agent's KV budget."""
        wanted = self._gate.control.kv_bytes
        return self._balloon.blocks if wanted is None else min(self._balloon.blocks, wanted // self._block_bytes)

    def _blocks_of(self, request: Any) -> int:
        """What it holds at its end; one that can never have them would wait forever."""
        tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)  # type: ignore[attr-defined]
        return -(-tokens // self.block_size)  # type: ignore[attr-defined]

    def _evict(self, request: Any) -> None:
        self._counts["evictions"] += 1
        self._counts["evicted_tokens"] += request.num_computed_tokens
        self._evicted += self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)  # type: ignore[attr-defined]

    def _answer_evicted(self, outputs: dict[int, Any]) -> None:
        """vLLM itself tells nobody of a request that its scheduler ended."""
        for request in self._evicted:
            told = outputs.setdefault(request.client_index, EngineCoreOutputs())
            told.outputs.append(EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT))
        self._evicted = []

    # Memory

    def _keep_budget(self) -> None:
        """Take or give back blocks until the agent's budget is kept; who does not fit is evicted, newest first."""
        wanted = self._gate.control.kv_bytes
        if wanted == self._kv_bytes:
            return
        limit = self._blocks_max()
        for request in [*self.waiting, *self.kv_holding_waiting, *self.running]:  # type: ignore[attr-defined]
            if self._blocks_of(request) > limit:
                self._evict(request)
        while self._balloon.missing(limit) > 0 and self.running:
            self._evict(self.running[-1])
        taken = self._balloon.resize(limit)
        self._kv_bytes = wanted
        if taken and self._core is not None:
            self._return_memory(taken)

    def _return_memory(self, runs: list[tuple[int, int]]) -> None:
        try:
            self._core.model_executor.collective_rpc("return_kv_blocks", args=(runs,))
        except Exception as error:
            logger.warning("ROSE: the memory of %d KV blocks was not returned: %s", self._balloon.held, error)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """vLLM insists on an empty pool; a balloon in it is not a request."""
        limit = self._balloon.limit
        self._balloon.resize(self._balloon.blocks)
        done = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        self._balloon.resize(limit)
        self._cached = ((), 0)
        return bool(done)

    # Weights

    def _notice_swap(self) -> None:
        version = self._core.get_weight_version() if self._core is not None else "default"
        if version == self._version:
            return
        self._version, self._swaps = version, self._swaps + 1
        for request in [*self.waiting, *self.kv_holding_waiting]:  # type: ignore[attr-defined]
            if request.num_computed_tokens == 0:
                self._salt(request)

    def _salt(self, request: Any) -> None:
        given = getattr(request, "rose_salt", None)
        if given is None:
            given = request.rose_salt = request.cache_salt or ""
        request.cache_salt = f"{self._swaps}:{self._version}:{given}"
        request.block_hashes.clear()
        request.update_block_hashes()

    # Telling

    def _count_scheduled(self, output: Any, requests: Mapping[str, Any]) -> None:
        counts = self._counts
        for name, new in output.num_scheduled_tokens.items():
            request = requests[name]
            before = request.num_computed_tokens - new
            counts["prompt_tokens"] += max(0, min(new, request.num_prompt_tokens - before))
        for begun in output.scheduled_new_reqs:
            counts["prefix_query_tokens"] += requests[begun.req_id].num_prompt_tokens
            counts["prefix_hit_tokens"] += begun.num_computed_tokens
            self._live[begun.req_id] = (begun.num_computed_tokens, 0)
        counts["preemptions"] += len(output.preempted_req_ids or ())

    def _tell(self, state: State) -> None:
        self._notice_swap()
        gate, balloon, now_s = self._gate, self._balloon, time.monotonic()
        self._told_s = now_s
        done = gate.control_number if self._kv_bytes == gate.control.kv_bytes else gate.control_number - 1
        self._status = Status(
            os.getpid(),
            done=done,
            at_s=now_s,
            state=state,
            gate_open=gate.last_grant.is_open(now_s),
            until_s=gate.last_grant.until_s,
            why=gate.last_grant.reason,
            version=self._version,
            running=len(self.running),
            waiting=len(self.waiting) + len(self.kv_holding_waiting),  # type: ignore[attr-defined]
            kv_blocks_limit=balloon.limit,
            kv_blocks_used=balloon.used,
            kv_blocks_cached=self._cached_blocks(state),
            block_tokens=self.block_size,  # type: ignore[attr-defined]
            block_bytes=self._block_bytes,
            max_context_tokens=self.max_model_len,  # type: ignore[attr-defined]
            live=self._live,
            lent=gate.lent(),
            **self._counts,
        )
        self._sheet.write(self._status)
        self._live = {name: made for name, made in self._live.items() if name in self.requests}  # type: ignore[attr-defined]

    def _cached_blocks(self, state: State) -> int:
        """Counted when it stands still, and only if anything has happened since: it looks at every block."""
        requests = len(self.requests)  # type: ignore[attr-defined]
        happened = (self._counts["steps"], self._counts["evictions"], requests, self._balloon.held)
        if state != "running" and happened != self._cached[0]:
            self._cached = (happened, self._balloon.cached)
        return self._cached[1]


_COUNTERS = (
    "steps",
    "prompt_tokens",
    "generated_tokens",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "preemptions",
    "evictions",
    "evicted_tokens",
)


def _desk_folder() -> Path:
    found = os.environ.get(DESK_VARIABLE)
    if not found:
        raise ConfigError(
            "a rollout engine works for an agent, and none has started this one",
            hint="start it with `rose lend vllm --serving-url URL --rollout-model MODEL`",
        )
    return Path(found)


def rollout_view(running: Iterable[Any], waiting: Iterable[Any]) -> RolloutView:
    """What could run now. The context is that of the deepest prompt, if it is deeper than those who decode."""
    decoding = context = prompt = depth = 0
    for request in running:
        computed = request.num_computed_tokens
        left = len(request._all_token_ids) - computed
        if left <= 1:
            decoding += 1
            context += computed
        else:
            prompt += left
            depth = max(depth, computed)
    prompt += sum([len(request._all_token_ids) - request.num_computed_tokens for request in waiting])
    return RolloutView(decoding, prompt, max(depth, context // decoding if decoding else 0))


class RolloutScheduler(_Gated, Scheduler):  # type: ignore[misc]
    """For synchronous scheduling: CPUs, and `--no-async-scheduling`, which a rollout engine should have."""


class AsyncRolloutScheduler(_Gated, AsyncScheduler):  # type: ignore[misc]
    """For asynchronous scheduling; one step is under way at a time all the same."""
