"""A relay by its address, as settings and commands name it; what an address does not need is never imported.

/var/rose/relay            a folder (also file:/var/rose/relay)
tcp://host:7070            our own server; tcps:// with TLS
s3://bucket/folder         object stores: s3, gs, az
mooncake://host:50051      the master of a Mooncake Store
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rose.errors import ConfigError
from rose.weights.relay.base import Relay

OBJECT_SCHEMES = ("s3", "gs", "az")
Kind = Literal["folder", "tcp", "object", "mooncake"]


@dataclass(frozen=True, slots=True)
class Access:
    """What an address needs beside itself."""

    secret: bytes = b""  # tcp: the run's secret, or its read key for reading only
    authority: str | None = None  # tcps: a file of certificates to trust, the system's if None
    trusted_network: bool = False  # mooncake: needed for any address but loopback
    object_options: tuple[tuple[str, str], ...] = ()  # s3, gs, az: as obstore names them; else the environment's


def relay_kind(address: str) -> Kind:
    """Without opening it. Raises ConfigError for what is no address."""
    scheme, colon, rest = address.partition(":")
    if rest.startswith("//"):
        if scheme in ("tcp", "tcps"):
            return "tcp"
        if scheme in OBJECT_SCHEMES:
            return "object"
        if scheme == "mooncake":
            return "mooncake"
    if scheme == "file" or not colon or address.startswith(("/", ".")):
        return "folder"
    raise ConfigError(
        f"`{address}` is not the address of a relay",
        hint="name a folder, tcp://host:port, s3://bucket/folder or mooncake://host:port",
    )


def open_relay(address: str, access: Access | None = None) -> Relay:
    access, kind = access or Access(), relay_kind(address)
    scheme, _, rest = address.partition(":")
    if kind == "tcp":
        from rose.weights.relay import wire
        from rose.weights.relay.tcp import TcpRelay

        tls = wire.client_tls(access.authority) if scheme == "tcps" else None
        return TcpRelay(rest.removeprefix("//").rstrip("/"), access.secret, tls=tls)
    if kind == "object":
        from rose.weights.relay.object import ObjectRelay

        return ObjectRelay(address, dict(access.object_options))
    if kind == "mooncake":
        from rose.weights.relay.mooncake import MooncakeRelay

        return MooncakeRelay(rest.removeprefix("//").rstrip("/"), trusted_network=access.trusted_network)
    from rose.weights.relay.filesystem import FilesystemRelay

    return FilesystemRelay(rest if scheme == "file" else address)
