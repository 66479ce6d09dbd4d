"""A copy of a worker's weights that does not run: versions are built in it, and swapped in when they are whole.

It holds the worker's own tensors, fused, split and padded as the engine has them, as bit patterns. Pieces are found in
them by the layout, and known by the hash of their numbers, which is computed when it is asked for and not known: so it
does not matter how the numbers got there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from rose.weights.coding import BITS, Bits, Codec
from rose.weights.manifest import content_hash
from rose.weights.relay.base import Buffer
from rose.weights.shards import Array, Box, Holding, Holdings, Tensor, places


class Shadow:
    """A worker's weights that do not run: local arrays of bit patterns, and what is known of their pieces."""

    def __init__(
        self, arrays: Mapping[str, Array], holdings: Holdings, tensors: Sequence[Tensor], *, is_blank: bool = False
    ) -> None:
        self.is_blank = is_blank  # nothing was written yet: no piece equals any version, and none is read to learn that
        self._arrays = arrays
        self._holdings = holdings
        self._dtypes = {tensor.name: tensor.dtype for tensor in tensors}
        self._places: dict[Box, list[Holding]] = {}
        self._hashes: dict[Box, bytes | None] = {}

    def cut(self, boxes: Sequence[Box]) -> list[Box]:
        """The pieces needed here. What was known of pieces that are cut as before stays known."""
        found: dict[Box, list[Holding]] = defaultdict(list)
        for box, holding in places(boxes, self._holdings):
            found[box].append(holding)
        self._hashes = {box: self._hashes.get(box) for box in found}
        self._places = dict(found)
        return list(found)

    def hash_of(self, box: Box) -> bytes:
        """Of the piece's numbers, computed if it is not known. Two places (tied) that differ count as unknown."""
        known = b"" if self.is_blank else self._hashes[box]
        if known is None:
            hashes = {content_hash(self._copy(box, held), self._dtypes[box.tensor]) for held in self._places[box]}
            known = self._hashes[box] = hashes.pop() if len(hashes) == 1 else b""
        return known

    def forget(self, box: Box) -> None:
        """Whoever writes to the arrays says which pieces."""
        self._hashes[box] = None

    def forget_all(self) -> None:
        self.is_blank = False
        self._hashes = dict.fromkeys(self._hashes)

    def write(self, box: Box, payload: Buffer, codec: Codec) -> None:
        """Apply a payload at every place of the piece. If it fails the piece is unknown."""
        self.is_blank = False
        self.forget(box)
        for held in self._places[box]:
            view = held.view(self._arrays[held.local], box)
            if view.flags.c_contiguous:
                codec.apply(payload, view)
            else:
                block = np.ascontiguousarray(view)
                codec.apply(payload, block)
                view[...] = block

    def _copy(self, box: Box, held: Holding) -> Bits:
        dtype = BITS[self._dtypes[box.tensor]]
        return np.ascontiguousarray(held.view(self._arrays[held.local], box)).view(dtype)
