"""Several gateways of a simulated world: cores and ledgers of their own, and the real client that makes them one.

It takes the place of a `SimulatedGateway` in a world. Devices dial the shard that their name chooses, and are moved by
the real rules. A fault of "the gateway" hits one of the shards. The invariants are those of one gateway, over the
merged stream of batches.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from rose.api.trajectories import Batch, PublishReply, ShardStatus
from rose.client import GatewayClient
from rose.config.server_settings import GatewaySettings
from rose.core.shard_balance import BalanceRules, ShardLoad
from rose.core.shard_placement import shard_of
from rose.engines.base import Sampling
from rose.gateway.gateway_core import GatewayCore
from rose.gateway.gateway_server import durable
from rose.gateway.sessions import Finish
from rose.gateway.shard_moves import ShardMoves
from rose.gateway.shard_peers import EXCHANGE_S, status_of
from rose.sharded_client import ShardedGatewayClient
from rose.sim.invariant_checker import EventLog, GatewayRecord, InvariantChecker
from rose.sim.scenario import ReceivedAnswer, Scenario, SimulatedEpisode
from rose.sim.simulated_agent import Accept
from rose.sim.simulated_gateway import MODEL, SETTINGS, SimulatedGateway, WatchedLedger
from rose.sim.weight_store import WeightStore

STATUS_WAIT_S = 20.0  # as live clients do
Answer = TypeVar("Answer")


class ShardChecker(InvariantChecker):
    """The checker of a world, for one shard: what is not durable there is lost with that shard alone."""

    def __init__(self, whole: InvariantChecker) -> None:
        self.__dict__.update(whole.__dict__)
        self._whole = whole
        self._pending, self._batches = GatewayRecord(), {}

    def placed(self, *placement: Any) -> None:
        self._acknowledged = self._whole._acknowledged
        super().placed(*placement)


class ShardLog(EventLog):
    """The event log of a world; the gateway is called by its number."""

    def __init__(self, whole: EventLog, shard: int) -> None:
        self._whole, self._shard = whole, shard

    def record(self, actor: str, event: str) -> None:
        self._whole.record(f"shard {self._shard}" if actor == "gateway" else actor, event)


class SimulatedShard(SimulatedGateway):
    """One of several gateways."""

    def __init__(self, shard: int, addresses: tuple[str, ...], rules: BalanceRules, *parts: Any) -> None:
        super().__init__(*parts)
        self._shard, self._addresses, self._rules = shard, addresses, rules

    def core(self, ledger: WatchedLedger) -> GatewayCore:
        chosen = {name: getattr(self._scenario, name) for name in SETTINGS}
        settings = GatewaySettings(**chosen, shards=self._addresses, shard=self._shard)
        core = GatewayCore(MODEL, settings, ledger, now_s=self._loop.time())
        core.shard_moves = ShardMoves(core.pool, core.scheduler, settings, self._rules)
        return core

    @property
    def is_answering(self) -> bool:
        return self._core is not None and not self.gate.is_stopped

    def load(self) -> ShardLoad:
        return self._running_core().shard_moves.load(self._loop.time())

    def move_workers(self, others: list[ShardLoad]) -> None:
        if self._core is not None:
            moves = self._core.shard_moves
            before = moves.moved
            moves.update(others, self._loop.time())
            self.counts["moved"] += moves.moved - before
            self._check()

    async def status(self, at_least: int) -> ShardStatus:
        trajectories = self._running_core().trajectories
        await self._news.wait_until(lambda: trajectories.complete_groups >= at_least or None, STATUS_WAIT_S)
        await durable(self._ledger)
        return status_of(self._running_core(), self._loop.time())


class SimulatedShardClient(GatewayClient):
    """The trainer's client of one shard."""

    def __init__(self, shard: SimulatedShard) -> None:
        super().__init__("", "")
        self._shard = shard

    async def shard_status(self, at_least: int = 0) -> ShardStatus:
        return await self._shard.work(lambda: self._shard.status(at_least))

    async def next_batch(self, groups: int, after: int) -> Batch:
        while (batch := await self._shard.work(lambda: self._shard.batch(groups, after, STATUS_WAIT_S))) is None:
            pass
        return batch

    async def publish(self, version: str, **fields: Any) -> PublishReply:
        await self._shard.work(lambda: self._shard.publish(version))
        return PublishReply(version, [], {})


