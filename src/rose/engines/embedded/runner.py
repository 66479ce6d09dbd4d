"""The computation of steps (token ids in, logits out, one thread per core), and the memory of keys and values.

With one core a step is one compiled call. With more, requests are kept whole where that balances, and the threads meet
at the end; a long prompt is cut, and then they meet once per layer, because its later half attends to the keys of the
earlier half. KV memory may be the engine's own, or lent in pages: only blocks that the pool handed out are touched.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rose.engines.blocks import BlockPool
from rose.engines.embedded import engine_kernels as k
from rose.engines.embedded.engine_weights import PackedWeights, aligned_floats, pad16
from rose.models.model_spec import ModelSpec
from rose.models.rope import rope_frequencies

SCORED_ROWS = 16  # of a prompt whose logits are computed together: a few megabytes of a large vocabulary
IMBALANCE_MAX = 1.25  # a thread may get this much more than its share before a request is cut


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Keys and values as one array of blocks: block b is floats[b * size : (b + 1) * size]."""

    floats: NDArray[np.float32]
    pool: BlockPool

    def copy(self, moves: Mapping[int, int]) -> None:
        """Copy blocks {from: to}; no other block is touched, for its page may be away."""
        blocks = self.floats.reshape(self.pool.capacity, -1)
        for block, place in moves.items():
            blocks[place] = blocks[block]


def block_bytes(spec: ModelSpec) -> int:
    """Return the size of the keys and values of sixteen tokens, all layers, in float32."""
    return 4 * spec.layers * 2 * spec.kv_heads * pad16(spec.head_size) * k.BLOCK_TOKENS


def own_memory(spec: ModelSpec, size_bytes: int) -> KvMemory:
    """Return as many blocks as fit, none of them lent; memory stays the system's until it is touched."""
    blocks = max(1, size_bytes // block_bytes(spec))
    return KvMemory(aligned_floats(blocks * block_bytes(spec) // 4), BlockPool(blocks))


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one thread: `segments` rows are (first row, rows, position, slot)."""

    row0: int
    rows: int
    segments: NDArray[np.int64]


def share_out(segments: NDArray[np.int64], threads: int) -> tuple[list[Share], bool]:
    """Return contiguous parts of about equal rows, and whether no request is in two of them."""
    total = int(segments[:, 1].sum())
    if threads == 1 or total < threads:
        return [Share(0, total, segments)], True
    ends = np.cumsum(segments[:, 1])
    ideal = [total * part // threads for part in range(1, threads)]
    cuts = [int(ends[np.abs(ends - cut).argmin()]) for cut in ideal]
    sizes = np.diff([0, *cuts, total])
    whole = sizes.min() > 0 and sizes.max() <= IMBALANCE_MAX * total / threads + 1
    parts = []
    for low, high in pairwise([0, *(cuts if whole else ideal), total]):
        piece = segments.copy()
        first = np.maximum(segments[:, 0], low)
        last = np.minimum(segments[:, 0] + segments[:, 1], high)
        piece[:, 0], piece[:, 1] = first, last - first
        piece[:, 2] = segments[:, 2] + first - segments[:, 0]
        parts.append(Share(low, high - low, np.ascontiguousarray(piece[piece[:, 1] > 0])))
    return parts, bool(whole)


class Runner:
    """The work space of one model on one set of cores. Not thread-safe."""

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
        self._scored: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None  # made when a prompt is scored
        self._scratch = [_scratch(shape, max_context) for _ in self.cores]
        frequencies, factor = rope_frequencies(spec.rope, spec.head_size)
        angles = np.arange(max_context, dtype=np.float32)[:, None] * frequencies[None, :]
        self._cos, self._sin = np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)
        self._barrier = threading.Barrier(len(self.cores))
        self._pool = _thread_pool(self.cores) if len(self.cores) > 1 else None

    def run(self, ids: NDArray[np.int64], segments: NDArray[np.int64], block_table: NDArray[np.int32],
            kv: NDArray[np.float32], sampled_rows: NDArray[np.int64]) -> NDArray[np.float32]:  # fmt: skip
        """Return the logits of the sampled rows; the next step reuses the array."""
        w, count = self.weights, len(sampled_rows)
        shares, is_whole = share_out(segments, len(self.cores))

        def run_share(thread: int) -> None:
            share, layers = shares[thread], int(w.shape[k.LAYERS])

            def run_layers(first: int, last: int, store: bool, attend: bool) -> None:
                k.forward(k.PRODUCT, first, last, store, attend, w.shape, w.table, w.tail, w.floats, share.row0,
                          share.rows, share.segments, block_table, kv, self._cos, self._sin, self._work,
                          self._scratch[thread])  # fmt: skip

            k.embed(ids, share.row0, share.rows, w.embedding_bf16, w.embedding_f32, bool(w.shape[k.BF16]),
                    self._work[0], self._bits)  # fmt: skip
            if is_whole:
                run_layers(0, layers, True, True)
                return
            for layer in range(layers):
                run_layers(layer, layer + 1, True, False)
                self._barrier.wait()
                run_layers(layer, layer + 1, False, True)

        # Part 0 runs here, the others on their own threads.
        others = [self._pool.submit(run_share, part) for part in range(1, len(shares))] if self._pool else []
        run_share(0)
        for other in others:
            other.result()
        logits = self._logits[:count]
        if count:
            k.logits_of(k.PRODUCT, w.shape, w.tail, w.floats, self._work[0], sampled_rows, self._last, logits)
        return logits

    def logits_from(self, first_row: int, count: int) -> NDArray[np.float32]:
        """Return the logits of a few rows of the last run; the next call reuses the array."""
        w = self.weights
        if self._scored is None:
            hidden, vocabulary = int(w.shape[k.HIDDEN]), int(w.shape[k.VOCABULARY])
            self._scored = _rows(SCORED_ROWS, hidden), _rows(SCORED_ROWS, vocabulary)
        normed, logits = self._scored[0], self._scored[1][:count]
        rows = np.arange(first_row, first_row + count, dtype=np.int64)
        k.logits_of(k.PRODUCT, w.shape, w.tail, w.floats, self._work[0], rows, normed, logits)
        return logits

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _rows(rows: int, width: int) -> NDArray[np.float32]:
    return aligned_floats(rows * width).reshape(rows, width)


def _scratch(shape: NDArray[np.int64], max_context: int) -> tuple[NDArray[np.float32], ...]:
    rows = max(k.ATTENTION_ROWS, int(shape[k.HEADS] // shape[k.KV_HEADS]))
    columns = -(-max_context // k.BLOCK_TOKENS) * k.BLOCK_TOKENS
    return _rows(rows, int(shape[k.HEAD])), _rows(rows, columns), np.zeros(rows, np.float32)


def _thread_pool(cores: Sequence[int]) -> ThreadPoolExecutor:
    """Return one thread per further core; each takes the next core when it starts."""
    left = list(cores[1:])

    def start() -> None:
        with contextlib.suppress(OSError):  # a process that may not use the core still computes
            os.sched_setaffinity(0, {left.pop(0)})

    return ThreadPoolExecutor(len(left), thread_name_prefix="rose-core", initializer=start)
