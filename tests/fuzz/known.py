"""Findings of the fuzzers whose defect is not repaired yet. Each entry goes with its repair.

A key is a pattern of a finding's signature; the value says where the defect is described.
"""

from __future__ import annotations

import re

KNOWN_OPEN: dict[str, str] = {}


def why(signature: str) -> str | None:
    """Return why this finding is expected, or None if it is not."""
    return next((reason for pattern, reason in KNOWN_OPEN.items() if re.search(pattern, signature)), None)
