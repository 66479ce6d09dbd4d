"""New weights by patches, on a model that fuses, cuts and ties as vLLM's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose.errors import ModelError
from rose.vllm.patching import MixedWeights, Patch, apply, compare, find_places


class Fused(torch.nn.Module):
    """`q` and `k` in one matrix, of `down` only the second half of the columns, the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.down = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.embedding = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            match name:
                case "q":
                    self.qk.data.narrow(0, 0, 4).copy_(tensor)
                case "k":
                    self.qk.data.narrow(0, 4, 2).copy_(tensor)
                case "down":
                    self.down.data.copy_(tensor.narrow(1, 3, 3))
                case "embedding":
                    self.embedding.data[: len(tensor)].copy_(tensor)
                case "strange":
                    self.down.data.t().copy_(tensor)
                case _:
                    raise KeyError(name)


SHAPES = {"q": (4, 4), "k": (2, 4), "down": (4, 6), "embedding": (7, 4)}


def version(seed: int, share: float = 1.0) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=chance).to(torch.bfloat16) for name, shape in SHAPES.items()}


def state(model: Fused) -> list[torch.Tensor]:
    return [parameter.data.clone() for parameter in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other))


def loaded(tensors: dict[str, torch.Tensor]) -> Fused:
    model = Fused()
    model.load_weights(tensors.items())
    return model


def test_finding_places_changes_nothing() -> None:
    model = loaded(version(1))
    before = state(model)
    places = find_places(model, SHAPES)
    assert same(before, state(model))
    assert torch.zeros(2).copy_(torch.ones(2)).tolist() == [1.0, 1.0], "torch copies again"
    assert {name: len(found) for name, found in places.items()} == dict.fromkeys(SHAPES, 1)


def test_a_patched_model_equals_one_loaded_cold() -> None:
    model, new = loaded(version(1)), version(2)
    new["q"] = version(1)["q"]
    patch = compare("2", new.items(), find_places(model, SHAPES))
    assert all(target is not model.qk or len(index) for target, index, _ in patch.writes)
    apply(patch)
    assert same(state(model), state(loaded(new)))


def test_only_what_differs_is_written() -> None:
    model, new = loaded(version(1)), version(1)
    new["k"][1, 2] += 1
    new["down"][0, 0] += 1  # a column that this worker has not
    patch = compare("2", new.items(), find_places(model, SHAPES))
    assert patch.numbers == 1


def test_staging_does_not_touch_the_model() -> None:
    model = loaded(version(1))
    before = state(model)
    compare("2", version(2).items(), find_places(model, SHAPES))
    assert same(before, state(model))


def test_a_failed_update_is_undone() -> None:
    model = loaded(version(1))
    before = state(model)
    patch = compare("2", version(2).items(), find_places(model, SHAPES))
    target, index, numbers = patch.writes[-1]
    patch.writes[-1] = (target, index + 10_000, numbers)
    with pytest.raises(ModelError, match="taken back"):
        apply(patch)
    assert same(before, state(model))


def test_an_update_that_wrote_one_place_twice_is_undone() -> None:
    class Tied(Fused):
        def load_weights(self, weights: Any) -> None:
            super().load_weights([("embedding" if name == "head" else name, tensor) for name, tensor in weights])

    model, new = Tied(), {"embedding": torch.ones(7, 4), "head": torch.full((7, 4), 2.0)}
    before = state(model)
    patch = compare("2", new.items(), find_places(model, dict.fromkeys(new, (7, 4))))
    with pytest.raises(ModelError, match="taken back"):
        apply(patch)
    assert same(before, state(model))


def test_an_update_that_cannot_be_undone_is_mixed_weights() -> None:
    class Broken:
        """Takes one write and then nothing any more."""

        def __init__(self) -> None:
            self.writes = 0

        def __getitem__(self, index: Any) -> torch.Tensor:
            return torch.zeros(1)

        def index_copy_(self, *arguments: Any) -> None:
            self.writes += 1
            raise RuntimeError("no")

    patch = Patch("2", [(Broken(), torch.zeros(1, dtype=torch.long), torch.ones(1))])
    with pytest.raises(MixedWeights, match="cannot be taken back"):
        apply(patch)


def broken(name: str) -> dict[str, torch.Tensor]:
    tensors = version(2)
    match name:
        case "lacks":
            del tensors["k"]
        case "has a tensor":
            tensors["more"] = torch.zeros(1)
        case "not finite":
            tensors["q"][0, 0] = float("nan")
    return tensors


@pytest.mark.parametrize("words", ["lacks", "has a tensor", "not finite"])
def test_weights_that_do_not_fit_are_refused(words: str) -> None:
    places = find_places(loaded(version(1)), SHAPES)
    with pytest.raises(ModelError, match=words):
        compare("2", broken(words).items(), places)


@pytest.mark.parametrize("name, words", [("unheard of", "does not take"), ("strange", "cannot be patched")])
def test_a_model_that_cannot_be_patched_is_refused_at_once(name: str, words: str) -> None:
    shapes = {name: (3, 4)}
    with pytest.raises(ModelError, match=words):
        find_places(loaded(version(1)), shapes)
