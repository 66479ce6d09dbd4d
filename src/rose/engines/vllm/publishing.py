"""What of a vLLM scheduler goes onto the board, and when. Knows vLLM's objects by their fields only.

A request that comes is a milestone, at once. A step is noted when it is scheduled and told when its output is taken;
then the view is written anew. Between two steps nothing else changes. A request counts as running once it has its
first token and only its newest one is not computed; before that, and again after a preemption, it waits.

Most steps only decode, the same requests as the step before, and nobody ends. Then every context is one longer and
every newest token is new, which needs no look at any request: after a step of the model none of them is in a cache,
and looking at 128 of them takes five times as long.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, KeysView, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.core.facts import StepFeatures
from rose.core.passive import FinishedStep, MilestoneKind
from rose.engines.vllm.board import WAITING_SHOWN, BoardWriter

UNKNOWN = -1  # how many tokens, but there are some
LAST, CONTEXT = 0, 1  # columns of what is shown of a running request; the third is its arrival


class _Tracked:
    """One request; the list is vLLM's own, looked at without a copy."""

    __slots__ = ("answer_ids", "arrival_s", "key", "last_s", "tokens")

    def __init__(self, key: int, arrival_s: float, answer_ids: list[int]) -> None:
        self.key, self.arrival_s, self.answer_ids = key, arrival_s, answer_ids
        self.last_s, self.tokens = 0.0, 0


@dataclass(frozen=True, slots=True)
class _UnderWay:
    began_s: float
    features: StepFeatures
    is_same: bool  # one token each of the same requests as the step before


