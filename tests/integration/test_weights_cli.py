"""`rose weights` and `rose relay` on a relay that a publisher filled; publishers and receivers that are killed."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.contract.chain_ends import equal
from tests.contract.relays import LIMITED, SECRET, HttpStore
from tests.unit.cli.published import RUN, bits_at, fill_relay, weights_at

from rose.cli import main as cli
from rose.errors import RoseError
from rose.weights.chain import RetryPolicy
from rose.weights.publish import Publisher
from rose.weights.receive import Receiver
from rose.weights.relay.filesystem import FilesystemRelay
from rose.weights.relay.relay_base import RelayFull

ROOT = Path(__file__).parents[2]
PATIENCE = RetryPolicy(limit_s=20, wait_s_max=0.2)
ROUNDS = 8


@pytest.fixture
def filled(tmp_path):
    return fill_relay(tmp_path)


def said(capsys, *words: str, code: int = 0) -> str:
    assert cli.main(list(words)) == code
    out, err = capsys.readouterr()
    return out + err


def test_relay_up_serves_a_folder_until_it_is_told_to_stop(filled, tmp_path):
    relay, _ = filled
    words = ["relay", "up", "--folder", str(relay.folder), "--listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "rose", *words, "--secret-file", str(tmp_path / "secret")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        address = re.search(r"http://[\d.:]+", process.stdout.readline())[0]
        receiver = Receiver(address, RUN, secret=SECRET, retry=PATIENCE)
        assert equal(receiver.fetch().tensors, bits_at(4))
        receiver.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


# Killed at random


def publish_for_ever(address: str, version: int) -> None:
    state = weights_at(version)
    publisher = Publisher(
        state,
        address,
        run=RUN,
        secret=SECRET,
        retry=PATIENCE,
        anchor_every=3,
        keep_versions=4,
        chunk_elements_max=3000,
    )
    while True:
        version += 1
        for name, array in weights_at(version).items():
            state[name][...] = array
        publisher.publish(version).result()
        print(version, flush=True)


def receive_for_ever(address: str) -> None:
    receiver = Receiver(address, RUN, secret=SECRET, retry=PATIENCE)
    while True:
        try:
            received = receiver.fetch()
        except RoseError:
            continue  # swept or cut off on the way: the next round goes on from there
        if received is not None:
            assert equal(received.tensors, bits_at(received.version.version))
            receiver.installed(received)
            receiver.prepare()
            print(received.version.version, flush=True)


def start(task: str, address: str, version: int = 0) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.integration.test_weights_cli", task, address, str(version)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def last_number(process: subprocess.Popen[str]) -> int:
    """Kill it, and return the last number that it said; an end of its own would be a failure."""
    assert process.poll() is None, f"it left by itself with code {process.returncode}"
    process.kill()
    return max(map(int, process.communicate()[0].split()), default=0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_publisher_receiver_and_relay_may_be_killed_at_any_time(tmp_path):
    chance = random.Random(2)
    store = HttpStore(tmp_path)
    version = received = 0
    running = {task: start(task, store.address) for task in ("publish", "receive")}
    for _ in range(ROUNDS):
        time.sleep(chance.uniform(1.0, 4.0))
        victim = chance.choice(["publish", "receive", "relay"])
        if victim == "relay":
            store.restart()
        elif victim == "publish":
            version = max(version, last_number(running["publish"]))
            running["publish"] = start("publish", store.address, version)
        else:
            received = max(received, last_number(running["receive"]))
            running["receive"] = start("receive", store.address)
    version = max(version, last_number(running["publish"]))
    received = max(received, last_number(running["receive"]))
    assert version > 0 and received > 0
    last = Publisher(weights_at(version + 1), store.address, run=RUN, secret=SECRET, retry=PATIENCE)
    published = last.publish(version + 1).result()
    final = Receiver(store.address, RUN, secret=SECRET, retry=PATIENCE).fetch()
    assert final.hash == published.hash and equal(final.tensors, bits_at(version + 1))
    last.close()
    store.close()


def test_a_full_disk_under_the_relay_is_loud_and_harmless(tmp_path):
    relay = FilesystemRelay(tmp_path / "relay")
    state = weights_at(1)
    publisher = Publisher(state, relay, run=RUN, secret=SECRET, retry=RetryPolicy(limit_s=0.0), chunk_elements_max=5000)
    first = publisher.publish(1).result()
    state["a.weight"] *= np.float32(1.5)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(RelayFull, match="no room"):
            publisher.publish(2).result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    receiver = Receiver(relay, RUN, secret=SECRET)
    assert receiver.fetch().hash == first.hash
    again = publisher.publish(3).result()
    assert receiver.fetch().hash == again.hash
    publisher.close()


def test_the_limit_is_felt_in_another_process_too(tmp_path):
    """A receiver whose disk is full says so and leaves; it does not die of a signal."""
    relay = FilesystemRelay(tmp_path / "relay", durable=False)
    with Publisher(weights_at(1), relay, run=RUN, secret=SECRET) as publisher:
        publisher.publish(1).result()
    program = (
        "import sys, pathlib\nfrom rose.errors import RoseError\nfrom rose.weights.receive import Receiver\n"
        f"receiver = Receiver(sys.argv[1], {RUN!r}, secret={SECRET!r}, folder=pathlib.Path(sys.argv[2]))\n"
        "try:\n    receiver.fetch()\nexcept RoseError as error:\n    print(error)\n    sys.exit(7)\n"
    )
    command = [sys.executable, "-c", LIMITED, "10000", "-c", program, str(tmp_path / "relay"), str(tmp_path / "into")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 7, done.stderr
    assert "no room" in done.stdout


if __name__ == "__main__":
    if sys.argv[1] == "publish":
        publish_for_ever(sys.argv[2], int(sys.argv[3]))
    receive_for_ever(sys.argv[2])
