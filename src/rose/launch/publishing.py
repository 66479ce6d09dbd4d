"""How a run's weights get to its workers: into a relay after every step, under the run's name, signed by the trainer.

The relay is a folder of the run unless the settings name another. The secret is the one that the environment holds
(`weights.connecting`); without one it is made for this run and kept in `weights.secret` for `rose weights`. Workers get
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

from rose.errors import ConfigError, Unavailable
from rose.launch.folder import RunFolder
from rose.launch.settings import WeightsSettings
from rose.private_files import write_private
from rose.weights.connecting import SECRET, SECRET_FILE, reach, run_secret
from rose.weights.keys import check_secret, read_key, write_key
from rose.weights.relay.base import Relay
from rose.weights.relay.filesystem import FilesystemRelay
from rose.weights.relay.opening import relay_kind

if TYPE_CHECKING:
    from rose.weights.publish import Published, Publisher

SECRET_NAME = "weights.secret"


class Publishing:
    """One per run. `open`, `begin`, then `publish` after every step; `close` at the end."""

    def __init__(self, settings: WeightsSettings, folder: RunFolder) -> None:
        self.run = folder.name
        self.address = _absolute(settings.relay or str(folder.weights))
        self._settings = settings
        self._secret = self._known_secret(folder)
        # For the environment of workers. They may read and verify, and never see the secret, also not a given one.
        self.variables = {SECRET: read_key(self._secret).text(), SECRET_FILE: ""}
        self._relay: Relay | None = None
        self._publisher: Publisher | None = None

    def open(self) -> None:
        """Raises ConfigError, Unavailable: before anything else was started."""
        if self._settings.relay is None:
            self._relay = FilesystemRelay(self.address, durable=False)  # what must survive a power cut is a checkpoint
        else:
            self._relay = reach(self.address, self._secret)
            self._relay.list(self.run)

    def begin(self, weights: Mapping[str, Any], version: int = 0, after_epoch: int = 0) -> Published:
        """Publish them as this version, and from now on these tensors as they are then."""
        from rose.weights.chain import Patience
        from rose.weights.codec.kernels import warm_up
        from rose.weights.publish import Publisher

        assert self._relay is not None
        warm_up(to_encode=True)
        self._publisher = Publisher(
            weights,
            self._relay,
            run=self.run,
            secret=self._secret,
            after_epoch=after_epoch,
            anchor_every=self._settings.anchor_every,
            keep_versions=self._settings.keep_versions,
            patience=Patience(limit_s=self._settings.patience_s),
        )
        return self._publisher.publish(version).result()

    def publish(self, version: int) -> Published:
        """Until workers can have it. An anchor that is due and the cleaning up go on while they take it."""
        assert self._publisher is not None
        return self._publisher.publish(version).result()

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        if self._relay is not None:
            self._relay.close()

    def _known_secret(self, folder: RunFolder) -> bytes:
        if (given := given_secret(self._settings)) is not None:
            return given
        kept = folder.path / SECRET_NAME
        try:
            if kept.exists():
                return check_secret(kept.read_bytes().strip())
            made = secrets.token_hex(32).encode()
            write_private(kept, made + b"\n")
        except OSError as error:
            raise Unavailable(f"{kept} cannot be used: {error.strerror}", hint="see its owner and the disk") from error
        return made


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
    """Folders from the root on: workers may stand elsewhere."""
    return str(Path(address.removeprefix("file:")).resolve()) if relay_kind(address) == "folder" else address
