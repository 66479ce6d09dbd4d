"""The weights of a model: named tensors in safetensors files or in memory, their bf16 numbers, and writing them.

`safetensors` opens every file and so checks it whole (header, offsets, length). Its numpy flavour has no bf16, so the
bytes come from a read-only map of the same file, and only tensors that are asked for are read. bf16 is held as uint16,
the upper half of a float32. Files are written here, because the package orders metadata by a random hash, and the same
weights must be the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from rose.errors import ModelError
from rose.models.files import read_object, sibling_name
from rose.models.model_spec import ModelSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES: dict[str, type[np.generic]] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
MISSING_SHOWN_MAX = 3

Shape = tuple[int, ...]
Storage = Literal["bf16", "f16", "f32"]
TAGS: dict[Storage, tuple[str, int]] = {"bf16": ("BF16", 2), "f16": ("F16", 2), "f32": ("F32", 4)}
HEADER_ALIGNMENT = 8

HALF_ULP = np.uint32(0x7FFF)
QUIET = np.uint16(0x0040)


@dataclass(frozen=True, slots=True)
class _Stored:
    place: str  # for messages: a file's name, or "memory"
    dtype: str  # "BF16", "F16" or "F32"; `check` refuses anything else
    shape: Shape
    read: Callable[[], NDArray[np.generic]]


class Tensors:
    """Named tensors, in files or in memory."""

    def __init__(self, where: str, stored: Mapping[str, _Stored]) -> None:
        self.where = where
        self._stored = stored

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> Shape:
        return self._find(name).shape

    def dtype(self, name: str) -> str:
        return self._find(name).dtype

    def place(self, name: str) -> str:
        return self._find(name).place

    def stored(self, name: str) -> NDArray[np.generic]:
        """Return the tensor as it is stored: float32, float16, or uint16 for the bits of bf16."""
        return self._array(name)

    def float32(self, name: str) -> NDArray[np.float32]:
        """Return the tensor's exact numbers, as a fresh array or a read-only view."""
        array = self._array(name)
        if array.dtype == np.uint16:
            return from_bf16(array.astype(np.uint16, copy=False))
        return array.astype(np.float32, copy=False)

    def bits16(self, name: str) -> NDArray[np.uint16]:
        """Return the tensor's numbers as bf16 bits, or raise ModelError if one of them is not a bf16."""
        array = self._array(name)
        if array.dtype == np.uint16:
            return array.astype(np.uint16, copy=False)
        values = self.float32(name)
        if not is_bf16_valued(values):
            raise ModelError(f"{name} in {self.place(name)} holds numbers that are not bf16")
        return (np.ascontiguousarray(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)

    def _find(self, name: str) -> _Stored:
        if name not in self._stored:
            raise ModelError(f"{self.where} holds no tensor {name}")
        return self._stored[name]

    def _array(self, name: str) -> NDArray[np.generic]:
        if self.dtype(name) not in DTYPES:
            raise _unsupported_dtype(self, name)
        return self._stored[name].read()


class MemoryTensors(Tensors):
    """Tensors held as numpy arrays: float32, float16, or uint16 for the bits of bf16."""

    def __init__(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        tags = {np.dtype(dtype): tag for tag, dtype in DTYPES.items()}
        stored = {
            name: _Stored(
                "memory", tags.get(array.dtype, str(array.dtype)), array.shape, partial(arrays.__getitem__, name)
            )
            for name, array in arrays.items()
        }
        super().__init__("memory", stored)


def _read_file(path: Path) -> dict[str, _Stored]:
    """Check a safetensors file, and return its tensors, which are read when asked for."""
    try:
        with safe_open(str(path), framework="np"):
            pass
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing", hint="copy or download the folder again") from error
    except (SafetensorError, ValueError) as error:
        hint = "it may be truncated; copy or download it again"
        raise ModelError(f"{path} is not a whole safetensors file: {error}", hint=hint) from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    header = json.loads(mapped[8:start].tobytes())
    header.pop("__metadata__", None)

    def read(entry: dict[str, Any]) -> NDArray[np.generic]:
        begin, end = entry["data_offsets"]
        values = np.frombuffer(mapped[start + begin : start + end], dtype=DTYPES[entry["dtype"]])
        # A header of odd length leaves the numbers unaligned, which compiled kernels do not take.
        return np.require(values, requirements="A").reshape(entry["shape"])

    return {
        name: _Stored(path.name, str(entry["dtype"]), tuple(entry["shape"]), partial(read, entry))
        for name, entry in header.items()
    }


def open_tensors(folder: Path | str) -> Tensors:
    """Open a folder's model.safetensors, or the shards its index names."""
    folder = Path(folder)
    index = folder / INDEX
    if (folder / SINGLE).exists():
        return Tensors(str(folder), _read_file(folder / SINGLE))
    if not index.exists():
        hint = "copy the weights too; a pytorch_model.bin must be saved again as safetensors"
        raise ModelError(f"{folder / SINGLE} is missing, and so is {INDEX}", hint=hint)
    file_of = read_object(index).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise ModelError(f"{index}: weight_map must be an object that names a file for each tensor")
    for name, file in file_of.items():
        if not isinstance(file, str) or Path(file).name != file or Path(file).suffix != ".safetensors":
            raise ModelError(f"{index}: weight_map.{name} must be a safetensors file in the same folder")
    shards = {}
    for file in sorted(set(file_of.values())):
        if not (folder / file).exists():
            hint = "copy or download the missing file"
            raise ModelError(f"{index} names {file}, which is not in the folder", hint=hint)
        shards[file] = _read_file(folder / file)
    for name, file in file_of.items():
        if name not in shards[file]:
            raise ModelError(f"{index} says {name} is in {file}, but it is not")
    return Tensors(str(folder), {name: shards[file][name] for name, file in file_of.items()})


def expected_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Return the shapes of all tensors that a model of this spec must have; a tied lm_head is not among them."""
    query, key_value = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    linears = {
        "self_attn.q_proj": (query, spec.hidden, spec.qkv_bias),
        "self_attn.k_proj": (key_value, spec.hidden, spec.qkv_bias),
        "self_attn.v_proj": (key_value, spec.hidden, spec.qkv_bias),
        "self_attn.o_proj": (spec.hidden, query, spec.output_bias),
        "mlp.gate_proj": (spec.ffn, spec.hidden, spec.mlp_bias),
        "mlp.up_proj": (spec.ffn, spec.hidden, spec.mlp_bias),
        "mlp.down_proj": (spec.hidden, spec.ffn, spec.mlp_bias),
    }
    layer_shapes: dict[str, Shape] = {"input_layernorm.weight": (spec.hidden,)}
    for name, (rows, columns, bias) in linears.items():
        layer_shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            layer_shapes[f"{name}.bias"] = (rows,)
    if spec.qk_norm:
        layer_shapes["self_attn.q_norm.weight"] = layer_shapes["self_attn.k_norm.weight"] = (spec.head_size,)
    layer_shapes["post_attention_layernorm.weight"] = (spec.hidden,)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocabulary, spec.hidden)}
    for layer in range(spec.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    shapes["model.norm.weight"] = (spec.hidden,)
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocabulary, spec.hidden)
    return shapes


def check(tensors: Tensors, spec: ModelSpec) -> None:
    """Refuse tensors that are not those of the spec: missing, of another shape or dtype, or too many."""
    expected = expected_tensors(spec)
    present = set(tensors.names())
    missing = [name for name in expected if name not in present]
    if missing:
        shown = ", ".join(missing[:MISSING_SHOWN_MAX])
        more = f" and {len(missing) - MISSING_SHOWN_MAX} more" if len(missing) > MISSING_SHOWN_MAX else ""
        raise ModelError(
            f"the weights in {tensors.where} lack {shown}{more}, which config.json implies",
            hint="check that config.json belongs to these weights and that no shard is missing",
        )
    for name, shape in expected.items():
        if tensors.shape(name) != shape:
            raise ModelError(
                f"{name} in {tensors.place(name)} is {tensors.shape(name)}, config.json implies {shape}",
                hint="check that config.json belongs to these weights",
            )
        if tensors.dtype(name) not in DTYPES:
            raise _unsupported_dtype(tensors, name)
    for name in sorted(present - expected.keys()):
        if name.startswith("model.") and ".rotary_emb." not in name:
            raise ModelError(f"{name} in {tensors.place(name)} has no place in the model config.json describes")
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    is_tied = spec.tied_embeddings and head in present
    if is_tied and not np.array_equal(tensors.float32(head), tensors.float32(embedding)):
        raise ModelError(
            f"config.json ties {head} to {embedding}, but the one in {tensors.place(head)} differs",
            hint="set tie_word_embeddings to false in config.json if the model has its own lm_head",
        )


def tensors_are_bf16_valued(tensors: Tensors, spec: ModelSpec) -> bool:
    """Return whether every matrix of the model holds bf16 numbers only, in whatever type it is stored."""
    matrices = [name for name, shape in expected_tensors(spec).items() if len(shape) == 2]
    return all(tensors.dtype(name) == "BF16" or is_bf16_valued(tensors.float32(name)) for name in matrices)


def _unsupported_dtype(tensors: Tensors, name: str) -> ModelError:
    dtype = tensors.dtype(name)
    return ModelError(f"{name} in {tensors.place(name)} is {dtype}; supported are {', '.join(DTYPES)}")


# bf16


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the nearest bf16 of each number, ties to even; NaN stays NaN."""
    whole = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    upper = (whole >> np.uint32(16)).astype(np.uint16)
    rounded = ((whole + (HALF_ULP + (whole >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), upper | QUIET, rounded)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the exact float32 of each bf16."""
    whole = bits.astype(np.uint32)
    whole <<= np.uint32(16)
    return whole.view(np.float32)


def is_bf16_valued(values: NDArray[np.float32]) -> bool:
    """Return whether every number is exactly a bf16."""
    return not np.any(np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) & np.uint32(0xFFFF))


# Writing


def write_tensors(
    path: Path | str,
    arrays: Mapping[str, NDArray[np.float32]],
    dtype: Storage = "bf16",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays in one type, bf16 and f16 rounded to nearest even. Readers see the old file or the new one."""
    path = Path(path)
    names = sorted(arrays)
    tag, value_bytes = TAGS[dtype]
    metadata = {"format": "pt"} if metadata is None else metadata
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    begin = 0
    for name in names:
        end = begin + arrays[name].size * value_bytes
        entries[name] = {"dtype": tag, "shape": list(arrays[name].shape), "data_offsets": [begin, end]}
        begin = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % HEADER_ALIGNMENT)
    with _replacing(path) as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name in names:
            file.write(_stored(name, arrays[name], dtype).data)


def _stored(name: str, array: NDArray[np.float32], dtype: Storage) -> NDArray[np.generic]:
    values = np.ascontiguousarray(array, dtype="<f4")
    if dtype == "f32":
        return values
    if dtype == "bf16":
        return to_bf16(values)
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    if not np.array_equal(np.isinf(halves), np.isinf(values)):
        raise ModelError(f"{name} holds numbers beyond 65504, which f16 cannot", hint="write bf16 or f32")
    return halves


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that gets the name `path` when it is written and on disk; an error leaves nothing behind."""
    temporary = sibling_name(path)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
