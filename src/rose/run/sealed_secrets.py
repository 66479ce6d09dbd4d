"""Secrets on their way to a process that has shown nothing but a public key.

The receiver makes a key pair for this one use and keeps the private half in memory. The sender makes another, and
encrypts by the key that both halves give (X25519, HKDF-SHA256, ChaCha20-Poly1305). So what carries the message, and
whatever shows or keeps it, sees random bytes. It is not proof against a carrier that puts its own public key in place
of the receiver's: such a carrier must be one that could read the receiver's memory anyway, as a cluster's own scheduler
can.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Meta

from rose.bounds import Name, Text
from rose.errors import RequestRefused

PUBLIC_BYTES = 32
NONCE = bytes(12)  # a key seals one message only
_decoder = msgspec.json.Decoder(Annotated[dict[Name, Text], Meta(max_length=64)])


class SecretReceiver:
    """The receiving end: give `public` to the sender."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def unseal(self, sealed: bytes) -> dict[str, str]:
        """Return the secrets by variable. Raises RequestRefused if they were sealed for another or altered."""
        sender, message = sealed[:PUBLIC_BYTES], sealed[PUBLIC_BYTES:]
        try:
            cipher = _cipher(self._private, sender, sender + self.public)
            return _decoder.decode(cipher.decrypt(NONCE, message, None))
        except (InvalidTag, ValueError, msgspec.MsgspecError) as error:
            raise RequestRefused("these secrets were sealed for another process, or were altered") from error


def seal(secrets: Mapping[str, str], public: bytes) -> bytes:
    """Return the secrets, readable only for the receiver that has made this public key."""
    private = X25519PrivateKey.generate()
    sender = private.public_key().public_bytes_raw()
    return sender + _cipher(private, public, sender + public).encrypt(NONCE, msgspec.json.encode(dict(secrets)), None)


def _cipher(private: X25519PrivateKey, peer: bytes, both: bytes) -> ChaCha20Poly1305:
    shared = private.exchange(X25519PublicKey.from_public_bytes(peer))
    return ChaCha20Poly1305(HKDF(SHA256(), length=32, salt=None, info=b"rose sealed secrets 1 " + both).derive(shared))
