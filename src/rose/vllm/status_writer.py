"""Publish a vLLM scheduler's state in the status segment. Knows vLLM's objects by their fields only.

An arrival is published at once; a step is noted when it is scheduled and published when its output is taken, with the
view if a request came or went. A request counts as running once it has a token since it was begun and only its newest
one is not computed; before that, and again after a preemption, it waits.

After a step of the model hardly anything is in a cache, and reading 128 requests would take longer than all else here.
So requests that only decode or only wait are not read, but kept as rows, which change when a request arrives, begins,
starts to decode, ends or is cancelled. At every step the numbers of rows must agree with vLLM's. If they do not (a
preemption, a request left out of a step, several new tokens of one), the rows are made anew from vLLM's own lists.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from rose.core.facts import StepFeatures
from rose.core.observed_engine import MilestoneKind
from rose.vllm.status_segment import IN_STEP, NO_STEP, RUNNING_VALUES, WAITING_SHOWN, SegmentWriter, StepValues

_CAME, _FIRST_TOKEN, _ENDED, _GONE = MilestoneKind
_Shape = tuple[float, float, float, float]  # a step's features, in their order


class _Tracked:
    """One request; the list is vLLM's own, read without a copy."""

    __slots__ = ("answer_ids", "arrival_s", "first_s", "key", "preemptions", "tokens")

    def __init__(self, key: int, arrival_s: float, answer_ids: list[int]) -> None:
        self.key, self.arrival_s, self.answer_ids = key, arrival_s, answer_ids
        self.first_s = 0.0  # when it had its first token
        self.tokens = self.preemptions = 0  # that it had when it was last read


class _Rows:
    """Rows of floats by name, in no order: the last row takes the place of one that is removed.

    The second of each row is a number of tokens, and `tokens` their sum.
    """

    __slots__ = ("index", "names", "tokens", "values", "width")

    def __init__(self, width: int) -> None:
        self.width, self.values, self.tokens = width, array("d"), 0.0
        self.names: list[str] = []
        self.index: dict[str, int] = {}

    def add(self, name: str, *row: float) -> None:
        self.index[name] = len(self.names)
        self.names.append(name)
        self.values.extend(row)
        self.tokens += row[1]

    def remove(self, name: str) -> bool:
        """Remove a row. Return whether it was there."""
        place, width, values = self.index.pop(name, None), self.width, self.values
        if place is None:
            return False
        self.tokens -= values[place * width + 1]
        last, row = self.names.pop(), values[-width:]
        del values[-width:]
        if place < len(self.names):
            self.names[place], self.index[last] = last, place
            values[place * width : (place + 1) * width] = row
        return True


