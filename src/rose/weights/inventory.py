"""What a relay holds under a run's name, for people: version records with their manifests, claims, and leftovers.

A `ChainReader` looks only at what a worker may use. This reads everything, earlier epochs and broken records too;
`superseded` says which keys no worker needs any more.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from rose.core import versions
from rose.core.versions import VersionId
from rose.errors import RoseError
from rose.weights.chain import Folder, Names, RetryPolicy, is_ahead
from rose.weights.manifest import Claim, Manifest, WeightsRefused, check_manifest, read_signed
from rose.weights.relay.relay_base import KeyMissing, Relay, RelayEntry


@dataclass(frozen=True, slots=True)
class ListedRecord:
    """One version record: its manifest if one may be used, and what is wrong if something is."""

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
    records: tuple[ListedRecord, ...]  # in order of version
    claims: tuple[str, ...]

    @property
    def newest(self) -> VersionId | None:
        """Return the version that a worker without weights would take."""
        epoch = max(self.epochs, default=0)
        whole = [record.manifest for record in self.records if record.is_whole and record.folder.version.epoch == epoch]
        return versions.newest(manifest.version_record() for manifest in whole if manifest is not None)

    def find(self, version: VersionId) -> list[ListedRecord]:
        return [record for record in self.records if record.folder.version == version]

    def numbered(self, version: int) -> VersionId | None:
        """Return the version of this number in the latest epoch that has one."""
        ids = (record.folder.version for record in self.records)
        return max((known for known in ids if known.version == version), default=None)

    def superseded(self, keep_versions: int) -> list[str]:
        """Return the keys that no worker needs, manifests first; a publication under way in the newest epoch stays."""
        newest = self.newest
        if newest is None:
            return []
        current = [record for record in self.records if record.is_whole and record.folder.version.epoch == newest.epoch]
        kept = versions.kept([record.manifest.version_record() for record in current if record.manifest], keep_versions)
        stays = {record.folder for record in current if record.manifest and record.manifest.version_record() in kept}
        stays |= {
            record.folder for record in self.records if record.manifest is None and record.folder.version > newest
        }
        keys = [key for record in self.records if record.folder not in stays for key in record.keys]
        keys += [claim for claim in self.claims if claim != Names(self.run).claim(max(self.epochs))]
        return sorted(keys, key=lambda key: (not key.endswith("/manifest"), key))


def read_inventory(relay: Relay, run: str, secret: bytes, retry: RetryPolicy | None = None) -> Inventory:
    """Read all claims and manifests of a run. Raises Unavailable."""
    names, retry = Names(run), retry or RetryPolicy()
    entries = retry.call(lambda: relay.list(run))
    claims = {entry.key: epoch for entry in entries if (epoch := names.epoch_of(entry.key)) is not None}
    by_folder: dict[Folder, dict[str, int]] = defaultdict(dict)
    for entry in entries:
        place = names.place_of(entry.key)
        if place is not None:
            by_folder[place[0]][entry.key] = entry.size_bytes
    epochs = [
        epoch
        for entry in entries
        if (epoch := claims.get(entry.key)) is not None and _is_claimed(relay, names, secret, epoch, entry, retry)
    ]
    records = [_listed(relay, names, secret, folder, sizes, retry) for folder, sizes in sorted(by_folder.items())]
    return Inventory(run, tuple(sorted(epochs)), tuple(records), tuple(claims))


def _is_claimed(relay: Relay, names: Names, secret: bytes, epoch: int, entry: RelayEntry, retry: RetryPolicy) -> bool:
    """Return whether a claim is signed and not ahead of the clock."""
    if is_ahead(epoch, time.time()):
        return False
    try:
        claim = retry.call(lambda: read_signed(relay.get, secret, entry.key, entry.size_bytes, Claim))
    except (KeyMissing, WeightsRefused):
        return False
    return (claim.run, claim.epoch) == (names.run, epoch)


def _listed(
    relay: Relay, names: Names, secret: bytes, folder: Folder, sizes: Mapping[str, int], retry: RetryPolicy
) -> ListedRecord:
    key = names.manifest(folder)
    manifest, trouble = None, ""
    if key not in sizes:
        trouble = "no manifest: not finished, or never will be"
    else:
        try:
            signed = retry.call(lambda: read_signed(relay.get, secret, key, sizes[key], Manifest))
            manifest = check_manifest(signed, run=names.run, expected=None)
            missing = [bucket.key for bucket in manifest.buckets if sizes.get(bucket.key) != bucket.size_bytes]
            trouble = f"{len(missing)} of {len(manifest.buckets)} buckets are missing or cut" if missing else ""
        except KeyMissing:
            trouble = "deleted while it was looked at"
        except RoseError as error:
            trouble = error.what
    return ListedRecord(folder, tuple(sizes), sum(sizes.values()), manifest, trouble)
