"""The manifest of a link: everything a receiver must know before it touches a byte, signed by the trainer.

It says which weights these are (run, epoch, version), what they start from, which tensors there are, where every piece
lies, and how the bytes and the numbers of each piece hash. It is written after everything it names, so that its
appearance is the commit of a version.

    ROSE2 <64 bytes: Ed25519 signature> <32 bytes: SHA-256 of the body> <body: msgpack>

The signature covers the key under which a record lies and the hash of its body. So no record can be passed off as
another one, and a reader that holds only the public key verifies the head before it reads or decodes the body.
Payloads are held to a SHA-256, since they come from a relay that other programs may write to; the numbers they
lead to are held to XXH3, which is ten times faster and has only mistakes to find.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec import Meta

from rose.bounds import ITEMS_MAX, Count, Label, Name, Serial
from rose.core.versions import Link, VersionId
from rose.errors import RequestRefused, Unavailable
from rose.weights.chain import ATTEMPT_MAX, EPOCH_MAX, VERSION_MAX
from rose.weights.coding import BITS, Bits, Payload
from rose.weights.decoding import Undecodable, decode_msgpack
from rose.weights.keys import SIGNATURE_BYTES, read_key, write_key
from rose.weights.relay.base import KEY_CHARACTERS_MAX, KeyMissing, Relay
from rose.weights.shards import ITEM_BYTES, Box, Tensor, check_cover

FORMAT = 2
MAGIC = b"ROSE2"
EARLIER_MAGIC = b"ROSE1"  # sealed by an HMAC of the run's secret, which every worker had to hold
HASH_BYTES = 32
HEAD_BYTES = len(MAGIC) + SIGNATURE_BYTES + HASH_BYTES
RECORD_BYTES_MAX = 256 << 20  # about a million pieces
FIRST_READ_BYTES = 64 << 10  # read before the signature is verified; most records are shorter
DIMENSIONS_MAX = 8
PIECES_MAX = 1 << 20
VERSION_BYTES_MAX = 1 << 44  # 16 TiB of dense weights; more is a mistake, and is refused before memory is taken for it

Record = TypeVar("Record", bound=msgspec.Struct)
Epoch = Annotated[int, Meta(ge=0, le=EPOCH_MAX)]
Version = Annotated[int, Meta(ge=0, le=VERSION_MAX)]
Place = Annotated[tuple[Serial, ...], Meta(max_length=DIMENSIONS_MAX)]
Digest = Annotated[bytes, Meta(max_length=HASH_BYTES)]


class WeightsRefused(RequestRefused):
    """A version that must not be used, or not from here: forged, damaged, of another run, or not fitting."""


class Fenced(WeightsRefused):
    """Another trainer has taken over this run; what this one publishes is ignored."""


class PieceEntry(msgspec.Struct, frozen=True, array_like=True):
    """One piece: which box of which tensor, where its payload lies, and what it must come to."""

    tensor: Count  # in `Manifest.tensors`
    start: Place
    stop: Place
    bucket: Count  # in `Manifest.buckets`; of no meaning if the length is 0
    offset: Serial
    length: Serial  # 0 if nothing changed
    payload_hash: Digest
    content_hash: Digest
    base_hash: Digest  # empty in an anchor


class BucketEntry(msgspec.Struct, frozen=True, array_like=True):
    key: Annotated[str, Meta(max_length=KEY_CHARACTERS_MAX)]
    size_bytes: Serial


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    name: Name
    dtype: Annotated[str, Meta(pattern="^(BF16|F16|F32)$")]
    shape: Place


Buckets = Annotated[list[BucketEntry], Meta(max_length=PIECES_MAX)]
Pieces = Annotated[list[PieceEntry], Meta(max_length=PIECES_MAX)]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Count
    run: Name
    epoch: Epoch
    version: Version
    attempt: Annotated[int, Meta(ge=0, le=ATTEMPT_MAX)]
    base: tuple[Epoch, Version] | None  # epoch and version; None is an anchor
    codec: Label
    tensors: Annotated[list[TensorEntry], Meta(max_length=ITEMS_MAX)]
    buckets: Buckets
    pieces: Pieces
    version_hash: Label

    @property
    def id(self) -> VersionId:
        return VersionId(self.epoch, self.version)

    @property
    def base_id(self) -> VersionId | None:
        return None if self.base is None else VersionId(*self.base)

    @property
    def kind(self) -> str:
        return "anchor" if self.base is None else "delta"

    def size_bytes(self) -> int:
        return sum(bucket.size_bytes for bucket in self.buckets)

    def link(self) -> Link:
        return Link(self.id, self.base_id, self.size_bytes(), self.attempt)

    def boxes(self) -> list[Box]:
        return [Box(self.tensors[piece.tensor].name, piece.start, piece.stop) for piece in self.pieces]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank of the trainer contributes to a link, for the rank that writes the manifest."""

    rank: Count
    buckets: Buckets
    pieces: Pieces  # with `bucket` counted within this part


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer's claim on an epoch: the trainer that wrote it first has the epoch. `at_s` is seconds since 1970."""

    run: Name
    epoch: Epoch
    owner: Label
    at_s: Serial


