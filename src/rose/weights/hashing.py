"""One word for the weights in a model folder, as `manifest.version_hash` is for a version in a relay.

Both hash the numbers of every tensor under its name, type and place. A relay's version may be cut into pieces, a folder
never is: the words are the same for models without a tensor of more than `publish.PIECE_ELEMENTS_MAX` numbers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rose.models.tensors import open_tensors
from rose.weights.coding import BITS
from rose.weights.manifest import PieceEntry, TensorEntry, content_hash, version_hash


def folder_hash(folder: Path | str) -> str:
    """Reads everything, so not where others wait. Raises ModelError."""
    tensors = open_tensors(folder)
    names = sorted(tensors.names())
    entries = [TensorEntry(name, tensors.dtype(name), tensors.shape(name)) for name in names]
    pieces = []
    for index, entry in enumerate(entries):
        numbers = tensors.bits16(entry.name) if entry.dtype == "BF16" else tensors.float32(entry.name)
        bits = np.ascontiguousarray(numbers.astype(np.float16) if entry.dtype == "F16" else numbers)
        digest = content_hash(bits.view(BITS[entry.dtype]), entry.dtype)
        start = (0,) * len(entry.shape)
        pieces.append(PieceEntry(index, start, entry.shape, 0, 0, 0, b"", digest, b""))
    return version_hash(entries, pieces)
