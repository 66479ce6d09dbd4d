"""The roles of the gateway's clients: one token per role, from the environment or made at every start.

Agents (environments) send turns and finish trajectories. Workers join the pool. Trainers take batches, publish weights,
and may do what an agent may. Operators read the state and drain workers. Tokens that the gateway made are in the
service registry while it runs, where commands of the same user find them. A token from the environment is not written.

A client that can set nothing but its key names its session there: `TOKEN/SESSION`, for agents and trainers.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
from aiohttp import web

from rose.bounds import Count, Label, Text
from rose.openai.access import check_bearer, check_distinct, key_of, token_from
from rose.openai.http_errors import Failure
from rose.openai.service_registry import entries, registered, registry_folder

Role = Literal["agent", "worker", "trainer", "operator"]
VARIABLES: dict[Role, str] = {
    "agent": "ROSE_AGENT_TOKEN",
    "worker": "ROSE_WORKER_TOKEN",
    "trainer": "ROSE_TRAINER_TOKEN",
    "operator": "ROSE_OPERATOR_TOKEN",
}
ROLE = web.RequestKey("rose.role", str)  # of a request, once it is known
KEY_SESSION = web.RequestKey("rose.key_session", str)  # of a request whose key names a session
WITH_SESSION: tuple[Role, ...] = ("agent", "trainer")
ROLES: tuple[Role, ...] = ("agent", "worker", "trainer", "operator")


class RoleTokens(msgspec.Struct, frozen=True):
    """The token of each role."""

    agent: Label
    worker: Label
    trainer: Label
    operator: Label

    def of(self, role: Role) -> str:
        return str(getattr(self, role))


class GatewayEntry(msgspec.Struct, frozen=True):
    """A running gateway, as the service registry holds it."""

    process_id: Count
    url: Text
    tokens: RoleTokens  # empty for a role whose token is in the environment


def tokens_from_environment() -> RoleTokens:
    """Return the token of each role, from the environment or made now.

    Raises ConfigError for a token that is too short, and for one that two roles share.
    """
    tokens = RoleTokens(*(token_from(VARIABLES[role]) for role in ROLES))
    check_distinct({VARIABLES[role]: tokens.of(role) for role in ROLES})
    return tokens


def check_role(request: web.Request, tokens: RoleTokens, allowed: tuple[Role, ...]) -> None:
    """Note the role of a request, and the session that its key names.

    Raises Failure for one that may not do this: 401 without a token, else 403.
    """
    key = key_of(request)
    for role, secret in zip(allowed, _secrets(tokens, allowed)):
        session = session_in(key, secret, role)
        if session is not None:
            request[ROLE], request[KEY_SESSION] = role, session.decode(errors="surrogateescape")
            return
    known = [role for role in ROLES if session_in(key, tokens.of(role).encode(), role) is not None]
    if known:
        message = f"this is for the role {' or '.join(allowed)}; the token is that of the role {known[0]}"
        raise Failure(403, message, kind="permission_error", code="wrong_role")
    check_bearer(request, tokens.of(allowed[0]))


def session_in(key: bytes, secret: bytes, role: Role) -> bytes | None:
    """Return the session that a key of this role names, empty for none; None if it is not a key of this role."""
    is_token = hmac.compare_digest(key, secret)
    has_session = hmac.compare_digest(key[: len(secret) + 1], secret + b"/") and role in WITH_SESSION
    return key[len(secret) + 1 :] if is_token or has_session else None


def is_trusted(request: web.Request) -> bool:
    """Return whether the request is the trainer's, which may act on every trajectory of its run."""
    return bool(request[ROLE] == "trainer")


@cache
def _secrets(tokens: RoleTokens, roles: tuple[Role, ...]) -> tuple[bytes, ...]:
    return tuple(tokens.of(role).encode() for role in roles)


@contextmanager
def registered_gateway(entry: GatewayEntry) -> Iterator[Path]:
    """Register the gateway while it runs, with the tokens that it made itself; yields the file that holds them."""
    made = {role: "" if VARIABLES[role] in os.environ else entry.tokens.of(role) for role in ROLES}
    content = msgspec.json.encode(msgspec.structs.replace(entry, tokens=RoleTokens(**made)))
    entries(registry_folder("gateways"))  # removes the entries of gateways that were killed
    with registered(registry_folder("gateways"), content) as path:
        yield path


def running_gateways() -> list[GatewayEntry]:
    """Return the gateways of this user that run on this machine."""
    known = []
    for content in entries(registry_folder("gateways")):
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            known.append(msgspec.json.decode(content, type=GatewayEntry))
    return known


def token_for(role: Role, url: str) -> str | None:
    """Return the token from the environment, or that of this user's gateway at this address, or None."""
    if VARIABLES[role] in os.environ:
        return token_from(VARIABLES[role])
    for entry in running_gateways():
        if entry.url == url.rstrip("/") and entry.tokens.of(role):
            return entry.tokens.of(role)
    return None
