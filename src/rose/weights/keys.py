"""The keys of a run, all derived from one secret: the trainer's, and the lesser key of the workers.

The operator configures one secret, which the trainer and the relay server hold. Three keys are derived from it by
HKDF-SHA256: the Ed25519 key that signs records, and one key per role at the relay server (`reader`, `writer`). Workers
hold the *read key*: the reader's key and the public half of the signing key. Its holder can read the relay and verify
what the trainer signed. It cannot write, delete, claim or sign, and the secret cannot be computed from it.

    rose-read-<64 hex digits: the reader's key at the relay server><64 hex digits: the Ed25519 public key>

Wherever a secret is expected for reading, the text of a read key is accepted instead. Either is given as bytes, or lies
in the file that ROSE_RELAY_SECRET_FILE names, or in ROSE_RELAY_SECRET itself.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from rose.errors import ConfigError

SECRET, SECRET_FILE = "ROSE_RELAY_SECRET", "ROSE_RELAY_SECRET_FILE"  # environment variables
KEY_BYTES = 32
SIGNATURE_BYTES = 64
SECRET_BYTES_MIN = 16  # 128 bits if they are random
DIFFERENT_BYTES_MIN = 8  # fewer are not random: 16 random hex digits have 10 different ones on average
_READ_KEY = re.compile(rb"rose-read-([0-9a-f]{64})([0-9a-f]{64})")
_READ_KEY_BEGINS = b"rose-read-"
_MAKE_ONE = "make one with: openssl rand -hex 32"


@dataclass(frozen=True, slots=True)
class ReadKey:
    """The keys of a worker: `relay` authenticates it at the relay server, `public` verifies signatures."""

    relay: bytes
    public: bytes

    def text(self) -> str:
        return f"{_READ_KEY_BEGINS.decode()}{self.relay.hex()}{self.public.hex()}"

    def is_signed(self, signature: bytes, message: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(self.public).verify(signature, message)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class WriteKey:
    """The keys that the trainer and the relay server derive from the secret."""

    relay: bytes
    signing: Ed25519PrivateKey
    read: ReadKey


@lru_cache(maxsize=16)  # every record and connection asks again
def write_key(secret: bytes) -> WriteKey:
    """Derive all keys of the secret. Raises ConfigError for a read key or a weak secret."""
    if is_read_key(secret):
        raise ConfigError(
            "a read key can neither publish, claim, delete nor serve a relay",
            hint="give the trainer and the relay server the run's secret; read keys are for workers",
        )
    check_secret(secret)
    signing = Ed25519PrivateKey.from_private_bytes(_derived(secret, b"signing"))
    read = ReadKey(_derived(secret, b"relay reader"), signing.public_key().public_bytes_raw())
    return WriteKey(_derived(secret, b"relay writer"), signing, read)


@lru_cache(maxsize=16)
def read_key(secret: bytes) -> ReadKey:
    """Return the read key of a secret, or the one that the text is. Raises ConfigError."""
    if not is_read_key(secret):
        return write_key(secret).read
    match = _READ_KEY.fullmatch(secret)
    if match is None:
        raise ConfigError("the read key is damaged", hint="print it again with: rose relay key --secret-file FILE")
    return ReadKey(*(bytes.fromhex(part.decode()) for part in match.groups()))


def is_read_key(secret: bytes) -> bool:
    return secret.startswith(_READ_KEY_BEGINS)


def for_reading(secret: bytes) -> bytes:
    """Reduce a secret to the text of its read key, so that a worker keeps no more power than it needs."""
    return read_key(secret).text().encode()


def check_secret(secret: bytes) -> bytes:
    """Return the secret, or the text of a read key. Raises ConfigError for one that can be guessed."""
    if is_read_key(secret):
        read_key(secret)
        return secret
    if len(secret) < SECRET_BYTES_MIN:
        what = f"the run's secret has {len(secret)} bytes; at least {SECRET_BYTES_MIN} are needed"
        raise ConfigError(what, hint=_MAKE_ONE)
    is_repeated = secret in (secret + secret)[1:-1]
    if len(set(secret)) < DIFFERENT_BYTES_MIN or is_repeated:
        raise ConfigError("the run's secret is not random: it repeats a few characters", hint=_MAKE_ONE)
    return secret


def run_secret(secret: bytes | None = None, file: Path | str | None = None) -> bytes:
    """Return the run's secret or its read key: the argument, a file's, or the environment's. Raises ConfigError."""
    if secret is not None:
        return check_secret(secret)
    path = file or os.environ.get(SECRET_FILE)
    if path:
        try:
            return check_secret(Path(path).read_bytes().strip())
        except OSError as error:
            hint = f"make one with: openssl rand -hex 32 > {path}"
            raise ConfigError(f"the run's secret in {path} cannot be read: {error.strerror}", hint=hint) from error
    if os.environ.get(SECRET):
        return check_secret(os.fsencode(os.environ[SECRET].strip()))
    raise ConfigError(
        "the run's secret is not known here",
        hint=f"set {SECRET} or {SECRET_FILE}: for the trainer to a secret (openssl rand -hex 32), for workers to the "
        "read key that `rose relay key` prints",
    )


def _derived(secret: bytes, label: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=b"rose-weights-2 " + label).derive(secret)
