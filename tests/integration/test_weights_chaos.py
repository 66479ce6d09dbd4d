"""Publisher, relay and receiver are killed at random and started again; who arrives holds what was published."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.contract.chain_ends import Member, Trainer, equal, random_weights, stepped
from tests.contract.relays import SECRET, HttpStore

from rose.errors import RoseError
from rose.weights.chain import RetryPolicy
from rose.weights.relay.opening import RelayAccess, open_relay
from rose.weights.relay.relay_base import Relay

ROOT = Path(__file__).parents[2]
PATIENCE = RetryPolicy(limit_s=20, wait_s_max=0.2)
ROUNDS = 25


def weights_at(version: int) -> dict:
    """What a version is, whoever publishes it."""
    weights = random_weights(0)
    for number in range(1, version + 1):
        weights = stepped(weights, number)
    return weights


def publish_for_ever(relay: Relay, version: int) -> None:
    trainer = Trainer(relay, retry=PATIENCE, at_least=int(time.time()))
    while True:
        version += 1
        trainer.publish(version, weights_at(version), anchor=version % 5 == 0)
        trainer.writer.sweep(4)
        print(version, flush=True)


def receive_for_ever(relay: Relay) -> None:
    member = Member(relay, retry=PATIENCE)
    while True:
        try:
            target = member.sync()
        except RoseError:
            continue  # swept or cut off on the way: the next round goes on from there
        if target is not None:
            assert equal(member.arrays, weights_at(target.version))
            print(target.version, flush=True)


def start(task: str, store: HttpStore, version: int = 0) -> subprocess.Popen[str]:
    assert store.address is not None
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.integration.test_weights_chaos", task, store.address, str(version)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def last_number(process: subprocess.Popen[str]) -> int:
    """Kill it, and return the last number that it said; an end of its own would be a failure."""
    assert process.poll() is None, f"it left by itself with code {process.returncode}"
    process.kill()
    return max(map(int, process.communicate()[0].split()), default=0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kill_anything_at_any_time(tmp_path):
    chance = random.Random(1)
    store = HttpStore(tmp_path)
    version = received = 0
    running = {task: start(task, store) for task in ("publish", "receive")}
    for _ in range(ROUNDS):
        time.sleep(chance.uniform(0.3, 2.0))
        victim = chance.choice(["publish", "receive", "relay"])
        if victim == "relay":
            store.restart()
        elif victim == "publish":
            version = max(version, last_number(running["publish"]))
            running["publish"] = start("publish", store, version)
        else:
            received = max(received, last_number(running["receive"]))
            running["receive"] = start("receive", store)
    version = max(version, last_number(running["publish"]))
    received = max(received, last_number(running["receive"]))
    assert version > 0 and received > 0
    last = Trainer(store.open(), retry=PATIENCE, at_least=int(time.time()))
    last.publish(version + 1, weights_at(version + 1))
    member = Member(store.open(), retry=PATIENCE)
    target = member.sync()
    assert target == last.writer.newest
    assert equal(member.arrays, weights_at(version + 1))
    store.close()


if __name__ == "__main__":
    opened = open_relay(sys.argv[2], RelayAccess(secret=SECRET))
    if sys.argv[1] == "publish":
        publish_for_ever(opened, int(sys.argv[3]))
    receive_for_ever(opened)
