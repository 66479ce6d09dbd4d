"""A model's weights in the order the kernels read them.

Every linear layer becomes panels of sixteen output columns, k running inside a panel; queries, keys and values
are one product, so are gate and up. All of it lives in one buffer, addressed by byte offsets, so that a new
version is one new buffer and a swap is one assignment. Linear weights are kept as bf16 pairs when every one of
them is exactly a bf16 number (half the memory, the same results bit for bit) and as float32 otherwise; norms and
biases are always float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.engines.embedded import kernels as k
from rose.errors import ModelError
from rose.models.spec import ModelSpec
from rose.models.tensors import Tensors, check, tensors_are_bf16_valued

ALIGNMENT_BYTES = 64
EXPONENT = np.uint16(0x7F80)  # all ones in a bf16 that is infinite or not a number


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """One version of a model's weights, ready to run. The arrays are never written again."""

    version: str
    shape: NDArray[np.int64]
    table: NDArray[np.int64]
    tail: NDArray[np.int64]
    floats: NDArray[np.float32]
    embedding_bf16: NDArray[np.uint16]
    embedding_f32: NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        return self.floats.nbytes + self.embedding_bf16.nbytes + self.embedding_f32.nbytes

    def emptied(self) -> PackedWeights:
        """The same without anything in it: what is left of weights that were released."""
        empty = {name: getattr(self, name)[:0].copy() for name in ("floats", "embedding_bf16", "embedding_f32")}
        return replace(self, **empty)


