"""Open a relay by its address, as settings and commands name it, importing only what the address needs.

/var/rose/relay            a folder (also file:/var/rose/relay)
http://host:7070           our own server; https:// with TLS
s3://bucket/folder         object stores: s3, gs, az
mooncake://host:50051      the master of a Mooncake Store
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rose.errors import ConfigError
from rose.weights.relay.relay_base import Relay

OBJECT_SCHEMES = ("s3", "gs", "az")
SERVER_SCHEMES = {"http": "http", "https": "https", "tcp": "http", "tcps": "https"}  # tcp, tcps: until 0.3
Kind = Literal["folder", "server", "object", "mooncake"]


@dataclass(frozen=True, slots=True)
class RelayAccess:
    """Credentials and options of an address."""

    secret: bytes = b""  # http: the run's secret, or its read key for reading only
    authority: str | None = None  # https: a file of certificates to trust, the system's if None
    trusted_network: bool = False  # mooncake: needed for any address but loopback
    object_options: tuple[tuple[str, str], ...] = ()  # s3, gs, az: as obstore names them; else the environment's


def relay_kind(address: str) -> Kind:
    """Return the kind of relay at an address, without opening it. Raises ConfigError."""
    scheme, colon, rest = address.partition(":")
    if rest.startswith("//"):
        if scheme in SERVER_SCHEMES:
            return "server"
        if scheme in OBJECT_SCHEMES:
            return "object"
        if scheme == "mooncake":
            return "mooncake"
    if scheme == "file" or not colon or address.startswith(("/", ".")):
        return "folder"
    raise ConfigError(
        f"`{address}` is not the address of a relay",
        hint="name a folder, http://host:port, s3://bucket/folder or mooncake://host:port",
    )


def connect_relay(relay: Relay | str, secret: bytes) -> Relay:
    """Return an open relay as it is, or open an address with the run's secret or read key."""
    return open_relay(relay, RelayAccess(secret=secret)) if isinstance(relay, str) else relay


def open_relay(address: str, access: RelayAccess | None = None) -> Relay:
    """Return the relay at an address. Raises ConfigError."""
    access, kind = access or RelayAccess(), relay_kind(address)
    scheme, _, rest = address.partition(":")
    if kind == "server":
        from rose.weights.relay.relay_api import client_tls
        from rose.weights.relay.relay_client import HttpRelay

        tls = client_tls(access.authority) if SERVER_SCHEMES[scheme] == "https" else None
        return HttpRelay(rest.removeprefix("//").rstrip("/"), access.secret, tls=tls)
    if kind == "object":
        from rose.weights.relay.object import ObjectRelay

        return ObjectRelay(address, dict(access.object_options))
    if kind == "mooncake":
        from rose.weights.relay.mooncake import MooncakeRelay

        return MooncakeRelay(rest.removeprefix("//").rstrip("/"), trusted_network=access.trusted_network)
    from rose.weights.relay.filesystem import FilesystemRelay

    return FilesystemRelay(rest if scheme == "file" else address)
