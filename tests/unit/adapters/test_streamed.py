"""Weights that an iterator yields: they must be those of the model folder, or nothing is published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.contract.chain_ends import QUICK, RUN, SECRET, Member

from rose.adapters.streamed import StreamedPublisher
from rose.errors import ModelError, Unavailable
from rose.models.presets import write_preset
from rose.models.tensors import open_tensors
from rose.weights.manifest import Fenced, folder_hash
from rose.weights.relay.memory_relay import MemoryRelay

Named = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("models") / "frozenlake-1m", seed=0)


@pytest.fixture
def weights(folder: Path) -> Named:
    tensors = open_tensors(folder)
    return [(name, torch.from_numpy(tensors.float32(name).copy())) for name in tensors.names()]


@pytest.fixture
def relay() -> MemoryRelay:
    return MemoryRelay()


@pytest.fixture
def publisher(folder: Path, relay: MemoryRelay) -> Iterator[StreamedPublisher]:
    made = StreamedPublisher(folder, relay, run=RUN, secret=SECRET, retry=QUICK)
    yield made
    made.close()


def version_in(relay: MemoryRelay, publisher: StreamedPublisher) -> int:
    member = Member(relay, tensors=publisher._publisher.tensors)
    member.sync()
    return member.manifest.version


def test_the_hash_is_that_of_the_folder_whatever_the_trainer_computes_in(publisher, folder, weights):
    assert publisher.publish(1, weights).hash == folder_hash(folder)
    assert publisher.publish(2, [(name, value.bfloat16()) for name, value in weights]).hash == folder_hash(folder)


def test_names_of_wrappers_and_a_tied_head_are_understood(publisher, folder, weights):
    wrapped = [(f"_orig_mod.{name}", value) for name, value in weights]
    head = ("lm_head.weight", dict(weights)["model.embed_tokens.weight"])
    assert publisher.publish(1, [*wrapped, head]).hash == folder_hash(folder)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda found: found[1:], r"`model\.embed_tokens\.weight` did not come"),
        (lambda found: [*found, found[3]], "came twice"),
        (lambda found: [("vision.weight", found[0][1]), *found], r"`vision\.weight` is not in the folder"),
        (lambda found: [(name, value[:-1]) for name, value in found], r"in the folder \[.*and \d+ more"),
        (lambda found: [(name, value.to(torch.int8)) for name, value in found], "int8, not bf16"),
    ],
)
def test_weights_of_another_model_are_refused_with_the_first_differences(publisher, relay, weights, change, reason):
    publisher.publish(1, weights)
    with pytest.raises(ModelError, match=reason) as raised:
        publisher.publish(2, change(weights))
    assert "no parameter frozen" in str(raised.value)
    assert version_in(relay, publisher) == 1
    assert publisher.publish(3, weights).kind == "anchor"


def test_the_iterator_is_advanced_to_its_end_whatever_happens(publisher, relay, weights):
    """Other ranks take part in each of its steps, and would wait for ever."""
    taken: list[str] = []

    def counted(found: Named) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in found:
            taken.append(name)
            yield name, value

    with pytest.raises(ModelError, match="not finite"):
        publisher.publish(1, counted([(name, value * float("nan")) for name, value in weights]))
    assert taken == [name for name, _ in weights]


def test_an_iterator_that_raises_in_the_middle_leaves_the_version_before(publisher, relay, weights):
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights[:5]
        raise Unavailable("a rank is gone")

    publisher.publish(1, weights)
    with pytest.raises(Unavailable, match="a rank is gone"):
        publisher.publish(2, broken())
    assert version_in(relay, publisher) == 1


def test_a_trainer_that_was_replaced_is_fenced_off(publisher, folder, relay, weights):
    publisher.publish(1, weights)
    later = StreamedPublisher(folder, relay, run=RUN, secret=SECRET, retry=QUICK)
    later.publish(1, weights)
    with pytest.raises(Fenced, match="another trainer"):
        publisher.publish(2, weights)
    later.close()
