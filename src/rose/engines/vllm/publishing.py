"""What of a vLLM scheduler goes onto the board, and when. Knows vLLM's objects by their fields only.

A request that comes is a milestone, at once. A step is noted when it is scheduled and told when its output is taken;
then the view is written anew, if anybody came or went. Between two steps nothing else changes. A request counts as
running once it has a token since it was begun and only its newest one is not computed; before that, and again after a
preemption, it waits.

After a step of the model hardly anything is in a cache, and looking at 128 requests would take longer than everything
else here. So nobody is looked at who only decodes or only waits: they are kept in bags of rows that are changed when
somebody comes, begins, starts to decode, ends or is gone. How many vLLM holds of each kind must agree with the bags at
every step. If it does not (a preemption, a request that was left out of a step), or if somebody who decodes has more
than one new token, the bags are filled anew from vLLM's own lists.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from rose.core.facts import StepFeatures
from rose.core.passive import MilestoneKind
from rose.engines.vllm.board import IN_STEP, NO_STEP, WAITING_SHOWN, BoardWriter, Told

_CAME, _FIRST_TOKEN, _ENDED, _GONE = MilestoneKind
_Shape = tuple[float, float, float, float]  # a step's features, in their order


class _Tracked:
    """One request; the list is vLLM's own, looked at without a copy."""

    __slots__ = ("answer_ids", "arrival_s", "key", "preemptions", "tokens")

    def __init__(self, key: int, arrival_s: float, answer_ids: list[int]) -> None:
        self.key, self.arrival_s, self.answer_ids = key, arrival_s, answer_ids
        self.tokens = self.preemptions = 0  # that it had when it was last looked at


class _Bag:
    """Rows of floats by name, in no order: the place of one who leaves is taken by the last.

    The second of each row is a number of tokens, and `tokens` their sum.
    """

    __slots__ = ("index", "names", "tokens", "values", "width")

    def __init__(self, width: int) -> None:
        self.width, self.values, self.tokens = width, array("d"), 0.0
        self.names: list[str] = []
        self.index: dict[str, int] = {}

    def join(self, name: str, *row: float) -> None:
        self.index[name] = len(self.names)
        self.names.append(name)
        self.values.extend(row)
        self.tokens += row[1]

    def leave(self, name: str) -> bool:
        """Whether it was there."""
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