_DECODERS: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Manifest, Part, Claim)
}


def seal(secret: bytes, key: str, record: msgspec.Struct) -> bytes:
    """Return the record as it lies in the relay under this key, signed. Raises ConfigError for a read key."""
    body = msgspec.msgpack.encode(record)
    hashed = hashlib.sha256(body).digest()
    return MAGIC + write_key(secret).sign(_signed(key, hashed)) + hashed + body


def unseal(secret: bytes, key: str, data: Payload, kind: type[Record]) -> Record:
    """Return the record if the trainer signed it for this key; a read key is enough. Raises WeightsRefused."""
    hashed = check_head(secret, key, data)
    body = memoryview(data)[HEAD_BYTES:]
    if not hmac.compare_digest(hashlib.sha256(body).digest(), hashed):
        raise WeightsRefused(f"`{key}` is damaged: its bytes are not those that were signed")
    try:
        found: Record = decode_msgpack(_DECODERS[kind], body)
    except Undecodable as error:
        what = f"`{key}` is signed but unreadable: {error}"
        raise WeightsRefused(what, hint="run the same ROSE on both sides") from error
    return found


def check_head(secret: bytes, key: str, data: Payload) -> bytes:
    """Verify the signature in the first bytes of a record and return the hash of its body. Raises WeightsRefused."""
    head = bytes(memoryview(data)[:HEAD_BYTES])
    if head.startswith(EARLIER_MAGIC):
        raise WeightsRefused(
            f"`{key}` was written by an earlier ROSE, which did not sign", hint="publish again with this version"
        )
    if len(head) < HEAD_BYTES or not head.startswith(MAGIC):
        raise WeightsRefused(f"`{key}` is not a record of ROSE, or of another version of it")
    signature, hashed = head[len(MAGIC) : -HASH_BYTES], head[-HASH_BYTES:]
    if not read_key(secret).is_signed(signature, _signed(key, hashed)):
        raise WeightsRefused(
            f"the signature of `{key}` is wrong: it was written by a stranger, for another key, or it is damaged",
            hint="give workers the read key of the trainer's secret: rose relay key",
        )
    return hashed


def read_signed(relay: Relay, secret: bytes, key: str, size_bytes: int, kind: type[Record]) -> Record:
    """Read and verify the record of this size. Nothing beyond its first bytes is read before its signature is right.

    Raises WeightsRefused, KeyMissing, Unavailable.
    """
    if size_bytes > RECORD_BYTES_MAX:
        raise WeightsRefused(f"`{key}` has {size_bytes:,} bytes; a record has at most {RECORD_BYTES_MAX:,}")
    try:
        data = relay.get(key, 0, min(size_bytes, FIRST_READ_BYTES))
        check_head(secret, key, data)
        if size_bytes > FIRST_READ_BYTES:
            data = b"".join([data, relay.get(key, FIRST_READ_BYTES, size_bytes)])
    except (KeyMissing, WeightsRefused, Unavailable):
        raise
    except RequestRefused as error:  # it is shorter than the listing said
        raise WeightsRefused(error.what) from error
    return unseal(secret, key, data, kind)


