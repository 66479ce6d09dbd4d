"""Fit the requests of a rollout engine into fewer groups of KV blocks without losing what was computed.

After some minutes every request has blocks in nearly every group, so giving a few groups back by eviction alone would
end almost all of them. Instead the full blocks of doomed groups are copied into room in the groups that stay, and their
hashes in the prefix cache move along. Their requests are preempted and come back through that cache: at most one
partial block of each is computed again. No table in the worker is touched, so this holds for any model runner.

`choose` decides, on plain numbers; `Compaction.carry_out` changes vLLM's scheduler. A cut with more bytes to copy than
`MOVED_BYTES_MAX` is not for compaction, since serving waits meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rose.core.memory import Holder
from rose.vllm.elastic_kv import ElasticKv

MOVED_BYTES_MAX = 128 << 20  # some 25 ms of one core, less than one of a GPU


@dataclass(frozen=True, slots=True)
class Stay:
    """Which requests stay, in which groups."""

    groups: frozenset[int]
    requests: frozenset[str]


def choose(holders: Sequence[Holder], references: dict[int, int], size: int, groups: int) -> Stay:
    """Return which of the requests fit into so many groups, those with the most work first.

    `references` are the blocks in use of each group. The null block's group stays always, and of the others the fullest
    do. A request needs its blocks and one to go on with. Shared blocks count once.
    """
    null, *others = sorted(references)
    kept = sorted(others, key=lambda group: (-references[group], group))[: groups - 1]
    room, blocks, stays = groups * size - 1, set[int](), set[str]()
    for holder in sorted(holders, key=lambda holder: (-holder.work_tokens, holder.request_id)):
        together = blocks | set(holder.blocks)
        if len(together) + len(stays) + 1 <= room:
            blocks, stays = together, stays | {holder.request_id}
    return Stay(frozenset({null, *kept}), frozenset(stays))


class Compaction:
    """One engine's compaction: its groups, and vLLM's scheduler."""

    def __init__(self, kv: ElasticKv, scheduler: Any) -> None:
        self._kv, self._scheduler = kv, scheduler
        self.moved_blocks = 0

    def carry_out(self, holders: Sequence[Holder], groups: int, evict: Callable[[Any], None]) -> bool:
        """Empty all but so many groups, and give them back. Return False if too much would have to be copied."""
        kv, scheduler = self._kv, self._scheduler
        size, requests = kv.groups.blocks, scheduler.requests
        stay = choose(holders, kv.balloon.references(), size, groups)
        movers = [
            holder
            for holder in holders
            if holder.request_id in stay.requests and any(block // size not in stay.groups for block in holder.blocks)
        ]
        sources = self._full_blocks(movers, stay.groups)
        if len(sources) * kv.groups.pages * kv.groups.page_bytes // size > MOVED_BYTES_MAX:
            return False
        for holder in holders:
            if holder.request_id not in stay.requests:
                evict(requests[holder.request_id])
        self._move(sources, stay.groups)
        for holder in movers:
            self._preempt(requests[holder.request_id])
        kv.give_back([group for group in kv.balloon.present if group not in stay.groups])
        return True

    def _full_blocks(self, movers: Iterable[Holder], kept: frozenset[int]) -> list[Any]:
        """Return the blocks of these requests, outside of the kept groups, that the prefix cache knows."""
        size, blocks = self._kv.groups.blocks, self._scheduler.kv_cache_manager.block_pool.blocks
        outside = {block for holder in movers for block in holder.blocks if block // size not in kept}
        return [blocks[number] for number in sorted(outside) if blocks[number].block_hash is not None]

    def _move(self, sources: Sequence[Any], kept: frozenset[int]) -> None:
        pool = self._scheduler.kv_cache_manager.block_pool
        free = [block for group in sorted(kept) for block in self._kv.balloon.blocks_of(group) if _is_free(block)]
        free.sort(key=lambda block: block.block_hash is not None)  # what is cached is overwritten last
        moves = list(zip(sources, free, strict=False))
        self._kv.copy_blocks([(source.block_id, target.block_id) for source, target in moves])
        for source, target in moves:
            pool._maybe_evict_cached_block(target)
            pool.move_block_hashes(source, target)
            pool.free_block_queue.remove(target)  # to the end of the queue, where cached blocks are
            pool.free_block_queue.append(target)
        self.moved_blocks += len(moves)

    def _preempt(self, request: Any) -> None:
        """Preempt a request, as vLLM does where blocks are missing."""
        scheduler = self._scheduler
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)  # the worker needs all its tokens again


def _is_free(block: Any) -> bool:
    return block.ref_cnt == 0 and not block.is_null
