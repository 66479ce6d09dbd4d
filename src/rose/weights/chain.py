"""The chain of versions in a relay: how its keys are named, who may add to it, and how long to try.

    RUN/epochs/e1763258031                                   a claim: whose trainer's epoch this is
    RUN/e1763258031/v0000000017/delta.0000/r00000.b00003.XX  a bucket: payloads of pieces, one after the other
    RUN/e1763258031/v0000000017/delta.0000/part.00001        what one rank contributed, if there are several
    RUN/e1763258031/v0000000017/delta.0000/manifest          written last: now the link exists

Nothing that is signed is ever overwritten. A writer that tries again takes a new key: the names of buckets end in
random digits, and a link that the relay lost gets another attempt. So a repeated call can do no harm, needs no memory
of the first one, and no other program can occupy the keys in advance.

A trainer claims an epoch before it publishes; the claim can be written once, so two trainers never share an epoch, and
readers follow the highest claim only. That is the fence: a trainer that was replaced is ignored, however late it
learns. An epoch is the time of its claim in seconds since 1970, or one more than the highest claim if that is later: so
epochs go up even if the relay has lost every claim, and a number never means two trainers.

Only claims that the trainer's key signed count. A claim more than a day ahead of the clock does not count, and one
under which nothing was published expires after a day (`stands`). Anything else under `epochs/` is ignored, and removed
by the trainer's next sweep.

`writing.ChainWriter` adds links, `reading.ChainReader` follows them; `core.versions` decides which.
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
READS_MAX = 3  # of what comes damaged, before it is taken for damaged where it lies
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}")
_CLAIM = re.compile(r"epochs/e(\d{10})")
_FILE = re.compile(r"e(\d{10})/v(\d{10})/(anchor|delta)\.(\d{4})/([^/]+)")


@dataclass(frozen=True, slots=True, order=True)
class Folder:
    """Where one link lies."""

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
        """Return a new key each time: it ends in random digits, so no other program can have written it before."""
        return f"{self.folder(folder)}/r{rank:05}.b{index:05}.{secrets.token_hex(8)}"

    def part(self, folder: Folder, rank: int) -> str:
        return f"{self.folder(folder)}/part.{rank:05}"

    def manifest(self, folder: Folder) -> str:
        return f"{self.folder(folder)}/manifest"

    def epoch_of(self, key: str) -> int | None:
        """The epoch that a key claims; None if it is no claim."""
        match = _CLAIM.fullmatch(key.removeprefix(f"{self.run}/"))
        return int(match[1]) if match else None

    def place_of(self, key: str) -> tuple[Folder, str] | None:
        """The link that a key belongs to and its name there; None if it is nothing of a link."""
        match = _FILE.fullmatch(key.removeprefix(f"{self.run}/"))
        if not match:
            return None
        return Folder(VersionId(int(match[1]), int(match[2])), match[3], int(match[4])), match[5]


def is_ahead(epoch: int, unix_s: float) -> bool:
    """Whether an epoch is too far in the future to count."""
    return epoch > unix_s + CLAIM_AHEAD_S_MAX


def stands(epoch: int, claimed_s: float, unix_s: float, is_used: Callable[[], bool]) -> bool:
    """Whether a signed claim counts. `is_used`: something was published under it."""
    return not is_ahead(epoch, unix_s) and (unix_s - claimed_s <= CLAIM_UNUSED_S_MAX or is_used())


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to try again what the world refused, and how long to wait in between."""

    limit_s: float = 60.0
    first_wait_s: float = 0.05
    wait_s_max: float = 2.0
    now_s: Callable[[], float] = time.monotonic
    sleep_s: Callable[[float], None] = time.sleep

    def call(self, trial: Callable[[int], Result]) -> Result:
        """Call with 0, 1, 2 ... until it does not raise Unavailable, or the time is up."""
        until_s = self.now_s() + self.limit_s
        number, wait_s = 0, self.first_wait_s
        while True:
            try:
                return trial(number)
            except Unavailable:
                if self.now_s() + wait_s > until_s:
                    raise
            self.sleep_s(wait_s)
            number, wait_s = number + 1, min(2 * wait_s, self.wait_s_max)
