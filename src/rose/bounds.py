"""Bounded types for everything that enters from outside: HTTP bodies, WebSocket frames, relay messages, files.

msgspec decodes an integer of any size, a float that is NaN and a list of any length. Each of these has killed a
process: an integer over 64 bits cannot be stored or encoded again, NaN passes every comparison, a long list is work in
proportion. A field of a decoded struct therefore has one of these types, or states a bound of its own with `Meta`. A
violated bound is a `msgspec.ValidationError` while decoding, before any code of ours sees the value.

`tests/tidy/test_bounds.py` finds every type that is decoded in this package and fails on a field without a bound.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
NAME_CHARACTERS_MAX = 256
SESSION_CHARACTERS_MAX = 321  # the longest name, a mark, and the longest secret of a trajectory
TEXT_CHARACTERS_MAX = 4096  # a sentence, an address, a path: PATH_MAX is 4096
TOKENS_MAX = 1 << 20  # of one sequence; the longest contexts of today's models
ITEMS_MAX = 1 << 16  # of a list that is not tokens: workers, turns of one frame, tensors of a model
FLOAT_MAX = 1e30  # far beyond any measured quantity; sums and squares of such values stay finite
SECONDS_MAX = 1e9  # thirty years
LOG_PROBABILITY_MAX = 1e-3  # rounding in fp32 may leave a probability just over one

Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Serial = Annotated[int, Meta(ge=0, le=INT64_MAX)]  # numbers that grow for ever, and sizes in bytes
Integer = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
Priority = Annotated[int, Meta(ge=-INT32_MAX - 1, le=INT32_MAX)]
Finite = Annotated[float, Meta(ge=-FLOAT_MAX, le=FLOAT_MAX)]  # NaN and infinities fail both comparisons
NonNegative = Annotated[float, Meta(ge=0, le=FLOAT_MAX)]
Seconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
Share = Annotated[float, Meta(ge=0, le=1)]
LogProbability = Annotated[float, Meta(ge=-FLOAT_MAX, le=LOG_PROBABILITY_MAX)]

Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]
Label = Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)]  # a name that may be empty
Text = Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
VersionName = Label  # of a set of weights

TokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=TOKENS_MAX)]
LogProbabilities = Annotated[tuple[LogProbability, ...], Meta(max_length=TOKENS_MAX)]

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)
"""The exceptions of a decoder for hostile bytes. Text that is not UTF-8 and deep nesting raise their own."""
