"""Which of several gateways (shards) a group of trajectories lives on, and how batches of shards become one stream.

Every party that names a trajectory finds its shard by the same arithmetic: clients, and the proxy
(`deploy/haproxy/shards.lua`, which a test compares with this module). Rendezvous hashing needs no table, and another
shard moves only its own share of the groups. All members of a group are on one shard, so that it is completed there.

Batch n of the merged stream is batch n of every shard, and a shard that contributes nothing makes an empty one. So the
merged stream needs no state of its own: the shards' ledgers hold all of it, and any party may die between two steps.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

_SECRET = re.compile(r"\.[A-Za-z0-9_-]{16,64}\Z")  # of a trajectory, at the end of its session's name
_MASK = (1 << 64) - 1
_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64


def group_of(session: str) -> str:
    """Return the group in the name of a trajectory or of its session: GROUP/MEMBER or GROUP/MEMBER.SECRET."""
    name = _SECRET.sub("", session)
    return name.rpartition("/")[0] or name


def shard_of(group: str, shards: int) -> int:
    """Return the number of the shard that a group lives on; of a worker's name, the shard that it joins first."""
    digest = zlib.crc32(group.encode(errors="surrogateescape"))
    return max(range(shards), key=lambda shard: _mixed(digest + (shard + 1) * _STEP))


def _mixed(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class ShardBatches:
    """What a shard has for the merged stream: its newest batch with its groups, and groups that are in no batch yet."""

    last_batch: int
    last_groups: int
    complete_groups: int


def plan_batch(groups: int, after: int, shards: Sequence[ShardBatches]) -> list[int] | None:
    """Return how many groups each shard contributes to the batch after batch `after`; None while there are too few.

    If some shard has made its part before, for a client that died, the batch is completed at once: it has as many
    groups as were asked for then if as many are asked for now. The fullest shards contribute most.
    """
    made = [shard.last_groups if shard.last_batch > after else None for shard in shards]
    left = [shard.complete_groups if part is None else 0 for shard, part in zip(shards, made)]
    missing = groups - sum(part or 0 for part in made)
    if missing > sum(left) and all(part is None for part in made):
        return None
    counts = [part or 0 for part in made]
    for _ in range(min(missing, sum(left))):
        shard = max(range(len(left)), key=left.__getitem__)
        left[shard] -= 1
        counts[shard] += 1
    return counts
