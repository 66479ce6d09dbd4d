"""New weights as patches of those in place: only what differs is written, between two steps, and undone if it fails.

Where a checkpoint's tensor lies in a model (fused with others, cut for tensor parallelism, tied) is known to the
model's own loader alone. So the loader runs once on empty tensors with torch's `copy_` replaced by a recorder, which
notes what would be copied where. From then on a tensor is compared with its places, and the differing numbers are
written there by index. `copy_` is replaced for the whole process, so recording too happens between two steps. torch is
not imported here: a process that has a model has torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rose.errors import ModelError

Array = Any  # a torch tensor
TAKEN_BACK, NOT_STAGED = "was taken back", "is not staged"
UNCHANGED = (TAKEN_BACK, NOT_STAGED)  # the words of an update that failed and left the weights as they were


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A part of a checkpoint's tensor, as a view of it, and where it lies in the model."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    target: Array

    def of(self, tensor: Array) -> Array:
        return tensor.as_strided(self.shape, self.strides, self.offset)


@dataclass(slots=True)
class Patch:
    """The numbers to write at indices of flat targets; `before` is what was there."""

    version: str
    writes: list[tuple[Array, Array, Array]] = field(default_factory=list)
    before: list[Array] = field(default_factory=list)

    @property
    def numbers(self) -> int:
        return sum(len(index) for _, index, _ in self.writes)


class MixedWeights(ModelError):
    """An update failed and could not be taken back: nothing may run on this model any more."""


def find_places(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[TensorPlace]]:
    """Return the places of every tensor, between two steps. Raises ModelError if the model's loader does more."""
    like = next(iter(model.parameters())).data
    tensor_class: Any = next(kind for kind in type(like).__mro__ if kind.__name__ == "Tensor")
    places_of: dict[str, list[TensorPlace]] = {}
    for name, shape in shapes.items():
        places: list[TensorPlace] = []
        plain = tensor_class.copy_
        tensor_class.copy_ = _recorder(places)
        try:
            model.load_weights([(name, like.new_empty(shape))])
        except Exception as error:
            raise ModelError(f"vLLM's loader does not take `{name}` of {tuple(shape)}: {error}") from error
        finally:
            tensor_class.copy_ = plain
        for place in places:
            if tuple(place.target.shape) != place.shape or not place.target.is_contiguous():
                raise ModelError(
                    f"vLLM keeps `{name}` in a form that cannot be patched",
                    hint="on a CPU start the rollout engine by `rose lend vllm`, which keeps weights unpacked",
                )
        places_of[name] = [replace(place, target=place.target.detach().view(-1)) for place in places]
    return places_of


def _recorder(places: list[TensorPlace]) -> Any:
    def record(target: Array, source: Array, non_blocking: bool = False) -> Array:
        places.append(TensorPlace(tuple(source.shape), tuple(source.stride()), source.storage_offset(), target))
        return target

    return record


def compare(version: str, tensors: Iterable[tuple[str, Array]], places: Mapping[str, list[TensorPlace]]) -> Patch:
    """Return what must be written to turn the model into this version. Only reads it. Raises ModelError."""
    patch, missing = Patch(version), set(places)
    for name, tensor in tensors:
        if name not in places:
            raise ModelError(f"version `{version}` has a tensor `{name}` that the running model has not")
        missing.discard(name)
        if not bool(tensor.isfinite().all()):
            raise ModelError(f"`{name}` of version `{version}` holds numbers that are not finite")
        for place in places[name]:
            new = place.of(tensor).reshape(-1).to(device=place.target.device, dtype=place.target.dtype)
            index = (new != place.target).nonzero().view(-1)
            if len(index):
                patch.writes.append((place.target, index, new[index]))
    if missing:
        raise ModelError(f"version `{version}` lacks `{min(missing)}` and {len(missing) - 1} other tensors")
    return patch


def apply(patch: Patch) -> None:
    """Write a patch between two steps. Raises ModelError if nothing changed, MixedWeights otherwise."""
    try:
        for target, index, numbers in patch.writes:
            patch.before.append(target[index])
            target.index_copy_(0, index, numbers)
        wrong = sum(int((target[index] != numbers).sum()) for target, index, numbers in patch.writes)
        if wrong:
            raise ModelError(f"{wrong} numbers of version `{patch.version}` are not what was written")
    except Exception as error:
        try:
            # From the last write to the first, so that a place written twice gets back its first value.
            for (target, index, _), before in reversed(list(zip(patch.writes, patch.before))):
                target.index_copy_(0, index, before)
        except Exception as second:
            what = f"version `{patch.version}` is half written ({error}) and cannot be taken back"
            raise MixedWeights(what) from second
        raise ModelError(f"version `{patch.version}` {TAKEN_BACK}: {error}") from error
