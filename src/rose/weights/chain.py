"""The chain of versions in a relay: the names of its keys, which claims count, and the retry policy.

    RUN/epochs/e1763258031                                   a claim: whose trainer's epoch this is
    RUN/e1763258031/v0000000017/delta.0000/r00000.b00003.XX  a bucket: payloads of chunks, one after the other
    RUN/e1763258031/v0000000017/delta.0000/part.00001        what one rank contributed, if there are several
    RUN/e1763258031/v0000000017/delta.0000/manifest          written last: now the version record exists

Nothing that is signed is ever overwritten. A writer that tries again takes a new key: the names of buckets end in
random digits, and a record that the relay lost gets another attempt. So a repeated call does no harm, and no other
program can occupy the keys in advance.

A trainer claims an epoch before it publishes. A claim can be written once, and readers follow the highest claim only:
a trainer that was replaced is ignored, however late it learns. An epoch is the time of its claim in seconds since 1970,
or one more than the highest claim, so epochs go up even if the relay has lost every claim. Only claims that the
trainer's key signed count, and only if they are not far ahead of the clock or unused for long (`claim_counts`).

`writing.ChainWriter` adds records, `reading.ChainReader` follows them; `core.versions` decides which.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rose.core.versions import VersionId
from rose.errors import ConfigError, Unavailable

Result = TypeVar("Result")

EPOCH_MAX = 10**10 - 1
VERSION_MAX = 10**10 - 1
ATTEMPT_MAX = 10**4 - 1
CLAIM_AHEAD_S_MAX = 86_400  # clocks of one cluster differ by seconds; a day ahead is a mistake or an attack
CLAIM_UNUSED_S_MAX = 86_400  # a trainer publishes its first version within minutes of its claim
READS_MAX = 3  # of a damaged value, before it is taken for damaged in the relay
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}")
_CLAIM = re.compile(r"epochs/e(\d{10})")
_FILE = re.compile(r"e(\d{10})/v(\d{10})/(anchor|delta)\.(\d{4})/([^/]+)")


@dataclass(frozen=True, slots=True, order=True)
class Folder:
    """The folder of one version record."""

    version: VersionId
    kind: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Names:
    """The keys of one run."""

    run: str

    def __post_init__(self) -> None:
        if not _RUN.fullmatch(self.run):
            hint = "use letters, digits and . _ = -, at most 100"
            raise ConfigError(f"`{self.run[:120]}` cannot name a run", hint=hint)

    def claim(self, epoch: int) -> str:
        if not 0 <= epoch <= EPOCH_MAX:
            raise ConfigError(f"{epoch} is not an epoch: epochs are seconds since 1970", hint="check the clock")
        return f"{self.run}/epochs/e{epoch:010}"

    def epoch_folder(self, epoch: int) -> str:
        return f"{self.run}/e{epoch:010}"

    def folder(self, folder: Folder) -> str:
        assert 0 <= folder.version.version <= VERSION_MAX and 0 <= folder.attempt <= ATTEMPT_MAX
        version = f"e{folder.version.epoch:010}/v{folder.version.version:010}"
        return f"{self.run}/{version}/{folder.kind}.{folder.attempt:04}"

    def bucket(self, folder: Folder, rank: int, index: int) -> str:
        """Return a new key each time: no other program can have written one with these random digits."""
        return f"{self.folder(folder)}/r{rank:05}.b{index:05}.{secrets.token_hex(8)}"

    def rank_manifest(self, folder: Folder, rank: int) -> str:
        return f"{self.folder(folder)}/part.{rank:05}"

    def manifest(self, folder: Folder) -> str:
        return f"{self.folder(folder)}/manifest"

    def epoch_of(self, key: str) -> int | None:
        """Return the epoch that a key claims; None if it is no claim."""
        match = _CLAIM.fullmatch(key.removeprefix(f"{self.run}/"))
        return int(match[1]) if match else None

    def place_of(self, key: str) -> tuple[Folder, str] | None:
        """Return the version record that a key belongs to and its name there, or None."""
        match = _FILE.fullmatch(key.removeprefix(f"{self.run}/"))
        if not match:
            return None
        return Folder(VersionId(int(match[1]), int(match[2])), match[3], int(match[4])), match[5]


def is_ahead(epoch: int, unix_s: float) -> bool:
    """Return whether an epoch is too far in the future to count."""
    return epoch > unix_s + CLAIM_AHEAD_S_MAX


def claim_counts(epoch: int, claimed_s: float, unix_s: float, is_used: Callable[[], bool]) -> bool:
    """Return whether a signed claim counts; `is_used` tells whether something was published under it."""
    return not is_ahead(epoch, unix_s) and (unix_s - claimed_s <= CLAIM_UNUSED_S_MAX or is_used())


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to repeat a call that is unavailable, and how long to wait in between."""

    limit_s: float = 60.0
    first_wait_s: float = 0.05
    wait_s_max: float = 2.0
    now_s: Callable[[], float] = time.monotonic
    sleep_s: Callable[[float], None] = time.sleep

    def call(self, trial: Callable[[], Result]) -> Result:
        """Call until the call does not raise Unavailable, or the time is up."""
        until_s = self.now_s() + self.limit_s
        wait_s = self.first_wait_s
        while True:
            try:
                return trial()
            except Unavailable:
                if self.now_s() + wait_s > until_s:
                    raise
            self.sleep_s(wait_s)
            wait_s = min(2 * wait_s, self.wait_s_max)