class SimulatedShards(SimulatedGateway):
    """Several gateways as one. Tests and benchmarks set `count` and `rules` in subclasses."""

    count = 2
    rules = BalanceRules()

    def __init__(
        self, scenario: Scenario, store: WeightStore, checker: InvariantChecker, log: EventLog, chance: random.Random
    ) -> None:
        self._chance, self._loop = chance, asyncio.get_running_loop()
        addresses = tuple(f"shard-{number}" for number in range(self.count))
        self.address = ",".join(addresses)
        self.shards = [
            SimulatedShard(
                number, addresses, self.rules, scenario, store, ShardChecker(checker), ShardLog(log, number), chance
            )
            for number in range(self.count)
        ]
        self.listeners: dict[str, Accept] = {
            address: shard.accept for address, shard in zip(addresses, self.shards, strict=True)
        }
        self._client = ShardedGatewayClient(addresses, "")
        self._client._shards = [SimulatedShardClient(shard) for shard in self.shards]
        self._homes: dict[str, SimulatedShard] = {}
        self._is_closed = False

    @property
    def counts(self) -> Counter[str]:  # type: ignore[override]
        return sum((shard.counts for shard in self.shards), Counter())

    def pick(self) -> SimulatedGateway:
        return self._chance.choice(self.shards)

    def start(self) -> None:
        for shard in self.shards:
            shard.start()
        self._loop.call_later(EXCHANGE_S, self._exchange)

    def close(self) -> None:
        self._is_closed = True
        for shard in self.shards:
            shard.close()

    def drain(self, name: str) -> None:
        for shard in self.shards:
            shard.drain(name)

    def check_idle(self) -> None:
        for shard in self.shards:
            shard.check_idle()

    def _exchange(self) -> None:
        """Tell every shard the loads of those that answer, as the shards' own exchange does."""
        if self._is_closed:
            return
        loads = {shard: shard.load() for shard in self.shards if shard.is_answering}
        for shard in loads:
            others = [load for other, load in loads.items() if other is not shard]
            self._loop.call_later(self._chance.uniform(0.001, 0.1), self._deliver, shard, others)
        self._loop.call_later(EXCHANGE_S, self._exchange)

    @staticmethod
    def _deliver(shard: SimulatedShard, others: list[ShardLoad]) -> None:
        shard.gate.enter(lambda: shard.move_workers(others))

    # Clients

    def work(self, do: Callable[[], Awaitable[Answer]]) -> asyncio.Future[Answer]:
        """Begin a request, which goes on to a shard."""
        answer: asyncio.Future[Answer] = asyncio.ensure_future(cast(Any, do()))
        # Mark as retrieved: the answer of a duplicated request is not read.
        answer.add_done_callback(lambda answer: None if answer.cancelled() else answer.exception())
        return answer

    async def begin(self, episode: SimulatedEpisode, group: str, group_size: int) -> None:
        shard = self._homes[episode.trajectory_id] = self.shards[shard_of(group, self.count)]
        await shard.work(lambda: shard.begin(episode, group, group_size))

    async def turn(
        self, trajectory_id: str, prompt_ids: tuple[int, ...], sampling: Sampling, *, whole: bool
    ) -> ReceivedAnswer:
        shard = self._homes[trajectory_id]
        return await shard.work(lambda: shard.turn(trajectory_id, prompt_ids, sampling, whole=whole))

    async def finish(self, trajectory_id: str, finish: Finish) -> None:
        shard = self._homes[trajectory_id]
        await shard.work(lambda: shard.finish(trajectory_id, finish))

    async def batch(self, groups: int, after: int, wait_s: float) -> Batch | None:
        try:
            async with asyncio.timeout(wait_s):
                return await self._client.next_batch(groups, after)
        except TimeoutError:
            return None

    async def publish(self, version: str) -> None:
        await self._client.publish(version)
