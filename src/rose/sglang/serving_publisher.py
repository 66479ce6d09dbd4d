"""The serving side's hooks: SGLang's own scheduler, which publishes what it does in a status segment.

`ROSE_SGLANG=serving` is all that a serving engine needs. The hooks decide nothing. An error in one is logged once, ends
publishing, and is never raised into serving: an engine that publishes nothing is not lent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import sglang
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel, get_serving

from rose.errors import ConfigError
from rose.sglang.plugin import SCHEDULER
from rose.sglang.rollout_gate import kv_token_bytes
from rose.sglang.status_publisher import SglangStatusWriter
from rose.vllm.discovery import new_segment_path
from rose.vllm.status_segment import SegmentWriter, own_header

logger = logging.getLogger("sglang.rose")


def register_hooks() -> None:
    """Register the hooks on SGLang's scheduler."""
    for method, hook, kind in (
        ("run_event_loop", _begin, HookType.BEFORE),
        ("_add_request_to_queue", _after_queued, HookType.AFTER),
        ("_release_aborted_request", _after_left, HookType.AFTER),
        ("get_next_batch_to_run", _around_planning, HookType.AROUND),
        ("process_batch_result", _after_result, HookType.AFTER),
    ):
        HookRegistry.register(f"{SCHEDULER}.{method}", hook, kind)


def _begin(scheduler: Any) -> None:
    scheduler.rose_writer = None
    try:
        if get_parallel().tp_rank == 0:
            scheduler.rose_writer = _writer_of(scheduler)
    except Exception as error:
        logger.exception("ROSE: this engine will not be lent, its status segment could not be made: %s", error)


def _writer_of(scheduler: Any) -> SglangStatusWriter:
    parallel = get_parallel()
    if parallel.pp_size > 1 or scheduler.disaggregation_mode.value != "null" or not scheduler.spec_algorithm.is_none():
        raise ConfigError("ROSE lends no engine with pipeline stages, disaggregation or speculative decoding")
    header = own_header(
        f"sglang {sglang.__version__}",
        str(get_serving().served_model_name),
        step_tokens=scheduler.chunked_prefill_size or scheduler.max_prefill_tokens,
        sequences=scheduler.max_running_requests,
        kv_blocks=scheduler.max_total_num_tokens,
        block_bytes=kv_token_bytes(scheduler),
        block_tokens=1,
    )
    return SglangStatusWriter(SegmentWriter(new_segment_path(), header))


def _after_queued(result: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    def publish(writer: SglangStatusWriter) -> None:
        if scheduler.waiting_queue and scheduler.waiting_queue[-1] is req:  # SGLang may have refused it
            writer.on_queued(req)

    _guarded(scheduler, publish)


def _after_left(result: Any, scheduler: Any, req: Any) -> None:
    _guarded(scheduler, lambda writer: writer.on_left(req))


def _around_planning(plain: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    began_s = time.monotonic()
    plan = plain(scheduler, *args, **kwargs)

    def publish(writer: SglangStatusWriter) -> None:
        if plan.batch_to_run:
            writer.on_planned(plan.batch_to_run, began_s)
        else:
            has_part = scheduler.chunked_req is not None or bool(scheduler.result_queue)
            is_idle = plan.running_batch.is_empty() and not scheduler.waiting_queue and not has_part
            writer.on_nothing_planned(_used(scheduler), is_idle=is_idle)

    _guarded(scheduler, publish)
    return plan


def _after_result(result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    _guarded(scheduler, lambda writer: writer.on_finished(batch, _used(scheduler)))


def _used(scheduler: Any) -> int:
    free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
    return max(0, int(scheduler.max_total_num_tokens - free))


def _guarded(scheduler: Any, publish: Callable[[SglangStatusWriter], None]) -> None:
    writer: SglangStatusWriter | None = getattr(scheduler, "rose_writer", None)
    if writer is None:
        return
    try:
        publish(writer)
    except Exception as error:
        scheduler.rose_writer = None
        logger.exception("ROSE: this engine publishes nothing any more and is not lent; serving goes on")
        try:
            writer.publish_stop(f"{type(error).__name__}: {error}")
        except Exception as second:
            logger.error("ROSE: nor can that be published: %s", second)
