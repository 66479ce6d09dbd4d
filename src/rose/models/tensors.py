"""The weights of a model: named tensors from a folder of safetensors, or from memory.

`safetensors` opens every file and so checks it whole (header, offsets, length); its numpy flavour cannot
hand out bf16, the usual case, so the bytes are then taken from a read-only map of the same file. Nothing is
read before it is asked for, and only the tensors a spec implies are ever touched.

A folder and a dict of arrays (`MemoryTensors`, weights that come from a trainer) look the same to a reader:
both are `Tensors`, and `check` compares either with what a config.json implies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from rose.errors import ModelError
from rose.models.bits import from_bf16, is_bf16_valued
from rose.models.files import read_object
from rose.models.spec import ModelSpec
from rose.models.writer import write_tensors

__all__ = [
    "Tensors",
    "TensorFolder",
    "MemoryTensors",
    "open_tensors",
    "write_tensors",
    "expected_tensors",
    "check",
    "tensors_are_bf16_valued",
]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES: dict[str, type[np.generic]] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
MISSING_SHOWN_MAX = 3

Shape = tuple[int, ...]


class Tensors(Protocol):
    """Named tensors, wherever they come from."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> Shape: ...

    def dtype(self, name: str) -> str:
        """One of "BF16", "F16" and "F32"; anything else is for `check` to refuse."""

    def place(self, name: str) -> str:
        """Where the tensor is, for a message: a file's name, or "memory"."""

    def float32(self, name: str) -> NDArray[np.float32]:
        """The tensor's numbers, exactly; a fresh array or a read-only view."""

    def bits16(self, name: str) -> NDArray[np.uint16]:
        """The tensor's numbers as bf16 bits; only for one whose numbers are all bf16."""


class _Shard:
    """One safetensors file: what is in it, and where."""

    def __init__(self, path: Path) -> None:
        try:
            with safe_open(str(path), framework="np"):
                pass
            self.bytes = np.memmap(path, dtype=np.uint8, mode="r")
        except FileNotFoundError as error:
            raise ModelError(f"{path} is missing", hint="copy or download the folder again") from error
        except (SafetensorError, ValueError) as error:
            hint = "it may be truncated; copy or download it again"
            raise ModelError(f"{path} is not a whole safetensors file: {error}", hint=hint) from error
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
        length = int.from_bytes(self.bytes[:8].tobytes(), "little")
        self.start = 8 + length
        self.header = json.loads(self.bytes[8 : self.start].tobytes())
        self.header.pop("__metadata__", None)
        self.path = path

    def array(self, name: str, dtype: type[np.generic]) -> NDArray[np.generic]:
        begin, end = self.header[name]["data_offsets"]
        raw = self.bytes[self.start + begin : self.start + end]
        # A header of odd length leaves the numbers unaligned, which compiled kernels do not take.
        return np.require(np.frombuffer(raw, dtype=dtype), requirements="A").reshape(self.header[name]["shape"])


class TensorFolder:
    """The tensors of a model folder, in one file or in shards."""

    def __init__(self, folder: Path, shards: Mapping[str, _Shard]) -> None:
        self.folder = folder
        self._shards = shards

    def names(self) -> Iterable[str]:
        return self._shards.keys()

    def shape(self, name: str) -> Shape:
        return tuple(self._shard(name).header[name]["shape"])

    def dtype(self, name: str) -> str:
        return str(self._shard(name).header[name]["dtype"])

    def place(self, name: str) -> str:
        return self._shard(name).path.name

    def float32(self, name: str) -> NDArray[np.float32]:
        return _as_float32(self._array(name))

    def bits16(self, name: str) -> NDArray[np.uint16]:
        return _as_bits16(name, self.place(name), self._array(name))

    def _shard(self, name: str) -> _Shard:
        if name not in self._shards:
            raise ModelError(f"{self.folder} holds no tensor {name}")
        return self._shards[name]

    def _array(self, name: str) -> NDArray[np.generic]:
        dtype = self.dtype(name)
        if dtype not in DTYPES:
            raise _unsupported_dtype(self, name)
        return self._shard(name).array(name, DTYPES[dtype])


