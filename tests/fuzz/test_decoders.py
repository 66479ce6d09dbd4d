"""Only stated errors escape from anything that decodes bytes from outside. `make fuzz` looks for more by coverage."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.fuzz.decoders import TARGETS, try_one

# Inputs that once let another error out.
ROWS = [
    ("worker-messages", bytes.fromhex("0091828474797065a442656174a3776879a2fffe")),
    ("worker-messages", b"\0\x91\x82\xa4type\xa4Beat\xa3why\xa2\xff\xfe"),
    ("worker-messages", b"\0\x91\x82\xa4type\xa4Beat\xa3zzz" + b"\x91" * 2000 + b"\xc0"),
    ("gateway-messages", b"\0\x91\x82\xa4type\xa5Leave\xa3why\xa2\xff\xfe"),
    ("gateway-messages", b"\0\x91\x82\xa4type\xa5Leave\xa3zzz" + b"\x91" * 2000 + b"\xc0"),
    ("engine-messages", b"\0\x82\xa4type\xa6Cancel\xaarequest_id\xa2\xff\xfe"),
    ("relay-responses", b'\0{"error":{"message":"\xff\xfe"}}'),
    ("relay-responses", b'\0{"zzz":' + b"[" * 2000),
    ("manifests", b"\0\x81\xa3run\xa2\xff\xfe"),
    ("manifests", b"\0\x81\xa3zzz" + b"\x91" * 2000 + b"\xc0"),
    ("ledger-rows", b"\0\x93\xa1b\x92\x01\x02\xa2\xff\xfe"),
]


@pytest.mark.parametrize("name, data", ROWS, ids=range(len(ROWS)))
def test_inputs_that_once_failed(name: str, data: bytes) -> None:
    try_one(name, data)


@pytest.mark.parametrize("name", TARGETS)
@hypothesis.given(data=st.one_of(st.binary(max_size=200), st.integers(0, 2**64 - 1).map(lambda n: b"\1%d" % n)))
def test_only_stated_errors_escape(name: str, data: bytes) -> None:
    try_one(name, data)