class Publisher:
    """By the engine's own thread, from inside its scheduler."""

    __slots__ = (
        "_board", "_decoding", "_is_ahead", "_is_changed", "_is_mixed", "_keys", "_last", "_now_s", "_prompts",
        "_together", "_tracked", "_under_way", "_unlisted", "_waiting", "_wall_s",
    )  # fmt: skip

    def __init__(
        self,
        board: BoardWriter,
        *,
        now_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._board, self._now_s, self._wall_s = board, now_s, wall_s
        self._tracked: dict[str, _Tracked] = {}
        self._waiting, self._unlisted = _Bag(2), 0  # who is not begun, and how many more of them there are
        self._prompts: dict[str, Any] = {}  # begun, but not decoding yet
        self._decoding, self._together = _Bag(3), 0  # and the steps that they have made together
        self._is_mixed = False  # somebody who decodes is not in step: more new tokens than one, or none
        self._is_changed = False  # since the last view
        self._is_ahead = False  # a step was scheduled since the last one was told
        self._keys = 0
        self._under_way: deque[tuple[float, _Shape, bool, bool]] = deque()  # since when, and what `_plan` said
        self._last: Told = NO_STEP
        board.view(now_s(), (), (), 0)

    # What happens to requests

    def came(self, request: Any) -> None:
        """vLLM stamps arrivals by the wall clock, in its HTTP process."""
        name = request.request_id
        if name in self._tracked:
            return
        self._keys += 1
        arrival_s = min(0.0, request.arrival_time - self._wall_s()) + self._now_s()
        self._tracked[name] = _Tracked(self._keys, arrival_s, request._output_token_ids)
        self._waiting.join(name, arrival_s, _tokens_left(request))
        self._board.milestone(_CAME, self._keys, arrival_s, request.num_prompt_tokens)

    def gone(self, requests: Iterable[Any]) -> None:
        """Taken out from outside, before their end."""
        for request in requests:
            tracked = self._tracked.pop(request.request_id, None)
            if tracked is not None:
                self._forget(request.request_id)
                self._board.milestone(_GONE, tracked.key, self._now_s(), len(tracked.answer_ids))

    def _forget(self, name: str) -> None:
        self._is_changed = True
        is_known = self._decoding.leave(name) or self._prompts.pop(name, None) is not None or self._waiting.leave(name)
        self._unlisted -= not is_known

    # Steps

    def scheduled(self, began_s: float, counts: Mapping[str, int], scheduler: Any) -> None:
        """A step is under way; `counts` are its new tokens by request, already added to what is computed."""
        if not counts:
            return
        queued = len(scheduler.waiting) + len(scheduler.kv_holding_waiting)
        is_same = queued == len(self._waiting.names) + self._unlisted and not self._prompts
        if is_same and len(counts) == len(self._decoding.names):
            plan = self._plan(counts, (), scheduler.requests)
        else:
            others = counts.keys() - self._decoding.index.keys()
            self._begin(others, scheduler.requests)
            self._list_waiting(scheduler)
            plan = self._plan(counts, others, scheduler.requests)
        self._is_ahead, self._is_mixed = True, self._is_mixed or not plan[1]
        self._under_way.append((began_s, *plan))
        if len(self._under_way) == 1:
            self._board.busy_since(began_s)

    def stepped(self, scheduler: Any, counts: Mapping[str, int]) -> None:
        """Its output was taken."""
        now_s, before_s, is_plain, is_whole = self._now_s(), self._last[1], True, False
        if counts:
            began_s, shape, is_plain, is_whole = self._under_way.popleft()
            self._last = (began_s if began_s > before_s else before_s, now_s, *shape)
            self._together += 1
        if len(scheduler.requests) != len(self._tracked):
            self._tell_ends(scheduler, counts, now_s)
        if self._prompts:
            self._prompts_went_on(counts, now_s)
        decoding, self._is_ahead = self._decoding, False
        if counts and is_plain:
            is_plain = not self._is_mixed and (is_whole or decoding.index.keys() <= counts.keys())
        if not is_plain or len(decoding.names) + len(self._prompts) != len(scheduler.running):
            self._list_running(scheduler.running, counts, before_s)
            self._list_waiting(scheduler)
        pool = scheduler.kv_cache_manager.block_pool
        self._show(now_s, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), has_stepped=bool(counts))

    def turn_off(self, why: str) -> None:
        self._board.turn_off(why)

    def close(self) -> None:
        self._board.close()

    def _plan(
        self, counts: Mapping[str, int], others: Iterable[str], requests: Mapping[str, Any]
    ) -> tuple[_Shape, bool, bool]:
        """The shape of a step, whether who decodes has one new token in it, and whether all of them will be in it.

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

    def _show(self, now_s: float, used_blocks: int, *, has_stepped: bool) -> None:
        is_view = self._is_changed or not has_stepped
        if is_view:
            self._is_changed = False
            shown = array("d", self._prompts_left()) + self._waiting.values if self._prompts else self._waiting.values
            rows = (shown, self._decoding.values)
            self._board.view(now_s, *rows, used_blocks, self._last, self._together, is_step_next=has_stepped)
        if has_stepped:
            busy_since_s = now_s if self._under_way else 0.0
            self._board.step(self._last, used_blocks, self._together, busy_since_s, not is_view)

    # Who is where

    def _tell_ends(self, scheduler: Any, counts: Mapping[str, int], now_s: float) -> None:
        requests, tracked = scheduler.requests, self._tracked
        ended = [name for name in scheduler.finished_req_ids if name in tracked and name not in requests]
        if len(tracked) - len(ended) != len(requests):
            ended = list(tracked.keys() - requests.keys())
        for name in ended:
            one = tracked.pop(name)
            self._forget(name)
            self._tell_first_token(one, now_s)
            self._board.milestone(_ENDED if name in counts else _GONE, one.key, now_s, len(one.answer_ids))

    def _tell_first_token(self, one: _Tracked, now_s: float) -> None:
        if not one.tokens and one.answer_ids:
            self._board.milestone(_FIRST_TOKEN, one.key, now_s)

    def _prompts_went_on(self, counts: Mapping[str, int], now_s: float) -> None:
        self._is_changed = True
        for name in counts.keys() & self._prompts.keys():
            one, request = self._tracked[name], self._prompts[name]
            self._tell_first_token(one, now_s)
            before, one.tokens = one.tokens, len(one.answer_ids)
            if one.tokens > before and _tokens_left(request) <= 1:
                del self._prompts[name]
                self._decode(name, one, request, IN_STEP)

    def _decode(self, name: str, one: _Tracked, request: Any, last_s: float) -> None:
        self._decoding.join(name, last_s, request.num_computed_tokens - self._together, one.arrival_s)

    def _list_running(self, requests: Iterable[Any], counts: Mapping[str, int], before_s: float) -> None:
        """Anew. Who was left out of the step has the newest token that it had; `before_s`: that of most of them."""
        before, self._decoding, self._prompts = self._decoding, _Bag(3), {}
        self._is_mixed, self._is_changed = False, True
        for request in requests:
            name = request.request_id
            one, place = self._tracked.get(name), before.index.get(name)
            if one is None:
                continue
            if place is None or request.num_preemptions != one.preemptions or _tokens_left(request) > 1:
                self._prompt(name, one, request)
                continue
            last_s = IN_STEP if name in counts else before.values[3 * place] or before_s
            self._is_mixed |= last_s not in (IN_STEP, self._last[1])
            self._decode(name, one, request, last_s)

    def _begin(self, names: Iterable[str], requests: Mapping[str, Any]) -> None:
        for name in names:
            one = self._tracked.get(name)
            if one is not None and name not in self._prompts:
                self._unlisted -= not self._waiting.leave(name)
                self._prompt(name, one, requests[name])

    def _prompt(self, name: str, one: _Tracked, request: Any) -> None:
        """It decodes when it has more tokens than now."""
        if request.num_preemptions != one.preemptions:
            one.preemptions, one.tokens = request.num_preemptions, one.tokens and len(one.answer_ids)
        self._prompts[name] = request

    def _list_waiting(self, scheduler: Any) -> None:
        """Anew, if it does not agree or too few of many are listed."""
        queues = (scheduler.kv_holding_waiting, scheduler.waiting)
        queued, listed = sum(map(len, queues)), len(self._waiting.names)
        enough = min(queued, WAITING_SHOWN // 2)
        if queued == listed + self._unlisted and self._unlisted >= 0 and listed >= enough:
            return
        self._waiting, self._is_changed = _Bag(2), True
        for queue in queues:
            # A priority queue is sorted anew by who walks through it; its heap is not.
            for request in islice(getattr(queue, "_heap", queue), WAITING_SHOWN):
                one = self._tracked.get(request.request_id)
                if one is not None:
                    self._waiting.join(request.request_id, one.arrival_s, _tokens_left(request))
        self._unlisted = queued - len(self._waiting.names)

    def _prompts_left(self) -> list[float]:
        found: list[float] = []
        for name, request in self._prompts.items():
            found += (self._tracked[name].arrival_s, max(1, _tokens_left(request)))
        return found


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
    """The shape of a step that was scheduled."""
    return StepFeatures(*map(int, _shape_of(counts, requests)))
