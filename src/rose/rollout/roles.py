"""Who may do what at the gateway: one token per role, from the environment or made at every start.

Agents (environments) send turns and finish trajectories, workers join the pool, trainers take batches and publish
weights, and may do what an agent may; operators see how everything is and send workers away, and no more. A token that
was made is kept in a file that only its user can read, so that the other commands of the same user find it; it goes
when the gateway goes.
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

from rose.front.devices import folder as devices_folder
from rose.front.failures import Failure
from rose.front.tokens import check_bearer, token_from

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
    agent: str
    worker: str
    trainer: str
    operator: str

    def of(self, role: Role) -> str:
        found: str = getattr(self, role)
        return found


class GatewayCard(msgspec.Struct, frozen=True):
    process_id: int
    url: str
    tokens: Tokens


def tokens_from_environment() -> Tokens:
    """Raises ConfigError for one that is no token."""
    return Tokens(*(token_from(VARIABLES[role]) for role in ROLES))


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


def bearer_of(request: web.Request) -> bytes:
    """The token of a request, empty without one. A header may hold any bytes, which are no reason to fail."""
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    return given.strip().encode(errors="surrogateescape") if kind.lower() == "bearer" else b""


@cache
def _secrets(tokens: Tokens, roles: tuple[Role, ...]) -> tuple[bytes, ...]:
    return tuple(tokens.of(role).encode() for role in roles)


def _folder() -> Path:
    return devices_folder().parent / "gateways"


@contextmanager
def shown(card: GatewayCard) -> Iterator[Path]:
    """While the gateway runs; where its tokens are. A cache that cannot be written is no reason not to run."""
    path = _folder() / f"{card.process_id}.json"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(card))
    try:
        yield path
    finally:
        with suppress(OSError):
            path.unlink()


def token_for(role: Role, url: str) -> str | None:
    """From the environment, or of a gateway of this user at this address; None if neither is there."""
    given = os.environ.get(VARIABLES[role])
    if given is not None:
        return token_from(VARIABLES[role])
    for path in sorted(_folder().glob("*.json")):
        with suppress(OSError, msgspec.DecodeError):
            card = msgspec.json.decode(path.read_bytes(), type=GatewayCard)
            if card.url == url.rstrip("/") and Path(f"/proc/{card.process_id}").exists():
                return card.tokens.of(role)
    return None
