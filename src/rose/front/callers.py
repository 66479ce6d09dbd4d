"""Which requests come from a web page that has no business here: judged by the headers Host and Origin.

A page in a user's browser can send requests to this machine. Cross-site ones carry the page's `Origin`. A page whose
own name was made to point to this machine (DNS rebinding) is same-origin, and carries its name in `Host`. So a server
that listens on a loopback address accepts only loopback names there, and those that a setting adds. A server that
other machines reach has names that it cannot know: it accepts any Host unless the setting lists some.

The content type of a body is not checked: every browser sends `Origin` with a cross-site POST, and `curl -d` without
a header is a usual way to try a server.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from rose.config.device import FrontSettings
from rose.front.failures import Failure
from rose.front.ports import is_loopback


class CallerCheck:
    """The check of one server. Raises Failure (403)."""

    def __init__(self, settings: FrontSettings) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in settings.allowed_hosts)
        self._is_loopback = is_loopback(settings.host)
        self._is_open = not self._is_loopback and not self._names
        self._allowed: set[str] = set()  # Host headers that have passed; few, and bounded

    def check(self, request: web.Request) -> None:
        host = request.headers.get(hdrs.HOST, "")
        if host not in self._allowed:
            self._check_host(host)
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is not None:
            self._check_origin(origin, host)

    def _check_host(self, host: str) -> None:
        if not self._is_open and not self._knows(_name_of(f"//{host}")):
            message = f"this server does not answer to the name `{host[:80]}`; the setting allowed_hosts adds names"
            raise Failure(403, message, code="host_not_allowed")
        if len(self._allowed) < 64:  # honest clients write a few names; hostile ones any number
            self._allowed.add(host)

    def _check_origin(self, origin: str, host: str) -> None:
        name = _name_of(origin)
        if name and (self._knows(name) or (self._is_open and name == _name_of(f"//{host}"))):
            return
        message = f"web pages of `{origin[:80]}` may not call this server; the setting allowed_hosts adds names"
        raise Failure(403, message, code="origin_not_allowed")

    def _knows(self, name: str) -> bool:
        if name in self._names:
            return True
        return self._is_loopback and (is_loopback(name) or name.endswith(".localhost"))


def _name_of(address: str) -> str:
    """The host of an address, in small letters; empty if there is none."""
    try:
        name = (urlsplit(address).hostname or "").rstrip(".")
        return str(ipaddress.ip_address(name)) if ":" in name else name
    except ValueError:
        return ""
