"""The trainer's end of the weight transfer: publishes to a relay after every step, under the run's name, signed.

The relay is a folder of the run unless the settings name another. The secret is the one that the environment holds
(`weights.keys`); without one it is made for this run and kept in `weights.secret` for `rose weights`. Workers get
only the read key that is derived from it, in their environment.

What the run begins with is version 0, so that every worker runs weights whose hash is known from the first turn on. A
run that is resumed begins with the version of its checkpoint, whole, in a new epoch and under the secret it had: what
the trainer before it had published is of an earlier epoch, and workers do not look at it. All that computes happens in
the trainer's thread and in those that it starts.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rose.errors import ConfigError, Unavailable
from rose.private_files import write_private
from rose.run.run_folder import RunFolder
from rose.run.run_settings import WeightsSettings
from rose.weights.keys import SECRET, SECRET_FILE, check_secret, read_key, run_secret, write_key
from rose.weights.relay.filesystem import FilesystemRelay
from rose.weights.relay.opening import connect_relay, relay_kind
from rose.weights.relay.relay_base import Relay

if TYPE_CHECKING:
    from rose.train.ranks import Ranks
    from rose.weights.publish import PublishedVersion, Publisher

SECRET_NAME = "weights.secret"


class Publishing:
    """The publisher of one run: call `open`, `begin`, `publish` after every step, and `close` at the end.

    `address` is what workers are told; it changes if a relay server stands before the run's folder.
    """

    def __init__(self, settings: WeightsSettings, folder: RunFolder) -> None:
        self.run = folder.name
        self.address = _absolute(settings.relay or str(folder.weights))
        self.is_own = settings.relay is None  # the run's folder
        self._folder = folder.weights
        self._settings = settings
        self._secret_file = folder.path / SECRET_NAME
        self._secret = self._known_secret()
        # For the environment of workers. They may read and verify, and never see the secret, also not a given one.
        self.variables = {SECRET: read_key(self._secret).text(), SECRET_FILE: ""}
        self.variables_of_relay = {SECRET: os.fsdecode(self._secret)}  # for a relay server of the run's own
        self._relay: Relay | None = None
        self._publisher: Publisher | None = None

    def open(self) -> None:
        """Open the relay, before anything else is started. Raises ConfigError, Unavailable."""
        if self._settings.relay is None:
            self._relay = FilesystemRelay(self._folder, durable=False)  # what must survive a power cut is a checkpoint
        else:
            self._relay = connect_relay(self.address, self._secret)
            self._relay.list(self.run)

    def begin(self, weights: Mapping[str, Any], version: int = 0, after_epoch: int = 0) -> PublishedVersion:
        """Publish these tensors as this version; later versions are the same tensors as they are then."""
        self.claim(weights, after_epoch)
        return self.publish(version)

    def claim(self, weights: Mapping[str, Any], after_epoch: int, ranks: Ranks | None = None) -> int:
        """Prepare to publish these tensors, of several ranks their shards, and return the epoch."""
        assert self._relay is not None
        options = {"after_epoch": after_epoch, **_options(self._settings), **_shares(weights, ranks)}
        self._publisher = _publisher(weights, self._relay, run=self.run, secret=self._secret, **options)
        return self._publisher.epoch

    def address_for_ranks(self) -> RelayAddress:
        relay = _absolute(str(self._folder)) if self.is_own else self.address  # not the server before the folder
        return RelayAddress(relay, self.run, self._settings, str(self._secret_file.resolve()))

    def publish(self, version: int) -> PublishedVersion:
        """Publish a version, and return once workers can fetch it; full snapshots and cleaning up go on meanwhile."""
        assert self._publisher is not None
        return self._publisher.publish(version).result()

    def wait(self) -> None:
        """Wait for full snapshots and cleaning up that are under way."""
        assert self._publisher is not None
        self._publisher.wait()

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        if self._relay is not None:
            self._relay.close()

    @property
    def secret(self) -> bytes:
        """Return what signs versions, for the other ranks of the trainer."""
        return self._secret

    def _known_secret(self) -> bytes:
        if (given := given_secret(self._settings)) is not None:
            return given
        kept = self._secret_file
        try:
            if kept.exists():
                return check_secret(kept.read_bytes().strip())
            made = secrets.token_hex(32).encode()
            write_private(kept, made + b"\n")
        except OSError as error:
            raise Unavailable(f"{kept} cannot be used: {error.strerror}", hint="see its owner and the disk") from error
        return made


class RelayAddress(msgspec.Struct, frozen=True):
    """What another rank needs to publish its shards: it gets the secret apart, or finds it in the environment or file.

    A folder is its own, if the machines share it under one path.
    """

    relay: str
    run: str
    settings: WeightsSettings
    secret_file: str

    def join(self, weights: Mapping[str, Any], secret: bytes | None, epoch: int, ranks: Ranks) -> Publisher:
        """Return the publisher of a rank above 0. Raises Unavailable, ConfigError."""
        known = secret or given_secret(self.settings) or check_secret(Path(self.secret_file).read_bytes().strip())
        is_folder = self.settings.relay is None
        relay = FilesystemRelay(self.relay, durable=False) if is_folder else connect_relay(self.relay, known)
        options = {"epoch": epoch, "rank": ranks.rank, **_options(self.settings), **_shares(weights, ranks)}
        return _publisher(weights, relay, run=self.run, secret=known, **options)


def _publisher(weights: Mapping[str, Any], relay: Relay, **options: Any) -> Publisher:
    from rose.weights.codec.codec_kernels import warm_up
    from rose.weights.publish import Publisher

    warm_up(to_encode=True)
    return Publisher(weights, relay, **options)


def _options(settings: WeightsSettings) -> dict[str, Any]:
    from rose.weights.chain import RetryPolicy

    retry = RetryPolicy(limit_s=settings.patience_s)
    return {"anchor_every": settings.anchor_every, "keep_versions": settings.keep_versions, "retry": retry}


def _shares(weights: Mapping[str, Any], ranks: Ranks | None) -> dict[str, Any]:
    """Return which rank publishes which rows: those it holds."""
    if ranks is None:
        return {}
    from rose.weights.layouts import row_shards, whole
    from rose.weights.shards import Tensor

    tensors = [Tensor(name, tuple(weight.shape)) for name, weight in weights.items()]
    return {"tensors": tensors, "layout": row_shards([whole(tensors)], ranks.count)}


def given_secret(settings: WeightsSettings) -> bytes | None:
    """Return the secret of the environment. Raises ConfigError if it cannot sign, or is missing where one is needed."""
    if os.environ.get(SECRET) or os.environ.get(SECRET_FILE):
        given = run_secret()
        write_key(given)  # raises ConfigError for a read key
        return given
    if settings.relay is not None and "://" in settings.relay:
        hint = f"set {SECRET} or {SECRET_FILE} to that of the relay, or of your own making: openssl rand -hex 32"
        raise ConfigError(f"the secret for the relay {settings.relay} is not known", hint=hint)
    return None


def _absolute(address: str) -> str:
    """Return a relay address with an absolute folder: workers may have another working directory."""
    return str(Path(address.removeprefix("file:")).resolve()) if relay_kind(address) == "folder" else address
