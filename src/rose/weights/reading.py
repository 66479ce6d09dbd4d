"""The worker's end of the chain: see what there is, and bring a shadow of the weights to a version, bit for bit.

    reader = ChainReader(relay, run="r1", secret=secret, tensors=tensors)
    target = reader.refresh()
    manifest = reader.bring(shadow, target)              # the shadow now holds the version, verified

Every piece finds its own way. Its hash tells which versions it already equals, wherever it came from: a version
fetched before, a model folder, or an attempt that broke off halfway. From there the fewest bytes lead to the target, by
deltas or from an anchor; pieces that go the same way share it. A piece takes all its links before the next one
does, and what comes next is fetched meanwhile. Payloads are checked before they are applied, and the numbers after the
last of them; in between nothing is installed anywhere, since a shadow is only a shadow.

What is refused (a stranger's manifest, another run's, a damaged payload) is told in `refused`; whatever other way there
is gets taken. If none is left, that is an error, and the weights that run stay. Reading needs only the run's read key.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from rose.core import versions
from rose.core.versions import Link, VersionId
from rose.errors import RequestRefused, RoseError, Unavailable
from rose.weights.chain import READS_MAX, Folder, Names, Patience, is_ahead, stands
from rose.weights.coding import Codec, SparseCodec, check_same
from rose.weights.keys import for_reading
from rose.weights.manifest import (
    Claim,
    Manifest,
    PieceEntry,
    Record,
    WeightsRefused,
    check_manifest,
    payload_hash,
    read_signed,
)
from rose.weights.relay.base import Buffer, Entry, KeyMissing, Relay
from rose.weights.shadow import Shadow
from rose.weights.shards import Box, Tensor

RANGE_BYTES_MAX = 64 << 20  # what is read in one call
AHEAD_BYTES_MAX = 64 << 20  # what is read ahead of the range that is being applied; both are in memory at a time
ROUNDS_MAX = 8  # of looking for another way
GAP_BYTES_MAX = 64 << 10  # bytes of others' pieces that are read along rather than asked around


@dataclass(frozen=True, slots=True)
class _Source:
    """A link that can be used: its manifest, and its pieces by box."""

    key: str
    manifest: Manifest
    pieces: Mapping[Box, PieceEntry]


@dataclass(frozen=True, slots=True)
class _Range:
    """Bytes of one bucket that are read in one call, and the pieces in them."""

    source: _Source
    bucket: int
    start: int
    stop: int
    boxes: tuple[Box, ...]

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


class _Damaged(Exception):
    """A payload that is not what its manifest says, however often it is read."""

    def __init__(self, source: _Source, what: str) -> None:
        self.source = source
        self.what = what


class ChainReader:
    """One per worker rank; for one thread at a time."""

    def __init__(
        self,
        relay: Relay,
        *,
        run: str,
        secret: bytes,
        tensors: Sequence[Tensor] | None = None,
        codec: Codec | None = None,
        patience: Patience | None = None,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.relay = relay
        self.names = Names(run)
        self.secret = for_reading(secret)
        self._unix_s = unix_s
        self.tensors = tensors
        self.codec = codec or SparseCodec()
        self.patience = patience or Patience()
        self.epoch = 0  # the fence: nothing of a lower epoch is looked at
        self.refused: dict[str, str] = {}  # keys in the relay that must not be used, and why
        self._unfit: set[str] = set()  # of those, links that the trainer signed
        self._claims: dict[Entry, Claim] = {}  # verified
        self._manifests: dict[Folder, Manifest] = {}  # checked, and there when the relay was last listed
        self._sources: dict[Link, _Source] = {}  # of those, what is whole

    # What there is

    def refresh(self) -> VersionId | None:
        """Look at the relay; returns the newest version that can be had from it by whoever holds nothing."""
        entries = self.patience.call(lambda _: self.relay.list(self.names.run))
        present = {entry.key for entry in entries}
        self._claims = {entry: claim for entry, claim in self._claims.items() if entry.key in present}
        self.refused = {key: why for key, why in self.refused.items() if key in present}
        self._unfit &= self.refused.keys()
        self._follow_claims(entries)
        self._read_manifests(entries)
        self._find_sources({entry.key: entry.size_bytes for entry in entries})
        return versions.newest(self._sources)

    def versions(self) -> list[VersionId]:
        """Every version to which some link leads, in order."""
        return sorted({link.version for link in self._sources})

    def manifest_of(self, version: VersionId) -> Manifest:
        """The manifest of the cheapest link to a version. Raises WeightsRefused if there is none."""
        links = [link for link in self._sources if link.version == version]
        if not links:
            newest = max(self.versions(), default=None)
            raise WeightsRefused(f"version {version} is not in the relay; the newest is {newest}")
        return self._sources[min(links, key=lambda link: link.size_bytes)].manifest

    def _follow_claims(self, entries: Sequence[Entry]) -> None:
        """Set the epoch to the highest claim that stands, never back unless its own claim expired unused."""
        places = [self.names.place_of(entry.key) for entry in entries]
        used = {place[0].version.epoch for place in places if place is not None and place[1] == "manifest"}
        claims = {epoch: entry for entry in entries if (epoch := self.names.epoch_of(entry.key)) is not None}
        if claims.get(self.epoch) in self._claims and not self._stands(claims[self.epoch], self.epoch, used):
            self.epoch = 0
        for epoch in sorted((epoch for epoch in claims if epoch > self.epoch), reverse=True):
            if self._stands(claims[epoch], epoch, used):
                self.epoch = epoch
                return

    def _stands(self, entry: Entry, epoch: int, used: Container[int]) -> bool:
        if is_ahead(epoch, self._unix_s()):
            self.refused[entry.key] = f"epoch {epoch} is more than a day ahead of the clock"
            return False
        claim = self._claims.get(entry) or self._record(entry, Claim)
        if claim is None or (claim.run, claim.epoch) != (self.names.run, epoch):
            return False
        self._claims[entry] = claim
        return stands(epoch, claim.at_s, self._unix_s(), lambda: epoch in used)

    def _read_manifests(self, entries: Iterable[Entry]) -> None:
        present: dict[Folder, Manifest] = {}
        for entry in entries:
            place = self.names.place_of(entry.key)
            if place is None or place[1] != "manifest" or place[0].version.epoch != self.epoch:
                continue
            manifest = self._manifests.get(place[0]) or self._checked(place[0], entry)
            if manifest is not None:
                present[place[0]] = manifest
        self._manifests = present

    def _checked(self, folder: Folder, entry: Entry) -> Manifest | None:
        key = entry.key
        manifest = self._record(entry, Manifest) if key not in self._unfit else None
        if manifest is None:
            return None
        try:
            check_same(self.codec, manifest.codec)
            if Folder(manifest.id, manifest.kind, manifest.attempt) != folder:
                raise WeightsRefused(f"`{key}` is the manifest of another link")
            return check_manifest(manifest, run=self.names.run, expected=self.tensors)
        except RoseError as error:
            self._refuse(key, error.what)
            return None

    def _refuse(self, key: str, why: str) -> None:
        """Never look again at a link that the trainer signed and that cannot be used here."""
        self._unfit.add(key)
        self.refused[key] = why

    def _record(self, entry: Entry, kind: type[Record]) -> Record | None:
        """A signed record, or None if it is gone by now or refused. It is read again: a bit may flip on the way.

        What is not signed is looked at again next time: the trainer may replace it by a record of its own.
        """
        for trial in range(READS_MAX):
            try:
                found = self.patience.call(
                    lambda _: read_signed(self.relay, self.secret, entry.key, entry.size_bytes, kind)
                )
            except KeyMissing:
                return None
            except WeightsRefused as error:
                if trial == READS_MAX - 1:
                    self.refused[entry.key] = error.what
            else:
                self.refused.pop(entry.key, None)
                return found
        return None

    def _find_sources(self, sizes: Mapping[str, int]) -> None:
        self._sources = {}
        for folder, manifest in self._manifests.items():
            key = self.names.manifest(folder)
            is_whole = all(sizes.get(bucket.key) == bucket.size_bytes for bucket in manifest.buckets)
            if is_whole and key not in self._unfit:
                pieces = dict(zip(manifest.boxes(), manifest.pieces))
                self._sources[manifest.link()] = _Source(key, manifest, pieces)

    # Going there

    def bring(self, shadow: Shadow, target: VersionId) -> Manifest:
        """Turn the shadow into the target version. After an error it is unfinished; the next call goes on with it."""
        missing: KeyMissing | None = None
        for _ in range(ROUNDS_MAX):
            manifest = self.manifest_of(target)
            boxes = shadow.cut(manifest.boxes())
            try:
                self._walk(shadow, boxes, target)
                return manifest
            except _Damaged as damaged:
                self._refuse(damaged.source.key, damaged.what)
            except KeyMissing as error:  # swept or lost since the relay was listed
                missing = error
            self.refresh()
        raise Unavailable(f"version {target} could not be read from the relay: {missing or 'too much is damaged'}")

    def _walk(self, shadow: Shadow, boxes: Sequence[Box], target: VersionId) -> None:
        """Every piece along its links, one piece after the other; then each is held against the target's hash."""
        taken = self._ways(shadow, boxes, target)
        links = sorted(taken, key=lambda link: (link.version, not link.is_anchor))
        ranges = _by_piece(range_ for link in links for range_ in _ranges(self._sources[link], taken[link]))
        with (
            ThreadPoolExecutor(1, thread_name_prefix="weights-fetch") as pool,
            contextlib.closing(_ahead(pool, self._get, ranges)) as fetched,
        ):
            for range_, data in fetched:
                self._apply(shadow, range_, data)
                del data  # before more is fetched
        goal = next(source for link, source in self._sources.items() if link.version == target)
        for box in boxes:
            if shadow.hash_of(box) != goal.pieces[box].content_hash:
                raise _Damaged(goal, f"`{box.tensor}` did not come to the numbers of version {target}")

    def _ways(self, shadow: Shadow, boxes: Sequence[Box], target: VersionId) -> dict[Link, list[Box]]:
        """Which pieces take which link."""
        alike: dict[frozenset[VersionId], list[Box]] = defaultdict(list)
        for box in boxes:
            alike[self._equals(box, shadow.hash_of(box))].append(box)
        taken: dict[Link, list[Box]] = defaultdict(list)
        for held, same in alike.items():
            way = versions.shortest(self._sources, held, target)
            if way is None:
                raise WeightsRefused(
                    f"no way leads from the weights held here to version {target}",
                    hint="ask the trainer for an anchor; until then the running weights stay",
                )
            for link in way:
                taken[link] += same
        return taken

    def _equals(self, box: Box, known: bytes) -> frozenset[VersionId]:
        """The versions that a piece with this hash equals."""
        found = set()
        for link, source in self._sources.items():
            piece = source.pieces.get(box)
            if piece is None:
                continue  # cut in another way
            if piece.content_hash == known:
                found.add(link.version)
            if link.base is not None and piece.base_hash == known:
                found.add(link.base)
        return frozenset(found)

    def _apply(self, shadow: Shadow, range_: _Range, data: Buffer) -> None:
        for box in range_.boxes:
            try:
                shadow.write(box, _payload(range_, box, data), self.codec)
            except RoseError as error:
                raise _Damaged(range_.source, error.what) from error

    def _get(self, range_: _Range) -> Buffer:
        """The bytes of a range, checked; read again if they are wrong, since that may have happened on the way."""
        key = range_.source.manifest.buckets[range_.bucket].key
        for _ in range(READS_MAX):
            try:
                data = self.patience.call(lambda _: self.relay.get(key, range_.start, range_.stop))
            except KeyMissing:
                raise
            except RequestRefused as error:
                raise _Damaged(range_.source, error.what) from error
            if len(data) == range_.size_bytes and all(_is_right(range_, box, data) for box in range_.boxes):
                return data
        raise _Damaged(range_.source, f"a payload in `{key}` is damaged")


