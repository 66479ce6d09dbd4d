"""One transformer step as one compiled call; a row's result is the same bits in any batch.

A row is one new token; a *segment* is the rows of one request: (first row, rows, position of the first row, slot in the
block table). Sizes are padded to multiples of 16 with zero weights. KV memory is one flat float32 array of blocks, with
for each layer and KV head: keys transposed, [head size][16 tokens], then values in panels, [head size / 16][16][16]; so
attention uses the same `tiles` as every other product. Fresh blocks must have zero values, because masked tokens are
multiplied by zero rather than skipped.
"""

from __future__ import annotations

import numpy as np

from rose.engines.embedded.vector import call_at, callback, entry, exp_and_sum, inner, rms_norm, silu_multiply, tiles

BLOCK_TOKENS = 16  # one panel of keys
ATTENTION_ROWS = 12  # query rows that share one pass over the keys
L2_BYTES = 256 * 1024  # activations of one pass should stay in the second-level cache

# Columns of the layer table: byte offsets into the weight buffer.
NORM_1, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, OUT_BIAS, NORM_2, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS = range(12)
TABLE_COLUMNS = 12
# Entries of the shape array.
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, HEAD_REAL, FFN, VOCABULARY, BF16, QK_NORM, BIASES = range(11)
SHAPE_ENTRIES = 11
# Entries of the tail array: byte offsets of what is not per layer.
FINAL_NORM, HEAD_WEIGHT, ZEROS, HIDDEN_SCALE, HEAD_SCALE = range(5)
TAIL_ENTRIES = 5

_NARROW = dict.fromkeys(range(1, 7), 1)
_WIDE = {1: 4, 2: 2}  # few rows leave registers free for more panels
_narrow_bf16, _wide_bf16 = tiles(_NARROW, True), tiles(_WIDE, True)
_narrow_f32, _wide_f32 = tiles(_NARROW, False), tiles(_WIDE, False)


