"""A small trainer and a small worker on the two ends of a chain: what the real ones do, without their loops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rose.core.versions import VersionId
from rose.weights.chain import RetryPolicy
from rose.weights.coding import BITS, Codec
from rose.weights.layouts import local_shapes, whole
from rose.weights.manifest import Manifest
from rose.weights.reading import ChainReader
from rose.weights.relay.memory_relay import MemoryRelay
from rose.weights.relay.relay_base import Relay
from rose.weights.shards import Layout, Placements, Tensor, plan
from rose.weights.weight_buffers import StagingCopy
from rose.weights.writing import ChainWriter, Draft, Encoded, encode_chunk

SECRET = b"the secret of a run in a test"
RUN = "run-1"
TENSORS = [Tensor("embed", (11, 6)), Tensor("up", (9, 6), "F32"), Tensor("norm", (6,), "F16")]
QUICK = RetryPolicy(limit_s=2.0, first_wait_s=0.0, wait_s_max=0.0)

Weights = dict[str, np.ndarray]


def random_weights(seed: int, tensors: Sequence[Tensor] = TENSORS) -> Weights:
    """Any bits at all: also not-a-number, infinities, denormals and minus zero."""
    random = np.random.default_rng(seed)
    return {t.name: random.integers(0, np.iinfo(BITS[t.dtype]).max, t.shape, BITS[t.dtype]) for t in tensors}


def stepped(weights: Weights, seed: int, share: float = 0.3) -> Weights:
    """The weights after a step that changes a share of them by a little."""
    random = np.random.default_rng(seed)
    return {
        name: np.where(random.random(array.shape) < share, array ^ array.dtype.type(1 + seed % 3), array)
        for name, array in weights.items()
    }


def shard(weights: Weights, placements: Placements) -> Weights:
    """A rank's local tensors, filled from whole ones; padding is zero."""
    dtypes = {name: array.dtype for name, array in weights.items()}
    shapes = local_shapes(placements)
    arrays = {
        placement.local: np.zeros(shapes[placement.local], dtypes[placement.region.tensor]) for placement in placements
    }
    for placement in placements:
        region = placement.region
        placement.view(arrays[placement.local])[...] = weights[region.tensor][
            tuple(map(slice, region.start, region.stop))
        ]
    return arrays


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


class Trainer:
    """One rank of a trainer: keeps what it published last, encodes against it."""

    def __init__(
        self,
        relay: Relay,
        *,
        tensors: Sequence[Tensor] = TENSORS,
        layout: Layout | None = None,
        workers: Sequence[Layout] = (),
        rank: int = 0,
        codec: Codec | None = None,
        retry: RetryPolicy = QUICK,
        chunk_elements_max: int = 40,
        epoch: int | None = None,
        at_least: int = 1,
    ) -> None:
        layout = layout or [whole(tensors)]
        self.plan = plan(tensors, layout, workers, chunk_elements_max=chunk_elements_max)
        self.dtypes = {tensor.name: tensor.dtype for tensor in tensors}
        self.layout, self.rank = layout, rank
        self.writer = ChainWriter(relay, run=RUN, secret=SECRET, tensors=tensors, codec=codec, rank=rank, retry=retry)
        self.base: dict = {}
        self.hashes: dict = {}
        self.is_broken = False  # a publication failed halfway: the next must be an anchor
        if epoch is None:
            self.writer.claim(at_least=at_least)
        else:
            self.writer.join(epoch)

    def chunks(self, local: Weights):
        """This rank's chunks of its local tensors, each in one block of memory."""
        for region in self.plan.chunks_of(self.rank):
            placement = next(placement for placement in self.layout[self.rank] if region.is_within(placement.region))
            yield region, np.ascontiguousarray(placement.view(local[placement.local], region))

    def push(self, version: int, local: Weights, *, anchor: bool, bucket_chunks: int = 3) -> Draft:
        """Encode and push everything of this rank; the draft is returned uncommitted."""
        base = None if anchor or self.is_broken else self.writer.newest
        draft = self.writer.begin(version, base)
        self.is_broken = True
        try:
            self._push_all(draft, base, local, bucket_chunks)
        except BaseException:
            draft.abandon()
            raise
        return draft

    def _push_all(self, draft: Draft, base: VersionId | None, local: Weights, bucket_chunks: int) -> None:
        bucket: list[Encoded] = []
        for region, new in self.chunks(local):
            dtype = self.dtypes[region.tensor]
            if base is None:
                encoded = encode_chunk(self.writer.codec, region, dtype, new)
            else:
                encoded = encode_chunk(self.writer.codec, region, dtype, new, self.base[region], self.hashes[region])
            self.base[region], self.hashes[region] = new.copy(), encoded.content_hash
            bucket.append(encoded)
            if len(bucket) == bucket_chunks:
                draft.push(bucket)
                bucket = []
        draft.push(bucket)

    def publish(self, version: int, local: Weights, *, anchor: bool = False) -> Manifest:
        with self.push(version, local, anchor=anchor or self.writer.newest is None) as draft:
            manifest = draft.commit()
        self.is_broken = False
        return manifest

    def republish(self) -> Manifest:
        """An anchor of what was published last, from the copy."""
        assert self.writer.newest is not None and not self.is_broken
        draft = self.writer.begin(self.writer.newest.version, None)
        draft.push([encode_chunk(self.writer.codec, b, self.dtypes[b.tensor], a) for b, a in self.base.items()])
        return draft.commit()


class Member:
    """One rank of a worker: a staging and a reader."""

    def __init__(
        self,
        relay: Relay,
        *,
        tensors: Sequence[Tensor] = TENSORS,
        placements: Placements | None = None,
        weights: Weights | None = None,
        codec: Codec | None = None,
        retry: RetryPolicy = QUICK,
    ) -> None:
        self.placements = placements or whole(tensors)
        self.arrays = shard(weights or random_weights(99, tensors), self.placements)
        self.staging = StagingCopy(self.arrays, self.placements, tensors)
        self.reader = ChainReader(relay, run=RUN, secret=SECRET, tensors=tensors, codec=codec, retry=retry)
        self.manifest: Manifest | None = None

    def sync(self) -> VersionId | None:
        """Go to the newest version there is; None if there is none."""
        target = self.reader.refresh()
        if target is not None:
            self.manifest = self.reader.bring(self.staging, target)
        return target


class Story:
    """A trainer that has published versions 1 to `versions`, and what they were."""

    def __init__(self, versions: int = 1, relay=None, **options) -> None:
        self.relay = relay if relay is not None else MemoryRelay()
        self.trainer = Trainer(self.relay, **options)
        self.weights = random_weights(0)
        self.published = {}
        self.go_on(versions)

    def go_on(self, versions: int, *, anchor: bool = False) -> None:
        for _ in range(versions):
            number = len(self.published) + 1
            self.weights = stepped(self.weights, number)
            self.trainer.publish(number, self.weights, anchor=anchor)
            self.published[number] = self.weights
