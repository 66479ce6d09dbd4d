"""The scheduler of a rollout engine: SGLang's own behind the gate, which ends requests without a step.

The plugin puts this class in the place of SGLang's, by SGLang's hook registry. While the gate is closed SGLang plans as
ever (a finished prefill joins the running batch), but finds neither a prefill nor a decode step to run, and sleeps.

SGLang ends a running request after one more decode step, which behind a closed gate would never come. So an aborted
request is retracted first: then it waits, and SGLang ends waiting requests at once. What it produced was sent already.

SGLang keeps the prefix cache over new weights while requests run. Requests are salted here with the version and the
number of swaps so far (`extra_key`), so KV computed under old weights is never found under new ones.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import zmq
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import NextBatchPlan, retract_all
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel, get_serving

from rose.errors import ConfigError
from rose.sglang.parked_sleep import ParkedSleep
from rose.sglang.plugin import SCHEDULER
from rose.sglang.rollout_gate import GateSizes, RolloutGate, kv_token_bytes, step_features, tokens_of, view_of
from rose.vllm.control_segment import ENGINE_FOLDER_VARIABLE


def register_hooks() -> None:
    """Put the gated scheduler in the place of SGLang's."""
    HookRegistry.register(SCHEDULER, SglangRolloutScheduler, HookType.REPLACE)


