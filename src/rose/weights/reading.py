"""The worker's end of the chain: find versions, and bring a staging copy of the weights to one, bit for bit.

    reader = ChainReader(relay, run="r1", secret=secret, tensors=tensors)
    target = reader.refresh()
    manifest = reader.bring(staging, target)             # the staging copy now holds the version, verified

Every chunk takes its own path. Its hash tells which versions it already equals, wherever it came from: a version
fetched before, a model folder, or an attempt that broke off. From there the fewest bytes lead to the target, by deltas
or from a full snapshot (anchor). A chunk takes all its records before the next one does, and what comes next is fetched
meanwhile. Payloads are checked before they are applied, and the numbers after the last of them.

What must not be used (a forged manifest, another run's, a damaged payload) is listed in `refused`, and another path is
taken. If none is left, that is an error, and the running weights stay. Reading needs only the run's read key.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from rose.core import versions
from rose.core.versions import VersionId, VersionRecord
from rose.errors import RequestRefused, RoseError, Unavailable
from rose.weights.chain import READS_MAX, Folder, Names, RetryPolicy, claim_counts, is_ahead
from rose.weights.coding import Codec, SparseCodec, check_same
from rose.weights.keys import for_reading
from rose.weights.manifest import (
    ChunkEntry,
    Claim,
    Manifest,
    Signed,
    WeightsRefused,
    check_manifest,
    payload_hash,
    read_signed,
)
from rose.weights.relay.relay_base import Buffer, KeyMissing, Relay, RelayEntry
from rose.weights.shards import Tensor, TensorRegion
from rose.weights.weight_buffers import StagingCopy

RANGE_BYTES_MAX = 64 << 20  # what is read in one call
AHEAD_BYTES_MAX = 64 << 20  # what is read ahead of the range that is being applied; both are in memory at a time
ROUNDS_MAX = 8  # of looking for another path
GAP_BYTES_MAX = 64 << 10  # bytes of other chunks that are read along rather than asked around


@dataclass(frozen=True, slots=True)
class _Source:
    """A record that can be used: its manifest, and its chunks by region."""

    key: str
    manifest: Manifest
    chunks: Mapping[TensorRegion, ChunkEntry]


@dataclass(frozen=True, slots=True)
class _Range:
    """Bytes of one bucket that are read in one call, and the chunks in them."""

    source: _Source
    bucket: int
    start: int
    stop: int
    regions: tuple[TensorRegion, ...]

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


class _Damaged(Exception):
    """A payload that is not what its manifest says, however often it is read."""

    def __init__(self, source: _Source, what: str) -> None:
        self.source = source
        self.what = what


class ChainReader:
    """The reader of one worker rank, for one thread at a time."""

    def __init__(
        self,
        relay: Relay,
        *,
        run: str,
        secret: bytes,
        tensors: Sequence[Tensor] | None = None,
        codec: Codec | None = None,
        retry: RetryPolicy | None = None,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.relay = relay
        self.names = Names(run)
        self.secret = for_reading(secret)
        self._unix_s = unix_s
        self.tensors = tensors
        self.codec = codec or SparseCodec()
        self.retry = retry or RetryPolicy()
        self.epoch = 0  # records of a lower epoch are ignored
        self.refused: dict[str, str] = {}  # keys in the relay that must not be used, and why
        self._unfit: set[str] = set()  # of those, records that the trainer signed
        self._claims: dict[RelayEntry, Claim] = {}  # verified
        self._manifests: dict[Folder, Manifest] = {}  # checked, and there when the relay was last listed
        self._sources: dict[VersionRecord, _Source] = {}  # of those, the whole ones
        self.reset_counters()

    def reset_counters(self) -> None:
        """Set what was read and how long reading and decoding took to zero."""
        self.read_bytes, self.read_s, self.decode_s = 0, 0.0, 0.0

    # What the relay has

    def refresh(self) -> VersionId | None:
        """List the relay and return the newest version that a worker without weights can reach."""
        entries = self.retry.call(lambda: self.relay.list(self.names.run))
        sizes = {entry.key: entry.size_bytes for entry in entries}
        self._claims = {entry: claim for entry, claim in self._claims.items() if entry.key in sizes}
        self.refused = {key: why for key, why in self.refused.items() if key in sizes}
        self._unfit &= self.refused.keys()
        self._follow_claims(entries)
        known, self._manifests, self._sources = self._manifests, {}, {}
        for entry in entries:
            place = self.names.place_of(entry.key)
            if place is None or place[1] != "manifest" or place[0].version.epoch != self.epoch:
                continue
            manifest = known.get(place[0]) or self._checked(place[0], entry)
            if manifest is None:
                continue
            self._manifests[place[0]] = manifest
            is_whole = all(sizes.get(bucket.key) == bucket.size_bytes for bucket in manifest.buckets)
            if is_whole and entry.key not in self._unfit:
                chunks = dict(zip(manifest.regions(), manifest.chunks))
                self._sources[manifest.version_record()] = _Source(entry.key, manifest, chunks)
        return versions.newest(self._sources)

    def versions(self) -> list[VersionId]:
        """Return every version to which some record leads, in order."""
        return sorted({record.version for record in self._sources})

    def manifest_of(self, version: VersionId) -> Manifest:
        """Return the manifest of the smallest record of a version. Raises WeightsRefused."""
        records = [record for record in self._sources if record.version == version]
        if not records:
            newest = max(self.versions(), default=None)
            raise WeightsRefused(f"version {version} is not in the relay; the newest is {newest}")
        return self._sources[min(records, key=lambda record: record.size_bytes)].manifest

    def _follow_claims(self, entries: Sequence[RelayEntry]) -> None:
        """Set the epoch to the highest claim that counts, never back unless its own claim expired unused."""
        places = [self.names.place_of(entry.key) for entry in entries]
        used = {place[0].version.epoch for place in places if place is not None and place[1] == "manifest"}
        claims = {epoch: entry for entry in entries if (epoch := self.names.epoch_of(entry.key)) is not None}
        if claims.get(self.epoch) in self._claims and not self._claim_counts(claims[self.epoch], self.epoch, used):
            self.epoch = 0
        for epoch in sorted((epoch for epoch in claims if epoch > self.epoch), reverse=True):
            if self._claim_counts(claims[epoch], epoch, used):
                self.epoch = epoch
                return

    def _claim_counts(self, entry: RelayEntry, epoch: int, used: Container[int]) -> bool:
        if is_ahead(epoch, self._unix_s()):
            self.refused[entry.key] = f"epoch {epoch} is more than a day ahead of the clock"
            return False
        claim = self._claims.get(entry) or self._read_signed(entry, Claim)
        if claim is None or (claim.run, claim.epoch) != (self.names.run, epoch):
            return False
        self._claims[entry] = claim
        return claim_counts(epoch, claim.at_s, self._unix_s(), lambda: epoch in used)

    def _checked(self, folder: Folder, entry: RelayEntry) -> Manifest | None:
        manifest = self._read_signed(entry, Manifest) if entry.key not in self._unfit else None
        if manifest is None:
            return None
        try:
            check_same(self.codec, manifest.codec)
            if Folder(manifest.id, manifest.kind, manifest.attempt) != folder:
                raise WeightsRefused(f"`{entry.key}` is the manifest of another record")
            return check_manifest(manifest, run=self.names.run, expected=self.tensors)
        except RoseError as error:
            self._refuse(entry.key, error.what)
            return None

    def _refuse(self, key: str, why: str) -> None:
        """Ignore a record for good that the trainer signed and that cannot be used here."""
        self._unfit.add(key)
        self.refused[key] = why

    def _read_signed(self, entry: RelayEntry, kind: type[Signed]) -> Signed | None:
        """Return a signed record, or None if it is gone or refused. It is read again: a bit may flip on the way.

        What is not signed is read again next time: the trainer may replace it by a record of its own.
        """
        for trial in range(READS_MAX):
            try:
                record = self.retry.call(
                    lambda: read_signed(self._read, self.secret, entry.key, entry.size_bytes, kind)
                )
            except KeyMissing:
                return None
            except WeightsRefused as error:
                if trial == READS_MAX - 1:
                    self.refused[entry.key] = error.what
            else:
                self.refused.pop(entry.key, None)
                return record
        return None

    def _read(self, key: str, start: int, stop: int) -> Buffer:
        begin_s = time.perf_counter()
        data = self.relay.get(key, start, stop)
        self.read_bytes += len(data)
        self.read_s += time.perf_counter() - begin_s
        return data

    # Bringing weights to a version

    def bring(self, staging: StagingCopy, target: VersionId) -> Manifest:
        """Turn the staging copy into the target version. After an error the next call continues from what is there."""
        missing: KeyMissing | None = None
        for _ in range(ROUNDS_MAX):
            manifest = self.manifest_of(target)
            try:
                self._walk(staging, staging.cut(manifest.regions()), target)
                return manifest
            except _Damaged as damaged:
                self._refuse(damaged.source.key, damaged.what)
            except KeyMissing as error:  # swept or lost since the relay was listed
                missing = error
            self.refresh()
        raise Unavailable(f"version {target} could not be read from the relay: {missing or 'too much is damaged'}")

    def _walk(self, staging: StagingCopy, regions: Sequence[TensorRegion], target: VersionId) -> None:
        """Take every chunk along its records, then compare each with the target's hash."""
        paths = self._paths(staging, regions, target)
        records = sorted(paths, key=lambda record: (record.version, not record.is_anchor))
        ranges = _by_chunk(range_ for record in records for range_ in _ranges(self._sources[record], paths[record]))
        with (
            ThreadPoolExecutor(1, thread_name_prefix="weights-fetch") as pool,
            contextlib.closing(_ahead(pool, self._fetch, ranges)) as fetched,
        ):
            for range_, data in fetched:
                begin_s = time.perf_counter()
                for region in range_.regions:
                    try:
                        staging.write(region, _payload(range_, region, data), self.codec)
                    except RoseError as error:
                        raise _Damaged(range_.source, error.what) from error
                self.decode_s += time.perf_counter() - begin_s
                del data  # before more is fetched
        goal = next(source for record, source in self._sources.items() if record.version == target)
        for region in regions:
            if staging.hash_of(region) != goal.chunks[region].content_hash:
                raise _Damaged(goal, f"`{region.tensor}` did not come to the numbers of version {target}")

    def _paths(
        self, staging: StagingCopy, regions: Sequence[TensorRegion], target: VersionId
    ) -> dict[VersionRecord, list[TensorRegion]]:
        """Return which chunks take which record."""
        alike: dict[frozenset[VersionId], list[TensorRegion]] = defaultdict(list)
        for region in regions:
            alike[self._equal_versions(region, staging.hash_of(region))].append(region)
        paths: dict[VersionRecord, list[TensorRegion]] = defaultdict(list)
        for held, same in alike.items():
            path = versions.shortest(self._sources, held, target)
            if path is None:
                raise WeightsRefused(
                    f"no way leads from the weights held here to version {target}",
                    hint="ask the trainer for an anchor; until then the running weights stay",
                )
            for record in path:
                paths[record] += same
        return paths

    def _equal_versions(self, region: TensorRegion, known: bytes) -> frozenset[VersionId]:
        """Return the versions that a chunk with this hash equals."""
        equal = set()
        for record, source in self._sources.items():
            chunk = source.chunks.get(region)
            if chunk is None:
                continue  # this record is cut in another way
            if chunk.content_hash == known:
                equal.add(record.version)
            if record.base is not None and chunk.base_hash == known:
                equal.add(record.base)
        return frozenset(equal)

    def _fetch(self, range_: _Range) -> Buffer:
        """Return the checked bytes of a range; they are read again if wrong, which may have happened on the way."""
        key = range_.source.manifest.buckets[range_.bucket].key
        for _ in range(READS_MAX):
            try:
                data = self.retry.call(lambda: self._read(key, range_.start, range_.stop))
            except KeyMissing:
                raise
            except RequestRefused as error:
                raise _Damaged(range_.source, error.what) from error
            if len(data) == range_.size_bytes and all(_is_right(range_, region, data) for region in range_.regions):
                return data
        raise _Damaged(range_.source, f"a payload in `{key}` is damaged")