def pad16(size: int) -> int:
    return -(-size // 16) * 16


def pack(spec: ModelSpec, tensors: Tensors, version: str) -> PackedWeights:
    """Check the tensors against the spec and lay them out. Raises ModelError."""
    check(tensors, spec)
    return _Packer(spec, tensors, tensors_are_bf16_valued(tensors, spec)).pack(version)


class _Packer:
    def __init__(self, spec: ModelSpec, tensors: Tensors, bf16: bool) -> None:
        self.spec, self.tensors, self.bf16 = spec, tensors, bf16
        self.hidden, self.head, self.ffn = pad16(spec.hidden), pad16(spec.head_size), pad16(spec.ffn)
        self.pieces: list[NDArray[np.float32]] = []
        self.size_bytes = 0

    def pack(self, version: str) -> PackedWeights:
        spec = self.spec
        zeros = self._put(np.zeros(self._widest_row(), np.float32))
        table = np.zeros((spec.layers, k.TABLE_COLUMNS), np.int64)
        for layer in range(spec.layers):
            self._pack_layer(table[layer], f"model.layers.{layer}.", zeros)
        tail = np.zeros(k.TAIL_ENTRIES, np.int64)
        tail[k.ZEROS] = zeros
        tail[k.FINAL_NORM] = self._put(self._vector("model.norm.weight", self.hidden))
        tail[k.HIDDEN_SCALE] = self._put(np.array([1 / spec.hidden, spec.rms_eps], np.float32))
        tail[k.HEAD_SCALE] = self._put(np.array([1 / spec.head_size, spec.rms_eps], np.float32))
        head = "model.embed_tokens" if spec.tied_embeddings else "lm_head"
        tail[k.HEAD_WEIGHT] = self._put_matrix([(f"{head}.weight", None)], self.hidden)
        return PackedWeights(version, self._shape(), table, tail, self._join(), *self._embedding())

    def _pack_layer(self, row: NDArray[np.int64], prefix: str, zeros: int) -> None:
        spec, attention, mlp = self.spec, prefix + "self_attn.", prefix + "mlp."
        heads = [("q_proj", spec.heads), ("k_proj", spec.kv_heads), ("v_proj", spec.kv_heads)]
        row[k.NORM_1] = self._put(self._vector(prefix + "input_layernorm.weight", self.hidden))
        row[k.NORM_2] = self._put(self._vector(prefix + "post_attention_layernorm.weight", self.hidden))
        row[k.QKV] = self._put_matrix([(f"{attention}{name}.weight", count) for name, count in heads], self.hidden)
        row[k.OUT] = self._put_out(attention + "o_proj.weight")
        row[k.GATE_UP] = self._put_matrix(
            [(f"{mlp}{name}.weight", None) for name in ("gate_proj", "up_proj")], self.hidden
        )
        row[k.DOWN] = self._put_matrix([(mlp + "down_proj.weight", None)], self.ffn)
        row[k.Q_NORM] = row[k.K_NORM] = row[k.QKV_BIAS] = row[k.OUT_BIAS] = zeros
        row[k.GATE_UP_BIAS] = row[k.DOWN_BIAS] = zeros
        if spec.qk_norm:
            row[k.Q_NORM] = self._put(self._vector(attention + "q_norm.weight", self.head))
            row[k.K_NORM] = self._put(self._vector(attention + "k_norm.weight", self.head))
        if spec.qkv_bias:
            row[k.QKV_BIAS] = self._put(np.concatenate([self._head_bias(f"{attention}{n}.bias", c) for n, c in heads]))
        if spec.output_bias:
            row[k.OUT_BIAS] = self._put(self._vector(attention + "o_proj.bias", self.hidden))
        if spec.mlp_bias:
            both = [self._vector(f"{mlp}{name}.bias", self.ffn) for name in ("gate_proj", "up_proj")]
            row[k.GATE_UP_BIAS] = self._put(np.concatenate(both))
            row[k.DOWN_BIAS] = self._put(self._vector(mlp + "down_proj.bias", self.hidden))

    def _shape(self) -> NDArray[np.int64]:
        spec, shape = self.spec, np.zeros(k.SHAPE_ENTRIES, np.int64)
        shape[k.LAYERS], shape[k.HIDDEN], shape[k.FFN] = spec.layers, self.hidden, self.ffn
        shape[k.HEADS], shape[k.KV_HEADS] = spec.heads, spec.kv_heads
        shape[k.HEAD], shape[k.HEAD_REAL] = self.head, spec.head_size
        shape[k.VOCABULARY] = pad16(spec.vocabulary)
        shape[k.BF16], shape[k.QK_NORM] = self.bf16, spec.qk_norm
        shape[k.BIASES] = spec.output_bias or spec.mlp_bias
        return shape

    def _widest_row(self) -> int:
        spec = self.spec
        return max((spec.heads + 2 * spec.kv_heads) * self.head, 2 * self.ffn, pad16(spec.vocabulary), self.hidden)

    # Reading, padded

    def _read(self, name: str) -> NDArray[Any]:
        if not self.bf16:
            return self._read_floats(name)
        bits = self.tensors.bits16(name)
        if ((bits & EXPONENT) == EXPONENT).any():
            raise self._not_finite(name)
        return bits

    def _read_floats(self, name: str) -> NDArray[np.float32]:
        values = self.tensors.float32(name)
        if not np.isfinite(values).all():
            raise self._not_finite(name)
        return values

    def _not_finite(self, name: str) -> ModelError:
        what = f"{name} in {self.tensors.place(name)} holds numbers that are not finite"
        return ModelError(what, hint="the training that made it has diverged; take an earlier checkpoint")

    def _vector(self, name: str, size: int) -> NDArray[np.float32]:
        values = self._read_floats(name)
        return np.pad(values, (0, size - len(values)))

    def _head_bias(self, name: str, heads: int) -> NDArray[np.float32]:
        return self._spread(self._read_floats(name), heads).reshape(-1)

    def _spread(self, rows: NDArray[Any], heads: int) -> NDArray[Any]:
        """Rows of `heads` heads, each padded to the padded head size."""
        parted = rows.reshape(heads, self.spec.head_size, *rows.shape[1:])
        padding = [(0, 0), (0, self.head - self.spec.head_size)] + [(0, 0)] * (rows.ndim - 1)
        return np.pad(parted, padding).reshape(heads * self.head, *rows.shape[1:])

    def _put_matrix(self, parts: Iterable[tuple[str, int | None]], columns: int) -> int:
        """Stacked (out, in) matrices; a part with a head count is padded head by head."""
        stacked = []
        for name, heads in parts:
            matrix = self._read(name)
            if heads is not None:
                matrix = self._spread(matrix, heads)
            stacked.append(np.pad(matrix, ((0, -len(matrix) % 16), (0, columns - matrix.shape[1]))))
        return self._put_panels(np.concatenate(stacked) if len(stacked) > 1 else stacked[0])

    def _put_out(self, name: str) -> int:
        """The output projection reads padded heads, so its input columns are spread."""
        matrix = self._spread(np.ascontiguousarray(self._read(name).T), self.spec.heads).T
        return self._put_panels(np.pad(matrix, ((0, -len(matrix) % 16), (0, 0))))

    # Writing

    def _put_panels(self, matrix: NDArray[Any]) -> int:
        matrix = np.ascontiguousarray(matrix)
        if self.bf16:
            matrix = matrix.view(np.uint32)  # two consecutive k: low half, high half
        panels = matrix.reshape(-1, 16, matrix.shape[1]).transpose(0, 2, 1)
        return self._put(np.ascontiguousarray(panels).view(np.float32))

    def _put(self, values: NDArray[np.float32]) -> int:
        offset = self.size_bytes
        flat = values.reshape(-1)
        self.pieces.append(np.pad(flat, (0, -len(flat) % (ALIGNMENT_BYTES // 4))))
        self.size_bytes += self.pieces[-1].nbytes
        return offset

    def _join(self) -> NDArray[np.float32]:
        floats = aligned_floats(self.size_bytes // 4)
        np.concatenate(self.pieces, out=floats)
        return floats

    def _embedding(self) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
        table = self._read("model.embed_tokens.weight")
        table = np.ascontiguousarray(np.pad(table, ((0, 0), (0, self.hidden - table.shape[1]))))
        if self.bf16:
            return table, np.zeros((1, 1), np.float32)
        return np.zeros((1, 1), np.uint16), table


def aligned_floats(count: int) -> NDArray[np.float32]:
    """Zeros that start on a cache line."""
    raw = np.zeros(count * 4 + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + count * 4].view(np.float32)
