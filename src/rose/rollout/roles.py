"""Who may do what at the gateway: one token per role, from the environment or made at every start.

Agents (environments) send turns and finish trajectories, workers join the pool, trainers take batches and publish
weights, and may do what an agent may; operators see how everything is and send workers away, and no more. Each role has
another token. A token that the gateway made is kept in the service registry (front/registry.py), where the other
commands of the same user find it, until the gateway ends. A token from the environment is not written to any file.
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
from rose.front.failures import Failure
from rose.front.registry import entries, registered, registry_folder
from rose.front.tokens import bearer_of, check_bearer, check_distinct, token_from

Role = Literal["agent", "worker", "trainer", "operator"]
VARIABLES: dict[Role, str] = {
    "agent": "ROSE_AGENT_TOKEN",
    "worker": "ROSE_WORKER_TOKEN",
    "trainer": "ROSE_TRAINER_TOKEN",
    "operator": "ROSE_OPERATOR_TOKEN",
}
ROLE = web.RequestKey("rose.role", str)  # of a request, once it is known
ROLES: tuple[Role, ...] = ("agent", "worker", "trainer", "operator")


class Tokens(msgspec.Struct, frozen=True):
    agent: Label
    worker: Label
    trainer: Label
    operator: Label

    def of(self, role: Role) -> str:
        found: str = getattr(self, role)
        return found


class GatewayCard(msgspec.Struct, frozen=True):
    process_id: Count
    url: Text
    tokens: Tokens  # empty for a role whose token is in the environment


def tokens_from_environment() -> Tokens:
    """Return the token of each role, from the environment or made now.

    Raises ConfigError for a token that is too short, and for one that two roles share.
    """
    tokens = Tokens(*(token_from(VARIABLES[role]) for role in ROLES))
    check_distinct({VARIABLES[role]: tokens.of(role) for role in ROLES})
    return tokens


def check_role(request: web.Request, tokens: Tokens, allowed: tuple[Role, ...]) -> None:
    """Note the role of a request. Raises the answer for one that may not do this: 401 without a token, else 403."""
    given = bearer_of(request)
    for role, secret in zip(allowed, _secrets(tokens, allowed)):
        if hmac.compare_digest(given, secret):
            request[ROLE] = role
            return
    known = [role for role in ROLES if hmac.compare_digest(given, tokens.of(role).encode())]
    if known:
        message = f"this is for the role {' or '.join(allowed)}; the token is that of the role {known[0]}"
        raise Failure(403, message, kind="permission_error", code="wrong_role")
    check_bearer(request, tokens.of(allowed[0]))


def is_trusted(request: web.Request) -> bool:
    """Whether the request is the trainer's, who may act on every trajectory of its run."""
    return bool(request[ROLE] == "trainer")


@cache
def _secrets(tokens: Tokens, roles: tuple[Role, ...]) -> tuple[bytes, ...]:
    return tuple(tokens.of(role).encode() for role in roles)


def _folder() -> Path:
    return registry_folder("gateways")


@contextmanager
def shown(card: GatewayCard) -> Iterator[Path]:
    """Register the gateway while it runs, with the tokens that it made itself; yields the file that holds them."""
    made = {role: "" if VARIABLES[role] in os.environ else card.tokens.of(role) for role in ROLES}
    content = msgspec.json.encode(msgspec.structs.replace(card, tokens=Tokens(**made)))
    entries(_folder())  # removes those of gateways that were killed
    with registered(_folder(), content) as path:
        yield path


def token_for(role: Role, url: str) -> str | None:
    """Return the token from the environment, or of a gateway of this user at this address, or None."""
    given = os.environ.get(VARIABLES[role])
    if given is not None:
        return token_from(VARIABLES[role])
    for content in entries(_folder()):
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            card = msgspec.json.decode(content, type=GatewayCard)
            if card.url == url.rstrip("/") and card.tokens.of(role):
                return card.tokens.of(role)
    return None
