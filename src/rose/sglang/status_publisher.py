"""Publish an SGLang scheduler's state in the status segment. Knows SGLang's objects by their fields only.

The segment is the one that vLLM's scheduler writes, and so are its facts: an arrival is published at once, a step is
noted when it is planned and published when its result was processed, together with all requests. A request waits until
a step has given it a token, and again after SGLang has retracted it. With overlap the next step is planned before the
last one's result is known, so steps under way form a queue.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from rose.core.observed_engine import MilestoneKind
from rose.sglang.rollout_gate import step_features, tokens_of
from rose.vllm.status_segment import IN_STEP, NO_STEP, SegmentWriter, StepValues

_ARRIVED, _FIRST_TOKEN, _ENDED, _GONE = MilestoneKind
_Shape = tuple[float, float, float, float]  # a step's features, in their order


class _Followed:
    """One request of the serving engine."""

    __slots__ = ("arrival_s", "first_s", "is_decoding", "key", "last_s", "request", "tokens")

    def __init__(self, key: int, arrival_s: float, request: Any) -> None:
        self.key, self.arrival_s, self.request = key, arrival_s, request
        self.first_s = self.last_s = 0.0
        self.tokens, self.is_decoding = 0, False


class SglangStatusWriter:
    """The publisher of one scheduler's state, in the scheduler's thread."""

    def __init__(self, segment: SegmentWriter, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._segment, self._now_s = segment, now_s
        self._followed: dict[str, _Followed] = {}
        self._under_way: deque[tuple[float, _Shape]] = deque()
        self._last: StepValues = NO_STEP
        self._keys = 0
        self._is_changed = False  # since the last view
        segment.view(now_s(), (), (), 0)

    def on_queued(self, request: Any) -> None:
        """Publish an arrival, or note that a running request waits again."""
        self._is_changed = True
        known = self._followed.get(request.rid)
        if known is not None:
            known.is_decoding = False
            return
        self._keys += 1
        now_s = self._now_s()
        self._followed[request.rid] = _Followed(self._keys, now_s, request)
        self._segment.milestone(_ARRIVED, self._keys, now_s, len(request.origin_input_ids))

    def on_left(self, request: Any) -> None:
        """Publish that a request was cancelled before its end."""
        one = self._followed.pop(request.rid, None)
        if one is not None:
            self._is_changed = True
            self._segment.milestone(_GONE, one.key, self._now_s(), len(request.output_ids))

    def on_planned(self, batch: Any, began_s: float) -> None:
        """Publish a step that begins."""
        features = step_features(batch)
        shape = (features.new_tokens, features.kv_read_tokens, features.new_by_context, features.sequences)
        self._under_way.append((began_s, shape))
        if len(self._under_way) == 1:
            self._segment.busy_since(began_s)

    def on_nothing_planned(self, used: int, *, is_idle: bool) -> None:
        """Publish what has changed without a step; `is_idle` if the engine has no requests at all."""
        if is_idle:
            for one in list(self._followed.values()):
                self.on_left(one.request)
        if self._is_changed and not self._under_way:
            self._view(self._now_s(), used)

    def on_finished(self, batch: Any, used: int) -> None:
        """Publish a step whose result was processed, and every request after it."""
        if not self._under_way:
            return
        (began_s, shape), now_s = self._under_way.popleft(), self._now_s()
        for request in batch.reqs:
            one = self._followed.get(request.rid)
            if one is not None:
                self._on_step(one, request, now_s)
        self._last = (max(began_s, self._last[1]), now_s, *shape)
        self._view(now_s, used, is_step_next=True)
        self._segment.step(self._last, used, busy_since_s=now_s if self._under_way else 0.0)

    def _on_step(self, one: _Followed, request: Any, now_s: float) -> None:
        tokens = len(request.output_ids)
        if tokens > one.tokens:
            if not one.tokens:
                one.first_s = now_s
                self._segment.milestone(_FIRST_TOKEN, one.key, now_s)
            one.tokens, one.last_s, one.is_decoding = tokens, now_s, True
        if request.finished():
            is_whole = request.finished_reason.to_json()["type"] != "abort"
            self._segment.milestone(_ENDED if is_whole else _GONE, one.key, now_s, tokens)
            del self._followed[request.rid]

    def _view(self, now_s: float, used: int, *, is_step_next: bool = False) -> None:
        self._is_changed = False
        waiting, running = array("d"), array("d")
        for one in self._followed.values():
            request = one.request
            if one.is_decoding:
                last_s = IN_STEP if is_step_next and one.last_s == now_s else one.last_s
                running.extend((last_s, tokens_of(request) - 1, one.arrival_s, one.first_s, one.tokens))
            else:
                computed = request.prefix_len if request.kv.holds_kv else 0
                waiting.extend((one.arrival_s, max(1, tokens_of(request) - computed)))
        self._segment.view(now_s, waiting, running, used, self._last, is_step_next=is_step_next)

    def publish_stop(self, reason: str) -> None:
        self._segment.publish_stop(reason)
