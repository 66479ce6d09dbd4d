"""`rose weights`: what versions a relay holds, whether they are whole, what changed between two, and cleaning up."""

from __future__ import annotations

import argparse
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.cli.options import add_json_option, print_json, print_table
from rose.errors import RequestRefused

if TYPE_CHECKING:
    from rose.core.versions import VersionId
    from rose.weights.inventory import Inventory, ListedRecord
    from rose.weights.manifest import Manifest
    from rose.weights.relay.relay_base import Relay

SUMMARY = "list, show, verify, compare and delete weight versions in a relay"
ROWS_MAX = 12  # tensors in a table


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="list the versions of a run")
    show = actions.add_parser("show", help="show what is in one version")
    verify = actions.add_parser("verify", help="fetch a version whole and check every hash of it")
    diff = actions.add_parser("diff", help="fetch two versions and show what changed between them")
    gc = actions.add_parser("gc", help="delete what no worker can need any more")
    for action in (ls, show, verify, diff, gc):
        action.add_argument("--relay", required=True, metavar="URL", help="a folder, http://host:port, s3://bucket ...")
        action.add_argument("--run", required=True, metavar="NAME", help="the run's name in the relay")
        action.add_argument(
            "--secret-file", type=Path, metavar="FILE", help="the run's secret or read key (ROSE_RELAY_SECRET_FILE)"
        )
        action.add_argument("--trusted-network", action="store_true", help="mooncake: allow more than loopback")
        add_json_option(action)
    for action in (show, verify):
        action.add_argument("version", nargs="?", type=int, help="the newest if left out")
    diff.add_argument("old", type=int, metavar="A")
    diff.add_argument("new", type=int, metavar="B")
    gc.add_argument("--keep", type=int, default=None, metavar="N", help="versions that stay reachable by deltas (32)")
    gc.add_argument("--dry-run", action="store_true", help="only list what would be deleted")


def run(arguments: argparse.Namespace) -> int:
    from rose.weights.inventory import read_inventory
    from rose.weights.keys import for_reading, run_secret, write_key
    from rose.weights.relay.opening import RelayAccess, open_relay

    secret = run_secret(file=arguments.secret_file)
    if arguments.action == "gc":
        write_key(secret)  # raises ConfigError for a read key
    else:
        secret = for_reading(secret)
    access = RelayAccess(secret=secret, trusted_network=arguments.trusted_network)
    relay = open_relay(arguments.relay, access)
    try:
        inventory = read_inventory(relay, arguments.run, secret)
        if not inventory.records and not inventory.claims:
            hint = "check --run and --relay; a trainer's first publish creates it"
            raise RequestRefused(f"the relay holds nothing of run `{arguments.run}`", hint=hint)
        actions = {"ls": _ls, "show": _show, "verify": _verify, "diff": _diff, "gc": _gc}
        actions[arguments.action](arguments, relay, secret, inventory)
        return 0
    finally:
        relay.close()


def _ls(arguments: argparse.Namespace, relay: Relay, secret: bytes, inventory: Inventory) -> None:
    if arguments.json:
        print_json(
            {"versions": [_version(record) for record in inventory.records], "newest": _number(inventory.newest)}
        )
        return
    rows = [("version", "epoch", "kind", "base", "size", "times smaller", "hash", "")]
    for record in inventory.records:
        version, manifest = record.folder.version, record.manifest
        note = record.trouble or ("" if version.epoch == max(inventory.epochs, default=0) else "of an earlier trainer")
        base, size, ratio, digest = "", _size(record.size_bytes), "", ""
        if manifest is not None:
            base = "" if manifest.base is None else str(manifest.base[1])
            size, digest = _size(manifest.size_bytes()), manifest.version_hash[:12]
            ratio = f"{_dense_bytes(manifest) / max(1, manifest.size_bytes()):,.1f}"
        rows.append((str(version.version), str(version.epoch), record.folder.kind, base, size, ratio, digest, note))
    print_table(rows)
    newest = inventory.newest
    print(f"\nnewest for a worker that joins: {'none' if newest is None else newest}")
    if newest is not None:
        command = ["rose", "weights", "show", "--relay", arguments.relay, "--run", arguments.run]
        if arguments.secret_file is not None:
            command += ["--secret-file", str(arguments.secret_file)]
        if arguments.trusted_network:
            command.append("--trusted-network")
        print(f"next: {shlex.join(command)}")


