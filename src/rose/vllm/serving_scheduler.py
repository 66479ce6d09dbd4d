"""The serving side's schedulers: vLLM's own, which publish what they do in a status segment and decide nothing.

`vllm serve MODEL --scheduler-cls rose.vllm.ServingScheduler` is all that a serving engine needs. Publishing costs tens
of microseconds per step and never blocks. An error in it is logged once, ends it, and is never raised into serving: an
engine that publishes nothing is not lent. Only the scheduler of the other kind of scheduling and an unsupported vLLM
are refused, at start-up. With ROSE_KV_POOL set the scheduler also takes and returns its KV memory (`serving_memory`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from rose.vllm.discovery import new_segment_path
from rose.vllm.elastic_kv import ElasticKv
from rose.vllm.engine_hook import WakeUpThread, attach_schedulers
from rose.vllm.kv_allocation import PoolPlan, plan_of
from rose.vllm.serving_memory import ServingMemory
from rose.vllm.status_segment import SegmentHeader, SegmentWriter, own_header
from rose.vllm.status_writer import StatusWriter
from rose.vllm.supported_versions import check_scheduling

logger = logging.getLogger("vllm.rose")

WANTED_S = 3600.0  # an idle engine waits for rollouts that want its pages; any time will do

attach_schedulers()


class _Publishing:
    """A mixin before one of vLLM's schedulers; each override calls vLLM first, then publishes."""

    _rose: StatusWriter | None = None
    _memory: ServingMemory | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        wants_async = bool(self.scheduler_config.async_scheduling)  # type: ignore[attr-defined]
        check_scheduling(type(self).__name__, is_async=isinstance(self, AsyncScheduler), wants_async=wants_async)
        plan = plan_of(self.kv_cache_config)  # type: ignore[attr-defined]
        if plan is not None:
            self._memory = ServingMemory(ElasticKv(plan, self), self)
        self._is_idle = threading.Event()
        try:
            writer = SegmentWriter(new_segment_path(), _header_of(self))
            self._rose = StatusWriter(writer)
            if self._memory is not None:
                self._memory.writer = writer
        except Exception as error:
            logger.exception("ROSE: this engine will not be lent, its status segment could not be made: %s", error)

    def attach(self, core: Any) -> None:
        """Take this scheduler's engine, which calls this every time before it may sleep."""
        memory = self._memory
        if memory is None or memory.kv.is_attached:
            return
        memory.kv.attach(core.model_executor)
        writer = memory.writer
        if writer is not None:

            def is_wanted() -> bool:
                number = writer.wanted.number
                writer.wanted.wait(number, WANTED_S)
                return writer.wanted.number != number

            WakeUpThread(core, self._is_idle, is_wanted).start()

    def has_requests(self) -> bool:
        if super().has_requests():  # type: ignore[misc]
            return True
        if self._memory is not None:
            self._memory.give_back_unused()
            self._publish(_publish_pages, self._memory)
            self._is_idle.set()
        return False

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        self._publish(StatusWriter.on_arrival, request)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        self._publish(StatusWriter.on_cancelled, finished)
        return finished

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        began_s, memory = time.monotonic(), self._memory
        if memory is not None:
            self._is_idle.clear()
            memory.before_step()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if memory is not None:
            if output.num_scheduled_tokens:
                memory.kv.on_step_began()
            self._publish(_publish_pages, memory)
        self._publish(StatusWriter.on_scheduled, began_s, output.num_scheduled_tokens, self)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        memory = self._memory
        if memory is not None:
            if scheduler_output.num_scheduled_tokens:
                memory.on_step_ended()
            self._publish(_publish_pages, memory)
        self._publish(StatusWriter.on_finished, self, scheduler_output.num_scheduled_tokens)
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Reset vLLM's prefix cache; on a pool with every block free meanwhile, as vLLM insists."""

        def reset() -> bool:
            return bool(super(_Publishing, self).reset_prefix_cache(*args, **kwargs))  # type: ignore[misc]

        return reset() if self._memory is None else self._memory.kv.reset_prefix_cache(reset)

    def shutdown(self) -> None:
        self._publish(StatusWriter.close)
        self._rose = None
        super().shutdown()  # type: ignore[misc]

    def _publish(self, method: Callable[..., None], *arguments: Any) -> None:
        writer = self._rose
        if writer is None:
            return
        try:
            method(writer, *arguments)
        except Exception as error:
            self._rose = None
            logger.exception("ROSE: this engine publishes nothing any more and is not lent; serving goes on")
            try:
                writer.publish_stop(f"{type(error).__name__}: {error}")
            except Exception as second:
                logger.error("ROSE: nor can that be published: %s", second)


def _publish_pages(writer: StatusWriter, memory: ServingMemory) -> None:
    writer.held_blocks = memory.kv.balloon.held_blocks
    memory.publish()


def _header_of(scheduler: Any) -> SegmentHeader:
    config, model = scheduler.kv_cache_config, scheduler.vllm_config.model_config
    plan, parallel = plan_of(config), scheduler.vllm_config.parallel_config
    return own_header(
        f"vllm {vllm.__version__}",
        str(model.served_model_name or model.model),
        step_tokens=scheduler.max_num_scheduled_tokens,
        sequences=scheduler.max_num_running_reqs,
        kv_blocks=config.num_blocks - 1,
        block_bytes=kv_block_bytes(config),
        block_tokens=scheduler.block_size,
        pool=_pool_of(plan) if plan is not None else ("", 0, 0, 0, 0, 0),
        # Replicas of a dense model know no other one; those of a mixture of experts share every step.
        replica=(parallel.data_parallel_index, parallel.data_parallel_size > 1),
    )


def _pool_of(plan: PoolPlan) -> tuple[str, int, int, int, int, int]:
    groups = plan.groups
    return plan.folder, groups.pages_total, groups.page_bytes, groups.pages, groups.blocks, plan.ranks


def kv_block_bytes(config: Any) -> int:
    """Return the bytes of one KV block in all layers; layers that share an allocation count once."""
    total = sum({(tensor.size, tensor.offset): tensor.size for tensor in config.kv_cache_tensors}.values())
    return total // max(1, config.num_blocks)


class ServingScheduler(_Publishing, Scheduler):  # type: ignore[misc]
    """The scheduler for synchronous scheduling: CPUs, and `--no-async-scheduling`."""


class AsyncServingScheduler(_Publishing, AsyncScheduler):  # type: ignore[misc]
    """The scheduler for asynchronous scheduling, vLLM's default on GPUs."""