class SglangRolloutScheduler(Scheduler):  # type: ignore[misc]
    """SGLang's scheduler for one device, without overlap: one step at a time, whose end is known."""

    _now_s = 0.0  # of the newest decision
    _is_held = False  # the grant held back a request that SGLang would have begun

    # Fields of SGLang's scheduler
    chunked_prefill_size: int
    chunked_req: Any
    last_batch: Any
    max_prefill_tokens: int
    running_batch: Any
    waiting_queue: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        folder = os.environ.get(ENGINE_FOLDER_VARIABLE)
        if not folder:
            raise ConfigError("a rollout engine works for an agent", hint="start it with `rose lend sglang`")
        super().__init__(*args, **kwargs)
        self._check_settings()
        sockets = (self.ipc_channels.recv_from_tokenizer, self.ipc_channels.recv_from_rpc)
        sizes = GateSizes(
            step_tokens=self.chunked_prefill_size,
            sequences=self.max_running_requests,
            kv_tokens=self.max_total_num_tokens,
            token_bytes=kv_token_bytes(self),
            max_context_tokens=self.max_req_len - 1,  # SGLang cuts longer answers short without a word
        )
        sleep = ParkedSleep(zmq.Poller(), [socket for socket in sockets if socket is not None])
        self._gate = RolloutGate(Path(folder), sizes, sleep, lambda: str(get_serving().weight_version))
        self._swaps = 0
        self._gate.publish("idle", 0, 0, 0, 0)

    def _check_settings(self) -> None:
        parallel = get_parallel()
        if self.enable_overlap:
            raise ConfigError("the steps of a rollout engine must not overlap", hint="add --disable-overlap-schedule")
        if parallel.tp_size * parallel.pp_size * parallel.num_dp_ranks > 1:
            raise ConfigError("a rollout engine on SGLang has one device", hint="remove --tp-size and the like")
        if self.chunked_prefill_size is None:
            raise ConfigError("a prompt longer than a grant would never start", hint="set --chunked-prefill-size")

    # Stepping

    def ingest_requests(self, *args: Any, **kwargs: Any) -> Any:
        if self._engine_paused:  # for new weights; SGLang would poll
            self._gate.adopt_control()
            self._park("parked")
        return super().ingest_requests(*args, **kwargs)

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        began_s = time.monotonic()
        self._gate.ask(self._rollouts(), began_s)
        if self._gate.is_unloaded and self._has_requests():
            self.abort_request(AbortReq(abort_all=True))
        full, self._now_s = (self.chunked_prefill_size, self.max_prefill_tokens), began_s
        if self._gate.is_open:
            self.chunked_prefill_size = min(full[0], self._gate.tokens)
            self.max_prefill_tokens = min(full[1], self._gate.tokens)
        try:
            plan = super().get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        finally:
            self.chunked_prefill_size, self.max_prefill_tokens = full
        self.running_batch = plan.running_batch
        if plan.batch_to_run:
            self._on_planned(plan.batch_to_run, began_s)
        else:
            self.last_batch = None  # it is part of the running batch now
            self._park("parked" if self._has_requests() else "idle")
        return plan

    def get_new_batch_prefill(self, running_batch: Any) -> Any:
        if not self._gate.is_open:
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        if self._is_held:  # SGLang notes that the batch is full, and asks again only after a request has ended
            self._is_held = running_batch.batch_is_full = False
        return super().get_new_batch_prefill(running_batch)

    def get_num_allocatable_reqs(self, running_bs: int, *args: Any, **kwargs: Any) -> int:
        most = super().get_num_allocatable_reqs(running_bs, *args, **kwargs)
        granted = self._gate.sequences_to_begin(running_bs, self._now_s)
        self._is_held |= granted < most
        return min(most, granted)

    def update_running_batch(self, batch: Any) -> Any:
        if not self._gate.is_open:
            return None
        excess = batch.reqs[self._gate.sequences_to_keep(len(batch.reqs), self._now_s) :]
        if excess:
            batch.filter_batch(reqs_to_exclude=excess)
            self._requeue(excess, is_retracted=True)
        return super().update_running_batch(batch)

    def process_batch_result(self, batch: Any, result: Any) -> Any:
        requests = list(batch.reqs)
        before = [len(request.output_ids) for request in requests]
        result = super().process_batch_result(batch, result)
        self._gate.on_step_ended()
        for request, tokens in zip(requests, before):
            made = len(request.output_ids)
            self._gate.counts["generated_tokens"] += made - tokens
            cached, _ = self._gate.live.get(request.rid, (0, 0))
            self._gate.live[request.rid] = (cached, made)
        self._gate.publish("running", *self._levels())
        known = {request.rid for request in [*self.waiting_queue, *self.collect_inflight_reqs(), *requests]}
        ended = {request.rid for request in requests if request.finished()}
        self._gate.live = {rid: made for rid, made in self._gate.live.items() if rid in known - ended}
        return result

    def _on_planned(self, batch: Any, began_s: float) -> None:
        gate, counts = self._gate, self._gate.counts
        gate.on_step_began(step_features(batch), began_s)
        if not batch.forward_mode.is_extend():
            return
        for request in batch.reqs:
            prompt = len(request.origin_input_ids)
            counts["prompt_tokens"] += max(0, min(prompt, request.extend_end) - request.prefix_len)
            if request.rid not in gate.live:
                gate.live[request.rid] = (request.prefix_len, 0)
                counts["prefix_query_tokens"] += prompt
                counts["prefix_hit_tokens"] += request.prefix_len

    # Parking and status

    def _has_requests(self) -> bool:
        return bool(self.waiting_queue or self.chunked_req is not None or self.collect_inflight_reqs())

    def _rollouts(self) -> Any:
        return view_of(self.collect_inflight_reqs(), self.chunked_req, self.waiting_queue)

    def _levels(self) -> tuple[int, int, int, int]:
        running = len(self.collect_inflight_reqs())
        cached = int(self.tree_cache.evictable_size())
        free = int(self.token_to_kv_pool_allocator.available_size())
        return running, len(self.waiting_queue), max(0, self.max_total_num_tokens - free - cached), cached

    def _park(self, state: Any) -> None:
        self._gate.park(state, *self._levels())

    # Requests

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        self._salt(req)
        self._gate.counts["preemptions"] += is_retracted
        super()._add_request_to_queue(req, is_retracted)

    def abort_request(self, recv_req: Any) -> None:
        chosen = [
            request
            for request in self.collect_inflight_reqs()
            if (recv_req.abort_all or request.rid.startswith(recv_req.rid))
            and not request.finished()
            and request is not self.chunked_req
        ]
        for batch in (self.running_batch, self.last_batch):
            if chosen and batch is not None:
                batch.filter_batch(reqs_to_exclude=chosen)
                batch.batch_is_full = False
        self._gate.counts["evictions"] += len(chosen)
        self._gate.counts["evicted_tokens"] += sum(tokens_of(request) for request in chosen)
        self._requeue(chosen, is_retracted=False)
        super().abort_request(recv_req)

    def _requeue(self, requests: list[Any], *, is_retracted: bool) -> None:
        """Release the KV of requests that have left their batch, and let them wait; their tokens are kept."""
        if not requests:
            return
        retract_all(
            reqs=requests,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            tree_cache=self.tree_cache,
            hisparse_coordinator=self.hisparse_coordinator,
            offload_kv=False,
        )
        for request in requests:
            self._add_request_to_queue(request, is_retracted)

    # Weights

    def record_weight_version_change(self, new_version: str | None) -> None:
        super().record_weight_version_change(new_version)
        self._swaps += 1
        for request in self.waiting_queue:
            self._salt(request)

    def _salt(self, request: Any) -> None:
        tenant = getattr(request, "rose_tenant", None)
        if tenant is None:
            tenant = request.rose_tenant = request.extra_key or ""
        request.extra_key = f"{self._swaps}:{get_serving().weight_version}:{tenant}"
