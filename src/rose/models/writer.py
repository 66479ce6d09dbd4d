"""Weights written as one safetensors file: deterministic, and there whole or not at all.

The format is a length, a JSON header and the numbers. It is written here and not by the `safetensors`
package because that one orders metadata by a random hash: the same weights must be the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from rose.errors import ModelError
from rose.models.bits import to_bf16
from rose.models.files import sibling_name

Storage = Literal["bf16", "f16", "f32"]
TAGS: dict[Storage, tuple[str, int]] = {"bf16": ("BF16", 2), "f16": ("F16", 2), "f32": ("F32", 4)}
HEADER_ALIGNMENT = 8


def write_tensors(
    path: Path | str,
    arrays: Mapping[str, NDArray[np.float32]],
    dtype: Storage = "bf16",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays in the given type, bf16 and f16 rounded to nearest even. Readers see the old file or the new."""
    path = Path(path)
    names = sorted(arrays)
    header = _header(arrays, names, dtype, {"format": "pt"} if metadata is None else metadata)
    with replacing(path) as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name in names:
            file.write(_stored(name, arrays[name], dtype).data)


def _header(
    arrays: Mapping[str, NDArray[np.float32]], names: list[str], dtype: Storage, metadata: Mapping[str, str]
) -> bytes:
    tag, value_bytes = TAGS[dtype]
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    begin = 0
    for name in names:
        end = begin + arrays[name].size * value_bytes
        entries[name] = {"dtype": tag, "shape": list(arrays[name].shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % HEADER_ALIGNMENT)


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
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the name `path` once it is written and on disk; on an error it leaves nothing behind."""
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
