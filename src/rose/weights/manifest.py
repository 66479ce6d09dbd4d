"""The manifest of a link: everything a receiver must know before it touches a byte, sealed by the run's secret.

It says which weights these are (run, epoch, version), what they start from, which tensors there are, where every piece
lies, and how the bytes and the numbers of each piece hash. It is written after everything it names, so that its
appearance is the commit of a version.

    ROSE1 <32 bytes: HMAC-SHA256 of the key and the body> <body: msgpack>

The seal covers the key under which a record lies, so no record can be passed off as another one, and it is checked
before anything is decoded. Payloads are held to a SHA-256, since they come from a relay that anybody on its network
may reach; the numbers they lead to are held to XXH3, which is ten times faster and has only mistakes to find.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from rose.core.versions import Link, VersionId
from rose.errors import RequestRefused
from rose.weights.coding import BITS, Bits, Payload
from rose.weights.shards import Box, Tensor, check_cover

FORMAT = 1
MAGIC = b"ROSE1"
SEAL_BYTES = 32
RECORD_BYTES_MAX = 256 << 20  # about a million pieces

Record = TypeVar("Record", bound=msgspec.Struct)


class WeightsRefused(RequestRefused):
    """A version that must not be used, or not from here: forged, damaged, of another run, or not fitting."""


class Fenced(WeightsRefused):
    """Another trainer has taken over this run; what this one publishes is ignored."""


class PieceEntry(msgspec.Struct, frozen=True, array_like=True):
    """One piece: which box of which tensor, where its payload lies, and what it must come to."""

    tensor: int  # in `Manifest.tensors`
    start: tuple[int, ...]
    stop: tuple[int, ...]
    bucket: int  # in `Manifest.buckets`; of no meaning if the length is 0
    offset: int
    length: int  # 0 if nothing changed
    payload_hash: bytes
    content_hash: bytes
    base_hash: bytes  # empty in an anchor


class BucketEntry(msgspec.Struct, frozen=True, array_like=True):
    key: str
    size_bytes: int


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    run: str
    epoch: int
    version: int
    attempt: int
    base: tuple[int, int] | None  # epoch and version; None is an anchor
    codec: str
    tensors: list[TensorEntry]
    buckets: list[BucketEntry]
    pieces: list[PieceEntry]
    version_hash: str

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

    rank: int
    buckets: list[BucketEntry]
    pieces: list[PieceEntry]  # with `bucket` counted within this part


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer's mark on an epoch: whoever wrote it first has it."""

    run: str
    epoch: int
    owner: str


def seal(secret: bytes, key: str, record: msgspec.Struct) -> bytes:
    """The record as it lies in the relay under this key."""
    body = msgspec.msgpack.encode(record)
    return MAGIC + _seal_of(secret, key, body) + body


def unseal(secret: bytes, key: str, data: Payload, kind: type[Record]) -> Record:
    """The record, if it was sealed with this secret for this key. Raises WeightsRefused."""
    data = memoryview(data)
    body = data[len(MAGIC) + SEAL_BYTES :]
    if bytes(data[: len(MAGIC)]) != MAGIC or len(data) > RECORD_BYTES_MAX:
        raise WeightsRefused(f"`{key}` is not a record of ROSE, or of another version of it")
    if not hmac.compare_digest(data[len(MAGIC) : len(MAGIC) + SEAL_BYTES], _seal_of(secret, key, body)):
        raise WeightsRefused(
            f"the seal of `{key}` is wrong: it was written by a stranger, for another key, or it is damaged",
            hint="give the trainer and the workers the same secret",
        )
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise WeightsRefused(
            f"`{key}` is sealed but unreadable: {error}", hint="run the same ROSE on both sides"
        ) from error


def check_manifest(manifest: Manifest, *, run: str, expected: Sequence[Tensor] | None) -> Manifest:
    """Refuse what is sealed and still not ours to use: another run, other tensors, pieces that do not add up."""
    if manifest.format != FORMAT:
        raise WeightsRefused(f"a manifest of format {manifest.format}; this ROSE reads {FORMAT}")
    if manifest.run != run:
        raise WeightsRefused(f"a manifest of run `{manifest.run}` lies among those of `{run}`")
    tensors = [Tensor(entry.name, entry.shape, entry.dtype) for entry in manifest.tensors]
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


def _seal_of(secret: bytes, key: str, body: Any) -> bytes:
    seal = hmac.new(secret, f"{MAGIC.decode()}\n{key}\n".encode(), "sha256")
    seal.update(body)
    return seal.digest()
