"""Any two arrays of any type: the payload turns one into the other, both implementations write the same bytes, and a
receiver that follows a trainer forwards and backwards is always where the trainer was."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tests.unit.codec_reference import reference_blocks

from rose.weights import codec
from rose.weights.codec import CodecError, ElementType
from rose.weights.codec.format import ENTRY_BYTES, HEADER, block_count

TYPES = st.sampled_from(list(ElementType))
DENSITIES = st.sampled_from([0.0, 0.001, 0.01, 0.04, 0.1, 0.3, 0.5, 0.8, 1.0])
SPREADS = st.sampled_from([1, 2, 3, 4, 30, 1000, 1 << 15, 1 << 31])
SEEDS = st.integers(0, 2**32 - 1)


def moved(base: np.ndarray, density: float, spread: int, draw: np.random.Generator) -> np.ndarray:
    """About so many of the elements moved by at most so many ULPs, in bursts or evenly."""
    chances = np.full(len(base), density)
    if draw.random() < 0.3:
        chances *= draw.random(len(base) // 64 + 1).repeat(64)[: len(base)] < 0.2
    steps = draw.integers(-spread, spread + 1, len(base))
    after = np.where(draw.random(len(base)) < chances, base.astype(np.int64) + steps, base)
    return (after & ((1 << 8 * base.itemsize) - 1)).astype(base.dtype)


@st.composite
def updates(draw: Any, elements_max: int) -> tuple[np.ndarray, np.ndarray, ElementType]:
    kind, elements = draw(TYPES), draw(st.integers(0, elements_max))
    generator = np.random.default_rng(draw(SEEDS))
    if draw(st.booleans()):
        base = generator.integers(0, 1 << kind.bits, elements).astype(kind.storage)
    else:
        floats = (generator.standard_normal(elements) * 0.02).astype(np.float16 if kind == ElementType.FP16 else "f4")
        base = floats.view(f"u{floats.itemsize}")
        base = (base >> 16).astype(np.uint16) if kind == ElementType.BF16 else base
    return base, moved(base, draw(DENSITIES), draw(SPREADS), generator), kind


def try_to_apply(payload: bytes | bytearray, destination: np.ndarray) -> bool:
    try:
        codec.apply(payload, destination)
    except CodecError:
        return False
    return True


@given(updates(20_000), st.sampled_from([1, 7, 64, 1000, 1 << 20]), st.booleans(), st.integers(1, 3))
def test_round_trip(update, block_elements, contexts, threads):
    base, new, kind = update
    base, new = (base[:500], new[:500]) if block_elements < 10 else (base, new)
    options = {"block_elements": block_elements, "contexts": contexts, "threads": threads}
    payload = codec.encode(base, new, element_type=kind, **options)
    found = base.copy()
    codec.apply(payload, found, threads=threads)
    assert np.array_equal(found, new)
    assert len(payload) <= new.nbytes + HEADER.size + ENTRY_BYTES * block_count(len(new), block_elements)
    codec.apply(codec.encode(new, base, element_type=kind), found)
    assert np.array_equal(found, base)


@given(updates(1500), st.sampled_from([100, 1 << 20]))
def test_both_implementations_write_the_same_bytes_and_read_each_others(update, block_elements):
    base, new, kind = update
    options = {"element_type": kind, "block_elements": block_elements}
    for encode, arrays, more in (
        (codec.encode, (base, new), {}),
        (codec.encode, (base, new), {"contexts": True}),
        (codec.encode_full, (new,), {}),
    ):
        fast = encode(*arrays, **options, **more)
        found = base.copy()
        with reference_blocks():
            assert fast == encode(*arrays, **options, **more)
            codec.apply(fast, found)
        assert np.array_equal(found, new)


@given(updates(5000), st.integers(64, 2000), st.data())
def test_any_row_range(update, block_elements, data):
    base, new, kind = update
    start = data.draw(st.integers(0, len(new)))
    stop = data.draw(st.integers(start, len(new)))
    for payload in (
        codec.encode(base, new, element_type=kind, block_elements=block_elements),
        codec.encode_full(new, element_type=kind, block_elements=block_elements),
    ):
        rows = base[start:stop].copy()
        codec.apply(payload, rows, start=start, stop=stop)
        assert np.array_equal(rows, new[start:stop])


@given(updates(3000), st.data())
def test_damage_is_refused_or_decoded_but_never_worse(update, data):
    base, new, kind = update
    contexts = data.draw(st.booleans())
    payload = bytearray(codec.encode(base, new, element_type=kind, block_elements=1000, contexts=contexts))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    payload = payload[: data.draw(st.integers(0, len(payload)) | st.just(len(payload)))]
    memory = np.full(len(base) + 200, 77, base.dtype)
    memory[100:-100] = base
    try_to_apply(payload, memory[100:-100])
    assert np.all(memory[:100] == 77) and np.all(memory[-100:] == 77)


@given(st.binary(max_size=300))
def test_any_bytes_at_all(noise):
    held = np.zeros(100, np.uint16)
    head = codec.encode(held, held)[: HEADER.size]
    try_to_apply(head + noise, held)
    assert try_to_apply(noise, held) is False


class FollowsTheTrainer(RuleBasedStateMachine):
    """A trainer that steps and reverts; a receiver that knows only payloads."""

    def __init__(self) -> None:
        super().__init__()
        self.versions = [np.random.default_rng(1).integers(0, 1 << 16, 3000).astype(np.uint16)]
        self.held = self.versions[0].copy()

    @rule(density=DENSITIES, spread=SPREADS, seed=SEEDS)
    def step(self, density: float, spread: int, seed: int) -> None:
        newest = self.versions[-1]
        self.versions.append(moved(newest, density, spread, np.random.default_rng(seed)))
        codec.apply(codec.encode(newest, self.versions[-1], block_elements=512), self.held)

    @precondition(lambda self: len(self.versions) > 1)
    @rule()
    def revert(self) -> None:
        newest = self.versions.pop()
        codec.apply(codec.encode(newest, self.versions[-1], block_elements=700, contexts=True), self.held)

    @rule(version=st.integers(0, 100))
    def jump(self, version: int) -> None:
        """Back to an earlier version at once, and from an anchor."""
        self.versions = self.versions[: version % len(self.versions) + 1]
        self.held[:] = 0
        codec.apply(codec.encode_full(self.versions[-1]), self.held)

    @invariant()
    def is_where_the_trainer_is(self) -> None:
        assert np.array_equal(self.held, self.versions[-1])


def test_a_receiver_follows_the_trainer():
    run_state_machine_as_test(FollowsTheTrainer)