def _is_right(range_: _Range, box: Box, data: Buffer) -> bool:
    return payload_hash(_payload(range_, box, data)) == range_.source.pieces[box].payload_hash


def _payload(range_: _Range, box: Box, data: Buffer) -> memoryview:
    piece = range_.source.pieces[box]
    return memoryview(data)[piece.offset - range_.start :][: piece.length]


def _ranges(source: _Source, boxes: Iterable[Box]) -> Iterator[_Range]:
    """What to read for these pieces, neighbours together; pieces that did not change need nothing."""
    changed = [(source.pieces[box], box) for box in boxes if source.pieces[box].length]
    changed.sort(key=lambda item: (item[0].bucket, item[0].offset))
    current: _Range | None = None
    for piece, box in changed:
        stop = piece.offset + piece.length
        is_near = (
            current is not None and piece.bucket == current.bucket and piece.offset - current.stop <= GAP_BYTES_MAX
        )
        if current is not None and is_near and stop - current.start <= RANGE_BYTES_MAX:
            current = replace(current, stop=max(stop, current.stop), boxes=(*current.boxes, box))
            continue
        if current is not None:
            yield current
        current = _Range(source, piece.bucket, piece.offset, stop, (box,))
    if current is not None:
        yield current


def _by_piece(ranges: Iterable[_Range]) -> list[_Range]:
    """Ranges that come link by link, in an order in which the first pieces take all their links first.

    So deltas are applied while the next pieces of an anchor are on their way. No piece's own links change places.
    """
    places: dict[Box, int] = {}  # of the last range that a piece is in
    placed: list[tuple[int, _Range]] = []
    for range_ in ranges:
        place = max(places.setdefault(box, len(places)) for box in range_.boxes)
        places.update(dict.fromkeys(range_.boxes, place))
        placed.append((place, range_))
    placed.sort(key=lambda item: item[0])
    return [range_ for _, range_ in placed]


def _ahead(
    pool: ThreadPoolExecutor, get: Callable[[_Range], Buffer], ranges: Iterable[_Range]
) -> Generator[tuple[_Range, Buffer], None, None]:
    """Each range with its bytes; while the caller works on one, the next are on their way, or at least one."""
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
    """What the caller gets nobody else keeps: its memory is free when the caller is done with it."""
    range_, fetched = waiting.popleft()
    return range_, fetched.result()
