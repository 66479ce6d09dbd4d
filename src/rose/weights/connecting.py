"""How a trainer, a worker and a command come to a relay: by an open one or its address, with the run's secret.

The secret seals manifests, and opens the door of a relay server. It is given as bytes, or lies in the file that
ROSE_RELAY_SECRET_FILE names, or in ROSE_RELAY_SECRET itself.
"""

from __future__ import annotations

import os
from pathlib import Path

from rose.errors import ConfigError
from rose.weights.relay.base import Relay
from rose.weights.relay.opening import Access, open_relay

SECRET, SECRET_FILE = "ROSE_RELAY_SECRET", "ROSE_RELAY_SECRET_FILE"
SECRET_BYTES_MIN = 16


def run_secret(given: bytes | None = None, file: Path | str | None = None) -> bytes:
    """The run's secret, from wherever it is."""
    if given is not None:
        return check_secret(given)
    path = file or os.environ.get(SECRET_FILE)
    if path:
        try:
            return check_secret(Path(path).read_bytes().strip())
        except OSError as error:
            hint = f"make one with: openssl rand -hex 32 > {path}"
            raise ConfigError(f"the run's secret in {path} cannot be read: {error.strerror}", hint=hint) from error
    if os.environ.get(SECRET):
        return check_secret(os.environ[SECRET].strip().encode())
    raise ConfigError(
        "the run's secret is not known here",
        hint=f"make one with `openssl rand -hex 32`, and set {SECRET} or {SECRET_FILE} for the trainer and all workers",
    )


def check_secret(secret: bytes) -> bytes:
    if len(secret) < SECRET_BYTES_MIN:
        raise ConfigError(
            f"the run's secret has {len(secret)} bytes; at least {SECRET_BYTES_MIN} are needed",
            hint="make one with: openssl rand -hex 32",
        )
    return secret


def reach(relay: Relay | str, secret: bytes, access: Access | None = None) -> Relay:
    """An open relay as it is; an address is opened, with the run's secret if it has no other."""
    if not isinstance(relay, str):
        return relay
    return open_relay(relay, access or Access(secret=secret))
