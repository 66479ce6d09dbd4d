"""Runs steps: rows of token ids in, logits out, on one thread per core.

With one core a step is one compiled call. With more, the rows are shared out. Requests are kept whole where that
balances, and then the threads need not meet until the end; a long prompt is cut, and then they meet once per
layer, because the later half attends to the keys of the earlier half. Threads sleep while they wait.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.engines.embedded import kernels as k
from rose.engines.embedded.weights import PackedWeights, aligned_floats
from rose.models.spec import ModelSpec, rope_frequencies

IMBALANCE_MAX = 1.25  # a thread may get this much more than its share before a request is cut


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one thread: `segments` rows are (first row, rows, position, slot)."""

    row0: int
    rows: int
    segments: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shares:
    parts: tuple[Share, ...]
    whole: bool  # no request is in two parts


def share_out(segments: NDArray[np.int64], threads: int) -> Shares:
    """Contiguous parts of about equal rows, of whole requests if that is nearly as even."""
    total = int(segments[:, 1].sum())
    if threads == 1 or total < threads:
        return Shares((Share(0, total, segments),), True)
    ends = np.cumsum(segments[:, 1])
    ideal = [total * part // threads for part in range(1, threads)]
    cuts = [int(ends[np.abs(ends - cut).argmin()]) for cut in ideal]
    sizes = np.diff([0, *cuts, total])
    whole = sizes.min() > 0 and sizes.max() <= IMBALANCE_MAX * total / threads + 1
    return Shares(tuple(_cut(segments, [0, *(cuts if whole else ideal), total])), bool(whole))


def _cut(segments: NDArray[np.int64], edges: Sequence[int]) -> list[Share]:
    parts = []
    for low, high in pairwise(edges):
        piece = segments.copy()
        first = np.maximum(segments[:, 0], low)
        last = np.minimum(segments[:, 0] + segments[:, 1], high)
        piece[:, 0], piece[:, 1] = first, last - first
        piece[:, 2] = segments[:, 2] + first - segments[:, 0]
        parts.append(Share(low, high - low, np.ascontiguousarray(piece[piece[:, 1] > 0])))
    return parts


class Runner:
    """Owns the work space of one model on one core set. Not thread-safe."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: PackedWeights,
        cores: Sequence[int],
        *,
        max_rows: int,
        max_context: int,
        max_samples: int,
    ) -> None:
        self.weights = weights
        self.cores = tuple(cores)
        shape = weights.shape
        widths = (
            shape[k.HIDDEN],
            shape[k.HIDDEN],
            (shape[k.HEADS] + 2 * shape[k.KV_HEADS]) * shape[k.HEAD],
            shape[k.HEADS] * shape[k.HEAD],
            2 * shape[k.FFN],
        )
        self._work = tuple(_rows(max_rows, int(width)) for width in widths)
        self._bits = self._work[0].view(np.uint32)
        self._last = _rows(max_samples, int(shape[k.HIDDEN]))
        self._logits = _rows(max_samples, int(shape[k.VOCABULARY]))
        self._scratch = [_scratch(shape, max_context) for _ in self.cores]
        self._cos, self._sin = _rotations(spec, max_context)
        self._barrier = threading.Barrier(len(self.cores))
        self._pool = _thread_pool(self.cores) if len(self.cores) > 1 else None

    def run(self, ids: NDArray[np.int64], segments: NDArray[np.int64], block_table: NDArray[np.int32],
            kv: NDArray[np.float32], sampled_rows: NDArray[np.int64]) -> NDArray[np.float32]:  # fmt: skip
        """Logits of the sampled rows; the array is reused by the next step."""
        shares = share_out(segments, len(self.cores))
        run = self._run_whole if shares.whole else self._run_cut
        self._each(lambda thread: run(thread, shares.parts[thread], ids, block_table, kv), len(shares.parts))
        w, count = self.weights, len(sampled_rows)
        logits = self._logits[:count]
        if count:
            k.logits_of(k.PRODUCT, w.shape, w.tail, w.floats, self._work[0], sampled_rows, self._last, logits)
        return logits

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _each(self, work: Callable[[int], None], parts: int) -> None:
        """Part 0 here, the others on their own threads."""
        others = [self._pool.submit(work, part) for part in range(1, parts)] if self._pool is not None else []
        work(0)
        for other in others:
            other.result()

    def _embed(self, share: Share, ids: NDArray[np.int64]) -> None:
        w = self.weights
        k.embed(ids, share.row0, share.rows, w.embedding_bf16, w.embedding_f32, bool(w.shape[k.BF16]), self._work[0],
                self._bits)  # fmt: skip

    def _run_whole(self, thread: int, share: Share, ids: NDArray[np.int64], block_table: Any, kv: Any) -> None:
        self._embed(share, ids)
        self._layers(thread, share, block_table, kv, 0, int(self.weights.shape[k.LAYERS]), True, True)

    def _run_cut(self, thread: int, share: Share, ids: NDArray[np.int64], block_table: Any, kv: Any) -> None:
        self._embed(share, ids)
        for layer in range(int(self.weights.shape[k.LAYERS])):
            self._layers(thread, share, block_table, kv, layer, layer + 1, True, False)
            self._barrier.wait()
            self._layers(thread, share, block_table, kv, layer, layer + 1, False, True)

    def _layers(self, thread: int, share: Share, block_table: Any, kv: Any, first: int, last: int, store: bool,
                attend: bool) -> None:  # fmt: skip
        w = self.weights
        k.forward(k.PRODUCT, first, last, store, attend, w.shape, w.table, w.tail, w.floats, share.row0, share.rows,
                  share.segments, block_table, kv, self._cos, self._sin, self._work, self._scratch[thread])  # fmt: skip


def _rows(rows: int, width: int) -> NDArray[np.float32]:
    return aligned_floats(rows * width).reshape(rows, width)


def _scratch(shape: NDArray[np.int64], max_context: int) -> tuple[NDArray[np.float32], ...]:
    rows = max(k.ATTENTION_ROWS, int(shape[k.HEADS] // shape[k.KV_HEADS]))
    columns = -(-max_context // k.BLOCK_TOKENS) * k.BLOCK_TOKENS
    return _rows(rows, int(shape[k.HEAD])), _rows(rows, columns), np.zeros(rows, np.float32)


def _rotations(spec: ModelSpec, max_context: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    frequencies, factor = rope_frequencies(spec)
    angles = np.arange(max_context, dtype=np.float32)[:, None] * frequencies[None, :]
    return (np.cos(angles) * np.float32(factor)), (np.sin(angles) * np.float32(factor))


def _thread_pool(cores: Sequence[int]) -> ThreadPoolExecutor:
    """One thread per further core; thread n takes the nth of them when it starts."""
    left = list(cores[1:])

    def start() -> None:
        with contextlib.suppress(OSError):  # a process that may not use the core still computes
            os.sched_setaffinity(0, {left.pop(0)})

    return ThreadPoolExecutor(len(left), thread_name_prefix="rose-core", initializer=start)
