"""Which environment variables hold secrets of ROSE, and an environment without them.

A child process inherits the environment of its parent, and the environment can be read in /proc by every process of the
same user. A process therefore passes on only the secrets that the child's role needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SECRET = re.compile(r"ROSE_\w*(TOKENS?|SECRETS?|KEYS?|PASSWORD)(_FILE)?")


def is_secret(variable: str) -> bool:
    """Return whether a variable of this name holds, or names the file of, a token, a secret or a key."""
    return _SECRET.fullmatch(variable) is not None


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    return {variable: value for variable, value in environment.items() if not is_secret(variable)}