class MemoryTensors:
    """Tensors held as numpy arrays: float32, float16, or uint16 for the bits of bf16."""

    def __init__(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        self._arrays = arrays

    def names(self) -> Iterable[str]:
        return self._arrays.keys()

    def shape(self, name: str) -> Shape:
        return self._array(name).shape

    def dtype(self, name: str) -> str:
        found = self._array(name).dtype
        return next((tag for tag, dtype in DTYPES.items() if found == dtype), str(found))

    def place(self, name: str) -> str:
        return "memory"

    def float32(self, name: str) -> NDArray[np.float32]:
        return _as_float32(self._supported(name))

    def bits16(self, name: str) -> NDArray[np.uint16]:
        return _as_bits16(name, "memory", self._supported(name))

    def _array(self, name: str) -> NDArray[np.generic]:
        if name not in self._arrays:
            raise ModelError(f"the weights in memory hold no tensor {name}")
        return self._arrays[name]

    def _supported(self, name: str) -> NDArray[np.generic]:
        if self.dtype(name) not in DTYPES:
            raise _unsupported_dtype(self, name)
        return self._array(name)


def open_tensors(folder: Path | str) -> TensorFolder:
    """Open a folder's model.safetensors, or the shards its index names."""
    folder = Path(folder)
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        hint = "copy the weights too; a pytorch_model.bin must be saved again as safetensors"
        raise ModelError(f"{folder / SINGLE} is missing, and so is {INDEX}", hint=hint)
    if (folder / SINGLE).exists():
        shard = _Shard(folder / SINGLE)
        return TensorFolder(folder, dict.fromkeys(shard.header, shard))
    places = _read_index(folder / INDEX)
    shards = {file: _open_indexed(folder, file) for file in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in shards[file].header:
            raise ModelError(f"{folder / INDEX} says {name} is in {file}, but it is not")
    return TensorFolder(folder, {name: shards[file] for name, file in places.items()})


def _read_index(path: Path) -> dict[str, str]:
    places = read_object(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f"{path}: weight_map must be an object that names a file for each tensor")
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or Path(file).suffix != ".safetensors":
            raise ModelError(f"{path}: weight_map.{name} must be a safetensors file in the same folder")
    return places


def _open_indexed(folder: Path, file: str) -> _Shard:
    if not (folder / file).exists():
        hint = "copy or download the missing file"
        raise ModelError(f"{folder / INDEX} names {file}, which is not in the folder", hint=hint)
    return _Shard(folder / file)


def expected_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor a model of this spec must have; a tied model's lm_head is not among them."""
    found: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocabulary, spec.hidden)}
    for layer in range(spec.layers):
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_tensors(spec).items()}
    found["model.norm.weight"] = (spec.hidden,)
    if not spec.tied_embeddings:
        found["lm_head.weight"] = (spec.vocabulary, spec.hidden)
    return found


def _layer_tensors(spec: ModelSpec) -> dict[str, Shape]:
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
    found: dict[str, Shape] = {"input_layernorm.weight": (spec.hidden,)}
    for name, (rows, columns, bias) in linears.items():
        found[f"{name}.weight"] = (rows, columns)
        if bias:
            found[f"{name}.bias"] = (rows,)
    if spec.qk_norm:
        found["self_attn.q_norm.weight"] = found["self_attn.k_norm.weight"] = (spec.head_size,)
    found["post_attention_layernorm.weight"] = (spec.hidden,)
    return found


def check(tensors: Tensors, spec: ModelSpec) -> None:
    """Refuse tensors that are not those of the spec: missing, of another shape or dtype, or too many."""
    expected = expected_tensors(spec)
    present = set(tensors.names())
    _check_missing(tensors, [name for name in expected if name not in present])
    for name, shape in expected.items():
        _check_one(tensors, name, shape)
    for name in sorted(present - expected.keys()):
        if name.startswith("model.") and ".rotary_emb." not in name:
            raise ModelError(f"{name} in {tensors.place(name)} has no place in the model config.json describes")
    if spec.tied_embeddings and "lm_head.weight" in present:
        _check_tied(tensors)


def _check_missing(tensors: Tensors, missing: list[str]) -> None:
    if not missing:
        return
    where = tensors.folder if isinstance(tensors, TensorFolder) else "memory"
    shown = ", ".join(missing[:MISSING_SHOWN_MAX])
    more = f" and {len(missing) - MISSING_SHOWN_MAX} more" if len(missing) > MISSING_SHOWN_MAX else ""
    raise ModelError(
        f"the weights in {where} lack {shown}{more}, which config.json implies",
        hint="check that config.json belongs to these weights and that no shard is missing",
    )


def _check_one(tensors: Tensors, name: str, shape: Shape) -> None:
    if tensors.shape(name) != shape:
        raise ModelError(
            f"{name} in {tensors.place(name)} is {tensors.shape(name)}, config.json implies {shape}",
            hint="check that config.json belongs to these weights",
        )
    if tensors.dtype(name) not in DTYPES:
        raise _unsupported_dtype(tensors, name)


def _check_tied(tensors: Tensors) -> None:
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if not np.array_equal(tensors.float32(head), tensors.float32(embedding)):
        raise ModelError(
            f"config.json ties {head} to {embedding}, but the one in {tensors.place(head)} differs",
            hint="set tie_word_embeddings to false in config.json if the model has its own lm_head",
        )


def tensors_are_bf16_valued(tensors: Tensors, spec: ModelSpec) -> bool:
    """Whether every matrix of the model holds bf16 numbers only, whatever type it is stored as."""
    matrices = [name for name, shape in expected_tensors(spec).items() if len(shape) == 2]
    return all(tensors.dtype(name) == "BF16" or is_bf16_valued(tensors.float32(name)) for name in matrices)


def _unsupported_dtype(tensors: Tensors, name: str) -> ModelError:
    found = tensors.dtype(name)
    return ModelError(f"{name} in {tensors.place(name)} is {found}; supported are {', '.join(DTYPES)}")


def _as_float32(array: NDArray[np.generic]) -> NDArray[np.float32]:
    if array.dtype == np.uint16:
        return from_bf16(array.astype(np.uint16, copy=False))
    return array.astype(np.float32, copy=False)


def _as_bits16(name: str, place: str, array: NDArray[np.generic]) -> NDArray[np.uint16]:
    if array.dtype == np.uint16:
        return array.astype(np.uint16, copy=False)
    values = _as_float32(array)
    if not is_bf16_valued(values):
        raise ModelError(f"{name} in {place} holds numbers that are not bf16")
    return (np.ascontiguousarray(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
