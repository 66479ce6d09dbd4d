"""The trainer's end of the chain: claim an epoch, push buckets, and commit a version by its manifest.

    writer = ChainWriter(relay, run="r1", secret=secret, tensors=tensors)
    writer.claim()
    with writer.begin(7, base=writer.newest) as draft:   # or base=None: an anchor
        draft.push([encode_piece(...), ...])             # once per bucket, from any thread
        draft.commit()

With several ranks each pushes its own pieces under the same epoch and version; the others call `leave_part`, and the
one that commits calls `collect_parts` first, so that nothing but the relay joins them.

Nothing counts before the manifest is there, so a writer can stop at any point and leave only rubbish, which `sweep`
removes later. A relay that lost everything is filled again by committing an anchor of the newest version: that also
puts the claim back.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from rose.core import versions
from rose.core.versions import Link, VersionId
from rose.errors import ConfigError, Unavailable
from rose.weights.chain import READS_MAX, Folder, Names, Patience, is_ahead, stands
from rose.weights.coding import Bits, Codec, SparseCodec
from rose.weights.keys import write_key
from rose.weights.manifest import (
    FORMAT,
    BucketEntry,
    Claim,
    Fenced,
    Manifest,
    Part,
    PieceEntry,
    Record,
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
from rose.weights.relay.base import Entry, KeyExists, KeyMissing, Relay
from rose.weights.shards import Box, Tensor

KEEP_VERSIONS = 32  # a member that was away for fewer steps catches up by deltas
ANCHOR_EVERY = 16  # an anchor costs as much as some dozens of deltas; a member that joins reads at most this many


@dataclass(frozen=True, slots=True)
class Encoded:
    """One piece, ready to push."""

    box: Box
    payload: bytes
    content_hash: bytes
    base_hash: bytes = b""


def encode_piece(
    codec: Codec, box: Box, dtype: str, new: Bits, base: Bits | None = None, base_hash: bytes = b""
) -> Encoded:
    """From the base if there is one (its hash is known from the last version), else whole. No change costs nothing."""
    hashed = content_hash(new, dtype)
    if base is None:
        return Encoded(box, codec.encode_full(new, dtype), hashed)
    assert base_hash, "a base without its hash"
    payload = b"" if hashed == base_hash else codec.encode(base, new, dtype)
    return Encoded(box, payload, hashed, base_hash)


class ChainWriter:
    """One per trainer rank. Drafts may be filled from several threads; everything else is for one thread."""

    def __init__(
        self,
        relay: Relay,
        *,
        run: str,
        secret: bytes,
        tensors: Sequence[Tensor],
        codec: Codec | None = None,
        rank: int = 0,
        patience: Patience | None = None,
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
        self.patience = patience or Patience()
        self.epoch = 0
        self.newest: VersionId | None = None  # committed; a rank that does not commit is told, and sets it
        self._owner = uuid.uuid4().hex
        self._links: dict[Folder, tuple[Link, frozenset[str]]] = {}  # committed, with the keys each needs
        self._attempts: dict[tuple[VersionId, str], int] = defaultdict(int)
        self._open: set[Folder] = set()

    # The epoch

    def claim(self, *, at_least: int | None = None) -> int:
        """Take an epoch higher than any before; from then on a trainer that had an earlier one is fenced off.

        The clock keeps it higher even if the relay has forgotten the earlier ones; a trainer that knows better says so.
        Raises ConfigError if the epoch would be more than a day ahead of the clock.
        """
        assert self.epoch == 0, "an epoch was claimed before"
        epoch = int(self._unix_s()) if at_least is None else at_least
        signed = (claim.epoch for claim in self._claims(self._claim_sizes(), above=epoch - 1))
        epoch = max(epoch, next(signed, 0) + 1)
        while not self._mark(epoch):
            epoch += 1
        self.epoch = epoch
        return epoch

    def join(self, epoch: int) -> None:
        """Write in an epoch that another rank of this trainer claimed."""
        self.epoch = epoch

    def check_fence(self) -> None:
        """Raise Fenced if another trainer took over. A claim that the relay lost is put back."""
        sizes = self._claim_sizes()
        ours = self.read_record(self.names.claim(self.epoch), Claim, sizes.get(self.epoch))
        is_ours = ours.owner == self._owner if ours is not None else self._mark(self.epoch)
        if not is_ours or any(self._stands(claim) for claim in self._claims(sizes, above=self.epoch)):
            raise Fenced(
                f"another trainer has taken over run `{self.names.run}`; this one had epoch {self.epoch}",
                hint="stop this trainer, or restart it to take over again",
            )

    def _claim_sizes(self) -> dict[int, int]:
        """Return the size of whatever lies under the key of each epoch's claim."""
        entries = self.patience.call(lambda _: self.relay.list(f"{self.names.run}/epochs"))
        found = {self.names.epoch_of(entry.key): entry.size_bytes for entry in entries}
        return {epoch: size_bytes for epoch, size_bytes in found.items() if epoch is not None}

    def _claims(self, sizes: Mapping[int, int], above: int) -> Iterator[Claim]:
        """Yield the signed claims on later epochs that are not ahead of the clock, the highest first."""
        for epoch in sorted((epoch for epoch in sizes if epoch > above), reverse=True):
            if not is_ahead(epoch, self._unix_s()):
                claim = self.read_record(self.names.claim(epoch), Claim, sizes[epoch])
                if claim is not None and (claim.run, claim.epoch) == (self.names.run, epoch):
                    yield claim

    def _stands(self, claim: Claim) -> bool:
        return stands(claim.epoch, claim.at_s, self._unix_s(), lambda: self._is_used(claim.epoch))

    def _is_used(self, epoch: int) -> bool:
        entries = self.patience.call(lambda _: self.relay.list(self.names.epoch_folder(epoch)))
        return any(entry.key.endswith("/manifest") for entry in entries)

    def _mark(self, epoch: int) -> bool:
        """Whether the epoch is ours, by this call or one whose answer was lost. Raises ConfigError."""
        if is_ahead(epoch, self._unix_s()):
            raise ConfigError(
                f"run `{self.names.run}` would continue with epoch {epoch}, more than a day ahead of the clock",
                hint="set this machine's clock, or publish under another run name",
            )
        claim = Claim(self.names.run, epoch, self._owner, int(self._unix_s()))
        return self.put_record(self.names.claim(epoch), claim)

    # Records

    def put_record(self, key: str, record: msgspec.Struct) -> bool:
        """Write once, whatever gets lost on the way. False if another signed record was there before.

        What is there without a right signature was not written by a trainer of this run: it is replaced.
        """
        signed = seal(self.secret, key, record)

        def trial(_: int) -> bool:
            for _ in range(READS_MAX):
                try:
                    self.relay.put_new(key, [signed])
                    return True
                except KeyExists:
                    found = self.read_record(key, type(record))
                if found is not None:
                    return found == record
                self.relay.delete(key)
            raise Unavailable(f"a stranger writes `{key}` again and again", hint="see who may write to the relay")

        return self.patience.call(trial)

    def read_record(self, key: str, kind: type[Record], size_bytes: int | None = None) -> Record | None:
        """What lies there with a right signature; None if nothing does. It is read again: a bit may flip on the way."""

        def trial(_: int) -> Record:
            size = size_in(self.relay, key) if size_bytes is None else size_bytes
            return read_signed(self.relay, self.secret, key, size, kind)

        for _ in range(READS_MAX):
            try:
                return self.patience.call(trial)
            except KeyMissing:
                return None
            except WeightsRefused:
                continue
        return None

    # Links

    def begin(self, version: int, base: VersionId | None, *, attempt: int | None = None) -> Draft:
        """A new link to a version: a delta from the base, or an anchor. Ranks of one trainer name the same attempt."""
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
        self._links[draft.folder] = (manifest.link(), frozenset(needs))
        self.newest = max(manifest.id, self.newest or manifest.id)

    def is_anchor_due(self, anchor_every: int = ANCHOR_EVERY) -> bool:
        """Whether the next version should be an anchor too."""
        anchors = [link.version for link, _ in self._links.values() if link.is_anchor]
        if not anchors:
            return True
        later = {link.version for link, _ in self._links.values() if link.version > max(anchors)}
        return versions.anchor_is_due(len(later), anchor_every)

    def check_relay(self) -> bool:
        """Whether the newest version can be had from the relay by somebody who holds nothing.

        False means that the relay lost something: commit an anchor of the newest version.
        """
        present = {entry.key for entry in self._list()}
        self._links = {folder: known for folder, known in self._links.items() if known[1] <= present}
        return versions.newest(link for link, _ in self._links.values()) == self.newest

    def sweep(self, keep_versions: int = KEEP_VERSIONS) -> int:
        """Delete what nobody needs: superseded links, earlier epochs, rubbish of unfinished drafts. Returns the count.

        Manifests go first, so that no reader begins with a link that is being taken apart.
        """
        if not any(link.is_anchor for link, _ in self._links.values()):
            return 0
        kept = versions.kept([link for link, _ in self._links.values()], keep_versions)
        stays = self._open | {folder for folder, (link, _) in self._links.items() if link in kept}
        keys = [entry.key for entry in self._list() if self._is_rubbish(entry.key, stays)]
        for key in sorted(keys, key=lambda key: (not key.endswith("/manifest"), key)):
            self._delete(key)
        self._links = {folder: known for folder, known in self._links.items() if folder in stays}
        return len(keys)

    def _delete(self, key: str) -> bool:
        return self.patience.call(lambda _: self.relay.delete(key))

    def _is_rubbish(self, key: str, stays: set[Folder]) -> bool:
        claimed = self.names.epoch_of(key)
        place = self.names.place_of(key)
        if claimed is not None:
            return claimed < self.epoch or (claimed > self.epoch and not self._is_claimed(claimed))
        return place is not None and place[0].version.epoch <= self.epoch and place[0] not in stays

    def _is_claimed(self, epoch: int) -> bool:
        """Whether a trainer signed this later claim. Those ahead of the clock go as well: they would count one day."""
        return not is_ahead(epoch, self._unix_s()) and self.read_record(self.names.claim(epoch), Claim) is not None

    def _list(self) -> Sequence[Entry]:
        return self.patience.call(lambda _: self.relay.list(self.names.run))


