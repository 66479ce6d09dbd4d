"""The key in an Authorization header: bearer tokens, passwords of HTTP Basic, and what cannot be read."""

from __future__ import annotations

import base64

import pytest

from rose.api.authorization import key_of_header


def basic(credentials: bytes) -> str:
    return f"Basic {base64.b64encode(credentials).decode()}"


@pytest.mark.parametrize(
    "header, key",
    [
        ("Bearer abc", b"abc"),
        ("bearer  abc ", b"abc"),
        ("Bearer abc/s p", b"abc/s p"),
        ("Bearer \udcff", b"\xff"),
        (basic(b":abc"), b"abc"),
        (basic(b"user:abc"), b"abc"),
        (basic(b"user:a:b"), b"a:b"),
        (basic(b":\xff"), b"\xff"),
        (basic(b"abc"), b""),
        (basic(b"abc:"), b""),
        ("Basic abc", b""),
        ("Basic \udcff", b""),
        ("Basic Om Fi", b""),
        ("Basic", b""),
        ("Bearer", b""),
        ("Digest abc", b""),
        ("abc", b""),
        ("", b""),
    ],
)
def test_the_key_of_a_header(header: str, key: bytes) -> None:
    assert key_of_header(header) == key
