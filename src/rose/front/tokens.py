"""Bearer tokens: who may send rollouts, who may tell a device what to lend, and who may use its serving port.

A token is taken from the environment, or made anew at every start and kept in the device's registry entry (devices.py),
which only its user can read. Comparing takes the same time whatever is wrong with it. An answer to a wrong token comes
late and closes its connection: that slows guessing down, and costs clients with the right token nothing. The serving
port has a key only if one is set.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from collections.abc import Mapping

from aiohttp import hdrs, web

from rose.errors import ConfigError
from rose.front.connections import mark_authenticated, mark_refused
from rose.front.failures import Failure

ROLLOUT_VARIABLE, OWNER_VARIABLE = "ROSE_ROLLOUT_TOKEN", "ROSE_OWNER_TOKEN"
API_KEY_VARIABLE = "ROSE_API_KEY"
SHORTEST = 16  # characters: 96 bits if they are drawn at random, which no guessing over a network finds
LONGEST = 256
BRAKE_S = 0.25  # four guesses a second and connection
UNAUTHENTICATED = 401


def token_from(variable: str) -> str:
    """Return the token of the environment, or a new one. Raises ConfigError for one that is too weak."""
    given = os.environ.get(variable)
    return secrets.token_urlsafe(24) if given is None else _checked(variable, given)


def api_key_from_environment() -> str | None:
    """Return the key of the serving port; None if it needs none. Raises ConfigError for one that is too weak."""
    given = os.environ.get(API_KEY_VARIABLE)
    return None if given is None else _checked(API_KEY_VARIABLE, given)


def check_distinct(tokens: Mapping[str, str | None]) -> None:
    """Raise ConfigError if two roles have the same token. The keys are the names of their variables."""
    known: dict[str, str] = {}
    for variable, token in tokens.items():
        if token is None:
            continue
        if token in known:
            what = f"{known[token]} and {variable} are the same token: one role could act as the other"
            raise ConfigError(what, hint="set them to different values, or unset them")
        known[token] = variable


def _checked(variable: str, token: str) -> str:
    if not SHORTEST <= len(token) <= LONGEST or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{variable} is not a token: {SHORTEST} to {LONGEST} plain characters, no spaces",
            hint="make one with: python3 -c 'import secrets; print(secrets.token_urlsafe(24))'",
        )
    return token


def bearer_of(request: web.Request) -> bytes:
    """Return the token that a request bears, as bytes: a header may hold any. Empty if there is none."""
    kind, _, given = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    return given.strip().encode(errors="surrogateescape") if kind.lower() == "bearer" else b""


def check_bearer(request: web.Request, token: str) -> None:
    """Raise the answer for a request that does not bear this token."""
    if not hmac.compare_digest(bearer_of(request), token.encode()):
        raise Failure(
            UNAUTHENTICATED,
            "this needs a token: send the header `Authorization: Bearer TOKEN`",
            kind="authentication_error",
            code="invalid_token",
            headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
        )
    mark_authenticated(request)


async def brake(request: web.Request, failure: Failure) -> None:
    """Wait before a wrong token is answered. The connection makes room meanwhile if others need its place."""
    if failure.status == UNAUTHENTICATED:
        mark_refused(request)
        await asyncio.sleep(BRAKE_S)
