"""`rose weights`: what versions a relay holds, whether they are whole, what changed between two, and cleaning up."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.errors import RequestRefused

if TYPE_CHECKING:
    from rose.core.versions import VersionId
    from rose.weights.inventory import Inventory, LinkFound
    from rose.weights.manifest import Manifest
    from rose.weights.relay.base import Relay

SUMMARY = "look into a relay: list, show, verify and compare weight versions, and clean up"
SHOWN_MAX = 12  # tensors in a table


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="list the versions of a run")
    show = actions.add_parser("show", help="say what is in one version")
    verify = actions.add_parser("verify", help="fetch a version whole and check every hash of it")
    diff = actions.add_parser("diff", help="fetch two versions and say what changed between them")
    gc = actions.add_parser("gc", help="delete what no worker can need any more")
    for action in (ls, show, verify, diff, gc):
        action.add_argument("--relay", required=True, metavar="URL", help="a folder, tcp://host:port, s3://bucket ...")
        action.add_argument("--run", required=True, metavar="NAME", help="the run's name in the relay")
        action.add_argument(
            "--secret-file", type=Path, metavar="FILE", help="the run's secret or read key (ROSE_RELAY_SECRET_FILE)"
        )
        action.add_argument("--trusted-network", action="store_true", help="mooncake: allow more than loopback")
    for action in (show, verify):
        action.add_argument("version", nargs="?", type=int, help="the newest if left out")
    diff.add_argument("old", type=int, metavar="A")
    diff.add_argument("new", type=int, metavar="B")
    gc.add_argument("--keep", type=int, default=None, metavar="N", help="versions that stay reachable by deltas (32)")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be deleted")


def run(arguments: argparse.Namespace) -> int:
    from rose.weights.connecting import reach, run_secret
    from rose.weights.inventory import take_stock
    from rose.weights.keys import for_reading, write_key
    from rose.weights.relay.opening import Access

    secret = run_secret(file=arguments.secret_file)
    if arguments.action == "gc":
        write_key(secret)  # raises ConfigError for a read key
    else:
        secret = for_reading(secret)
    access = Access(secret=secret, trusted_network=arguments.trusted_network)
    relay = reach(arguments.relay, secret, access)
    try:
        stock = take_stock(relay, arguments.run, secret)
        if not stock.links and not stock.claims:
            hint = "check --run and --relay; a trainer's first publish creates it"
            raise RequestRefused(f"the relay holds nothing of run `{arguments.run}`", hint=hint)
        act = {"ls": _ls, "show": _show, "verify": _verify, "diff": _diff, "gc": _gc}[arguments.action]
        return act(arguments, relay, secret, stock)
    finally:
        relay.close()


# What there is


def _ls(arguments: argparse.Namespace, relay: Relay, secret: bytes, stock: Inventory) -> int:
    rows = [_row(link, stock) for link in stock.links]
    _print_table(("version", "epoch", "kind", "base", "size", "times smaller", "hash", ""), rows)
    newest = stock.newest
    print(f"\nnewest for a worker that joins: {'none' if newest is None else newest}")
    if newest is not None:
        print(f"next: {_command(arguments, 'show')}")
    return 0


def _command(arguments: argparse.Namespace, action: str) -> str:
    """How to ask the same relay for something else."""
    words = ["rose", "weights", action, "--relay", arguments.relay, "--run", arguments.run]
    words += ["--secret-file", str(arguments.secret_file)] if arguments.secret_file is not None else []
    return shlex.join([*words, "--trusted-network"] if arguments.trusted_network else words)


def _row(link: LinkFound, stock: Inventory) -> tuple[str, ...]:
    version, manifest = link.folder.version, link.manifest
    note = link.trouble or ("" if version.epoch == max(stock.epochs, default=0) else "of an earlier trainer")
    head = (str(version.version), str(version.epoch), link.folder.kind)
    if manifest is None:
        return (*head, "", _size(link.size_bytes), "", "", note)
    base = "" if manifest.base is None else str(manifest.base[1])
    ratio = _dense_bytes(manifest) / max(1, manifest.size_bytes())
    return (*head, base, _size(manifest.size_bytes()), f"{ratio:,.1f}", manifest.version_hash[:12], note)


def _show(arguments: argparse.Namespace, relay: Relay, secret: bytes, stock: Inventory) -> int:
    version = _chosen(arguments.version, stock)
    links = [link for link in stock.find(version) if link.manifest is not None]
    if not links:
        raise RequestRefused(f"version {version} was never finished", hint="`rose weights ls` says what is wrong")
    for number, link in enumerate(links):
        assert link.manifest is not None
        print("\n" * (number > 0) + "\n".join(_lines(link, link.manifest)))
    manifest = min((link.manifest for link in links if link.manifest), key=lambda found: found.size_bytes())
    print()
    _print_table(("tensor", "type", "shape", "pieces", "size", "times smaller"), _by_tensor(manifest))
    return 0


def _lines(link: LinkFound, manifest: Manifest) -> list[str]:
    parameters = sum(math.prod(entry.shape) for entry in manifest.tensors)
    base = "nothing: it is the version itself" if manifest.base is None else f"version {manifest.base[1]}"
    dense, size = _dense_bytes(manifest), manifest.size_bytes()
    return [
        f"version     {manifest.id}, {manifest.kind}, attempt {manifest.attempt}",
        f"from        {base}",
        f"hash        {manifest.version_hash}",
        f"model       {parameters:,} parameters in {len(manifest.tensors)} tensors, {_size(dense)} dense",
        f"payload     {_size(size)} in {len(manifest.buckets)} buckets and {len(manifest.pieces)} pieces",
        f"codec       {manifest.codec}, {dense / max(1, size):,.1f} times smaller",
        f"state       {link.trouble or 'whole, as far as the listing tells; `rose weights verify` reads every byte'}",
    ]


def _by_tensor(manifest: Manifest) -> list[tuple[str, ...]]:
    """The tensors with the largest payloads."""
    sizes, counts = [0] * len(manifest.tensors), [0] * len(manifest.tensors)
    for piece in manifest.pieces:
        sizes[piece.tensor] += piece.length
        counts[piece.tensor] += 1
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    rows: list[tuple[str, ...]] = []
    for index in order[:SHOWN_MAX]:
        entry = manifest.tensors[index]
        dense = math.prod(entry.shape) * (4 if entry.dtype == "F32" else 2)
        ratio = f"{dense / sizes[index]:,.1f}" if sizes[index] else "unchanged"
        rows.append(
            (entry.name, entry.dtype, " x ".join(map(str, entry.shape)), str(counts[index]), _size(sizes[index]), ratio)
        )
    if len(order) > SHOWN_MAX:
        rows.append((f"... and {len(order) - SHOWN_MAX} more", "", "", "", "", ""))
    return rows


# Reading it all


def _verify(arguments: argparse.Namespace, relay: Relay, secret: bytes, stock: Inventory) -> int:
    version = _chosen(arguments.version, stock)
    manifest, arrays = _fetched(relay, secret, arguments.run, version)
    dense = sum(array.nbytes for array in arrays.values())
    print(f"version {version} is whole: every payload and every number of {_size(dense)} was read and checked")
    print(f"hash {manifest.version_hash}")
    return 0


def _diff(arguments: argparse.Namespace, relay: Relay, secret: bytes, stock: Inventory) -> int:
    import numpy as np

    old, new = _chosen(arguments.old, stock), _chosen(arguments.new, stock)
    before_is, before = _fetched(relay, secret, arguments.run, old)
    after_is, after = _fetched(relay, secret, arguments.run, new)
    if {name: array.shape for name, array in before.items()} != {name: array.shape for name, array in after.items()}:
        raise RequestRefused(f"versions {old} and {new} are of different models")
    changed = {name: int(np.count_nonzero(before[name] != after[name])) for name in before}
    total = sum(array.size for array in before.values())
    print(f"from {old}, hash {before_is.version_hash}\nto   {new}, hash {after_is.version_hash}")
    print(f"{sum(changed.values()):,} of {total:,} numbers changed ({sum(changed.values()) / max(1, total):.2%})\n")
    order = sorted((name for name in changed if changed[name]), key=lambda name: -changed[name])
    rows = [(name, f"{changed[name]:,}", f"{changed[name] / before[name].size:.2%}") for name in order[:SHOWN_MAX]]
    if len(order) > SHOWN_MAX:
        rows.append((f"... and {len(order) - SHOWN_MAX} more", "", ""))
    _print_table(("tensor", "changed", "share"), rows)
    return 0


def _fetched(relay: Relay, secret: bytes, run_name: str, version: VersionId) -> tuple[Manifest, dict[str, Any]]:
    """A version as a worker that holds nothing would build it."""
    from rose.weights.layouts import whole
    from rose.weights.reading import ChainReader
    from rose.weights.shards import Tensor
    from rose.weights.slots import Slot, in_memory, locals_of

    reader = ChainReader(relay, run=run_name, secret=secret)
    reader.refresh()
    manifest = reader.manifest_of(version)
    tensors = [Tensor(entry.name, entry.shape, entry.dtype) for entry in manifest.tensors]
    slot = Slot(in_memory(locals_of(whole(tensors), tensors)), whole(tensors), tensors)
    return reader.bring(slot.shadow, version), dict(slot.arrays)


# Cleaning up


def _gc(arguments: argparse.Namespace, relay: Relay, secret: bytes, stock: Inventory) -> int:
    from rose.weights.writing import KEEP_VERSIONS

    keep = KEEP_VERSIONS if arguments.keep is None else arguments.keep
    if keep < 1:
        raise RequestRefused(f"--keep {keep}: at least the newest version must stay")
    keys = stock.superseded(keep)
    if arguments.dry_run:
        print("\n".join([*keys, f"{len(keys)} keys would be deleted"]))
        return 0
    deleted = sum(relay.delete(key) for key in keys)
    print(f"deleted {deleted} keys; version {stock.newest} and what leads to it stays")
    return 0


# Words


def _chosen(number: int | None, stock: Inventory) -> VersionId:
    version = stock.newest if number is None else stock.numbered(number)
    if version is None:
        have = sorted({link.folder.version.version for link in stock.links})
        listed = f"{have[0]} to {have[-1]}" if have else "none"
        wanted = "a version" if number is None else f"version {number}"
        hint = "`rose weights ls` lists them; raise keep_versions if the trainer is ahead"
        raise RequestRefused(f"{wanted} is not in the relay, which has {listed}", hint=hint)
    return version


def _dense_bytes(manifest: Manifest) -> int:
    return sum(math.prod(entry.shape) * (4 if entry.dtype == "F32" else 2) for entry in manifest.tensors)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def _print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
