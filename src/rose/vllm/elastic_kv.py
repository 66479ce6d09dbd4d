"""The KV memory of a vLLM scheduler on a page pool: groups of blocks that come when needed and go when they may.

The scheduler's process decides which groups have memory, and its workers map and unmap them (`kv_allocation`). Taking
is immediate: map, then release the blocks. Giving back is ordered behind the steps under way, because a step that was
scheduled before the blocks were held may still read or write them: the workers unmap when every such step has ended.

A group has memory on all ranks or on none. Every rank takes its pages first; only then are the blocks released. Where
one rank finds fewer free pages, or fails, the others give back what they took too much.

vLLM asks for blocks in one place, `KVCacheManager.allocate_slots`, which returns nothing if there are too few.
`watch_allocations` wraps it, so memory grows by what a request really lacks and vLLM preempts only where there is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rose.errors import Unavailable
from rose.vllm import kv_allocation
from rose.vllm.group_balloon import GroupBalloon
from rose.vllm.kv_allocation import PoolPlan, RankReply

Call = Callable[..., Any]  # a function of `kv_allocation` in the worker


class ElasticKv:
    """The groups of one engine, seen from its scheduler."""

    def __init__(self, plan: PoolPlan, scheduler: Any) -> None:
        self.plan, self.groups = plan, plan.groups
        self.balloon = GroupBalloon(scheduler.kv_cache_manager.block_pool, self.groups.blocks, self.groups.count)
        self._scheduler = scheduler
        scheduler.kv_cache_manager.block_pool.get_usage = self.usage  # vLLM's metric would count held blocks as used
        self._executor: Any = None
        self._begun = self._ended = 0  # steps
        self._leaving: deque[tuple[int, list[int]]] = deque()  # groups, and the step that must have ended before

    @property
    def is_attached(self) -> bool:
        return self._executor is not None

    def attach(self, executor: Any) -> None:
        """Take vLLM's executor, through which the worker is called."""
        self._executor = executor

    @property
    def held_groups(self) -> int:
        """Return the groups with memory, also those about to go."""
        return len(self.balloon.present) + sum(len(groups) for _, groups in self._leaving)

    @property
    def held_pages(self) -> int:
        return self.held_groups * self.groups.pages

    @property
    def used_pages(self) -> int:
        """Return the fewest pages into which the blocks of requests would fit."""
        return self.groups_for(self.balloon.used + 1) * self.groups.pages

    def usage(self) -> float:
        """Return the share of the engine's blocks that requests use."""
        return self.balloon.used / (self.groups.count * self.groups.blocks - 1)

    def groups_for(self, blocks: int) -> int:
        """Return how many groups have so many blocks."""
        return -(-max(0, blocks) // self.groups.blocks)

    # Taking

    def grow(self, groups: int) -> int:
        """Take memory for so many more groups, as far as there are free pages. Return how many there were."""
        absent = self.balloon.absent
        if groups <= 0 or not absent or self._executor is None:
            return 0
        leaving = {group for _, gone in self._leaving for group in gone}
        wanted = [group for group in absent if group not in leaving][:groups]
        mapped = self._map(wanted) if wanted else []
        self.balloon.release(reversed(mapped))  # vLLM hands out the blocks that were freed last, first
        return len(mapped)

    def _map(self, wanted: list[int]) -> list[int]:
        """Return the groups that have memory on every rank now. Raises Unavailable if a rank fails; then none has."""
        replies = self._replies(kv_allocation.map_groups, wanted)
        failure = _failure_of(replies)
        common = 0 if failure else min(len(reply.groups) for reply in replies)
        if any(len(reply.groups) > common for reply in replies):
            self._leaving.appendleft((0, wanted[common:]))  # no step has used them
            self._let_go()
        if failure:
            raise Unavailable(failure)
        return wanted[:common]

    def watch_allocations(self, find: Callable[[Any, int], bool]) -> None:
        """Call `find(request, missing blocks)` where vLLM lacks blocks for a request; try again if it returns true."""
        manager = self._scheduler.kv_cache_manager
        plain = manager.allocate_slots

        def allocate_slots(request: Any, *arguments: Any, **options: Any) -> Any:
            blocks = plain(request, *arguments, **options)
            while blocks is None and find(request, self._missing(request)):
                blocks = plain(request, *arguments, **options)
            return blocks

        manager.allocate_slots = allocate_slots

    def _missing(self, request: Any) -> int:
        """Return about how many blocks a request lacks; at least one."""
        blocks = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)  # of each of vLLM's KV groups
        whole = len(blocks) * self.blocks_for(len(request._all_token_ids) + 1)
        return max(1, whole - sum(map(len, blocks)) - self.balloon.free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // int(self._scheduler.block_size))

    # Giving back

    def give_back(self, groups: Sequence[int]) -> None:
        """Give back groups that no request refers to, as soon as the steps under way have ended."""
        if groups:
            self.balloon.hold(groups)
            self._leaving.append((self._begun, list(groups)))
            self._let_go()

    def on_step_began(self) -> None:
        self._begun += 1

    def on_step_ended(self) -> None:
        self._ended += 1
        self._let_go()

    def _let_go(self) -> None:
        while self._leaving and self._leaving[0][0] <= self._ended:
            self._call(kv_allocation.unmap_groups, self._leaving[0][1])
            self._leaving.popleft()

    def copy_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy blocks from the first number of each pair to the second, in every layer."""
        if moves:
            self._call(kv_allocation.copy_blocks, list(moves))

    def _call(self, method: Call, argument: Sequence[Any]) -> None:
        """Call a method on every rank. Raises Unavailable if one of them fails."""
        failure = _failure_of(self._replies(method, argument))
        if failure:
            raise Unavailable(failure)

    def _replies(self, method: Call, argument: Sequence[Any]) -> list[RankReply]:
        replies: list[RankReply] = self._executor.collective_rpc(method, args=(argument,))
        return replies

    # The prefix cache

    def reset_prefix_cache(self, reset: Callable[[], bool]) -> bool:
        """Run vLLM's reset, which wants every block free, with the balloon let down."""
        absent = self.balloon.absent
        self.balloon.release(absent)
        try:
            return reset()
        finally:
            self.balloon.hold(absent)


def _failure_of(replies: Sequence[RankReply]) -> str:
    """Return what went wrong on the first rank that failed."""
    for rank, reply in enumerate(replies):
        if reply.failure:
            return reply.failure if len(replies) == 1 else f"rank {rank}: {reply.failure}"
    return ""
