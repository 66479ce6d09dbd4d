"""Messages and records in a mapped file are whole, or torn, or counted as lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.vllm.seqlock_file import MappedFile, Ring, Slots, Torn


def test_a_slot_with_a_wrong_checksum_or_number_is_torn(tmp_path: Path) -> None:
    file = MappedFile.create(tmp_path / "slots", Slots.size_bytes(64))
    slots = Slots(file, 0, 64)
    assert slots.read() == (0, b"")
    assert slots.write(b"whole") == 1
    assert slots.read() == (1, b"whole")
    where = file.bytes.find(b"whole")
    file.bytes[where] ^= 1
    with pytest.raises(Torn):
        slots.read()
    file.bytes[where] ^= 1
    file.words[0] = 2  # the writer said so, and its slot is not there yet
    with pytest.raises(Torn):
        slots.read()
    file.close()


@given(appended=st.lists(st.integers(0, 30), max_size=20))
def test_a_ring_returns_every_record_or_counts_it_as_lost(tmp_path_factory, appended) -> None:
    path = tmp_path_factory.mktemp("rings") / "ring"
    file = MappedFile.create(path, Ring.size_bytes(16, 2))
    ring, seen, told = Ring(file, 0, 16, 2), 0, 0
    for count in appended:
        for _ in range(count):
            ring.append(ring.number + 1, 0.5)
        found, lost = ring.since(seen)
        assert [number for number, _ in found] == list(range(seen + 1 + lost, ring.number + 1))
        assert all(values == (number, 0.5) for number, values in found)
        told += len(found) + lost
        seen = ring.number
    assert told == sum(appended)
    file.close()
