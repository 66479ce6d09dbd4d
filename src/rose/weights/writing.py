"""The trainer's end of the chain: claim an epoch, push buckets, and commit a version by its manifest.

    writer = ChainWriter(relay, run="r1", secret=secret, tensors=tensors)
    writer.claim()
    with writer.begin(7, base=writer.newest) as draft:   # or base=None: a full snapshot (anchor)
        draft.push([encode_chunk(...), ...])             # once per bucket, from any thread
        draft.commit()

With several ranks each pushes its own chunks under the same epoch and version; the others call `put_rank_manifest`, and
the one that commits calls `collect_rank_manifests` first, so that nothing but the relay joins them.

Nothing counts before the manifest is there, so a writer can stop at any point and leave only leftovers, which `sweep`
removes later. A relay that lost everything is filled again by an anchor of the newest version, which also puts the
claim back.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rose.core import versions
from rose.core.versions import VersionId, VersionRecord
from rose.errors import ConfigError, Unavailable
from rose.weights.chain import READS_MAX, Folder, Names, RetryPolicy, claim_counts, is_ahead
from rose.weights.coding import Bits, Codec, SparseCodec
from rose.weights.keys import write_key
from rose.weights.manifest import (
    FORMAT,
    BucketEntry,
    ChunkEntry,
    Claim,
    Fenced,
    Manifest,
    RankManifest,
    Signed,
    TensorEntry,
    WeightsRefused,
    check_manifest,
    content_hash,
    payload_hash,
    read_signed,
    seal,
    size_in,
    version_hash,
)
from rose.weights.relay.relay_base import KeyExists, KeyMissing, Relay, RelayEntry
from rose.weights.shards import Tensor, TensorRegion

KEEP_VERSIONS = 32  # a worker that was away for fewer steps catches up by deltas
ANCHOR_EVERY = 16  # an anchor costs as much as some dozens of deltas; a worker that joins reads at most this many


@dataclass(frozen=True, slots=True)
class Encoded:
    """One chunk, ready to push."""

    region: TensorRegion
    payload: bytes  # empty if nothing changed
    content_hash: bytes
    base_hash: bytes = b""


def encode_chunk(
    codec: Codec, region: TensorRegion, dtype: str, new: Bits, base: Bits | None = None, base_hash: bytes = b""
) -> Encoded:
    """Encode a chunk against a base, whose hash is known from the last version, or whole without one."""
    hashed = content_hash(new, dtype)
    if base is None:
        return Encoded(region, codec.encode_full(new, dtype), hashed)
    assert base_hash, "a base without its hash"
    payload = b"" if hashed == base_hash else codec.encode(base, new, dtype)
    return Encoded(region, payload, hashed, base_hash)


class ChainWriter:
    """The writer of one trainer rank. Drafts may be filled from several threads; everything else is for one thread."""

    def __init__(
        self,
        relay: Relay,
        *,
        run: str,
        secret: bytes,
        tensors: Sequence[Tensor],
        codec: Codec | None = None,
        rank: int = 0,
        retry: RetryPolicy | None = None,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        write_key(secret)  # raises ConfigError for one that cannot sign
        self.relay = relay
        self.names = Names(run)
        self.secret = secret
        self._unix_s = unix_s
        self.tensors = list(tensors)
        self.codec = codec or SparseCodec()
        self.rank = rank
        self.retry = retry or RetryPolicy()
        self.epoch = 0
        self.newest: VersionId | None = None  # committed; set from outside on a rank that does not commit
        self._owner = uuid.uuid4().hex
        self._records: dict[Folder, tuple[VersionRecord, frozenset[str]]] = {}  # committed, with the keys each needs
        self._attempts: dict[tuple[VersionId, str], int] = defaultdict(int)
        self._open: set[Folder] = set()

    # The epoch

    def claim(self, *, at_least: int | None = None) -> int:
        """Take an epoch higher than any before, which fences off a trainer that had an earlier one.

        The clock keeps it higher even if the relay has forgotten the earlier ones. Raises ConfigError if the epoch
        would be more than a day ahead of the clock.
        """
        assert self.epoch == 0, "an epoch was claimed before"
        epoch = int(self._unix_s()) if at_least is None else at_least
        signed = (claim.epoch for claim in self._claims(self._claim_sizes(), above=epoch - 1))
        epoch = max(epoch, next(signed, 0) + 1)
        while not self._put_claim(epoch):
            epoch += 1
        self.epoch = epoch
        return epoch

    def join(self, epoch: int) -> None:
        """Write in an epoch that another rank of this trainer claimed."""
        self.epoch = epoch

    def check_fence(self) -> None:
        """Raise Fenced if another trainer took over. A claim that the relay lost is put back."""
        sizes = self._claim_sizes()
        ours = self.read_signed(self.names.claim(self.epoch), Claim, sizes.get(self.epoch))
        is_ours = ours.owner == self._owner if ours is not None else self._put_claim(self.epoch)
        if not is_ours or any(self._counts(claim) for claim in self._claims(sizes, above=self.epoch)):
            raise Fenced(
                f"another trainer has taken over run `{self.names.run}`; this one had epoch {self.epoch}",
                hint="stop this trainer, or restart it to take over again",
            )

    def _claim_sizes(self) -> dict[int, int]:
        """Return the size of whatever lies under the key of each epoch's claim."""
        entries = self.retry.call(lambda: self.relay.list(f"{self.names.run}/epochs"))
        sizes = {self.names.epoch_of(entry.key): entry.size_bytes for entry in entries}
        return {epoch: size_bytes for epoch, size_bytes in sizes.items() if epoch is not None}

    def _claims(self, sizes: Mapping[int, int], above: int) -> Iterator[Claim]:
        """Yield the signed claims on later epochs that are not ahead of the clock, the highest first."""
        for epoch in sorted((epoch for epoch in sizes if epoch > above), reverse=True):
            if not is_ahead(epoch, self._unix_s()):
                claim = self.read_signed(self.names.claim(epoch), Claim, sizes[epoch])
                if claim is not None and (claim.run, claim.epoch) == (self.names.run, epoch):
                    yield claim

    def _counts(self, claim: Claim) -> bool:
        def is_used() -> bool:
            entries = self.retry.call(lambda: self.relay.list(self.names.epoch_folder(claim.epoch)))
            return any(entry.key.endswith("/manifest") for entry in entries)

        return claim_counts(claim.epoch, claim.at_s, self._unix_s(), is_used)

    def _put_claim(self, epoch: int) -> bool:
        """Return whether the epoch is ours, by this call or one whose response was lost. Raises ConfigError."""
        if is_ahead(epoch, self._unix_s()):
            raise ConfigError(
                f"run `{self.names.run}` would continue with epoch {epoch}, more than a day ahead of the clock",
                hint="set this machine's clock, or publish under another run name",
            )
        claim = Claim(self.names.run, epoch, self._owner, int(self._unix_s()))
        return self.put_signed(self.names.claim(epoch), claim)

    # Signed records

    def put_signed(self, key: str, record: msgspec.Struct) -> bool:
        """Write a record once, whatever gets lost on the way; return False if another signed one was there before.

        A value without a right signature was not written by a trainer of this run: it is replaced.
        """
        signed = seal(self.secret, key, record)

        def put() -> bool:
            for _ in range(READS_MAX):
                try:
                    self.relay.put_new(key, [signed])
                    return True
                except KeyExists:
                    known = self.read_signed(key, type(record))
                if known is not None:
                    return known == record
                self.relay.delete(key)
            raise Unavailable(f"a stranger writes `{key}` again and again", hint="see who may write to the relay")

        return self.retry.call(put)

    def read_signed(self, key: str, kind: type[Signed], size_bytes: int | None = None) -> Signed | None:
        """Return the record with a right signature, or None. It is read again: a bit may flip on the way."""

        def read() -> Signed:
            size = size_in(self.relay, key) if size_bytes is None else size_bytes
            return read_signed(self.relay.get, self.secret, key, size, kind)

        for _ in range(READS_MAX):
            try:
                return self.retry.call(read)
            except KeyMissing:
                return None
            except WeightsRefused:
                continue
        return None

    # Version records

    def begin(self, version: int, base: VersionId | None, *, attempt: int | None = None) -> Draft:
        """Return a new draft: a delta from the base, or an anchor. Ranks of one trainer name the same attempt."""
        assert self.epoch, "claim an epoch first"
        target = VersionId(self.epoch, version)
        assert base is None or base < target, f"a delta from {base} to {target}"
        kind = "anchor" if base is None else "delta"
        if attempt is None:
            attempt = self._attempts[target, kind]
        self._attempts[target, kind] = attempt + 1
        draft = Draft(self, Folder(target, kind, attempt), base)
        self._open.add(draft.folder)
        return draft

    def _committed(self, draft: Draft, manifest: Manifest) -> None:
        self._open.discard(draft.folder)
        needs = [self.names.manifest(draft.folder), *(bucket.key for bucket in manifest.buckets)]
        self._records[draft.folder] = (manifest.version_record(), frozenset(needs))
        self.newest = max(manifest.id, self.newest or manifest.id)

    def check_relay(self) -> bool:
        """Return whether a worker without weights can reach the newest version.

        False means that the relay lost something: commit an anchor of the newest version.
        """
        present = {entry.key for entry in self._list()}
        self._records = {folder: known for folder, known in self._records.items() if known[1] <= present}
        return versions.newest(record for record, _ in self._records.values()) == self.newest

    def sweep(self, keep_versions: int = KEEP_VERSIONS) -> int:
        """Delete superseded records, earlier epochs and leftovers of unfinished drafts; return how many keys.

        Manifests go first, so that no reader begins with a record that is being taken apart.
        """
        if not any(record.is_anchor for record, _ in self._records.values()):
            return 0
        kept = versions.kept([record for record, _ in self._records.values()], keep_versions)
        stays = self._open | {folder for folder, (record, _) in self._records.items() if record in kept}
        keys = [entry.key for entry in self._list() if self._is_leftover(entry.key, stays)]
        for key in sorted(keys, key=lambda key: (not key.endswith("/manifest"), key)):
            self._delete(key)
        self._records = {folder: known for folder, known in self._records.items() if folder in stays}
        return len(keys)

    def _delete(self, key: str) -> bool:
        return self.retry.call(lambda: self.relay.delete(key))

    def _is_leftover(self, key: str, stays: set[Folder]) -> bool:
        claimed = self.names.epoch_of(key)
        if claimed is None:
            place = self.names.place_of(key)
            return place is not None and place[0].version.epoch <= self.epoch and place[0] not in stays
        if claimed <= self.epoch:
            return claimed < self.epoch
        # A later claim stays if a trainer signed it, unless it is ahead of the clock: it would count one day.
        return is_ahead(claimed, self._unix_s()) or self.read_signed(self.names.claim(claimed), Claim) is None

    def _list(self) -> Sequence[RelayEntry]:
        return self.retry.call(lambda: self.relay.list(self.names.run))


