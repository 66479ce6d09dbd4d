"""A trainer's own tensors, read piece by piece as the bit patterns that are published.

They are the live ones: nothing is copied but what must be cast, moved from another device or straightened out, and
that only for the piece at hand, into one piece of memory that is used again. So the trainer must not change them
until they have been read. torch counts the changes of a tensor, and `check_unchanged` looks at its counter: an update
that came too early is an error, not a mixture of two versions. Changes through `.data`, by fused optimizers and of
numpy arrays are not counted, and would go unseen: there only waiting helps, which the publisher does by itself.

torch is not imported here: whoever has torch tensors has torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rose.errors import ConfigError, ModelError, RequestRefused
from rose.models.bits import to_bf16
from rose.weights.coding import BITS, Bits
from rose.weights.shards import Box, Holding, Tensor

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # that torch puts into names
CHUNK_ELEMENTS = 1 << 20  # of numpy's casts and checks: small enough to stay in a core's cache
FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint16": "BF16"}
INFINITE = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}  # without the sign, what is no finite number begins here

Local = Any  # a torch tensor or a numpy array


class LiveTensors:
    """Tensors by name as they are now, each a torch tensor or a numpy array; bf16 comes as uint16 in numpy."""

    def __init__(self, source: Any) -> None:
        self._arrays = dict(_named(source))
        self._counters = {name: getattr(array, "_version", 0) for name, array in self._arrays.items()}
        if not self._arrays:
            raise ConfigError("there are no weights to publish", hint="give a model or a dict of named tensors")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(array.shape) for name, array in self._arrays.items()}

    def tensors(self, dtype: str | None) -> list[Tensor]:
        """As they are published: all in one type, or each in its own."""
        return [
            Tensor(name, tuple(array.shape), dtype or FLOATS[_type_name(array)]) for name, array in self._arrays.items()
        ]

    def bits(self, held: Holding, box: Box, dtype: str, room: Room) -> Bits:
        """One piece, in one block of memory: the tensor's own if it is as it must be, else the room."""
        if held.local not in self._arrays:
            raise ConfigError(f"`{held.local}`, which this rank should publish, is not among its tensors")
        view = held.view(self._arrays[held.local], box)
        return _numpy_bits(view, dtype, room) if isinstance(view, np.ndarray) else _torch_bits(view, dtype, room)

    def check_unchanged(self) -> None:
        changed = [
            name for name, count in self._counters.items() if getattr(self._arrays[name], "_version", 0) != count
        ]
        if changed:
            raise RequestRefused(
                f"{len(changed)} tensors, `{changed[0]}` first, changed while they were read; nothing is published",
                hint="give the publisher your optimizer, or call wait_read() before the weights change",
            )


class Room:
    """Memory for one piece; it is taken when it is first needed."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def of(self, shape: Sequence[int], dtype: str) -> Bits:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(BITS[dtype]).itemsize
        if len(self._bytes) < size:
            self._bytes = np.empty(size, np.uint8)
        return self._bytes[:size].view(BITS[dtype]).reshape(tuple(shape))


def check_finite(bits: Bits, dtype: str, box: Box) -> None:
    """Refuse what no engine should ever run: not-a-number and infinity."""
    limit = BITS[dtype](INFINITE[dtype])
    magnitude = BITS[dtype](np.iinfo(BITS[dtype]).max >> 1)
    flat = bits.reshape(-1)
    for first in range(0, len(flat), CHUNK_ELEMENTS):
        if (flat[first : first + CHUNK_ELEMENTS] & magnitude).max() >= limit:
            raise ModelError(
                f"`{box.tensor}` holds numbers that are not finite; this version is not published",
                hint="the training has diverged; go back to an earlier checkpoint",
            )


def _named(source: Any) -> Iterator[tuple[str, Local]]:
    """Every tensor under its checkpoint's name; one that several names share comes once, under the first."""
    if not isinstance(source, Mapping) and not hasattr(source, "state_dict"):
        hint = "give a torch module, or a dict of named torch tensors or numpy arrays"
        raise ConfigError(f"a {type(source).__name__} holds no weights that could be published", hint=hint)
    states = source if isinstance(source, Mapping) else source.state_dict()
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, array in states.items():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        array = array.to_local() if hasattr(array, "to_local") else array  # a DTensor's own shard
        array = array.detach() if hasattr(array, "detach") else array
        if _type_name(array) not in FLOATS:
            hint = "pass a dict of the tensors to publish"
            raise ConfigError(f"`{name}` is {_type_name(array)}; weights are bf16, fp16 or fp32", hint=hint)
        place, strides = _place(array)
        identity = (place, tuple(array.shape), strides)
        if place and identity in seen:
            continue
        seen.add(identity)
        yield name, array


def _place(array: Local) -> tuple[int, tuple[int, ...]]:
    """Where it lies in memory, and how."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data, array.strides
    return array.data_ptr(), tuple(array.stride())


def _type_name(array: Local) -> str:
    return str(array.dtype).removeprefix("torch.")


def _torch_bits(view: Any, dtype: str, room: Room) -> Bits:
    torch: Any = sys.modules["torch"]
    kind = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    whole = torch.int32 if dtype == "F32" else torch.int16  # numpy has no bf16, and torch few unsigned numbers
    if view.dtype != kind or not view.is_contiguous() or view.device.type != "cpu":
        block = torch.from_numpy(room.of(view.shape, dtype).view(np.int32 if dtype == "F32" else np.int16)).view(kind)
        view = block.copy_(view)
    bits: Bits = view.view(whole).numpy().view(BITS[dtype])
    return bits


def _numpy_bits(view: Any, dtype: str, room: Room) -> Bits:
    if FLOATS[view.dtype.name] == dtype and view.flags.c_contiguous:
        same: Bits = view.view(BITS[dtype])
        return same
    block = room.of(view.shape, dtype)
    if FLOATS[view.dtype.name] == dtype:
        block[...] = view.view(BITS[dtype])
    elif dtype == "BF16":
        _cast_to_bf16(view, block)
    else:
        raise ConfigError(f"weights of {view.dtype} are not published as {dtype}", hint="publish them as bf16")
    return block


def _cast_to_bf16(view: Any, block: Bits) -> None:
    straight, flat = np.ascontiguousarray(view).reshape(-1), block.reshape(-1)
    for first in range(0, len(flat), CHUNK_ELEMENTS):
        some = slice(first, first + CHUNK_ELEMENTS)
        flat[some] = to_bf16(straight[some].astype(np.float32, copy=False))
