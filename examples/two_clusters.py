"""The trainer of two_clusters.sh: own_trainer.py as it is, with a client that counts what it begins and gets back.

python examples/two_clusters.py MODEL GATEWAY RELAY STEPS WORKERS
"""

import asyncio
import sys
from collections import Counter

import own_trainer

import rose

WAIT_S = 300.0  # longest that workers may take to join, or to run a version; a busy machine is slow
SHOWN = 12  # digits of a hash


class CountingClient(rose.GatewayClient):
    """The gateway's client. It waits until every worker runs a version, and prints which weights each of them has."""

    workers, begun, returned = 0, Counter(), Counter()

    async def begin(self, body):
        self.begun[body.id] += 1
        return await super().begin(body)

    async def next_batch(self, groups, after):
        batch = await super().next_batch(groups, after)
        self.returned.update(member.trajectory_id for group in batch.groups for member in group.trajectories)
        return batch

    async def publish(self, version, *, hash, **where):
        await self.members(lambda member: True)
        reply = await super().publish(version, hash=hash, **where)
        members = await self.members(lambda member: member["hash"] == hash)
        running = ", ".join(f"{member['name']} {member['hash'][:SHOWN]}" for member in members)
        print(f"version {version}: trainer {hash[:SHOWN]}, {running}", flush=True)
        return reply

    async def members(self, is_expected):
        """Return the workers once all have joined and each is as expected."""
        async with asyncio.timeout(WAIT_S):
            while True:
                members = (await self.pool())["members"]
                if len(members) == self.workers and all(map(is_expected, members)):
                    return members
                await asyncio.sleep(0.1)

    async def __aexit__(self, *error):
        """Print what became of turns and trajectories."""
        if error[0] is None:
            members = (await self.pool())["members"]
            turns = ", ".join(f"{member['turns_ended']:,} {member['kind']} ({member['name']})" for member in members)
            lost, doubled = self.begun - self.returned, self.returned - Counter(set(self.begun))
            print(f"turns by pool: {turns}")
            print(f"trajectories: {self.begun.total()} begun, {self.returned.total()} trained on, ", end="")
            print(f"{lost.total()} lost, {doubled.total()} doubled", flush=True)
        await super().__aexit__(*error)


if __name__ == "__main__":
    *arguments, workers = sys.argv[1:]
    CountingClient.workers = int(workers)
    rose.GatewayClient = CountingClient  # own_trainer.py takes it from there
    asyncio.run(own_trainer.main(*arguments))