class Draft:
    """A version record under way; see `ChainWriter.begin`. `push` may be called from several threads."""

    def __init__(self, writer: ChainWriter, folder: Folder, base: VersionId | None) -> None:
        self.folder = folder
        self._writer = writer
        self._base = base
        self._tensors = {tensor.name: index for index, tensor in enumerate(writer.tensors)}
        self._buckets: list[BucketEntry] = []
        self._chunks: list[ChunkEntry] = []
        self._others: list[RankManifest] = []
        self._next_bucket = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *error: object) -> None:
        self.abandon()

    def push(self, chunks: Sequence[Encoded]) -> int:
        """Put the payloads into the relay as one bucket and return its size; unchanged chunks take no space."""
        writer = self._writer
        payloads = [chunk.payload for chunk in chunks if chunk.payload]
        with self._lock:
            number = self._next_bucket
            self._next_bucket += 1

        def put() -> BucketEntry:
            key = writer.names.bucket(self.folder, writer.rank, number)
            return BucketEntry(key, writer.relay.put_new(key, payloads))

        bucket = writer.retry.call(put) if payloads else None
        with self._lock:
            index, offset = len(self._buckets), 0
            if bucket is not None:
                self._buckets.append(bucket)
            for chunk in chunks:
                size = len(chunk.payload)
                place = (index, offset, size, payload_hash(chunk.payload)) if size else (0, 0, 0, b"")
                tensor, region = self._tensors[chunk.region.tensor], chunk.region
                hashes = chunk.content_hash, chunk.base_hash
                self._chunks.append(ChunkEntry(tensor, region.start, region.stop, *place, *hashes))
                offset += size
        return bucket.size_bytes if bucket is not None else 0

    # Several ranks

    def rank_manifest(self) -> RankManifest:
        """Return what this rank has pushed."""
        with self._lock:
            return RankManifest(self._writer.rank, list(self._buckets), list(self._chunks))

    def put_rank_manifest(self) -> None:
        """Leave this rank's manifest in the relay for the rank that commits, and end this draft."""
        writer = self._writer
        key = writer.names.rank_manifest(self.folder, writer.rank)
        if not writer.put_signed(key, self.rank_manifest()):
            raise Fenced(f"another trainer wrote `{key}`", hint="stop one of the two trainers")
        writer._open.discard(self.folder)

    def collect_rank_manifests(self, ranks: Iterable[int], retry: RetryPolicy | None = None) -> None:
        """Wait for the manifests of these ranks, and take them. Raises Unavailable if one does not come in time."""
        for rank in sorted(set(ranks) - {self._writer.rank} - {other.rank for other in self._others}):
            key = self._writer.names.rank_manifest(self.folder, rank)

            def read(rank: int = rank, key: str = key) -> RankManifest:
                known = self._writer.read_signed(key, RankManifest)
                if known is None:
                    raise Unavailable(f"rank {rank} has not pushed its part of version {self.folder.version}")
                return known

            self._others.append((retry or self._writer.retry).call(read))

    # The end

    def commit(self) -> Manifest:
        """Write the manifest: now the record exists. Raises Fenced if another trainer has taken over."""
        writer = self._writer
        manifest = check_manifest(self._manifest(), run=writer.names.run, expected=writer.tensors)
        writer.check_fence()
        key = writer.names.manifest(self.folder)
        if not writer.put_signed(key, manifest):
            raise Fenced(f"another trainer wrote `{key}`", hint="stop one of the two trainers")
        writer._committed(self, manifest)
        return manifest

    def abandon(self) -> None:
        """Leave what was pushed to the next sweep; do nothing if it is committed."""
        self._writer._open.discard(self.folder)

    def _manifest(self) -> Manifest:
        tensors = [TensorEntry(tensor.name, tensor.dtype, tensor.shape) for tensor in self._writer.tensors]
        buckets: list[BucketEntry] = []
        chunks: list[ChunkEntry] = []
        for part in [self.rank_manifest(), *self._others]:
            for chunk in part.chunks:  # buckets are counted within each rank's manifest
                bucket = chunk.bucket + len(buckets) if chunk.length else chunk.bucket
                chunks.append(msgspec.structs.replace(chunk, bucket=bucket))
            buckets += part.buckets
        version = self.folder.version
        return Manifest(
            format=FORMAT,
            run=self._writer.names.run,
            epoch=version.epoch,
            version=version.version,
            attempt=self.folder.attempt,
            base=None if self._base is None else (self._base.epoch, self._base.version),
            codec=self._writer.codec.name,
            tensors=tensors,
            buckets=buckets,
            chunks=chunks,
            version_hash=version_hash(tensors, chunks),
        )
