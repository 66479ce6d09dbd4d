"""Live tensors of torch and numpy, in any type and order of memory, become the bits that are published."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.contract.chain_ends import QUICK, RUN, SECRET, equal
from tests.unit.weights.test_publish import OPTIONS, Model, bits_of, held_by

from rose.errors import ConfigError
from rose.models.tensors import to_bf16
from rose.weights.publish import Publisher
from rose.weights.receive import Receiver
from rose.weights.relay.memory_relay import MemoryRelay


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_any_floating_type_is_published_as_bf16(kind):
    relay, model = MemoryRelay(), Model().to(kind)
    with Publisher(model, relay, **OPTIONS) as publisher:
        publisher.publish(1).result()
    assert equal(held_by(relay, publisher.tensors).arrays, bits_of(model))


def test_or_each_tensor_in_its_own_type():
    relay = MemoryRelay()
    state = {"a": torch.randn(6, 5), "b": torch.randn(9).half(), "c": torch.randn(4, 4).bfloat16()}
    with Publisher(state, relay, dtype=None, **OPTIONS) as publisher:
        publisher.publish(1).result()
    member = held_by(relay, publisher.tensors)
    assert [tensor.dtype for tensor in publisher.tensors] == ["F32", "F16", "BF16"]
    assert np.array_equal(member.arrays["a"].view(np.float32), state["a"].numpy())
    assert np.array_equal(member.arrays["b"].view(np.float16), state["b"].numpy())


def test_numpy_arrays_that_do_not_lie_in_one_block():
    relay = MemoryRelay()
    whole = np.random.default_rng(0).standard_normal((6, 10)).astype(np.float32)
    state = {
        "turned": whole.T,
        "bits": to_bf16(whole),
        "turned_bits": to_bf16(whole).T,
    }
    with Publisher(state, relay, **OPTIONS) as publisher:
        publisher.publish(1).result()
    member = held_by(relay, publisher.tensors)
    assert np.array_equal(member.arrays["turned"], to_bf16(whole).T)
    assert np.array_equal(member.arrays["turned_bits"], to_bf16(whole).T)


@pytest.mark.parametrize(
    "source, words",
    [
        ({}, "no weights"),
        ({"a": np.zeros(3, np.int64)}, "int64"),
        ({"a": torch.zeros(3, dtype=torch.long)}, "int64"),
        ([1, 2], "holds no weights"),
    ],
)
def test_what_cannot_be_published_is_said_at_once(source, words):
    with pytest.raises(ConfigError, match=words):
        Publisher(source, MemoryRelay(), **OPTIONS)


@pytest.mark.parametrize("make", [torch.tensor, np.float32], ids=["torch", "numpy"])
@pytest.mark.parametrize("dtype", ["BF16", None])
def test_a_single_number_is_a_tensor_too(make, dtype):
    single = make(1.0) if make is torch.tensor else np.array(1.0, make)
    relay, weights = MemoryRelay(), {"scale": single, "up": np.ones((3, 2), np.float32)}
    receiver = Receiver(relay, RUN, secret=SECRET, retry=QUICK)
    with Publisher(weights, relay, dtype=dtype, **OPTIONS) as publisher:
        for version in (1, 2, 3):
            single += 1
            publisher.publish(version).result()
            received = receiver.fetch()
            found = received.tensors["scale"]
            assert found.shape == () and found == (to_bf16(np.array(version + 1.0)) if dtype else version + 1)
            receiver.installed(received)
