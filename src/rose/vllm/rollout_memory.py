"""The KV memory of a rollout engine: an allocation of its own, or pages of the pool that serving has made.

Both kinds answer the scheduler the same questions: may a request ever fit, is there a budget to apply, apply it. An
allocation of its own follows the agent's limit alone; blocks over the limit are taken out of vLLM's pool. On a shared
pool `core.memory` sets the budget before every step, and whenever serving asks for pages, from what serving publishes.
The engine takes pages only within the budget, and the group of vLLM's null block is its own.

A smaller budget gives back empty groups, with whatever they cache. If that is not enough, the requests that fit are
moved together (`kv_compaction`), and the others are evicted with all their tokens. Where moving would take too long,
`core.memory.victims` chooses the evictions that empty enough groups for the least computed tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

from rose.core.memory import Holder, MemoryPolicy, MemorySampled, State, victims
from rose.vllm.balloon import Balloon
from rose.vllm.elastic_kv import ElasticKv
from rose.vllm.kv_compaction import Compaction
from rose.vllm.kv_groups import NULL_GROUP
from rose.vllm.vllm_arbiter import VllmArbiter

logger = logging.getLogger("vllm.rose")

Evict = Callable[[Any], None]


class RolloutMemory(Protocol):
    """The KV memory of a rollout engine, as its scheduler sees it."""

    def observe(self) -> None:
        """Set the budget anew."""

    @property
    def is_due(self) -> bool:
        """Return whether there is a budget to apply."""

    @property
    def blocks_max(self) -> int:
        """Return how many blocks a request may have at its end."""

    @property
    def changes(self) -> int:
        """Return a number that changes with the blocks that are held."""

    def attach(self, core: Any) -> None: ...
    def fit(self, evict: Evict) -> None:
        """Apply the budget; evict the requests that do not fit."""

    def before_step(self) -> None: ...
    def on_step(self, *, is_over: bool) -> None:
        """Note that a step begins or has ended."""

    def reset_prefix_cache(self, reset: Callable[[], bool]) -> bool: ...
    def status(self) -> dict[str, Any]:
        """Return the fields of `Status` about memory."""

    def cached(self) -> int: ...


def blocks_at_end(request: Any, block_size: int, max_model_len: int) -> int:
    """Return the blocks of a request at its end; one that can never have them would wait forever."""
    tokens = min(request.num_prompt_tokens + request.max_tokens, max_model_len)
    return int(-(-tokens // block_size))


class OwnMemory:
    """KV memory of the engine's own, limited by the agent."""

    def __init__(self, scheduler: Any, arbiter: VllmArbiter, block_bytes: int) -> None:
        self._scheduler, self._arbiter, self._block_bytes = scheduler, arbiter, block_bytes
        self._balloon = Balloon(scheduler.kv_cache_manager.block_pool)
        self._applied: int | None = None
        self._core: Any = None

    def attach(self, core: Any) -> None:
        self._core = core

    def observe(self) -> None:
        return

    @property
    def is_due(self) -> bool:
        return self._applied != self._arbiter.control.kv_bytes

    @property
    def blocks_max(self) -> int:
        kv_bytes = self._arbiter.control.kv_bytes
        return self._balloon.blocks if kv_bytes is None else min(self._balloon.blocks, kv_bytes // self._block_bytes)

    @property
    def changes(self) -> int:
        return self._balloon.held

    def fit(self, evict: Evict) -> None:
        """Take or return blocks until the agent's limit holds; evict the newest requests that do not fit."""
        kv_bytes, limit, balloon = self._arbiter.control.kv_bytes, self.blocks_max, self._balloon
        while balloon.missing(limit) > 0 and self._scheduler.running:
            evict(self._scheduler.running[-1])
        taken = balloon.resize(limit)
        self._applied = kv_bytes
        if taken and self._core is not None:
            try:
                self._core.model_executor.collective_rpc("return_kv_blocks", args=(taken,))
            except Exception as error:
                logger.warning("ROSE: the memory of %d KV blocks was not returned: %s", balloon.held, error)

    def before_step(self) -> None:
        return

    def on_step(self, *, is_over: bool) -> None:
        return

    def reset_prefix_cache(self, reset: Callable[[], bool]) -> bool:
        """Deflate the balloon for the reset, since vLLM insists on an empty pool."""
        limit = self._balloon.limit
        self._balloon.resize(self._balloon.blocks)
        done = reset()
        self._balloon.resize(limit)
        return done

    def cached(self) -> int:
        return self._balloon.cached

    def status(self) -> dict[str, Any]:
        return {"kv_blocks_limit": self._balloon.limit, "kv_blocks_used": self._balloon.used}


class PooledMemory:
    """Pages of the pool that serving has made, within a budget that serving's need sets."""

    def __init__(
        self, kv: ElasticKv, scheduler: Any, arbiter: VllmArbiter, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._kv, self._scheduler, self._arbiter, self._now_s = kv, scheduler, arbiter, now_s
        self._policy = MemoryPolicy(kv.groups.pages_total - kv.groups.pages)
        self._applied: int | None = None
        self._limit_pages: int | None = 0
        self._groups_max = 1  # with the null block's
        self._blocks_max_before = 0  # the most since a budget was applied
        self._compaction = Compaction(kv, scheduler)
        kv.watch_allocations(self._find)

    def attach(self, core: Any) -> None:
        self._kv.attach(core.model_executor)

    # The budget

    @property
    def is_due(self) -> bool:
        is_lower = self.blocks_max < self._blocks_max_before  # some requests may never fit now
        return is_lower or self._applied != self._arbiter.control.kv_bytes or self._over() > 0

    @property
    def blocks_max(self) -> int:
        return self._groups_max * self._kv.groups.blocks - 1 if self._limit_pages != 0 else 0

    @property
    def changes(self) -> int:
        return self._kv.balloon.held_blocks

    def observe(self) -> None:
        """Set the budget by what serving publishes; without that nothing but the null block's group may be held."""
        serving, kv, now_s = self._arbiter.serving_pages(), self._kv, self._now_s()
        kv_bytes, groups = self._arbiter.control.kv_bytes, kv.groups
        was_parked = self._limit_pages == 0
        self._limit_pages = kv_bytes // groups.page_bytes if kv_bytes is not None else None
        if was_parked and self._limit_pages != 0:
            self._policy.restart()
        if serving is None:
            self._groups_max = 1
            return
        # A model that asks uses all that it holds: vLLM has given it the blocks of its prefix cache.
        sample = MemorySampled(
            serving.held if serving.asked else serving.used,
            kv.held_pages - groups.pages,
            serving.asked,
            owner_limit_pages=self._limit_pages,
            burst_pages=serving.burst,
        )
        self._policy.observe(sample, now_s)
        self._groups_max = 1 + (self._policy.budget_pages or 0) // groups.pages
        self._blocks_max_before = max(self._blocks_max_before, self.blocks_max)

    def _over(self) -> int:
        """Return how many groups must go."""
        return len(self._kv.balloon.present) - self._groups_max

    def fit(self, evict: Evict) -> None:
        """Hold no more than the budget: give back empty groups, then evict."""
        self._give_back_empty()
        holders = self._holders()
        if self._over() > 0 and not self._compaction.carry_out(holders, self._groups_max, evict):
            for request_id in self._victims(holders):
                evict(self._scheduler.requests[request_id])
            self._give_back_empty()
        self._applied, self._blocks_max_before = self._arbiter.control.kv_bytes, self.blocks_max

    def _give_back_empty(self) -> None:
        over = self._over()
        if over > 0:
            self._kv.give_back(self._kv.balloon.empty()[:over])

    def _holders(self) -> list[Holder]:
        requests = self._scheduler.requests.values()
        holders = [Holder(one.request_id, one.num_computed_tokens, tuple(self._blocks_of(one))) for one in requests]
        return [holder for holder in holders if holder.blocks]

    def _victims(self, holders: Iterable[Holder]) -> list[str]:
        """Return the requests to evict. Serving cannot have the null block's group, so blocks in it do not count."""
        size = self._kv.groups.blocks
        outside = [replace(one, blocks=tuple(b for b in one.blocks if b // size != NULL_GROUP)) for one in holders]
        return victims([holder for holder in outside if holder.blocks], size, self._over())

    def _blocks_of(self, request: Any) -> Iterable[int]:
        return (block for ids in self._scheduler.kv_cache_manager.get_block_ids(request.request_id) for block in ids)

    # Taking

    def before_step(self) -> None:
        """Take a group if a running request might find no block."""
        missing = len(self._scheduler.running) + 1 - self._kv.balloon.free
        if missing > 0:
            self._grow(missing)

    def _find(self, request: Any, missing: int) -> bool:
        return self._grow(missing) > 0

    def _grow(self, blocks: int) -> int:
        wanted = min(self._kv.groups_for(blocks), -self._over())
        grown = self._kv.grow(wanted)
        if grown < wanted:
            self._arbiter.want_pages((wanted - grown) * self._kv.groups.pages)
        return grown

    def on_step(self, *, is_over: bool) -> None:
        if is_over:
            self._kv.on_step_ended()
        else:
            self._kv.on_step_began()

    # For the scheduler

    def reset_prefix_cache(self, reset: Callable[[], bool]) -> bool:
        return self._kv.reset_prefix_cache(reset)

    def cached(self) -> int:
        return self._kv.balloon.cached

    def status(self) -> dict[str, Any]:
        balloon, policy = self._kv.balloon, self._policy.status()
        return {
            "kv_blocks_limit": balloon.limit if self._limit_pages != 0 else 0,
            "kv_blocks_used": balloon.used,
            "pages": self._kv.held_pages,
            "pages_max": self._groups_max * self._kv.groups.pages,
            "headroom_pages": policy.headroom_pages,
            "memory_state": State(policy.state).value,
            "moved_blocks": self._compaction.moved_blocks,
        }