class StatusWriter:
    """The publisher of a scheduler's state, in the engine's own thread."""

    __slots__ = (
        "_decoding", "_is_ahead", "_is_changed", "_is_mixed", "_keys", "_last", "_now_s", "_prompts", "_segment",
        "_together", "_tracked", "_under_way", "_unlisted", "_waiting", "_wall_s", "held_blocks",
    )  # fmt: skip

    def __init__(
        self,
        segment: SegmentWriter,
        *,
        now_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._segment, self._now_s, self._wall_s = segment, now_s, wall_s
        self._tracked: dict[str, _Tracked] = {}
        self._waiting, self._unlisted = _Rows(2), 0  # requests that are not begun, and how many more of them there are
        self._prompts: dict[str, Any] = {}  # begun, but not decoding yet
        self._decoding, self._together = _Rows(RUNNING_VALUES), 0  # and the steps that they have made together
        self._is_mixed = False  # a decoding request is not in step: more new tokens than one, or none
        self._is_changed = False  # since the last view
        self._is_ahead = False  # a step was scheduled since the last one was published
        self._keys = 0
        self.held_blocks = 0  # of the pool, that no request can have
        self._under_way: deque[tuple[float, _Shape, bool, bool]] = deque()  # since when, and the result of `_plan`
        self._last: StepValues = NO_STEP
        segment.view(now_s(), (), (), 0)

    def on_arrival(self, request: Any) -> None:
        """Publish an arrival; vLLM stamps it by the wall clock, in its HTTP process."""
        name = request.request_id
        if name in self._tracked:
            return
        self._keys += 1
        arrival_s = min(0.0, request.arrival_time - self._wall_s()) + self._now_s()
        self._tracked[name] = _Tracked(self._keys, arrival_s, request._output_token_ids)
        self._waiting.add(name, arrival_s, _tokens_left(request))
        self._segment.milestone(_CAME, self._keys, arrival_s, request.num_prompt_tokens)

    def on_cancelled(self, requests: Iterable[Any]) -> None:
        """Publish requests that were cancelled before their end."""
        for request in requests:
            tracked = self._tracked.pop(request.request_id, None)
            if tracked is not None:
                self._forget(request.request_id)
                self._segment.milestone(_GONE, tracked.key, self._now_s(), len(tracked.answer_ids))

    def on_scheduled(self, began_s: float, counts: Mapping[str, int], scheduler: Any) -> None:
        """Publish a step that begins; `counts` are its new tokens by request, already added to what is computed."""
        if not counts:
            return
        queued = len(scheduler.waiting) + len(scheduler.kv_holding_waiting)
        is_same = queued == len(self._waiting.names) + self._unlisted and not self._prompts
        if is_same and len(counts) == len(self._decoding.names):
            plan = self._plan(counts, (), scheduler.requests)
        else:
            others = counts.keys() - self._decoding.index.keys()
            for name in others:
                one = self._tracked.get(name)
                if one is not None and name not in self._prompts:
                    self._unlisted -= not self._waiting.remove(name)
                    self._track_prompt(name, one, scheduler.requests[name])
            self._list_waiting(scheduler)
            plan = self._plan(counts, others, scheduler.requests)
        self._is_ahead, self._is_mixed = True, self._is_mixed or not plan[1]
        self._under_way.append((began_s, *plan))
        if len(self._under_way) == 1:
            self._segment.busy_since(began_s)

    def _plan(
        self, counts: Mapping[str, int], others: Iterable[str], requests: Mapping[str, Any]
    ) -> tuple[_Shape, bool, bool]:
        """Return a step's shape, whether each decoding request has one new token in it, and whether all are in it.

        `others` do not decode yet. Behind another step that is not known: some of them may decode after that one.
        """
        many, decoding = len(counts), self._decoding
        new_tokens, further, further_read, by_context = sum(counts.values()), 0, 0, 0
        for name in others:
            count, computed, many = counts[name], requests[name].num_computed_tokens, many - 1
            further, further_read = further + count, further_read + computed
            by_context += count * (computed - count) + count * (count + 1) // 2
        if self._is_ahead or many != len(decoding.names) or new_tokens != many + further:
            return _shape_of(counts, requests), new_tokens == many + further, False
        read = decoding.tokens + many * (self._together + 1)
        return (new_tokens, read + further_read, read + by_context, len(counts)), True, not self._under_way

    def on_finished(self, scheduler: Any, counts: Mapping[str, int]) -> None:
        """Publish a step whose output was taken."""
        now_s, before_s, is_plain, is_whole = self._now_s(), self._last[1], True, False
        if counts:
            began_s, shape, is_plain, is_whole = self._under_way.popleft()
            self._last = (began_s if began_s > before_s else before_s, now_s, *shape)
            self._together += 1
        if len(scheduler.requests) != len(self._tracked):
            self._publish_ends(scheduler, counts, now_s)
        if self._prompts:
            self._continue_prompts(counts, now_s)
        decoding, self._is_ahead = self._decoding, False
        if counts and is_plain:
            is_plain = not self._is_mixed and (is_whole or decoding.index.keys() <= counts.keys())
        if not is_plain or len(decoding.names) + len(self._prompts) != len(scheduler.running):
            self._list_running(scheduler.running, counts, before_s)
            self._list_waiting(scheduler)
        pool = scheduler.kv_cache_manager.block_pool
        used_blocks = pool.num_gpu_blocks - 1 - self.held_blocks - pool.get_num_free_blocks()
        is_view = self._is_changed or not counts
        if is_view:
            self._is_changed = False
            waiting = self._waiting.values
            if self._prompts:
                prompts = array("d")
                for name, request in self._prompts.items():
                    prompts.extend((self._tracked[name].arrival_s, max(1, _tokens_left(request))))
                waiting = prompts + waiting
            rows = (waiting, self._decoding.values)
            self._segment.view(now_s, *rows, used_blocks, self._last, self._together, is_step_next=bool(counts))
        if counts:
            busy_since_s = now_s if self._under_way else 0.0
            self._segment.step(self._last, used_blocks, self._together, busy_since_s, not is_view)

    def publish_stop(self, reason: str) -> None:
        self._segment.publish_stop(reason)

    def close(self) -> None:
        self._segment.close()

    def _forget(self, name: str) -> None:
        self._is_changed = True
        is_known = (
            self._decoding.remove(name) or self._prompts.pop(name, None) is not None or self._waiting.remove(name)
        )
        self._unlisted -= not is_known

    def _publish_ends(self, scheduler: Any, counts: Mapping[str, int], now_s: float) -> None:
        requests, tracked = scheduler.requests, self._tracked
        ended = [name for name in scheduler.finished_req_ids if name in tracked and name not in requests]
        if len(tracked) - len(ended) != len(requests):
            ended = list(tracked.keys() - requests.keys())
        for name in ended:
            one = tracked.pop(name)
            self._forget(name)
            self._publish_first_token(one, now_s)
            self._segment.milestone(_ENDED if name in counts else _GONE, one.key, now_s, len(one.answer_ids))

    def _publish_first_token(self, one: _Tracked, now_s: float) -> None:
        if not one.tokens and one.answer_ids:
            one.first_s = now_s
            self._segment.milestone(_FIRST_TOKEN, one.key, now_s)

    def _continue_prompts(self, counts: Mapping[str, int], now_s: float) -> None:
        """Publish first tokens, and count requests as decoding that have a new token."""
        self._is_changed = True
        for name in counts.keys() & self._prompts.keys():
            one, request = self._tracked[name], self._prompts[name]
            self._publish_first_token(one, now_s)
            before, one.tokens = one.tokens, len(one.answer_ids)
            if one.tokens > before and _tokens_left(request) <= 1:
                del self._prompts[name]
                self._add_decoding(name, one, request, IN_STEP)

    def _add_decoding(self, name: str, one: _Tracked, request: Any, last_s: float) -> None:
        context, answered = request.num_computed_tokens, len(one.answer_ids)
        together = self._together
        self._decoding.add(name, last_s, context - together, one.arrival_s, one.first_s, answered - together)

    def _track_prompt(self, name: str, one: _Tracked, request: Any) -> None:
        """Track a prompt; its request decodes once it has more tokens than now."""
        if request.num_preemptions != one.preemptions:
            one.preemptions, one.tokens = request.num_preemptions, one.tokens and len(one.answer_ids)
        self._prompts[name] = request

    def _list_running(self, requests: Iterable[Any], counts: Mapping[str, int], before_s: float) -> None:
        """Make the rows of running requests anew.

        A request that was left out of the step keeps the time of its newest token; most of them have `before_s`.
        """
        before, self._decoding, self._prompts = self._decoding, _Rows(RUNNING_VALUES), {}
        self._is_mixed, self._is_changed = False, True
        for request in requests:
            name = request.request_id
            one, place = self._tracked.get(name), before.index.get(name)
            if one is None:
                continue
            if place is None or request.num_preemptions != one.preemptions or _tokens_left(request) > 1:
                self._track_prompt(name, one, request)
                continue
            last_s = IN_STEP if name in counts else before.values[RUNNING_VALUES * place] or before_s
            self._is_mixed |= last_s not in (IN_STEP, self._last[1])
            self._add_decoding(name, one, request, last_s)

    def _list_waiting(self, scheduler: Any) -> None:
        """Make the rows of waiting requests anew, if their number is wrong or too few of many are listed."""
        queues = (scheduler.kv_holding_waiting, scheduler.waiting)
        queued, listed = sum(map(len, queues)), len(self._waiting.names)
        enough = min(queued, WAITING_SHOWN // 2)
        if queued == listed + self._unlisted and self._unlisted >= 0 and listed >= enough:
            return
        self._waiting, self._is_changed = _Rows(2), True
        for queue in queues:
            # Iterating over a priority queue sorts it anew; its heap is not sorted.
            for request in islice(getattr(queue, "_heap", queue), WAITING_SHOWN):
                one = self._tracked.get(request.request_id)
                if one is not None:
                    self._waiting.add(request.request_id, one.arrival_s, _tokens_left(request))
        self._unlisted = queued - len(self._waiting.names)


def _tokens_left(request: Any) -> int:
    return len(request._all_token_ids) - request.num_computed_tokens


def _shape_of(counts: Mapping[str, int], requests: Mapping[str, Any]) -> _Shape:
    kv_read = by_context = 0
    for name, count in counts.items():
        computed = requests[name].num_computed_tokens
        kv_read += computed
        by_context += count * (computed - count) + count * (count + 1) // 2
    return sum(counts.values()), kv_read, by_context, len(counts)


def features_of(counts: Mapping[str, int], requests: Mapping[str, Any]) -> StepFeatures:
    """Return the shape of a step that was scheduled."""
    return StepFeatures(*map(int, _shape_of(counts, requests)))
