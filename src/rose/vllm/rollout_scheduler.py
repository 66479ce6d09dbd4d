"""The rollout side's schedulers: vLLM's own behind admission, with a KV budget and a prefix cache per weight version.

Before every step the arbiter says how many tokens and sequences may run, and vLLM plans its step within that. One step
runs at a time, also under asynchronous scheduling. Requests that no longer fit into the KV budget are evicted, newest
first, and answered with "abort" and all their tokens. Blocks are salted with the weight version and the number of swaps
so far, so KV computed under old weights is never found under new ones.

vLLM's engine loop polls while its scheduler has requests that it does not run, and a polling engine starves a serving
engine on the same core. So a blocked scheduler is *parked*: it reports no requests, and the loop sleeps on its input
queue, where adds, aborts and calls still arrive. Threads put a wake-up into that queue when admission may have changed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from rose.core.facts import RolloutView
from rose.errors import ConfigError
from rose.vllm.control_segment import ENGINE_FOLDER_VARIABLE, State, Status, open_control, open_status
from rose.vllm.elastic_kv import ElasticKv
from rose.vllm.engine_hook import WakeUpThread, attach_schedulers
from rose.vllm.kv_allocation import plan_of
from rose.vllm.rollout_memory import OwnMemory, PooledMemory, RolloutMemory, blocks_at_end
from rose.vllm.serving_scheduler import kv_block_bytes
from rose.vllm.status_writer import features_of
from rose.vllm.supported_versions import check_chunked, check_scheduling
from rose.vllm.vllm_arbiter import VllmArbiter

logger = logging.getLogger("vllm.rose")

WAITING_SHOWN = 64
PUBLISH_S = 0.1  # a parked engine publishes its status no more often than this
ASK_S = 0.25  # with rollouts waiting or a dry run, even without events: grants begin and end by time too
OBSERVE_S = 0.5  # without any: serving's steps are learnt from all the same, and the segment keeps 512
COUNTERS = (
    "steps", "prompt_tokens", "generated_tokens", "prefix_query_tokens", "prefix_hit_tokens", "preemptions",
    "evictions", "evicted_tokens",
)  # fmt: skip


attach_schedulers()


class _Gated:
    """A mixin before one of vLLM's schedulers: admission, KV budget, prefix cache per weight version."""

    # Fields of vLLM's scheduler
    block_size: int
    finish_requests: Callable[..., list[Any]]
    finished_req_ids: set[str]
    kv_cache_config: Any
    kv_cache_manager: Any
    kv_holding_waiting: Any
    max_model_len: int
    max_num_active_reqs: int
    max_num_scheduled_tokens: int
    requests: dict[str, Any]
    running: list[Any]
    scheduler_config: Any
    waiting: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        folder = os.environ.get(ENGINE_FOLDER_VARIABLE)
        if not folder:
            raise ConfigError(
                "a rollout engine works for an agent, and none has started this one",
                hint="start it with `rose lend vllm --serving-url URL --rollout-model MODEL`",
            )
        super().__init__(*args, **kwargs)
        config = self.scheduler_config
        is_async, name = isinstance(self, AsyncScheduler), type(self).__name__
        check_scheduling(name, is_async=is_async, wants_async=bool(config.async_scheduling))
        check_chunked(bool(config.enable_chunked_prefill))
        self._full: tuple[int, int] = (self.max_num_scheduled_tokens, self.max_num_active_reqs)
        control = open_control(Path(folder))
        self._arbiter = VllmArbiter(control, step_tokens=self._full[0], sequences=self._full[1])
        self._block_bytes = kv_block_bytes(self.kv_cache_config)
        self._memory = self._rollout_memory()
        self._status_segment = open_status(Path(folder), create=True)
        self._status = Status(os.getpid())
        self._core: Any = None
        self._is_parked = threading.Event()
        self._evicted: list[Any] = []  # whose clients have not been answered yet
        self._is_stepping = False
        self._version, self._swaps = "", 0
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._live: dict[str, tuple[int, int]] = {}
        self._cached: tuple[tuple[int, ...], int] = ((), 0)
        self._published_s = self._observed_s = 0.0
        self._publish("idle")

    def _rollout_memory(self) -> RolloutMemory:
        plan = plan_of(self.kv_cache_config)
        if plan is None:
            return OwnMemory(self, self._arbiter, self._block_bytes)
        return PooledMemory(ElasticKv(plan, self), self, self._arbiter)

    # Parking

    def attach(self, core: Any) -> None:
        """Take this scheduler's engine, which calls this every time before it may sleep."""
        if self._core is core:
            return
        self._core = core
        self._memory.attach(core)

        def is_control_due() -> bool:
            return self._arbiter.wait_for_control(OBSERVE_S)

        def is_serving_due() -> bool:
            is_eager = self._arbiter.is_eager(has_work=self._has_work())
            self._arbiter.wait_for_serving(ASK_S, is_eager=is_eager)
            return is_eager or time.monotonic() - self._observed_s >= OBSERVE_S

        def is_memory_due() -> bool:
            return self._arbiter.wait_for_short(OBSERVE_S)

        waits = [is_control_due, is_serving_due]
        if isinstance(self._memory, PooledMemory):
            waits.append(is_memory_due)
        for is_due in waits:
            WakeUpThread(core, self._is_parked, is_due).start()

    def has_requests(self) -> bool:
        """Return whether the engine should step: if it is admitted, or with ends or budgets to report."""
        if self._is_stepping:
            return False
        if self._must_report():
            return True
        if not super().has_requests():  # type: ignore[misc]
            now_s = time.monotonic()
            is_eager = self._arbiter.is_eager(has_work=self._has_work())
            if now_s - self._observed_s >= OBSERVE_S or self._arbiter.has_new_control or is_eager:
                self._observed_s = now_s
                self._arbiter.observe()
                self._arbiter.ask(self._rollouts())
            return self._must_report() or self._park("idle")
        # Admitted when asked; `schedule` asks again after the time that this decision took.
        asked_s = time.monotonic()
        if self._has_work() and self._arbiter.ask(self._rollouts()).is_open(asked_s):
            return True
        self._arbiter.refit_if_due()
        return self._must_report() or self._park("parked")

    def _park(self, state: State) -> bool:
        self._is_parked.set()
        is_news = state != self._status.state or self._arbiter.control_number != self._status.done
        if is_news or time.monotonic() - self._published_s > PUBLISH_S:  # the agent may wait for its control
            self._publish(state)
        return False

    def _has_work(self) -> bool:
        return bool(self.running or self.waiting or self.kv_holding_waiting)

    def _must_report(self) -> bool:
        """Return whether there are ends to report or a KV budget to apply."""
        self._memory.observe()
        return bool(self.finished_req_ids or self._evicted) or self._memory.is_due

    def _rollouts(self) -> RolloutView:
        running, queues = self.running, (self.kv_holding_waiting, self.waiting)
        waiting = (request for queue in queues for request in islice(getattr(queue, "_heap", queue), WAITING_SHOWN))
        return rollout_view(running, waiting)

    # Stepping

    def schedule(self, throttle_prefills: bool = False) -> Any:
        began_s = time.monotonic()
        self._check_version()
        grant = self._arbiter.ask(self._rollouts())
        self._apply_budget()
        is_open = grant.is_open(began_s) and not self._is_stepping
        if is_open:
            self._memory.before_step()
        output = self._limited(grant.tokens if is_open else 0, grant.sequences, throttle_prefills)
        scheduled, requests = output.num_scheduled_tokens, self.requests
        if scheduled:
            self._is_parked.clear()
            self._is_stepping = True
            self._memory.on_step(is_over=False)
            self._arbiter.on_step_began(features_of(scheduled, requests), began_s)
            self._count(output, requests)
        return output

    def _limited(self, tokens: int, sequences: int, throttle_prefills: bool) -> Any:
        """Return vLLM's own step within these limits; its loops end with the budget and see no more requests."""
        full_tokens, full_active = self._full
        hidden = self.running[sequences:] if tokens else []
        self.running = self.running[:sequences] if hidden else self.running
        self.max_num_scheduled_tokens = min(full_tokens, tokens)
        self.max_num_active_reqs = min(full_active - len(hidden), sequences)
        try:
            output = super().schedule(throttle_prefills)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens, self.max_num_active_reqs = full_tokens, full_active
            self.running = self.running + hidden
        scheduled = output.num_scheduled_tokens
        if 0 < len(scheduled) < len(self.running):
            self.running.sort(key=lambda request: request.request_id in scheduled)  # left out now, first next time
        return output

    def _count(self, output: Any, requests: Mapping[str, Any]) -> None:
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

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if scheduler_output.num_scheduled_tokens:
            self._is_stepping = False
            self._memory.on_step(is_over=True)
            self._arbiter.on_step_ended()
            self._counts["steps"] += 1
            for one in [one for each in outputs.values() for one in each.outputs]:
                tokens = len(one.new_token_ids)
                self._counts["generated_tokens"] += tokens
                cached, before = self._live.get(one.request_id, (0, 0))
                self._live[one.request_id] = (cached, before + tokens)
        for request in self._evicted:  # vLLM does not report a request that its scheduler ends
            client_outputs = outputs.setdefault(request.client_index, EngineCoreOutputs())
            client_outputs.outputs.append(EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT))
        self._evicted = []
        self._publish("running" if scheduler_output.num_scheduled_tokens else "parked")
        return outputs

    # Requests and memory

    def add_request(self, request: Any) -> None:
        self._check_version()
        self._salt(request)
        super().add_request(request)  # type: ignore[misc]
        self._arbiter.adopt_control()
        self._memory.observe()
        if self._blocks_at_end(request) > self._memory.blocks_max:
            self._evict(request)

    def _blocks_at_end(self, request: Any) -> int:
        return blocks_at_end(request, self.block_size, self.max_model_len)

    def _evict(self, request: Any) -> None:
        self._counts["evictions"] += 1
        self._counts["evicted_tokens"] += request.num_computed_tokens
        self._evicted += self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def _apply_budget(self) -> None:
        """Apply the budget if it changed; evict the requests that it will never hold, and those that do not fit."""
        self._memory.observe()
        if self._is_stepping or not self._memory.is_due:
            return
        for request in [*self.waiting, *self.kv_holding_waiting, *self.running]:
            if self._blocks_at_end(request) > self._memory.blocks_max:
                self._evict(request)
        self._memory.fit(self._evict)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        def reset() -> bool:
            return bool(super(_Gated, self).reset_prefix_cache(*args, **kwargs))  # type: ignore[misc]

        self._cached = ((), 0)
        return self._memory.reset_prefix_cache(reset)

    # Weights

    def _check_version(self) -> None:
        """Notice a swap of weights; requests that have computed nothing are salted anew."""
        version = self._core.get_weight_version() if self._core is not None else "default"
        if version == self._version:
            return
        self._version, self._swaps = version, self._swaps + 1
        for request in [*self.waiting, *self.kv_holding_waiting]:
            if request.num_computed_tokens == 0:
                self._salt(request)

    def _salt(self, request: Any) -> None:
        salt = getattr(request, "rose_salt", None)
        if salt is None:
            salt = request.rose_salt = request.cache_salt or ""
        request.cache_salt = f"{self._swaps}:{self._version}:{salt}"
        request.block_hashes.clear()
        request.update_block_hashes()

    # Status

    def _publish(self, state: State) -> None:
        self._check_version()
        arbiter, memory, now_s = self._arbiter, self._memory, time.monotonic()
        self._published_s = now_s
        requests = len(self.requests)
        changes = (self._counts["steps"], self._counts["evictions"], requests, memory.changes)
        if state != "running" and changes != self._cached[0]:  # counting reads every block
            self._cached = (changes, memory.cached())
        is_applied = not memory.is_due
        self._status = Status(
            os.getpid(),
            done=arbiter.control_number if is_applied else arbiter.control_number - 1,
            at_s=now_s,
            state=state,
            gate_open=arbiter.last_grant.is_open(now_s),
            until_s=arbiter.last_grant.until_s,
            why=arbiter.last_grant.reason,
            version=self._version,
            running=len(self.running),
            waiting=len(self.waiting) + len(self.kv_holding_waiting),
            kv_blocks_cached=self._cached[1],
            block_tokens=self.block_size,
            block_bytes=self._block_bytes,
            max_context_tokens=self.max_model_len,
            live=self._live,
            lent=arbiter.account(),
            **(memory.status() | self._counts),
        )
        self._status_segment.write(self._status)
        self._live = {name: made for name, made in self._live.items() if name in self.requests}


def rollout_view(running: Iterable[Any], waiting: Iterable[Any]) -> RolloutView:
    """Return what could run now. The context is the deepest prompt's, if it exceeds the decoding mean."""
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
    """The scheduler for synchronous scheduling: CPUs, and `--no-async-scheduling`, as rollout engines should."""


class AsyncRolloutScheduler(_Gated, AsyncScheduler):  # type: ignore[misc]
    """The scheduler for asynchronous scheduling; one step is under way at a time all the same."""