def _show(arguments: argparse.Namespace, relay: Relay, secret: bytes, inventory: Inventory) -> None:
    version = _chosen(arguments.version, inventory)
    records = [(record, record.manifest) for record in inventory.find(version) if record.manifest is not None]
    if not records:
        raise RequestRefused(f"version {version} was never finished", hint="`rose weights ls` says what is wrong")
    if arguments.json:
        tensors = records[0][1].logical_tensors()
        listed = [{"name": each.name, "type": each.dtype, "shape": list(each.shape)} for each in tensors]
        print_json({"attempts": [_version(record) for record, _ in records], "tensors": listed})
        return
    for record, manifest in records:
        parameters = sum(math.prod(entry.shape) for entry in manifest.tensors)
        base = "nothing: it is the version itself" if manifest.base is None else f"version {manifest.base[1]}"
        dense, size = _dense_bytes(manifest), manifest.size_bytes()
        state = record.trouble or "whole, as far as the listing tells; `rose weights verify` reads every byte"
        print(f"version     {manifest.id}, {manifest.kind}, attempt {manifest.attempt}")
        print(f"from        {base}")
        print(f"hash        {manifest.version_hash}")
        print(f"model       {parameters:,} parameters in {len(manifest.tensors)} tensors, {_size(dense)} dense")
        print(f"payload     {_size(size)} in {len(manifest.buckets)} buckets and {len(manifest.chunks)} chunks")
        print(f"codec       {manifest.codec}, {dense / max(1, size):,.1f} times smaller")
        print(f"state       {state}\n")
    _print_tensors(min((manifest for _, manifest in records), key=lambda manifest: manifest.size_bytes()))


def _print_tensors(manifest: Manifest) -> None:
    """Print the tensors with the largest payloads."""
    tensors = manifest.logical_tensors()
    sizes, counts = [0] * len(tensors), [0] * len(tensors)
    for chunk in manifest.chunks:
        sizes[chunk.tensor] += chunk.length
        counts[chunk.tensor] += 1
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    rows = [("tensor", "type", "shape", "chunks", "size", "times smaller")]
    for index in order[:ROWS_MAX]:
        entry = tensors[index]
        ratio = f"{entry.size_bytes / sizes[index]:,.1f}" if sizes[index] else "unchanged"
        shape = " x ".join(map(str, entry.shape))
        rows.append((entry.name, entry.dtype, shape, str(counts[index]), _size(sizes[index]), ratio))
    if len(order) > ROWS_MAX:
        rows.append((f"... and {len(order) - ROWS_MAX} more", "", "", "", "", ""))
    print_table(rows)


def _verify(arguments: argparse.Namespace, relay: Relay, secret: bytes, inventory: Inventory) -> None:
    version = _chosen(arguments.version, inventory)
    manifest, arrays = _fetch(relay, secret, arguments.run, version)
    dense = sum(array.nbytes for array in arrays.values())
    if arguments.json:
        print_json({"version": _number(version), "hash": manifest.version_hash, "bytes": dense, "is_whole": True})
        return
    print(f"version {version} is whole: every payload and every number of {_size(dense)} was read and checked")
    print(f"hash {manifest.version_hash}")