def size_in(relay: Relay, key: str) -> int:
    """Return the size of a value as the relay lists it. Raises KeyMissing, Unavailable."""
    folder = key.rpartition("/")[0]
    for entry in relay.list(folder):
        if entry.key == key:
            return entry.size_bytes
    raise KeyMissing(key)


def check_manifest(manifest: Manifest, *, run: str, expected: Sequence[Tensor] | None) -> Manifest:
    """Refuse what is sealed and still not ours to use: another run, other tensors, pieces that do not add up."""
    if manifest.format != FORMAT:
        raise WeightsRefused(f"a manifest of format {manifest.format}; this ROSE reads {FORMAT}")
    if manifest.run != run:
        raise WeightsRefused(f"a manifest of run `{manifest.run}` lies among those of `{run}`")
    tensors = [Tensor(entry.name, entry.shape, entry.dtype) for entry in manifest.tensors]
    dense_bytes = sum(math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in tensors)
    if dense_bytes > VERSION_BYTES_MAX:
        raise WeightsRefused(
            f"version {manifest.id} has {dense_bytes:,} bytes; at most {VERSION_BYTES_MAX:,} are taken"
        )
    if expected is not None:
        _check_tensors(tensors, expected)
    for piece in manifest.pieces:
        _check_piece(manifest, piece)
    check_cover(tensors, manifest.boxes())
    if manifest.version_hash != version_hash(manifest.tensors, manifest.pieces):
        raise WeightsRefused(f"the hash of version {manifest.id} is not that of its pieces")
    return manifest


def _check_tensors(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    theirs = {tensor.name: tensor for tensor in tensors}
    for ours in expected:
        found = theirs.get(ours.name)
        if found is None:
            raise WeightsRefused(
                f"the published weights lack `{ours.name}`", hint="trainer and workers run different models"
            )
        if found != ours:
            theirs_is, ours_is = f"{found.dtype}{list(found.shape)}", f"{ours.dtype}{list(ours.shape)}"
            raise WeightsRefused(
                f"`{ours.name}` is {theirs_is} as published and {ours_is} here",
                hint="trainer and workers run different models",
            )


def _check_piece(manifest: Manifest, piece: PieceEntry) -> None:
    is_known = 0 <= piece.tensor < len(manifest.tensors) and piece.offset >= 0 and piece.length >= 0
    if is_known and piece.length:
        is_known = 0 <= piece.bucket < len(manifest.buckets)
        is_known = is_known and piece.offset + piece.length <= manifest.buckets[piece.bucket].size_bytes
    if is_known and not piece.length:
        is_known = bool(piece.base_hash) and piece.base_hash == piece.content_hash
    if not is_known or bool(piece.base_hash) != (manifest.base is not None):
        raise WeightsRefused(f"a piece of version {manifest.id} is not where its manifest says")


def payload_hash(payload: Payload) -> bytes:
    return hashlib.sha256(payload).digest()


def content_hash(bits: Bits, dtype: str) -> bytes:
    """Of the numbers of one piece; they lie in one block of memory."""
    assert bits.dtype == BITS[dtype] and bits.flags.c_contiguous
    little = bits if np.little_endian else bits.byteswap()
    return xxhash.xxh3_128_digest(little.reshape(-1).view(np.uint8).data)


def version_hash(tensors: Sequence[TensorEntry], pieces: Sequence[PieceEntry]) -> str:
    """One word for all the weights of a version, whichever link led to it."""
    lines = sorted((tensors[p.tensor].name, tensors[p.tensor].dtype, p.start, p.stop, p.content_hash) for p in pieces)
    return hashlib.sha256(msgspec.msgpack.encode(lines)).hexdigest()[:32]


def _signed(key: str, hashed: bytes) -> bytes:
    return b"%s\n%s\n%s" % (MAGIC, key.encode(), hashed)
