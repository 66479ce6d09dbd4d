"""Background tasks that a server needs: none of them ends unnoticed.

asyncio keeps the exception of a task until it is asked for, so a task that fails leaves its server half alive. A
supervised task reports its failure when it happens, and `on_failure` ends what depends on the task, usually the
process, which its parent starts again. A task that belongs to one handler and is awaited there needs no supervision.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from rose.errors import Unavailable

logger = logging.getLogger("rose.tasks")


def supervise(
    work: Coroutine[Any, Any, None], name: str, on_failure: Callable[[Unavailable], None]
) -> asyncio.Task[None]:
    """Run the work as a task. If it raises, log that and call `on_failure` with the reason for the operator."""

    def on_done(task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("%s failed", name, exc_info=error)
        on_failure(Unavailable(f"{name} failed: {type(error).__name__}: {error}", hint="the log says more"))

    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(on_done)
    return task


def settle(future: asyncio.Future[Unavailable], reason: Unavailable) -> None:
    """Set the future's result unless it has one: the first reason counts."""
    if not future.done():
        future.set_result(reason)
