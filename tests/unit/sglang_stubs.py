"""Modules in place of SGLang's, with as much of its scheduler and hook registry as ROSE's plugin uses."""

from __future__ import annotations

import importlib
import select
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

KV_TOKENS, TOKEN_BYTES = 1000, 8
MODULES = ("rollout_scheduler", "serving_publisher")
EOS = "length"


class StubReason:
    """A reason for an end."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def to_json(self) -> dict[str, str]:
        return {"type": self._kind}


class StubReq:
    """A request, with the fields of SGLang's that ROSE reads."""

    def __init__(self, rid: str, prompt_tokens: int = 8, max_tokens: int = 4, tenant: str | None = None) -> None:
        self.rid, self.max_tokens, self.extra_key = rid, max_tokens, tenant
        self.origin_input_ids, self.output_ids = [0] * prompt_tokens, list[int]()
        self.prefix_len = self.extend_end = 0
        self.kv = SimpleNamespace(holds_kv=False)
        self.finished_reason: StubReason | None = None

    def finished(self) -> bool:
        return self.finished_reason is not None


class StubBatch:
    """A batch of requests."""

    def __init__(self, reqs: list[StubReq], *, is_extend: bool = False) -> None:
        self.reqs, self.batch_is_full = reqs, False
        self.forward_mode = SimpleNamespace(is_extend=lambda: is_extend)

    def __bool__(self) -> bool:
        return True

    def is_empty(self) -> bool:
        return not self.reqs

    def filter_batch(self, reqs_to_exclude: list[StubReq] | None = None) -> None:
        excluded = reqs_to_exclude or []
        self.reqs = [one for one in self.reqs if not one.finished() and not any(one is other for other in excluded)]


class StubPlan(SimpleNamespace):
    """A plan: `batch_to_run` and `running_batch`."""


class StubScheduler:
    """Runs prefills first, a whole prompt or a chunk of one, and else one decode step of all running requests."""

    def __init__(self, *, is_overlapping: bool = False, chunk: int | None = 16) -> None:
        self.enable_overlap, self.chunked_prefill_size, self.max_prefill_tokens = is_overlapping, chunk, 16
        self.max_running_requests, self.max_total_num_tokens = 4, KV_TOKENS
        self.max_req_len = 127
        self.ipc_channels = SimpleNamespace(recv_from_tokenizer=None, recv_from_rpc=None)
        self.disaggregation_mode = SimpleNamespace(value="null")
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        self.token_to_kv_pool_allocator = SimpleNamespace(
            available_size=lambda: KV_TOKENS - self.used,
            get_kvcache=lambda: SimpleNamespace(get_kv_size_bytes=lambda: (KV_TOKENS * 4, KV_TOKENS * 4)),
        )
        self.tree_cache = SimpleNamespace(evictable_size=lambda: 0)
        self.req_to_token_pool = self.hisparse_coordinator = None
        self.waiting_queue: list[StubReq] = []
        self.running_batch = StubBatch([])
        self.last_batch: StubBatch | None = None
        self.chunked_req: StubReq | None = None
        self.result_queue: list[Any] = []
        self.aborted: list[str] = []
        self.chunks: list[int] = []  # the size of a chunk, at every prefill
        self._engine_paused = False
        self.weight_version = "default"

    @property
    def used(self) -> int:
        return sum(len(one.origin_input_ids) + len(one.output_ids) for one in self.collect_inflight_reqs())

    def run_event_loop(self) -> None:
        return

    def ingest_requests(self) -> str:
        return "received"

    def _add_request_to_queue(self, req: StubReq, is_retracted: bool = False) -> None:
        self.waiting_queue.append(req)

    def _release_aborted_request(self, req: StubReq) -> None:
        self.aborted.append(req.rid)

    def collect_inflight_reqs(self) -> set[StubReq]:
        return {one for batch in (self.running_batch, self.last_batch) if batch is not None for one in batch.reqs}

    def get_num_allocatable_reqs(self, running_bs: int) -> int:
        return self.max_running_requests - running_bs

    def get_next_batch_to_run(self, running_batch: StubBatch, last_batch: StubBatch | None) -> StubPlan:
        if last_batch is not None and last_batch.forward_mode.is_extend():
            done = [one for one in last_batch.reqs if one is not self.chunked_req]
            running_batch = StubBatch([*running_batch.reqs, *done])
        running_batch.filter_batch()
        plan = self.get_new_batch_prefill(running_batch)
        if plan.batch_to_run is None and not running_batch.is_empty():
            plan.batch_to_run = self.update_running_batch(running_batch)
        return plan

    def get_new_batch_prefill(self, running_batch: StubBatch) -> StubPlan:
        most = self.get_num_allocatable_reqs(len(running_batch.reqs))
        if running_batch.batch_is_full and self.chunked_req is None:
            return StubPlan(batch_to_run=None, running_batch=running_batch)
        running_batch.batch_is_full = most <= 0
        partly, room = self.chunked_req, self.chunked_prefill_size or 1000
        request = partly or (self.waiting_queue.pop(0) if self.waiting_queue and most > 0 else None)
        if request is None:
            return StubPlan(batch_to_run=None, running_batch=running_batch)
        self.chunks.append(room)
        request.prefix_len, whole = request.extend_end, len(request.origin_input_ids) + len(request.output_ids)
        request.extend_end, request.kv.holds_kv = min(whole, request.extend_end + room), True
        self.chunked_req = request if request.extend_end < whole else None
        return StubPlan(batch_to_run=StubBatch([request], is_extend=True), running_batch=running_batch)

    def update_running_batch(self, batch: StubBatch) -> StubBatch | None:
        return batch

    def process_batch_result(self, batch: StubBatch, result: Any) -> None:
        for one in batch.reqs:
            if one is not self.chunked_req:
                one.output_ids.append(7)
                if len(one.output_ids) >= one.max_tokens:
                    one.finished_reason = StubReason(EOS)

    def abort_request(self, recv_req: Any) -> None:
        def is_chosen(one: StubReq) -> bool:
            return recv_req.abort_all or one.rid.startswith(recv_req.rid)

        for one in filter(is_chosen, list(self.waiting_queue)):
            self.waiting_queue.remove(one)
            self._release_aborted_request(one)
        for one in filter(is_chosen, self.collect_inflight_reqs()):
            assert one is self.chunked_req, "it would have to wait for a step"

    def record_weight_version_change(self, new_version: str | None) -> None:
        self.weight_version = new_version or self.weight_version


