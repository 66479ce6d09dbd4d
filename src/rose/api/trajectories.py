"""Schemas to begin and finish trajectories, of the batches of finished groups that a trainer fetches, and of shards."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from rose.bounds import ITEMS_MAX, TOKENS_MAX, Count, Label, Name, Seconds, Serial, Text
from rose.core.trajectory import Trajectory

MSGPACK = "application/msgpack"  # media type of batches whose tokens need no text
SECRET_BYTES = 16
SECRET_PATTERN = r"^[A-Za-z0-9_-]{16,64}\Z"
SECRET_MARK = "."  # between the id of a trajectory and its secret
REWARD_MAX = 1e9  # sums and squares over a group stay finite, also in fp32

Secret = Annotated[str, Meta(max_length=64, pattern=SECRET_PATTERN)]
Reward = Annotated[float, Meta(ge=-REWARD_MAX, le=REWARD_MAX)]


class BeginBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The beginning of a trajectory. With an `id` of the caller's own, repeating the call has no second effect.

    An agent that may have to repeat the call sends a `secret` that it made itself. Without one the gateway makes one,
    and only the trainer can begin the trajectory again.
    """

    id: Name | None = None
    group: Name | None = None
    group_size: Annotated[int, Meta(ge=1, le=4096)] = 1
    task: Text = ""
    seed: Serial | None = None
    secret: Secret | None = None


class Begun(msgspec.Struct):
    """`session` is the name for the trajectory's turns and its end: its id and its secret."""

    id: Name
    group: Name | None
    task: Text
    seed: Serial
    session: Text = ""


class FinishBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The end of a trajectory and its reward. `is_lost`: the episode failed and is not learnt from."""

    reward: Reward = 0.0
    is_success: bool = False
    invalid_turns: Count = 0
    is_lost: bool = False


class Finished(msgspec.Struct):
    """The counts of a finished trajectory: its turns, and further branches of it (`forks`)."""

    id: Name
    turns: Count
    forks: Count


class FinishedGroup(msgspec.Struct, frozen=True):
    """A complete group: the trajectories of one task, and how many of them were lost."""

    group: Label
    task: Text
    trajectories: Annotated[tuple[Trajectory, ...], Meta(max_length=ITEMS_MAX)]
    lost: Count = 0


class Batch(msgspec.Struct, frozen=True):
    """Finished groups to train on. Batches are numbered from 1."""

    batch: Serial
    groups: Annotated[tuple[FinishedGroup, ...], Meta(max_length=TOKENS_MAX)]


class PublishBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A version to publish. The call waits up to `wait_s` for workers to run it; the reply names those that do.

    A version means one set of weights for ever: workers that run it do not read them again. The weights are in a folder
    that all workers can read, or under the run's name in a relay.
    """

    version: Name
    folder: Text = ""
    relay: Text = ""
    run: Annotated[str, Meta(max_length=100)] = ""
    hash: Annotated[str, Meta(max_length=128)] = ""
    wait_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class PublishReply(msgspec.Struct):
    """The workers that run the version, and those that do not yet.

    `sync_s`: per worker, seconds from publishing until it ran the version. `pause_s`: per worker, how long generation
    stalled.
    """

    version: Name
    ready: Annotated[list[Name], Meta(max_length=ITEMS_MAX)]
    behind: Annotated[dict[Name, Text], Meta(max_length=ITEMS_MAX)]  # why each of them does not run it yet
    sync_s: Annotated[dict[Name, Seconds], Meta(max_length=ITEMS_MAX)] = {}
    pause_s: Annotated[dict[Name, Seconds], Meta(max_length=ITEMS_MAX)] = {}


class ShardStatus(msgspec.Struct, frozen=True):
    """What one of several gateways tells its clients and the other gateways about itself.

    `shard` is its number among `shards`; None for a gateway that was not told. `last_groups` is the number of groups in
    its newest batch until that is confirmed, `complete_groups` those that are in no batch yet. The rest is its load:
    turns that wait for a worker, workers that could run one more turn, and idle workers that may move to another shard.
    """

    shard: Count | None
    shards: Count
    last_batch: Serial
    last_groups: Count
    complete_groups: Count
    waiting_turns: Count = 0
    free_workers: Count = 0
    idle_workers: Count = 0
    turns_per_worker: Count = 1
