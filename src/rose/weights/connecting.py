"""How a trainer, a worker and a command come to a relay: by an open one or its address, with the run's secret.

The trainer signs with the secret and writes to a relay server with it. A worker needs only the read key that is derived
from it (`weights.keys`). Either is given as bytes, or lies in the file that ROSE_RELAY_SECRET_FILE names, or in
ROSE_RELAY_SECRET itself.
"""

from __future__ import annotations

import os
from pathlib import Path

from rose.errors import ConfigError
from rose.weights.keys import check_secret
from rose.weights.relay.base import Relay
from rose.weights.relay.opening import Access, open_relay

SECRET, SECRET_FILE = "ROSE_RELAY_SECRET", "ROSE_RELAY_SECRET_FILE"


def run_secret(given: bytes | None = None, file: Path | str | None = None) -> bytes:
    """Return the run's secret, or its read key, from wherever it is. Raises ConfigError."""
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
        return check_secret(os.fsencode(os.environ[SECRET].strip()))
    raise ConfigError(
        "the run's secret is not known here",
        hint=f"set {SECRET} or {SECRET_FILE}: for the trainer to a secret (openssl rand -hex 32), for workers to the "
        "read key that `rose relay key` prints",
    )


def reach(relay: Relay | str, secret: bytes, access: Access | None = None) -> Relay:
    """An open relay as it is; an address is opened, with the run's secret if it has no other."""
    if not isinstance(relay, str):
        return relay
    return open_relay(relay, access or Access(secret=secret))