class Registry:
    """The hooks that were registered, by target."""

    def __init__(self) -> None:
        self.hooks: dict[str, tuple[Any, str]] = {}

    def register(self, target: str, hook: Any, kind: str) -> None:
        self.hooks[target] = (hook, kind)


def install(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put the stubs in place, and return ROSE's modules over them with the registry of hooks."""
    registry = Registry()
    serving = SimpleNamespace(weight_version="default", served_model_name="served")
    parallel = SimpleNamespace(tp_rank=0, tp_size=1, pp_size=1, num_dp_ranks=1)
    kinds = SimpleNamespace(REPLACE="replace", BEFORE="before", AFTER="after", AROUND="around")

    def retract_all(reqs: list[StubReq], **kwargs: Any) -> None:
        for one in reqs:
            one.prefix_len = one.extend_end = 0
            one.kv.holds_kv = False

    contents: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": "0.5.23"},
        "sglang.srt.managers.io_struct": {"AbortReq": lambda **named: SimpleNamespace(rid="", **named)},
        "sglang.srt.managers.schedule_batch": {"NextBatchPlan": StubPlan, "retract_all": retract_all},
        "sglang.srt.managers.scheduler": {"Scheduler": StubScheduler},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": kinds},
        "sglang.srt.runtime_context": {"get_parallel": lambda: parallel, "get_serving": lambda: serving},
        "zmq": {"Poller": select.poll},
    }
    for name in contents:
        words = name.split(".")
        for depth in range(1, len(words) + 1):
            path = ".".join(words[:depth])
            if path not in contents or depth == len(words):
                module = ModuleType(path)
                module.__dict__.update(contents.get(path, {}))
                monkeypatch.setitem(sys.modules, path, module)
    found = {}
    for name in MODULES:
        monkeypatch.delitem(sys.modules, f"rose.sglang.{name}", raising=False)
        found[name] = importlib.import_module(f"rose.sglang.{name}")
        monkeypatch.delitem(sys.modules, f"rose.sglang.{name}")
    return SimpleNamespace(registry=registry, serving=serving, parallel=parallel, **found)