@inner
def _product_pass(bf16, a, a_stride, rows, w, k, panels, start, start_stride, c, c_stride, ahead):
    w_panel = k * (32 if bf16 else 64)
    panel = 0
    if rows <= 2:
        wide = 4 if rows == 1 else 2
        next_panels = ahead if ahead else wide * w_panel
        while panel + wide <= panels:
            wp, sp, cp = w + panel * w_panel, start + panel * 64, c + panel * 64
            if bf16:
                _wide_bf16(rows, a, a_stride, wp, w_panel, k, sp, start_stride, cp, c_stride, next_panels)
            else:
                _wide_f32(rows, a, a_stride, wp, w_panel, k, sp, start_stride, cp, c_stride, next_panels)
            panel += wide
    next_panels = ahead if ahead else w_panel
    while panel < panels:
        wp = w + panel * w_panel
        row = 0
        while row < rows:
            left = rows - row  # six at a time; the end is split evenly, because small tiles waste the multiplier
            count = 6 if left >= 11 else ((left + 1) // 2 if left >= 7 else left)
            ap, sp, cp = a + row * a_stride, start + row * start_stride + panel * 64, c + row * c_stride + panel * 64
            if bf16:
                _narrow_bf16(count, ap, a_stride, wp, w_panel, k, sp, start_stride, cp, c_stride, next_panels)
            else:
                _narrow_f32(count, ap, a_stride, wp, w_panel, k, sp, start_stride, cp, c_stride, next_panels)
            row += count
        panel += 1


@callback("void(" + "int64, " * 11 + "int64)")
def _product(bf16, a, a_stride, rows, w, k, panels, start, start_stride, c, c_stride, ahead):
    """Compute c = start + a @ w, in passes of rows that fit the cache; `ahead` is as for `tiles`, 0 the next panel."""
    most = max(6, L2_BYTES // (k * 4) // 6 * 6)
    row = 0
    while row < rows:
        count = min(most, rows - row)
        ap, sp, cp = a + row * a_stride, start + row * start_stride, c + row * c_stride
        _product_pass(bf16, ap, a_stride, count, w, k, panels, sp, start_stride, cp, c_stride, ahead)
        row += count


PRODUCT = _product.address


@inner
def _row(array, row):
    return array.ctypes.data + row * array.strides[0]


@inner
def _linear(product, bf16, a, row0, rows, weight, size, columns, start, start_stride, c):
    """Compute rows of c = start + rows of a @ weight; a start stride of 0 adds the same row, a bias, to each."""
    a_at, c_at, panels = _row(a, row0), _row(c, row0), columns // 16
    call_at(product, bf16, a_at, a.strides[0], rows, weight, size, panels, start, start_stride, c_at, c.strides[0], 0)


@inner
def _norm_rows(x, out, row0, rows, gain, size, scale):
    for r in range(row0, row0 + rows):
        rms_norm(_row(x, r), gain, _row(out, r), size, scale)


@inner
def _add_bias(x, row0, rows, weight_floats, offset):
    for r in range(row0, row0 + rows):
        for i in range(x.shape[1]):
            x[r, i] += weight_floats[offset // 4 + i]


@inner
def _rotate(x, row, column, half, cos, sin, position):
    for i in range(half):
        a, b = x[row, column + i], x[row, column + half + i]
        c, s = cos[position, i], sin[position, i]
        x[row, column + i] = a * c - b * s
        x[row, column + half + i] = b * c + a * s


@inner
def _place_keys_and_values(shape, qkv, row, kv, at):
    """Write one row's keys and values; `at` is the float offset of (block, layer) plus the token's index."""
    heads, kv_heads, head = shape[HEADS], shape[KV_HEADS], shape[HEAD]
    size = head * BLOCK_TOKENS
    token = at % BLOCK_TOKENS
    base = at - token
    for g in range(kv_heads):
        k_column, v_column = (heads + g) * head, (heads + kv_heads + g) * head
        keys = base + g * size + token
        values = base + (kv_heads + g) * size + token * BLOCK_TOKENS
        for i in range(head):
            kv[keys + i * BLOCK_TOKENS] = qkv[row, k_column + i]
        for panel in range(head // BLOCK_TOKENS):
            for i in range(BLOCK_TOKENS):
                kv[values + panel * BLOCK_TOKENS * BLOCK_TOKENS + i] = qkv[row, v_column + panel * BLOCK_TOKENS + i]


@inner
def _rotate_and_store(shape, layer, weights, table, tail, segments, block_table, qkv, kv, cos, sin):
    heads, kv_heads, head = shape[HEADS], shape[KV_HEADS], shape[HEAD]
    block_floats = shape[LAYERS] * 2 * kv_heads * head * BLOCK_TOKENS
    layer_floats = 2 * kv_heads * head * BLOCK_TOKENS
    base, stride = qkv.ctypes.data, qkv.strides[0]
    for s in range(segments.shape[0]):
        row0, rows, position0, slot = segments[s]
        for r in range(rows):
            row, position = row0 + r, position0 + r
            for h in range(heads + kv_heads):
                if shape[QK_NORM]:
                    x = base + row * stride + h * head * 4
                    gain = weights + table[layer, Q_NORM if h < heads else K_NORM]
                    rms_norm(x, gain, x, head, weights + tail[HEAD_SCALE])
                _rotate(qkv, row, h * head, shape[HEAD_REAL] // 2, cos, sin, position)
            block = np.int64(block_table[slot, position // BLOCK_TOKENS])
            at = block * block_floats + layer * layer_floats + position % BLOCK_TOKENS
            _place_keys_and_values(shape, qkv, row, kv, at)


@inner
def _attend_tile(product, shape, layer, zeros, block_ids, position, count, qkv, row, g, kv, scale, out, scratch):
    """Compute attention of `count` consecutive positions of a request, for the query heads of one KV head."""
    queries, scores, sums = scratch
    heads, kv_heads, head = shape[HEADS], shape[KV_HEADS], shape[HEAD]
    group = heads // kv_heads
    rows = count * group
    size = head * BLOCK_TOKENS
    stride = 4 * shape[LAYERS] * 2 * kv_heads * size
    for i in range(count):
        for j in range(group):
            for c in range(head):
                queries[i * group + j, c] = qkv[row + i, (g * group + j) * head + c]
    blocks = (position + count + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    q_stride, s_stride = queries.strides[0], scores.strides[0]
    q_at, s_at = queries.ctypes.data, scores.ctypes.data
    keys = kv.ctypes.data + 4 * (layer * 2 * kv_heads + g) * size
    values = keys + 4 * kv_heads * size
    for b in range(blocks):
        k_at = keys + block_ids[b] * stride
        following = keys + block_ids[b + 1] * stride if b + 1 < blocks else values + block_ids[0] * stride
        call_at(product, 0, q_at, q_stride, rows, k_at, head, 1, zeros, 0, s_at + b * 64, s_stride, following - k_at)
    for i in range(count):
        for j in range(group):
            for t in range(position + i + 1, blocks * BLOCK_TOKENS):
                scores[i * group + j, t] = np.float32(-3.0e38)
    for r in range(rows):
        x = s_at + r * s_stride
        sums[r] = exp_and_sum(x, x, blocks * BLOCK_TOKENS, scale)
    queries[:rows] = np.float32(0.0)  # the queries are used up; their place takes the weighted values
    for b in range(blocks):
        v_at = values + block_ids[b] * stride
        following = values + block_ids[b + 1] * stride if b + 1 < blocks else v_at
        call_at(
            product, 0, s_at + b * 64, s_stride, rows, v_at, BLOCK_TOKENS, head // 16, q_at, q_stride, q_at, q_stride,
            following - v_at,
        )  # fmt: skip
    for i in range(count):
        for j in range(group):
            inverse = np.float32(1.0) / sums[i * group + j]
            for c in range(head):
                out[row + i, (g * group + j) * head + c] = queries[i * group + j, c] * inverse


@inner
def _attention(product, shape, layer, zeros, segments, block_table, qkv, kv, scale, out, scratch):
    group = shape[HEADS] // shape[KV_HEADS]
    most = max(1, ATTENTION_ROWS // group)
    for s in range(segments.shape[0]):
        row0, rows, position0, slot = segments[s]
        for g in range(shape[KV_HEADS]):
            done = 0
            while done < rows:
                count = min(most, rows - done)
                position, row = position0 + done, row0 + done
                _attend_tile(
                    product, shape, layer, zeros, block_table[slot], position, count, qkv, row, g, kv, scale, out,
                    scratch,
                )  # fmt: skip
                done += count


@entry
def forward(
    product, first, last, store, attend, shape, table, tail, weight_floats, row0, rows, segments, block_table, kv, cos,
    sin, work, scratch,
):  # fmt: skip
    """Run layers [first, last) for rows [row0, row0 + rows), whose states are in work[0].

    `store` computes queries, keys and values and puts the latter two into KV memory; `attend` does the rest. They are
    apart because rows of one request that run on two threads must meet in between.
    """
    x, normed, qkv, attended, gates = work
    weights, bf16 = weight_floats.ctypes.data, shape[BF16]
    hidden, ffn, width = shape[HIDDEN], shape[FFN], shape[HEADS] * shape[HEAD]
    columns = (shape[HEADS] + 2 * shape[KV_HEADS]) * shape[HEAD]
    zeros, hidden_scale = weights + tail[ZEROS], weights + tail[HIDDEN_SCALE]
    scale = np.float32(1.0 / np.sqrt(shape[HEAD_REAL]))
    x_at, x_stride = _row(x, row0), x.strides[0]
    for layer in range(first, last):
        t = table[layer]
        if store:
            _norm_rows(x, normed, row0, rows, weights + t[NORM_1], hidden, hidden_scale)
            _linear(product, bf16, normed, row0, rows, weights + t[QKV], hidden, columns, weights + t[QKV_BIAS], 0, qkv)
            _rotate_and_store(shape, layer, weights, table, tail, segments, block_table, qkv, kv, cos, sin)
        if attend:
            _attention(product, shape, layer, zeros, segments, block_table, qkv, kv, scale, attended, scratch)
            _linear(product, bf16, attended, row0, rows, weights + t[OUT], width, hidden, x_at, x_stride, x)
            if shape[BIASES]:
                _add_bias(x, row0, rows, weight_floats, t[OUT_BIAS])
            _norm_rows(x, normed, row0, rows, weights + t[NORM_2], hidden, hidden_scale)
            gate_up, bias = weights + t[GATE_UP], weights + t[GATE_UP_BIAS]
            _linear(product, bf16, normed, row0, rows, gate_up, hidden, 2 * ffn, bias, 0, gates)
            for r in range(row0, row0 + rows):
                silu_multiply(_row(gates, r), _row(gates, r) + ffn * 4, _row(gates, r), ffn)
            _linear(product, bf16, gates, row0, rows, weights + t[DOWN], ffn, hidden, x_at, x_stride, x)
            if shape[BIASES]:
                _add_bias(x, row0, rows, weight_floats, t[DOWN_BIAS])


@entry
def embed(ids, row0, rows, table_bf16, table_f32, bf16, x, x_bits):
    """Copy rows of the embedding table into the rows' states; `x_bits` is `x` seen as unsigned integers."""
    for r in range(row0, row0 + rows):
        token = ids[r]
        if bf16:
            for i in range(table_bf16.shape[1]):
                x_bits[r, i] = np.uint32(table_bf16[token, i]) << np.uint32(16)
        else:
            for i in range(table_f32.shape[1]):
                x[r, i] = table_f32[token, i]


@entry
def logits_of(product, shape, tail, weight_floats, x, rows, normed, logits):
    """Compute the final norm and the output projection of the given rows, in their order."""
    weights = weight_floats.ctypes.data
    hidden = shape[HIDDEN]
    for i in range(rows.shape[0]):
        rms_norm(_row(x, rows[i]), weights + tail[FINAL_NORM], _row(normed, i), hidden, weights + tail[HIDDEN_SCALE])
    head, zeros = weights + tail[HEAD_WEIGHT], weights + tail[ZEROS]
    _linear(product, shape[BF16], normed, 0, rows.shape[0], head, hidden, shape[VOCABULARY], zeros, 0, logits)
