"""Wall-clock time for people: UTC, ISO 8601 with microseconds, as `2026-11-19T23:31:58.123456Z`.

Decisions use the monotonic clock, which counts from the start of the machine and cannot jump. What people read beside
the records of other systems carries this time too.
"""

from __future__ import annotations

import time


def utc_text(seconds: float | None = None) -> str:
    """Return a moment, given as seconds since 1970, or now."""
    moment = time.time() if seconds is None else seconds
    whole = int(moment // 1)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{int((moment - whole) * 1e6):06d}Z"


def stamped(line: bytes, seconds: float | None = None) -> bytes:
    """Return a line that is one JSON object, with the moment as its first field `utc`."""
    assert line.startswith(b"{") and len(line) > 2, "not an object with fields"
    return b'{"utc":"%s",%s' % (utc_text(seconds).encode(), line[1:])