def _diff(arguments: argparse.Namespace, relay: Relay, secret: bytes, inventory: Inventory) -> None:
    import numpy as np

    old, new = _chosen(arguments.old, inventory), _chosen(arguments.new, inventory)
    old_manifest, before = _fetch(relay, secret, arguments.run, old)
    new_manifest, after = _fetch(relay, secret, arguments.run, new)
    if {name: array.shape for name, array in before.items()} != {name: array.shape for name, array in after.items()}:
        raise RequestRefused(f"versions {old} and {new} are of different models")
    changed = {name: int(np.count_nonzero(before[name] != after[name])) for name in before}
    changed_total, total = sum(changed.values()), sum(array.size for array in before.values())
    if arguments.json:
        hashes = {"old_hash": old_manifest.version_hash, "new_hash": new_manifest.version_hash}
        print_json({"old": _number(old), "new": _number(new), **hashes, "numbers": total, "changed": changed})
        return
    print(f"from {old}, hash {old_manifest.version_hash}\nto   {new}, hash {new_manifest.version_hash}")
    print(f"{changed_total:,} of {total:,} numbers changed ({changed_total / max(1, total):.2%})\n")
    order = sorted((name for name in changed if changed[name]), key=lambda name: -changed[name])
    rows = [("tensor", "changed", "share")]
    rows += [(name, f"{changed[name]:,}", f"{changed[name] / before[name].size:.2%}") for name in order[:ROWS_MAX]]
    if len(order) > ROWS_MAX:
        rows.append((f"... and {len(order) - ROWS_MAX} more", "", ""))
    print_table(rows)


def _fetch(relay: Relay, secret: bytes, run_name: str, version: VersionId) -> tuple[Manifest, dict[str, Any]]:
    """Fetch a version as a worker that holds nothing would."""
    from rose.weights.layouts import whole
    from rose.weights.reading import ChainReader
    from rose.weights.weight_buffers import WeightBuffer

    reader = ChainReader(relay, run=run_name, secret=secret)
    reader.refresh()
    manifest = reader.manifest_of(version)
    tensors = manifest.logical_tensors()
    buffer = WeightBuffer(whole(tensors), tensors)
    return reader.bring(buffer.staging, version), dict(buffer.arrays)


def _gc(arguments: argparse.Namespace, relay: Relay, secret: bytes, inventory: Inventory) -> None:
    from rose.weights.writing import KEEP_VERSIONS

    keep = KEEP_VERSIONS if arguments.keep is None else arguments.keep
    if keep < 1:
        raise RequestRefused(f"--keep {keep}: at least the newest version must stay")
    keys = inventory.superseded(keep)
    if arguments.json:
        deleted = 0 if arguments.dry_run else sum(relay.delete(key) for key in keys)
        print_json({"keys": list(keys), "deleted": deleted, "newest": _number(inventory.newest)})
        return
    if arguments.dry_run:
        print("\n".join([*keys, f"{len(keys)} keys would be deleted"]))
        return
    deleted = sum(relay.delete(key) for key in keys)
    print(f"deleted {deleted} keys; version {inventory.newest} and what leads to it stays")


def _chosen(number: int | None, inventory: Inventory) -> VersionId:
    version = inventory.newest if number is None else inventory.numbered(number)
    if version is None:
        numbers = sorted({record.folder.version.version for record in inventory.records})
        listed = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
        wanted = "a version" if number is None else f"version {number}"
        hint = "`rose weights ls` lists them; raise keep_versions if the trainer is ahead"
        raise RequestRefused(f"{wanted} is not in the relay, which has {listed}", hint=hint)
    return version


def _number(version: VersionId | None) -> dict[str, int] | None:
    return None if version is None else {"epoch": version.epoch, "version": version.version}


def _version(record: ListedRecord) -> dict[str, Any]:
    """Return what the relay's listing tells of one stored version, with plain values."""
    version, manifest = record.folder.version, record.manifest
    known: dict[str, Any] = {"kind": record.folder.kind, "bytes": record.size_bytes, "trouble": record.trouble or None}
    if manifest is not None:
        base = None if manifest.base is None else manifest.base[1]
        known |= {"base": base, "bytes": manifest.size_bytes(), "dense_bytes": _dense_bytes(manifest)}
        known |= {"hash": manifest.version_hash, "codec": manifest.codec}
    return {"version": version.version, "epoch": version.epoch, **known}


def _dense_bytes(manifest: Manifest) -> int:
    return sum(tensor.size_bytes for tensor in manifest.logical_tensors())


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
