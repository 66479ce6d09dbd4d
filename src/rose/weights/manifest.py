"""The manifest of a version record: what a receiver must know before it touches a byte, signed by the trainer.

It says which weights these are (run, epoch, version), what they start from, which tensors there are, where every chunk
lies, and how the bytes and the numbers of each chunk hash. It is written after everything it names, so its appearance
is the commit of a version.

    ROSE2 <64 bytes: Ed25519 signature> <32 bytes: SHA-256 of the body> <body: msgpack>

The signature covers the key under which a record lies and the hash of its body. So no record can be passed off as
another one, and a reader with only the public key verifies the head before it reads or decodes the body. Payloads are
checked by SHA-256, since other programs may write to a relay; the numbers they lead to by XXH3, which is ten times
faster and has only mistakes to find.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec import Meta

from rose.bounds import ITEMS_MAX, UNREADABLE, Count, Label, Name, Serial
from rose.core.versions import VersionId, VersionRecord
from rose.errors import RequestRefused, Unavailable
from rose.models.tensors import open_tensors
from rose.weights.chain import ATTEMPT_MAX, EPOCH_MAX, VERSION_MAX
from rose.weights.coding import BITS, Bits, Payload
from rose.weights.keys import SIGNATURE_BYTES, read_key, write_key
from rose.weights.relay.relay_base import KEY_CHARACTERS_MAX, Buffer, KeyMissing, Relay
from rose.weights.shards import Tensor, TensorRegion, check_cover

FORMAT = 2
MAGIC = b"ROSE2"
EARLIER_MAGIC = b"ROSE1"  # sealed by an HMAC of the run's secret, which every worker had to hold
HASH_BYTES = 32
HEAD_BYTES = len(MAGIC) + SIGNATURE_BYTES + HASH_BYTES
RECORD_BYTES_MAX = 256 << 20  # about a million chunks
FIRST_READ_BYTES = 64 << 10  # read before the signature is verified; most records are shorter
DIMENSIONS_MAX = 8
CHUNKS_MAX = 1 << 20
VERSION_BYTES_MAX = 1 << 44  # 16 TiB of dense weights; more is a mistake, and is refused before memory is taken for it

Signed = TypeVar("Signed", bound=msgspec.Struct)
Epoch = Annotated[int, Meta(ge=0, le=EPOCH_MAX)]
Version = Annotated[int, Meta(ge=0, le=VERSION_MAX)]
Place = Annotated[tuple[Serial, ...], Meta(max_length=DIMENSIONS_MAX)]
Digest = Annotated[bytes, Meta(max_length=HASH_BYTES)]
Get = Callable[[str, int, int], Buffer]


class WeightsRefused(RequestRefused):
    """A version that must not be used, or not from here: forged, damaged, of another run, or not fitting."""


class Fenced(WeightsRefused):
    """Another trainer has taken over this run; what this one publishes is ignored."""


class ChunkEntry(msgspec.Struct, frozen=True, array_like=True):
    """The region of a tensor, the place of its payload, and the hashes of bytes and numbers."""

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


Buckets = Annotated[list[BucketEntry], Meta(max_length=CHUNKS_MAX)]
ChunkEntries = Annotated[list[ChunkEntry], Meta(max_length=CHUNKS_MAX)]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"chunks": "pieces"}):
    format: Count
    run: Name
    epoch: Epoch
    version: Version
    attempt: Annotated[int, Meta(ge=0, le=ATTEMPT_MAX)]
    base: tuple[Epoch, Version] | None  # epoch and version; None is an anchor
    codec: Label
    tensors: Annotated[list[TensorEntry], Meta(max_length=ITEMS_MAX)]
    buckets: Buckets
    chunks: ChunkEntries
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

    def version_record(self) -> VersionRecord:
        return VersionRecord(self.id, self.base_id, self.size_bytes(), self.attempt)

    def logical_tensors(self) -> list[Tensor]:
        return [Tensor(entry.name, entry.shape, entry.dtype) for entry in self.tensors]

    def regions(self) -> list[TensorRegion]:
        return [TensorRegion(self.tensors[chunk.tensor].name, chunk.start, chunk.stop) for chunk in self.chunks]


class RankManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"chunks": "pieces"}):
    """The contribution of one trainer rank to a record, for the rank that writes the manifest."""

    rank: Count
    buckets: Buckets
    chunks: ChunkEntries  # with `bucket` counted within this part


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer's claim on an epoch: the trainer that wrote it first has the epoch. `at_s` is seconds since 1970."""

    run: Name
    epoch: Epoch
    owner: Label
    at_s: Serial


_DECODERS: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Manifest, RankManifest, Claim)
}


def seal(secret: bytes, key: str, record: msgspec.Struct) -> bytes:
    """Return the record as it lies in the relay under this key, signed. Raises ConfigError for a read key."""
    body = msgspec.msgpack.encode(record)
    hashed = hashlib.sha256(body).digest()
    return MAGIC + write_key(secret).signing.sign(_signed(key, hashed)) + hashed + body


def unseal(secret: bytes, key: str, data: Payload, kind: type[Signed]) -> Signed:
    """Return the record if the trainer signed it for this key; a read key is enough. Raises WeightsRefused."""
    hashed = check_head(secret, key, data)
    body = memoryview(data)[HEAD_BYTES:]
    if not hmac.compare_digest(hashlib.sha256(body).digest(), hashed):
        raise WeightsRefused(f"`{key}` is damaged: its bytes are not those that were signed")
    try:
        record: Signed = _DECODERS[kind].decode(body)
    except UNREADABLE as error:
        what = f"`{key}` is signed but unreadable: {error}"
        raise WeightsRefused(what, hint="run the same ROSE on both sides") from error
    return record


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


