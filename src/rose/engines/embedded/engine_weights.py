"""A model's weights in the order the kernels read them.

Every linear layer becomes panels of sixteen output columns, k running inside a panel; queries, keys and values are one
product, and so are gate and up. All of it is one buffer addressed by byte offsets, so that a swap is one assignment.
Linear weights are bf16 pairs if every one of them is exactly a bf16 number (half the memory, the same results bit for
bit) and float32 otherwise; norms and biases are always float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.engines.embedded import engine_kernels as k
from rose.errors import ModelError
from rose.models.model_spec import ModelSpec
from rose.models.tensors import Tensors, check, tensors_are_bf16_valued

ALIGNMENT_BYTES = 64
EXPONENT = np.uint16(0x7F80)  # all ones in a bf16 that is infinite or NaN


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
        """Return the same without any numbers: what is left of weights that were released."""
        empty = {name: getattr(self, name)[:0].copy() for name in ("floats", "embedding_bf16", "embedding_f32")}
        return replace(self, **empty)


def pad16(size: int) -> int:
    return -(-size // 16) * 16


def aligned_floats(count: int) -> NDArray[np.float32]:
    """Return zeros that start on a cache line."""
    raw = np.zeros(count * 4 + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + count * 4].view(np.float32)


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
        spec, vocabulary = self.spec, pad16(self.spec.vocabulary)
        widest = max((spec.heads + 2 * spec.kv_heads) * self.head, 2 * self.ffn, vocabulary, self.hidden)
        zeros = self._put(np.zeros(widest, np.float32))
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
        shape = np.zeros(k.SHAPE_ENTRIES, np.int64)
        shape[k.LAYERS], shape[k.HIDDEN], shape[k.FFN] = spec.layers, self.hidden, self.ffn
        shape[k.HEADS], shape[k.KV_HEADS] = spec.heads, spec.kv_heads
        shape[k.HEAD], shape[k.HEAD_REAL] = self.head, spec.head_size
        shape[k.VOCABULARY] = vocabulary
        shape[k.BF16], shape[k.QK_NORM] = self.bf16, spec.qk_norm
        shape[k.BIASES] = spec.output_bias or spec.mlp_bias
        floats = aligned_floats(self.size_bytes // 4)
        np.concatenate(self.pieces, out=floats)
        embedding = self._read("model.embed_tokens.weight")
        embedding = np.ascontiguousarray(np.pad(embedding, ((0, 0), (0, self.hidden - embedding.shape[1]))))
        in_bf16 = embedding if self.bf16 else np.zeros((1, 1), np.uint16)
        in_floats = np.zeros((1, 1), np.float32) if self.bf16 else embedding
        return PackedWeights(version, shape, table, tail, floats, in_bf16, in_floats)

    def _pack_layer(self, row: NDArray[np.int64], prefix: str, zeros: int) -> None:
        spec, attention, mlp = self.spec, prefix + "self_attn.", prefix + "mlp."
        heads = [("q_proj", spec.heads), ("k_proj", spec.kv_heads), ("v_proj", spec.kv_heads)]
        gate_up = ("gate_proj", "up_proj")
        row[k.NORM_1] = self._put(self._vector(prefix + "input_layernorm.weight", self.hidden))
        row[k.NORM_2] = self._put(self._vector(prefix + "post_attention_layernorm.weight", self.hidden))
        row[k.QKV] = self._put_matrix([(f"{attention}{name}.weight", count) for name, count in heads], self.hidden)
        # The output projection reads padded heads, so its input columns are spread.
        out = self._spread(np.ascontiguousarray(self._read(attention + "o_proj.weight").T), spec.heads).T
        row[k.OUT] = self._put_panels(np.pad(out, ((0, -len(out) % 16), (0, 0))))
        row[k.GATE_UP] = self._put_matrix([(f"{mlp}{name}.weight", None) for name in gate_up], self.hidden)
        row[k.DOWN] = self._put_matrix([(mlp + "down_proj.weight", None)], self.ffn)
        row[k.Q_NORM] = row[k.K_NORM] = row[k.QKV_BIAS] = row[k.OUT_BIAS] = zeros
        row[k.GATE_UP_BIAS] = row[k.DOWN_BIAS] = zeros
        if spec.qk_norm:
            row[k.Q_NORM] = self._put(self._vector(attention + "q_norm.weight", self.head))
            row[k.K_NORM] = self._put(self._vector(attention + "k_norm.weight", self.head))
        if spec.qkv_bias:
            biases = [self._spread(self._read(f"{attention}{name}.bias", True), count) for name, count in heads]
            row[k.QKV_BIAS] = self._put(np.concatenate(biases))
        if spec.output_bias:
            row[k.OUT_BIAS] = self._put(self._vector(attention + "o_proj.bias", self.hidden))
        if spec.mlp_bias:
            biases = [self._vector(f"{mlp}{name}.bias", self.ffn) for name in gate_up]
            row[k.GATE_UP_BIAS] = self._put(np.concatenate(biases))
            row[k.DOWN_BIAS] = self._put(self._vector(mlp + "down_proj.bias", self.hidden))

    def _read(self, name: str, as_floats: bool = False) -> NDArray[Any]:
        values: NDArray[Any]
        if self.bf16 and not as_floats:
            values = self.tensors.bits16(name)
            is_finite = not ((values & EXPONENT) == EXPONENT).any()
        else:
            values = self.tensors.float32(name)
            is_finite = bool(np.isfinite(values).all())
        if not is_finite:
            what = f"{name} in {self.tensors.place(name)} holds numbers that are not finite"
            raise ModelError(what, hint="the training that made it has diverged; take an earlier checkpoint")
        return values

    def _vector(self, name: str, size: int) -> NDArray[np.float32]:
        values = self._read(name, True)
        return np.pad(values, (0, size - len(values)))

    def _spread(self, rows: NDArray[Any], heads: int) -> NDArray[Any]:
        """Return rows of `heads` heads, each padded to the padded head size."""
        parted = rows.reshape(heads, self.spec.head_size, *rows.shape[1:])
        padding = [(0, 0), (0, self.head - self.spec.head_size)] + [(0, 0)] * (rows.ndim - 1)
        return np.pad(parted, padding).reshape(heads * self.head, *rows.shape[1:])

    def _put_matrix(self, parts: Iterable[tuple[str, int | None]], columns: int) -> int:
        """Store stacked (out, in) matrices; a part with a head count is padded head by head."""
        stacked = []
        for name, heads in parts:
            matrix = self._read(name)
            if heads is not None:
                matrix = self._spread(matrix, heads)
            stacked.append(np.pad(matrix, ((0, -len(matrix) % 16), (0, columns - matrix.shape[1]))))
        return self._put_panels(np.concatenate(stacked) if len(stacked) > 1 else stacked[0])

    def _put_panels(self, matrix: NDArray[Any]) -> int:
        matrix = np.ascontiguousarray(matrix)
        if self.bf16:
            matrix = matrix.view(np.uint32)  # two consecutive k: low half, high half
        panels = matrix.reshape(-1, 16, matrix.shape[1]).transpose(0, 2, 1)
        return self._put(np.ascontiguousarray(panels).view(np.float32))

    def _put(self, values: NDArray[np.float32]) -> int:
        """Store numbers, and return their byte offset."""
        offset = self.size_bytes
        flat = values.reshape(-1)
        self.pieces.append(np.pad(flat, (0, -len(flat) % (ALIGNMENT_BYTES // 4))))
        self.size_bytes += self.pieces[-1].nbytes
        return offset
