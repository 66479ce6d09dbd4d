"""What lies in a relay under a run's name, for people: links with their manifests, claims, and what belongs to nothing.

A `ChainReader` looks at what a worker may use, and at nothing else. This looks at everything, earlier epochs and broken
links too, and judges it; `superseded` says which keys nobody needs any more.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rose.core import versions
from rose.core.versions import VersionId
from rose.errors import RoseError
from rose.weights.chain import Folder, Names, Patience, is_ahead
from rose.weights.manifest import Claim, Manifest, WeightsRefused, check_manifest, read_signed
from rose.weights.relay.base import Entry, KeyMissing, Relay


@dataclass(frozen=True, slots=True)
class LinkFound:
    """One link: its manifest if there is one that may be used, and what is wrong if something is."""

    folder: Folder
    keys: tuple[str, ...]
    size_bytes: int
    manifest: Manifest | None
    trouble: str = ""

    @property
    def is_whole(self) -> bool:
        return self.manifest is not None and not self.trouble


@dataclass(frozen=True, slots=True)
class Inventory:
    run: str
    epochs: tuple[int, ...]  # with a signed claim
    links: tuple[LinkFound, ...]  # in order of version
    claims: tuple[str, ...]

    @property
    def newest(self) -> VersionId | None:
        """What a worker that holds nothing would take."""
        epoch = max(self.epochs, default=0)
        whole = [link.manifest.link() for link in self.links if link.is_whole and link.manifest is not None]
        return versions.newest(link for link in whole if link.version.epoch == epoch)

    def find(self, version: VersionId) -> list[LinkFound]:
        return [link for link in self.links if link.folder.version == version]

    def numbered(self, version: int) -> VersionId | None:
        """The version of this number in the latest epoch that has one."""
        found = [link.folder.version for link in self.links if link.folder.version.version == version]
        return max(found, default=None)

    def superseded(self, keep_versions: int) -> list[str]:
        """Keys that nobody needs, manifests first. What an unfinished publication of the newest epoch pushed stays."""
        newest = self.newest
        if newest is None:
            return []
        current = [link for link in self.links if link.is_whole and link.folder.version.epoch == newest.epoch]
        kept = versions.kept([link.manifest.link() for link in current if link.manifest], keep_versions)
        stays = {link.folder for link in current if link.manifest and link.manifest.link() in kept}
        stays |= {link.folder for link in self.links if link.manifest is None and link.folder.version > newest}
        keys = [key for link in self.links if link.folder not in stays for key in link.keys]
        keys += [claim for claim in self.claims if claim != Names(self.run).claim(max(self.epochs))]
        return sorted(keys, key=lambda key: (not key.endswith("/manifest"), key))


def take_stock(relay: Relay, run: str, secret: bytes, patience: Patience | None = None) -> Inventory:
    names, patience = Names(run), patience or Patience()
    entries = patience.call(lambda _: relay.list(run))
    claims = [entry for entry in entries if names.epoch_of(entry.key) is not None]
    epochs = sorted(epoch for entry in claims if (epoch := _claimed(relay, names, secret, entry, patience)) is not None)
    by_folder: dict[Folder, list[Entry]] = defaultdict(list)
    for entry in entries:
        place = names.place_of(entry.key)
        if place is not None:
            by_folder[place[0]].append(entry)
    links = [_link(relay, names, secret, folder, found, patience) for folder, found in sorted(by_folder.items())]
    return Inventory(run, tuple(epochs), tuple(links), tuple(entry.key for entry in claims))


def _claimed(relay: Relay, names: Names, secret: bytes, entry: Entry, patience: Patience) -> int | None:
    """Return the epoch of a signed claim that is not ahead of the clock."""
    epoch = names.epoch_of(entry.key)
    if epoch is None or is_ahead(epoch, time.time()):
        return None
    try:
        claim = patience.call(lambda _: read_signed(relay, secret, entry.key, entry.size_bytes, Claim))
    except (KeyMissing, WeightsRefused):
        return None
    return epoch if (claim.run, claim.epoch) == (names.run, epoch) else None


def _link(
    relay: Relay, names: Names, secret: bytes, folder: Folder, entries: Sequence[Entry], patience: Patience
) -> LinkFound:
    sizes = {entry.key: entry.size_bytes for entry in entries}
    key = names.manifest(folder)
    manifest, trouble = None, ""
    if key not in sizes:
        trouble = "no manifest: not finished, or never will be"
    else:
        try:
            found = patience.call(lambda _: read_signed(relay, secret, key, sizes[key], Manifest))
            manifest = check_manifest(found, run=names.run, expected=None)
            missing = [bucket.key for bucket in manifest.buckets if sizes.get(bucket.key) != bucket.size_bytes]
            trouble = f"{len(missing)} of {len(manifest.buckets)} buckets are missing or cut" if missing else ""
        except KeyMissing:
            trouble = "deleted while it was looked at"
        except RoseError as error:
            trouble = error.what
    return LinkFound(folder, tuple(sizes), sum(sizes.values()), manifest, trouble)
