"""Bearer tokens: who may send rollouts, and who may tell a device what to lend.

A token is taken from the environment, or made anew at every start and kept in the device's file (devices.py), which
only its user can read. Comparing takes the same time whatever is wrong with it.
"""

from __future__ import annotations

import hmac
import os
import secrets

from aiohttp import web

from rose.errors import ConfigError
from rose.front.failures import Failure

ROLLOUT_VARIABLE, OWNER_VARIABLE = "ROSE_ROLLOUT_TOKEN", "ROSE_OWNER_TOKEN"
SHORTEST = 8


def token_from(variable: str) -> str:
    given = os.environ.get(variable)
    if given is None:
        return secrets.token_urlsafe(24)
    if len(given) < SHORTEST or not given.isascii() or not given.isprintable() or " " in given:
        raise ConfigError(
            f"{variable} is not a token: at least {SHORTEST} plain characters, no spaces",
            hint="unset it, and a token is made at every start",
        )
    return given


def check_bearer(request: web.Request, token: str) -> None:
    """Raises the answer for a request that does not bear this token."""
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    sent = given.strip().encode(errors="surrogateescape")  # a header may hold any bytes
    if kind.lower() != "bearer" or not hmac.compare_digest(sent, token.encode()):
        raise Failure(
            401,
            "this needs a token: send the header `Authorization: Bearer TOKEN`",
            kind="authentication_error",
            code="invalid_token",
            headers={"WWW-Authenticate": "Bearer"},
        )