def read_signed(get: Get, secret: bytes, key: str, size_bytes: int, kind: type[Signed]) -> Signed:
    """Read and verify the record of this size. Nothing beyond its first bytes is read before its signature is right.

    Raises WeightsRefused, KeyMissing, Unavailable.
    """
    if size_bytes > RECORD_BYTES_MAX:
        raise WeightsRefused(f"`{key}` has {size_bytes:,} bytes; a record has at most {RECORD_BYTES_MAX:,}")
    try:
        data = get(key, 0, min(size_bytes, FIRST_READ_BYTES))
        check_head(secret, key, data)
        if size_bytes > FIRST_READ_BYTES:
            data = b"".join([data, get(key, FIRST_READ_BYTES, size_bytes)])
    except (KeyMissing, WeightsRefused, Unavailable):
        raise
    except RequestRefused as error:  # it is shorter than the listing said
        raise WeightsRefused(error.what) from error
    return unseal(secret, key, data, kind)


def size_in(relay: Relay, key: str) -> int:
    """Return the size of a value as the relay lists it. Raises KeyMissing, Unavailable."""
    for entry in relay.list(key.rpartition("/")[0]):
        if entry.key == key:
            return entry.size_bytes
    raise KeyMissing(key)


def check_manifest(manifest: Manifest, *, run: str, expected: Sequence[Tensor] | None) -> Manifest:
    """Return a signed manifest, or raise: another format, run or model, or chunks that do not add up."""
    if manifest.format != FORMAT:
        raise WeightsRefused(f"a manifest of format {manifest.format}; this ROSE reads {FORMAT}")
    if manifest.run != run:
        raise WeightsRefused(f"a manifest of run `{manifest.run}` lies among those of `{run}`")
    tensors = manifest.logical_tensors()
    dense_bytes = sum(tensor.size_bytes for tensor in tensors)
    if dense_bytes > VERSION_BYTES_MAX:
        raise WeightsRefused(
            f"version {manifest.id} has {dense_bytes:,} bytes; at most {VERSION_BYTES_MAX:,} are taken"
        )
    published, hint = {tensor.name: tensor for tensor in tensors}, "trainer and workers run different models"
    for ours in expected or ():
        theirs = published.get(ours.name)
        if theirs is None:
            raise WeightsRefused(f"the published weights lack `{ours.name}`", hint=hint)
        if theirs != ours:
            types = f"{theirs.dtype}{list(theirs.shape)} as published and {ours.dtype}{list(ours.shape)} here"
            raise WeightsRefused(f"`{ours.name}` is {types}", hint=hint)
    for chunk in manifest.chunks:
        is_sound = chunk.tensor < len(manifest.tensors) and bool(chunk.base_hash) == (manifest.base is not None)
        if chunk.length:
            is_sound = is_sound and chunk.bucket < len(manifest.buckets)
            is_sound = is_sound and chunk.offset + chunk.length <= manifest.buckets[chunk.bucket].size_bytes
        else:
            is_sound = is_sound and bool(chunk.base_hash) and chunk.base_hash == chunk.content_hash
        if not is_sound:
            raise WeightsRefused(f"a chunk of version {manifest.id} is not where its manifest says")
    check_cover(tensors, manifest.regions())
    if manifest.version_hash != version_hash(manifest.tensors, manifest.chunks):
        raise WeightsRefused(f"the hash of version {manifest.id} is not that of its chunks")
    return manifest


def payload_hash(payload: Payload) -> bytes:
    return hashlib.sha256(payload).digest()


def content_hash(bits: Bits, dtype: str) -> bytes:
    """Return the hash of a chunk's numbers, which are contiguous."""
    assert bits.dtype == BITS[dtype] and bits.flags.c_contiguous
    little = bits if np.little_endian else bits.byteswap()
    return xxhash.xxh3_128_digest(little.reshape(-1).view(np.uint8).data)


def version_hash(tensors: Sequence[TensorEntry], chunks: Sequence[ChunkEntry]) -> str:
    """Return one hash for all the weights of a version, equal for every record that leads to it."""
    lines = sorted((tensors[c.tensor].name, tensors[c.tensor].dtype, c.start, c.stop, c.content_hash) for c in chunks)
    return hashlib.sha256(msgspec.msgpack.encode(lines)).hexdigest()[:32]


def folder_hash(folder: Path | str) -> str:
    """Return the hash of a model folder, comparable with `version_hash`. Reads all weights. Raises ModelError.

    A relay's version may be cut into chunks, a folder never is: the hashes are equal for models without a tensor of
    more than `publish.CHUNK_ELEMENTS_MAX` numbers.
    """
    tensors = open_tensors(folder)
    entries = [TensorEntry(name, tensors.dtype(name), tensors.shape(name)) for name in sorted(tensors.names())]
    chunks = []
    for index, entry in enumerate(entries):
        numbers = tensors.bits16(entry.name) if entry.dtype == "BF16" else tensors.float32(entry.name)
        bits = np.ascontiguousarray(numbers.astype(np.float16) if entry.dtype == "F16" else numbers)
        digest = content_hash(bits.view(BITS[entry.dtype]), entry.dtype)
        chunks.append(ChunkEntry(index, (0,) * len(entry.shape), entry.shape, 0, 0, 0, b"", digest, b""))
    return version_hash(entries, chunks)


def _signed(key: str, hashed: bytes) -> bytes:
    return b"%s\n%s\n%s" % (MAGIC, key.encode(), hashed)
