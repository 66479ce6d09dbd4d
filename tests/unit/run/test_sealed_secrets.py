"""Secrets that only the process with the private key can read."""

from __future__ import annotations

import pytest

from rose.errors import RequestRefused
from rose.run.sealed_secrets import PUBLIC_BYTES, SecretReceiver, seal

SECRETS = {"ROSE_WORKER_TOKEN": "for-workers", "ROSE_RELAY_SECRET": "rose-read-0123"}


def test_the_receiver_reads_what_was_sealed_for_it() -> None:
    receiver = SecretReceiver()
    assert receiver.unseal(seal(SECRETS, receiver.public)) == SECRETS
    assert receiver.unseal(seal({}, receiver.public)) == {}


def test_what_travels_shows_no_secret_and_is_never_the_same() -> None:
    receiver = SecretReceiver()
    one, other = seal(SECRETS, receiver.public), seal(SECRETS, receiver.public)
    assert one != other
    assert not any(text.encode() in one for pair in SECRETS.items() for text in pair)


@pytest.mark.parametrize("place", [0, PUBLIC_BYTES, -1])
def test_altered_secrets_are_refused(place: int) -> None:
    receiver = SecretReceiver()
    sealed = bytearray(seal(SECRETS, receiver.public))
    sealed[place] ^= 1
    with pytest.raises(RequestRefused):
        receiver.unseal(bytes(sealed))


@pytest.mark.parametrize("sealed", [b"", b"x" * 10, b"\0" * 64])
def test_what_is_no_message_is_refused(sealed: bytes) -> None:
    with pytest.raises(RequestRefused):
        SecretReceiver().unseal(sealed)


def test_another_process_cannot_read_them() -> None:
    with pytest.raises(RequestRefused):
        SecretReceiver().unseal(seal(SECRETS, SecretReceiver().public))
