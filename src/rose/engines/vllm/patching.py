"""New weights as patches of those in place: only what differs is written, between two steps, and taken back if it
fails.

Where a checkpoint's tensor lies in a model (fused with others, cut for tensor parallelism, tied) is known to the
model's own loader alone. So the loader is run once on empty tensors with torch's `copy_` replaced by a pencil: what it
would have copied where is noted, and nothing is copied. From then on a tensor is compared with its places and the
differing numbers are written there by index. `copy_` is replaced for the whole process, so noting happens between two
steps too.

torch is not imported here: whoever has a model has torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rose.errors import ModelError

Array = Any  # a torch tensor
TAKEN_BACK, NOT_STAGED = "was taken back", "is not staged"
UNCHANGED = (TAKEN_BACK, NOT_STAGED)  # the words of an update that failed and left the weights as they were


@dataclass(frozen=True, slots=True)
class Place:
    """Part of a checkpoint's tensor, as a view of it, and where it lies in the model."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    target: Array

    def of(self, tensor: Array) -> Array:
        return tensor.as_strided(self.shape, self.strides, self.offset)


@dataclass(slots=True)
class Patch:
    """Numbers to be written at indices of flat targets; `before` is what was there."""

    version: str
    writes: list[tuple[Array, Array, Array]] = field(default_factory=list)
    before: list[Array] = field(default_factory=list)

    @property
    def numbers(self) -> int:
        return sum(len(index) for _, index, _ in self.writes)


class MixedWeights(ModelError):
    """An update failed and could not be taken back: nothing may run on this model any more."""


def find_places(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Place]]:
    """Of every tensor of a checkpoint. Between two steps. Raises ModelError for a model whose loader does more."""
    like = next(iter(model.parameters())).data
    tensor_class: Any = next(kind for kind in type(like).__mro__ if kind.__name__ == "Tensor")
    found: dict[str, list[Place]] = {}
    for name, shape in shapes.items():
        places: list[Place] = []
        plain = tensor_class.copy_
        tensor_class.copy_ = _pencil(places)
        try:
            model.load_weights([(name, like.new_empty(shape))])
        except Exception as error:
            raise ModelError(f"vLLM's loader does not take `{name}` of {tuple(shape)}: {error}") from error
        finally:
            tensor_class.copy_ = plain
        found[name] = [_flat(name, place) for place in places]
    return found


def _pencil(places: list[Place]) -> Any:
    def note(target: Array, source: Array, non_blocking: bool = False) -> Array:
        places.append(Place(tuple(source.shape), tuple(source.stride()), source.storage_offset(), target))
        return target

    return note


def _flat(name: str, place: Place) -> Place:
    target = place.target
    if tuple(target.shape) != place.shape or not target.is_contiguous():
        raise ModelError(
            f"vLLM keeps `{name}` in a form that cannot be patched",
            hint="on a CPU the rollout engine must be started by `rose lend vllm`, which keeps weights unpacked",
        )
    return Place(place.shape, place.strides, place.offset, target.detach().view(-1))


def compare(version: str, tensors: Iterable[tuple[str, Array]], places: Mapping[str, list[Place]]) -> Patch:
    """What must be written to turn the model into this version. Reads the model only. Raises ModelError."""
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
    """Between two steps. Raises ModelError and leaves everything as it was, or MixedWeights."""
    try:
        for target, index, numbers in patch.writes:
            patch.before.append(target[index])
            target.index_copy_(0, index, numbers)
        wrong = sum(int((target[index] != numbers).sum()) for target, index, numbers in patch.writes)
        if wrong:
            raise ModelError(f"{wrong} numbers of version `{patch.version}` are not what was written")
    except Exception as error:
        _take_back(patch, error)
        raise ModelError(f"version `{patch.version}` {TAKEN_BACK}: {error}") from error


def _take_back(patch: Patch, why: Exception) -> None:
    """From the last write to the first: what two of them wrote at one place is what it was before both."""
    try:
        for (target, index, _), before in reversed(list(zip(patch.writes, patch.before))):
            target.index_copy_(0, index, before)
    except Exception as error:
        raise MixedWeights(f"version `{patch.version}` is half written ({why}) and cannot be taken back") from error
