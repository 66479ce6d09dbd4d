"""What a relay on an object store asks of the library, whether that is installed or not."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rose.weights.relay import object as object_relay
from rose.weights.relay.object import ObjectRelay
from rose.weights.relay.relay_base import KeyExists

KINDS = ("AlreadyExistsError", "PreconditionError", "PermissionDeniedError", "UnauthenticatedError", "GenericError")


class Library:
    """Takes what is put as the library does: buffers, one after the other, from wherever they lie."""

    def __init__(self) -> None:
        self.store = SimpleNamespace(from_url=lambda url, **options: url)
        self.put_buffers: dict[str, list] = {}

    def head(self, store, key):
        if key not in self.put_buffers:
            raise FileNotFoundError(key)
        return {"size": sum(len(buffer) for buffer in self.put_buffers[key])}

    def put(self, store, key, buffers, *, mode, use_multipart):
        assert mode == "create" and not use_multipart
        self.put_buffers[key] = list(buffers)


@pytest.fixture
def library(monkeypatch) -> Library:
    made = Library()
    base = type("BaseError", (Exception,), {})
    errors = SimpleNamespace(BaseError=base, **{name: type(name, (base,), {}) for name in KINDS})
    monkeypatch.setattr(object_relay, "_library", lambda: (made, errors))
    return made


def test_a_value_is_sent_from_where_it_lies(library):
    """A bucket is some hundred megabytes with a trainer's name on them: there is no room for it twice."""
    buffers = [b"12345", bytearray(b"678"), memoryview(b"\1\0\2\0").cast("H"), b""]
    assert ObjectRelay("s3://bucket").put_new("run/a", buffers) == 12
    sent = library.put_buffers["run/a"]
    assert b"".join(sent) == b"12345678\1\0\2\0"
    for buffer, buffer in zip(buffers, sent):
        there, here = np.frombuffer(buffer, np.uint8), np.frombuffer(buffer, np.uint8)
        assert here.ctypes.data == there.ctypes.data or not len(buffer)


def test_chunks_that_fail_send_nothing(library):
    def buffers():
        yield b"1"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        ObjectRelay("s3://bucket").put_new("run/a", buffers())
    assert not library.put_buffers


def test_what_is_there_is_not_even_sent(library):
    relay = ObjectRelay("s3://bucket")
    relay.put_new("run/a", [b"1"])
    with pytest.raises(KeyExists):
        relay.put_new("run/a", [b"2"])
    assert library.put_buffers["run/a"] == [b"1"]
