"""The serving side's schedulers: vLLM's own, and everything they do is shown on a board. They decide nothing.

`vllm serve MODEL --scheduler-cls rose.engines.vllm.ServingScheduler` is all that a serving engine needs. Showing costs
tens of microseconds per step and waits for nobody. Whatever goes wrong with it is logged once, ends it, and is never
raised into serving: an engine that shows nothing is not lent. Only what can be known at start-up is refused there: the
scheduler of the other kind of scheduling, and by the package itself a vLLM that this was not written for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from rose.engines.vllm.board import BoardWriter, about_me
from rose.engines.vllm.finding import new_board_path
from rose.engines.vllm.publishing import Publisher
from rose.engines.vllm.support import check_scheduling

logger = logging.getLogger("vllm.rose")


class _Shows:
    """Mixed in before one of vLLM's schedulers; every override calls it first and then looks."""

    _rose: Publisher | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        wants_async = bool(self.scheduler_config.async_scheduling)  # type: ignore[attr-defined]
        check_scheduling(type(self).__name__, is_async=isinstance(self, AsyncScheduler), wants_async=wants_async)
        try:
            self._rose = Publisher(_board(self))
        except Exception as error:
            logger.exception("ROSE: this engine will not be lent, its board could not be made: %s", error)

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        self._show(Publisher.came, request)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        self._show(Publisher.gone, finished)
        return finished

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        began_s = time.monotonic()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._show(Publisher.scheduled, began_s, output.num_scheduled_tokens, self)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._show(Publisher.stepped, self, scheduler_output.num_scheduled_tokens)
        return outputs

    def shutdown(self) -> None:
        self._show(Publisher.close)
        self._rose = None
        super().shutdown()  # type: ignore[misc]

    def _show(self, what: Callable[..., None], *arguments: Any) -> None:
        publisher = self._rose
        if publisher is None:
            return
        try:
            what(publisher, *arguments)
        except Exception as error:
            self._rose = None
            logger.exception("ROSE: this engine shows nothing any more and is not lent; serving goes on")
            try:
                publisher.turn_off(f"{type(error).__name__}: {error}")
            except Exception as second:
                logger.error("ROSE: nor can that be shown: %s", second)


def _board(scheduler: Any) -> BoardWriter:
    config = scheduler.kv_cache_config
    block_bytes = kv_block_bytes(config)
    about = about_me(
        f"vllm {vllm.__version__}",
        str(scheduler.vllm_config.model_config.served_model_name or scheduler.vllm_config.model_config.model),
        step_tokens=scheduler.max_num_scheduled_tokens,
        sequences=scheduler.max_num_running_reqs,
        kv_blocks=config.num_blocks - 1,
        block_bytes=block_bytes,
    )
    return BoardWriter(new_board_path(), about)


def kv_block_bytes(config: Any) -> int:
    """Of one KV block in all layers; layers that share an allocation are counted once."""
    total = sum({(tensor.size, tensor.offset): tensor.size for tensor in config.kv_cache_tensors}.values())
    return total // max(1, config.num_blocks)


class ServingScheduler(_Shows, Scheduler):  # type: ignore[misc]
    """For synchronous scheduling: CPUs, and `--no-async-scheduling`."""


class AsyncServingScheduler(_Shows, AsyncScheduler):  # type: ignore[misc]
    """For asynchronous scheduling, vLLM's default on GPUs."""
