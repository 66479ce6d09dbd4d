"""The lossless delta codec for bf16, fp16 and fp32 weights: small, exact, in independent blocks.

    payload = encode(base, new)            # bytes, about 1/140 of the weights when 1 % of them changed
    apply(payload, base)                   # base is now new, bit for bit
    apply(encode_full(new), anything)      # needs no base

`deltas` codes whole arrays in threads, `format` the header and the directory, `codec_kernels` one block. The tests
compare it with a slow and obvious implementation. docs/weights-format.md describes the bytes.
"""

from rose.weights.codec.deltas import Description, apply, describe, encode, encode_full
from rose.weights.codec.format import CodecError, ElementType, Kind, Mode

__all__ = ["CodecError", "Description", "ElementType", "Kind", "Mode", "apply", "describe", "encode", "encode_full"]