class Publisher:
    """By the engine's own thread, from inside its scheduler."""

    def __init__(
        self,
        board: BoardWriter,
        *,
        now_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._board, self._now_s, self._wall_s = board, now_s, wall_s
        self._tracked: dict[str, _Tracked] = {}
        self._keys = 0
        self._under_way: deque[_UnderWay] = deque()
        self._names: KeysView[str] = {}.keys()  # of the step that was scheduled last, and its shape
        self._shape = StepFeatures()
        self._last = FinishedStep()
        self._waiting = array("d")
        self._queued: tuple[int, int] = (-1, -1)  # how many waited, and how many had come, when that was listed
        self._decoding: NDArray[np.float64] | None = None  # rows of those who run, if all of them were in the last step
        self._decoding_names: KeysView[str] = {}.keys()
        board.view(now_s(), (), (), 0, self._last)

    def came(self, request: Any) -> None:
        """vLLM stamps arrivals by the wall clock, in its HTTP process."""
        if request.request_id in self._tracked:
            return
        self._keys += 1
        arrival_s = min(0.0, request.arrival_time - self._wall_s()) + self._now_s()
        self._tracked[request.request_id] = _Tracked(self._keys, arrival_s, request._output_token_ids)
        self._board.milestone(MilestoneKind.CAME, self._keys, arrival_s, request.num_prompt_tokens)

    def gone(self, requests: Iterable[Any]) -> None:
        """Taken out from outside, before their end."""
        for request in requests:
            tracked = self._tracked.pop(request.request_id, None)
            if tracked is not None:
                self._board.milestone(MilestoneKind.GONE, tracked.key, self._now_s(), len(tracked.answer_ids))
                self._queued = (-1, -1)
                self._settled()
                self._decoding = None

    def scheduled(self, began_s: float, counts: Mapping[str, int], requests: Mapping[str, Any]) -> None:
        """A step is under way; `counts` are its new tokens by request, already added to what is computed."""
        if not counts:
            return
        before, many = self._shape, len(counts)
        is_decode = before.new_tokens == before.sequences == many == sum(counts.values())
        is_same = is_decode and counts.keys() == self._names
        if is_same:
            read = before.kv_read_tokens + many
            self._shape = StepFeatures(many, read, read, many)
        else:
            self._shape = features_of(counts, requests)
        self._names = counts.keys()
        self._under_way.append(_UnderWay(began_s, self._shape, is_same))
        if len(self._under_way) == 1:
            self._board.busy_since(began_s)

    def stepped(self, scheduler: Any, counts: Mapping[str, int]) -> None:
        """Its output was taken."""
        now_s = self._now_s()
        is_same = self._step_ended(now_s) if counts else False
        rows = self._decoding
        if rows is not None and is_same and len(rows) == len(scheduler.running) and self._nobody_ended(scheduler):
            rows[:, LAST] = now_s
            rows[:, CONTEXT] += 1
            running = array("d", rows.tobytes())
            prefilling: list[float] = []
        else:
            self._settled()
            self._decoding = None
            self._tell_tokens(counts, scheduler.requests, now_s)
            running, prefilling = self._listed(scheduler.running)
            if len(running) == 3 * len(counts) and not prefilling:
                self._decoding, self._decoding_names = np.array(running).reshape(-1, 3), counts.keys()
        waiting = self._queue(scheduler)
        pool = scheduler.kv_cache_manager.block_pool
        used_blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        shown = array("d", prefilling) + waiting if prefilling else waiting
        self._board.view(now_s, shown, running, used_blocks, self._last)

    def turn_off(self, why: str) -> None:
        self._board.turn_off(why)

    def close(self) -> None:
        self._board.close()

    def _step_ended(self, now_s: float) -> bool:
        step = self._under_way.popleft()
        self._last = FinishedStep(max(step.began_s, self._last.ended_s), now_s, step.features)
        self._board.step(self._last.began_s, now_s, step.features)
        self._board.busy_since(now_s if self._under_way else 0.0)
        return step.is_same

    def _nobody_ended(self, scheduler: Any) -> bool:
        return len(scheduler.requests) == len(self._tracked)

    def _settled(self) -> None:
        """The rows are no longer kept: whoever is in them learns when its newest token came."""
        if self._decoding is not None and len(self._decoding):
            last_s = float(self._decoding[0, LAST])
            for name in self._decoding_names:
                one = self._tracked.get(name)
                if one is not None:
                    one.last_s, one.tokens = last_s, UNKNOWN

    def _tell_tokens(self, counts: Mapping[str, int], requests: Mapping[str, Any], now_s: float) -> None:
        tracked = self._tracked
        for name in counts:
            one = tracked.get(name)
            if one is None:
                continue
            tokens = len(one.answer_ids)
            if tokens != one.tokens:
                if one.tokens == 0:
                    self._board.milestone(MilestoneKind.FIRST_TOKEN, one.key, now_s)
                one.tokens, one.last_s = tokens, now_s
            if name not in requests:
                del tracked[name]
                self._board.milestone(MilestoneKind.ENDED, one.key, now_s, tokens)

    def _listed(self, requests: Iterable[Any]) -> tuple[array[float], list[float]]:
        """Those who decode, and those who are still at their prompts."""
        running, waiting = array("d"), list[float]()
        for request in requests:
            one, computed = self._tracked.get(request.request_id), request.num_computed_tokens
            if one is None:
                continue
            left = len(request._all_token_ids) - computed
            if one.tokens and left <= 1:
                running.extend((one.last_s, computed, one.arrival_s))
            else:
                waiting += (one.arrival_s, max(1, left))
        return running, waiting

    def _queue(self, scheduler: Any) -> array[float]:
        """Those who were not begun; listed anew only if their number or that of arrivals has changed."""
        queues = (scheduler.kv_holding_waiting, scheduler.waiting)
        queued = (len(queues[0]) + len(queues[1]), self._keys)
        if queued == self._queued:
            return self._waiting
        found: list[float] = []
        for queue in queues:
            # A priority queue is sorted anew by who walks through it; its heap is not.
            for request in islice(getattr(queue, "_heap", queue), WAITING_SHOWN):
                one = self._tracked.get(request.request_id)
                if one is not None:
                    found += (one.arrival_s, len(request._all_token_ids) - request.num_computed_tokens)
        self._queued, self._waiting = queued, array("d", found)
        return self._waiting


def features_of(counts: Mapping[str, int], requests: Mapping[str, Any]) -> StepFeatures:
    """The shape of a step that was scheduled."""
    kv_read = by_context = 0
    for name, count in counts.items():
        computed = requests[name].num_computed_tokens
        kv_read += computed
        by_context += count * (computed - count) + count * (count + 1) // 2
    return StepFeatures(sum(counts.values()), kv_read, by_context, len(counts))