class Draft:
    """A link under way; see `ChainWriter.begin`. `push` may be called from several threads."""

    def __init__(self, writer: ChainWriter, folder: Folder, base: VersionId | None) -> None:
        self.folder = folder
        self._writer = writer
        self._base = base
        self._tensors = {tensor.name: index for index, tensor in enumerate(writer.tensors)}
        self._buckets: list[BucketEntry] = []
        self._pieces: list[PieceEntry] = []
        self._others: list[Part] = []
        self._next_bucket = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *error: object) -> None:
        self.abandon()

    def push(self, pieces: Sequence[Encoded]) -> int:
        """Put the payloads into the relay as one bucket; returns its size. Pieces that did not change take no room."""
        payloads = [piece.payload for piece in pieces if piece.payload]
        with self._lock:
            number = self._next_bucket
            self._next_bucket += 1
        bucket = self._put_bucket(number, payloads) if payloads else None
        with self._lock:
            index = len(self._buckets)
            if bucket is not None:
                self._buckets.append(bucket)
            self._pieces += self._entries(pieces, index)
        return bucket.size_bytes if bucket is not None else 0

    def _put_bucket(self, number: int, payloads: Sequence[bytes]) -> BucketEntry:
        writer = self._writer

        def trial(_: int) -> BucketEntry:
            key = writer.names.bucket(self.folder, writer.rank, number)
            return BucketEntry(key, writer.relay.put_new(key, payloads))

        return writer.patience.call(trial)

    def _entries(self, pieces: Iterable[Encoded], bucket: int) -> list[PieceEntry]:
        entries, offset = [], 0
        for piece in pieces:
            entries.append(
                PieceEntry(
                    self._tensors[piece.box.tensor],
                    piece.box.start,
                    piece.box.stop,
                    bucket if piece.payload else 0,
                    offset if piece.payload else 0,
                    len(piece.payload),
                    payload_hash(piece.payload) if piece.payload else b"",
                    piece.content_hash,
                    piece.base_hash,
                )
            )
            offset += len(piece.payload)
        return entries

    # Several ranks

    def part(self) -> Part:
        """What this rank has pushed."""
        with self._lock:
            return Part(self._writer.rank, list(self._buckets), list(self._pieces))

    def leave_part(self) -> None:
        """Leave the part in the relay, for the rank that commits; this rank is done with the draft."""
        writer = self._writer
        key = writer.names.part(self.folder, writer.rank)
        if not writer.put_record(key, self.part()):
            raise Fenced(f"another trainer wrote `{key}`", hint="stop one of the two trainers")
        writer._open.discard(self.folder)

    def collect_parts(self, ranks: Iterable[int], patience: Patience | None = None) -> None:
        """Wait until these ranks have left their parts, and take them. Raises Unavailable if one does not in time."""
        patience = patience or self._writer.patience
        for rank in sorted(set(ranks) - {self._writer.rank} - {part.rank for part in self._others}):
            self._others.append(patience.call(partial(self._part_of, rank)))

    def _part_of(self, rank: int, trial: int) -> Part:
        part = self._writer.read_record(self._writer.names.part(self.folder, rank), Part)
        if part is None:
            raise Unavailable(f"rank {rank} has not pushed its part of version {self.folder.version}")
        return part

    # The end

    def commit(self) -> Manifest:
        """Write the manifest: now the link exists. Raises Fenced if another trainer has taken over."""
        writer = self._writer
        manifest = check_manifest(self._manifest(), run=writer.names.run, expected=writer.tensors)
        writer.check_fence()
        key = writer.names.manifest(self.folder)
        if not writer.put_record(key, manifest):
            raise Fenced(f"another trainer wrote `{key}`", hint="stop one of the two trainers")
        writer._committed(self, manifest)
        return manifest

    def abandon(self) -> None:
        """Leave what was pushed to the next sweep; nothing if it is committed."""
        self._writer._open.discard(self.folder)

    def _manifest(self) -> Manifest:
        tensors = [TensorEntry(tensor.name, tensor.dtype, tensor.shape) for tensor in self._writer.tensors]
        buckets: list[BucketEntry] = []
        pieces: list[PieceEntry] = []
        for part in [self.part(), *self._others]:
            pieces += [_moved(piece, len(buckets)) for piece in part.pieces]
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
            pieces=pieces,
            version_hash=version_hash(tensors, pieces),
        )


def _moved(piece: PieceEntry, buckets: int) -> PieceEntry:
    return msgspec.structs.replace(piece, bucket=piece.bucket + buckets) if piece.length else piece