def _is_right(range_: _Range, region: TensorRegion, data: Buffer) -> bool:
    return payload_hash(_payload(range_, region, data)) == range_.source.chunks[region].payload_hash


def _payload(range_: _Range, region: TensorRegion, data: Buffer) -> memoryview:
    chunk = range_.source.chunks[region]
    return memoryview(data)[chunk.offset - range_.start :][: chunk.length]


def _ranges(source: _Source, regions: Iterable[TensorRegion]) -> Iterator[_Range]:
    """Yield what to read for these chunks, neighbours together; unchanged chunks need nothing."""
    changed = [(source.chunks[region], region) for region in regions if source.chunks[region].length]
    changed.sort(key=lambda item: (item[0].bucket, item[0].offset))
    current: _Range | None = None
    for chunk, region in changed:
        stop = chunk.offset + chunk.length
        if current is not None:
            is_near = chunk.bucket == current.bucket and chunk.offset - current.stop <= GAP_BYTES_MAX
            if is_near and stop - current.start <= RANGE_BYTES_MAX:
                current = replace(current, stop=max(stop, current.stop), regions=(*current.regions, region))
                continue
            yield current
        current = _Range(source, chunk.bucket, chunk.offset, stop, (region,))
    if current is not None:
        yield current


def _by_chunk(ranges: Iterable[_Range]) -> list[_Range]:
    """Reorder ranges that come record by record so that the first chunks take all their records first.

    So deltas are applied while the next chunks of a snapshot are on their way. A chunk's own records keep their order.
    """
    places: dict[TensorRegion, int] = {}  # of the last range that a chunk is in
    placed: list[tuple[int, _Range]] = []
    for range_ in ranges:
        place = max(places.setdefault(region, len(places)) for region in range_.regions)
        places.update(dict.fromkeys(range_.regions, place))
        placed.append((place, range_))
    return [range_ for _, range_ in sorted(placed, key=lambda item: item[0])]


def _ahead(
    pool: ThreadPoolExecutor, get: Callable[[_Range], Buffer], ranges: Iterable[_Range]
) -> Generator[tuple[_Range, Buffer], None, None]:
    """Yield each range with its bytes, while the next ones, or at least one, are on their way."""
    waiting: deque[tuple[_Range, Future[Buffer]]] = deque()
    ahead_bytes = 0  # of what waits behind the first
    try:
        for range_ in ranges:
            while len(waiting) > 1 and ahead_bytes + range_.size_bytes > AHEAD_BYTES_MAX:
                ahead_bytes -= waiting[1][0].size_bytes
                yield _first(waiting)
            ahead_bytes += range_.size_bytes if waiting else 0
            waiting.append((range_, pool.submit(get, range_)))
        while waiting:
            yield _first(waiting)
    finally:
        for _, fetched in waiting:
            fetched.cancel()


def _first(waiting: deque[tuple[_Range, Future[Buffer]]]) -> tuple[_Range, Buffer]:
    """Take the first result, keeping no reference: its memory is free when the caller is done with it."""
    range_, fetched = waiting.popleft()
    return range_, fetched.result()
