"""Who may call a server: tokens, and rejection of web pages of other sites by the headers Host and Origin.

A token is taken from the environment, or made anew at every start and kept in the device's registry entry, which only
its user can read. Comparing takes the same time whatever is wrong with it. A response to a wrong token comes late and
closes its connection: that slows guessing down, and costs clients with the right token nothing.

A page in a user's browser can send requests to this machine. Cross-site ones carry the page's `Origin`. A page whose
own name was made to point to this machine (DNS rebinding) is same-origin, and carries its name in `Host`.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import secrets
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from rose.api.authorization import key_of_header
from rose.config.server_settings import FrontSettings
from rose.errors import ConfigError
from rose.openai.connections import mark_authenticated, mark_refused
from rose.openai.http_errors import Failure
from rose.openai.http_server import is_loopback

ROLLOUT_VARIABLE, OWNER_VARIABLE = "ROSE_ROLLOUT_TOKEN", "ROSE_OWNER_TOKEN"
API_KEY_VARIABLE = "ROSE_API_KEY"
API_KEY_HEADER = "x-api-key"  # of Anthropic's clients; counts only without the header Authorization
SHORTEST = 16  # characters: 96 bits if they are drawn at random, which no guessing over a network finds
LONGEST = 256
BRAKE_S = 0.25  # four guesses a second and connection
UNAUTHENTICATED = 401
HOSTS_KEPT_MAX = 64  # honest clients write a few names; hostile ones any number


def token_from(variable: str) -> str:
    """Return the token of the environment, or a new one. Raise ConfigError for one that is too weak."""
    return optional_token_from(variable) or secrets.token_urlsafe(24)


def optional_token_from(variable: str) -> str | None:
    """Return the token of the environment, None if it is not set. Raise ConfigError for one that is too weak."""
    token = os.environ.get(variable)
    if token is None:
        return None
    if not SHORTEST <= len(token) <= LONGEST or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{variable} is not a token: {SHORTEST} to {LONGEST} plain characters, no spaces",
            hint="make one with: python3 -c 'import secrets; print(secrets.token_urlsafe(24))'",
        )
    return token


def check_distinct(tokens: Mapping[str, str | None]) -> None:
    """Raise ConfigError if one token can be taken for another. The keys are the names of their variables."""
    known: dict[str, str] = {}
    for variable, token in tokens.items():
        if token is None:
            continue
        for other, owner in known.items():
            if token == other:
                what = f"{owner} and {variable} are the same token: one role could act as the other"
                raise ConfigError(what, hint="set them to different values, or unset them")
            if f"{token}/".startswith(f"{other}/") or f"{other}/".startswith(f"{token}/"):
                what = f"one of {owner} and {variable} is the other with a session: one role could act as the other"
                raise ConfigError(what, hint="set them to other values, or unset them")
        known[token] = variable


def key_of(request: web.Request) -> bytes:
    """Return the token of a request; empty if there is none that can be read."""
    header = request.headers.get(hdrs.AUTHORIZATION)
    if header is not None:
        return key_of_header(header)
    return request.headers.get(API_KEY_HEADER, "").strip().encode(errors="surrogateescape")


def check_bearer(request: web.Request, token: str) -> None:
    """Raise Failure (401) for a request that does not bear this token."""
    if not hmac.compare_digest(key_of(request), token.encode()):
        raise Failure(
            UNAUTHENTICATED,
            "this needs a token: send the header `Authorization: Bearer TOKEN` or `x-api-key: TOKEN`, or the token as "
            "password of HTTP Basic",
            kind="authentication_error",
            code="invalid_token",
            headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
        )
    mark_authenticated(request)


def check_any_bearer(request: web.Request, tokens: Sequence[str]) -> None:
    """Raise Failure (401) for a request that bears none of these tokens."""
    key = key_of(request)
    matches = [hmac.compare_digest(key, token.encode()) for token in tokens]  # all of them: the time tells nothing
    check_bearer(request, tokens[matches.index(True)] if any(matches) else tokens[0])


async def brake(request: web.Request, failure: Failure) -> None:
    """Delay the response to a wrong token. The connection makes room meanwhile if others need its place."""
    if failure.status == UNAUTHENTICATED:
        mark_refused(request)
        await asyncio.sleep(BRAKE_S)


class CallerCheck:
    """The check of Host and Origin at one server.

    A server on a loopback address accepts only loopback names, and names that a setting adds. A server that other
    machines reach has names that it cannot know: it accepts any Host unless the setting lists some.
    """

    def __init__(self, settings: FrontSettings) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in settings.allowed_hosts)
        self._is_loopback = is_loopback(settings.host)
        self._is_open = not self._is_loopback and not self._names
        self._allowed: set[str] = set()  # Host headers that have passed

    def check(self, request: web.Request) -> None:
        """Raise Failure (403) for a request from a page of another site."""
        host = request.headers.get(hdrs.HOST, "")
        if host not in self._allowed:
            if not self._is_open and not self._knows(_name_of(f"//{host}")):
                message = f"this server does not answer to the name `{host[:80]}`; the setting allowed_hosts adds names"
                raise Failure(403, message, code="host_not_allowed")
            if len(self._allowed) < HOSTS_KEPT_MAX:
                self._allowed.add(host)
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None:
            return
        name = _name_of(origin)
        if not name or not (self._knows(name) or (self._is_open and name == _name_of(f"//{host}"))):
            message = f"web pages of `{origin[:80]}` may not call this server; the setting allowed_hosts adds names"
            raise Failure(403, message, code="origin_not_allowed")

    def _knows(self, name: str) -> bool:
        if name in self._names:
            return True
        return self._is_loopback and (is_loopback(name) or name.endswith(".localhost"))


def _name_of(address: str) -> str:
    """Return the host of an address, in small letters; empty if there is none."""
    try:
        name = (urlsplit(address).hostname or "").rstrip(".")
        return str(ipaddress.ip_address(name)) if ":" in name else name
    except ValueError:
        return ""
