"""A trainer's live tensors, read chunk by chunk as the bit patterns that are published.

Nothing is copied but what must be cast, moved from another device or made contiguous, and that only for the chunk at
hand. So the trainer must not change the tensors until they have been read. torch counts the changes of a tensor, and
`check_unchanged` compares its counter: an early update is an error, not a mixture of two versions. Changes through
`.data`, by fused optimizers and of numpy arrays are not counted: there only the publisher's waiting protects.

torch is not imported here: a process that has torch tensors has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rose.errors import ConfigError, ModelError, RequestRefused
from rose.models.tensors import to_bf16
from rose.weights.coding import BITS, Bits
from rose.weights.shards import ShardPlacement, Tensor, TensorRegion

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # that torch puts into names
PASS_ELEMENTS = 1 << 20  # of numpy's casts and checks: small enough to stay in a core's cache
FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint16": "BF16"}
INFINITE = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}  # without the sign, what is no finite number begins here

LocalArray = Any  # a torch tensor or a numpy array


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
        """Return the tensors as they are published: all in one type, or each in its own."""
        return [
            Tensor(name, tuple(array.shape), dtype or FLOATS[_type_name(array)]) for name, array in self._arrays.items()
        ]

    def bits(self, placement: ShardPlacement, region: TensorRegion, dtype: str, scratch: ScratchBuffer) -> Bits:
        """Return one chunk as contiguous bits: the tensor's own memory where possible, else the scratch buffer."""
        if placement.local not in self._arrays:
            raise ConfigError(f"`{placement.local}`, which this rank should publish, is not among its tensors")
        view = placement.view(self._arrays[placement.local], region)
        return _numpy_bits(view, dtype, scratch) if isinstance(view, np.ndarray) else _torch_bits(view, dtype, scratch)

    def check_unchanged(self) -> None:
        changed = [
            name for name, count in self._counters.items() if getattr(self._arrays[name], "_version", 0) != count
        ]
        if changed:
            raise RequestRefused(
                f"{len(changed)} tensors, `{changed[0]}` first, changed while they were read; nothing is published",
                hint="give the publisher your optimizer, or call wait_read() before the weights change",
            )


class ScratchBuffer:
    """Memory for one chunk, taken when it is first needed and used again."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def of(self, shape: Sequence[int], dtype: str) -> Bits:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(BITS[dtype]).itemsize
        if len(self._bytes) < size:
            self._bytes = np.empty(size, np.uint8)
        return self._bytes[:size].view(BITS[dtype]).reshape(tuple(shape))


def check_finite(bits: Bits, dtype: str, region: TensorRegion) -> None:
    """Raise ModelError if a number is infinite or not-a-number: no engine should ever run it."""
    limit = BITS[dtype](INFINITE[dtype])
    magnitude = BITS[dtype](np.iinfo(BITS[dtype]).max >> 1)
    flat = bits.reshape(-1)
    for first in range(0, len(flat), PASS_ELEMENTS):
        if (flat[first : first + PASS_ELEMENTS] & magnitude).max() >= limit:
            raise ModelError(
                f"`{region.tensor}` holds numbers that are not finite; this version is not published",
                hint="the training has diverged; go back to an earlier checkpoint",
            )


def checkpoint_name(name: str) -> str:
    """Return the name that a tensor has in a checkpoint, without what torch's wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _named(source: Any) -> Iterator[tuple[str, LocalArray]]:
    """Yield every tensor under its checkpoint's name; shared memory comes once, under the first name."""
    if not isinstance(source, Mapping) and not hasattr(source, "state_dict"):
        hint = "give a torch module, or a dict of named torch tensors or numpy arrays"
        raise ConfigError(f"a {type(source).__name__} holds no weights that could be published", hint=hint)
    seen: set[tuple[Any, ...]] = set()
    for name, array in (source if isinstance(source, Mapping) else source.state_dict()).items():
        name = checkpoint_name(name)
        array = array.to_local() if hasattr(array, "to_local") else array  # a DTensor's own shard
        array = array.detach() if hasattr(array, "detach") else array
        if _type_name(array) not in FLOATS:
            hint = "pass a dict of the tensors to publish"
            raise ConfigError(f"`{name}` is {_type_name(array)}; weights are bf16, fp16 or fp32", hint=hint)
        is_numpy = isinstance(array, np.ndarray)
        address = array.ctypes.data if is_numpy else array.data_ptr()
        identity = (address, tuple(array.shape), array.strides if is_numpy else tuple(array.stride()))
        if address and identity in seen:
            continue
        seen.add(identity)
        yield name, array


def _type_name(array: LocalArray) -> str:
    return str(array.dtype).removeprefix("torch.")


def _torch_bits(view: Any, dtype: str, scratch: ScratchBuffer) -> Bits:
    torch: Any = sys.modules["torch"]
    kind = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    integers = torch.int32 if dtype == "F32" else torch.int16  # numpy has no bf16, and torch few unsigned numbers
    if view.dtype != kind or not view.is_contiguous() or view.device.type != "cpu":
        signed = np.int32 if dtype == "F32" else np.int16
        view = torch.from_numpy(scratch.of(view.shape, dtype).view(signed)).view(kind).copy_(view)
    bits: Bits = view.view(integers).numpy().view(BITS[dtype])
    return bits


def _numpy_bits(view: Any, dtype: str, scratch: ScratchBuffer) -> Bits:
    is_same_type = FLOATS[view.dtype.name] == dtype
    if is_same_type and view.flags.c_contiguous:
        same: Bits = view.view(BITS[dtype])
        return same
    block = scratch.of(view.shape, dtype)
    if is_same_type:
        block[...] = view.view(BITS[dtype])
    elif dtype == "BF16":
        straight, flat = np.ascontiguousarray(view).reshape(-1), block.reshape(-1)
        for first in range(0, len(flat), PASS_ELEMENTS):
            some = slice(first, first + PASS_ELEMENTS)
            flat[some] = to_bf16(straight[some].astype(np.float32, copy=False))
    else:
        raise ConfigError(f"weights of {view.dtype} are not published as {dtype}", hint="publish them as bf16")
    return block
