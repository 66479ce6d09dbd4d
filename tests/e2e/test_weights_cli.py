"""`rose weights` and `rose relay` on a relay that a publisher filled; publishers and receivers that are killed."""

from __future__ import annotations

import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.contract.chain_ends import equal
from tests.contract.relays import LIMITED, SECRET, TcpStore

from rose.cli import main as cli
from rose.errors import RoseError
from rose.models.bits import to_bf16
from rose.weights.chain import Patience
from rose.weights.publish import Publisher
from rose.weights.receive import Receiver
from rose.weights.relay.base import RelayFull
from rose.weights.relay.filesystem import FilesystemRelay

ROOT = Path(__file__).parents[2]
RUN = "night-1"
PATIENCE = Patience(limit_s=20, wait_s_max=0.2)
ROUNDS = 8


def weights_at(version: int) -> dict[str, np.ndarray]:
    """What a version is, whoever publishes it."""
    random_numbers = np.random.default_rng(0)
    weights = {
        "a.weight": random_numbers.standard_normal((300, 70)).astype(np.float32),
        "b.bias": np.ones(9, np.float32),
    }
    weights["a.weight"][version % 300] += np.float32(0.01 * version)
    weights["b.bias"] *= np.float32(version)
    return weights


def bits_at(version: int) -> dict[str, np.ndarray]:
    return {name: to_bf16(array) for name, array in weights_at(version).items()}


@pytest.fixture
def filled(tmp_path):
    """A folder with versions 1 to 4 of a run, and the words that name it to the command."""
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    relay = FilesystemRelay(tmp_path / "relay", durable=False)
    state = weights_at(1)
    with Publisher(state, relay, run=RUN, secret=SECRET, piece_elements_max=5000) as publisher:
        for version in range(1, 5):
            for name, array in weights_at(version).items():
                state[name][...] = array
            publisher.publish(version).result()
        publisher.wait()
    where = ["--relay", str(tmp_path / "relay"), "--run", RUN, "--secret-file", str(tmp_path / "secret")]
    return relay, where


def said(capsys, *words: str, code: int = 0) -> str:
    assert cli.main(list(words)) == code
    out, err = capsys.readouterr()
    return out + err


def test_ls_lists_every_link(filled, capsys):
    text = said(capsys, "weights", "ls", *filled[1])
    assert len(re.findall(r"^\d+ +\d+ +(?:anchor|delta)", text, re.MULTILINE)) == 4
    assert re.search(r"newest for a worker that joins: 4 \(epoch \d+\)", text)
    [following] = re.findall(r"^next: rose (.*)$", text, re.MULTILINE)
    assert "version     4" in said(capsys, *shlex.split(following))


def test_show_describes_the_newest_or_a_chosen_one(filled, capsys):
    newest = said(capsys, "weights", "show", *filled[1])
    assert "version     4" in newest and "a.weight" in newest and "times smaller" in newest
    assert "21,009 parameters in 2 tensors" in newest
    assert "from        version 1" in said(capsys, "weights", "show", *filled[1], "2")


def test_verify_reads_everything_and_finds_a_flipped_bit(filled, capsys):
    relay, where = filled
    assert re.search(r"version 3 \(epoch \d+\) is whole", said(capsys, "weights", "verify", *where, "3"))
    bucket = next(entry.key for entry in relay.list() if "v0000000004/delta" in entry.key and ".b0" in entry.key)
    path = relay.folder / bucket
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    text = said(capsys, "weights", "verify", *where, code=1)
    assert "version 4" in text and "Traceback" not in text
    assert re.search(r"version 3 \(epoch \d+\) is whole", said(capsys, "weights", "verify", *where, "3"))


def test_diff_counts_what_changed(filled, capsys):
    text = said(capsys, "weights", "diff", *filled[1], "2", "4")
    before, after = bits_at(2), bits_at(4)
    changed = sum(int(np.count_nonzero(before[name] != after[name])) for name in before)
    assert f"{changed:,} of 21,009 numbers changed" in text and re.search(r"b\.bias +9 +100\.00%", text)


def test_gc_deletes_what_nobody_needs_and_nothing_else(filled, capsys):
    relay, where = filled
    old = {entry.key: bytes(relay.get(entry.key)) for entry in relay.list()}
    with Publisher(weights_at(5), relay, run=RUN, secret=SECRET) as publisher:
        publisher.publish(5)
        publisher.wait()
    for key, value in old.items():  # as if the trainer had died before it could clean up
        if relay.folder.joinpath(key).exists() is False:
            relay.put_new(key, [value])
    would = said(capsys, "weights", "gc", *where, "--dry-run")
    assert f"{len(old)} keys would be deleted" in would and "of an earlier trainer" in said(
        capsys, "weights", "ls", *where
    )
    assert f"deleted {len(old)} keys" in said(capsys, "weights", "gc", *where)
    assert not old.keys() & {entry.key for entry in relay.list()}
    assert re.search(r"version 5 \(epoch \d+\) is whole", said(capsys, "weights", "verify", *where))
    assert equal(Receiver(relay, RUN, secret=SECRET).fetch().tensors, bits_at(5))


def test_gc_leaves_an_unfinished_publication_alone(filled, capsys):
    relay, where = filled
    epoch = next(entry.key.split("/")[1] for entry in relay.list() if "/v0" in entry.key)
    relay.put_new(f"{RUN}/{epoch}/v0000000005/delta.0000/r00000.b00000.0", [b"on its way"])
    relay.put_new(f"{RUN}/{epoch}/v0000000002/delta.0007/r00000.b00000.0", [b"left behind"])
    said(capsys, "weights", "gc", *where)
    left = {entry.key.split("/")[2] + entry.key.split("/")[3] for entry in relay.list() if "/v0" in entry.key}
    assert "v0000000005delta.0000" in left and "v0000000002delta.0007" not in left


@pytest.mark.parametrize(
    "change, words",
    [
        (["--run", "other"], "holds nothing of run `other`"),
        (["--secret-file", "missing"], "cannot be read"),
        (["--relay", "ftp://x"], "not the address of a relay"),
    ],
)
def test_bad_input_is_a_sentence(filled, capsys, change, words):
    text = said(capsys, "weights", "ls", *filled[1], *change, code=1 if change[0] == "--run" else 2)
    assert words in text and "try:" in text and "Traceback" not in text


def test_a_version_that_is_not_there_is_told_with_those_that_are(filled, capsys):
    assert "version 77 is not in the relay, which has 1 to 4" in said(
        capsys, "weights", "show", *filled[1], "77", code=1
    )


def test_a_strangers_secret_shows_nothing_as_usable(filled, capsys, tmp_path):
    (tmp_path / "other").write_bytes(b"another secret that is long enough\n")
    text = said(capsys, "weights", "ls", *filled[1], "--secret-file", str(tmp_path / "other"))
    assert "newest for a worker that joins: none" in text and "signature" in text


def test_relay_up_serves_a_folder_until_it_is_told_to_stop(filled, tmp_path):
    relay, _ = filled
    words = ["relay", "up", "--folder", str(relay.folder), "--listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "rose", *words, "--secret-file", str(tmp_path / "secret")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        address = re.search(r"tcp://[\d.:]+", process.stdout.readline())[0]
        receiver = Receiver(address, RUN, secret=SECRET, patience=PATIENCE)
        assert equal(receiver.fetch().tensors, bits_at(4))
        receiver.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


def test_relay_up_without_a_folder_or_a_secret_says_so(filled, capsys, monkeypatch):
    for name in ("ROSE_RELAY_SECRET", "ROSE_RELAY_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert "needs a folder" in said(capsys, "relay", "up", code=2)
    assert "secret is not known" in said(capsys, "relay", "up", "--folder", "somewhere", code=2)


# Killed at random


def publish_for_ever(address: str, version: int) -> None:
    state = weights_at(version)
    publisher = Publisher(
        state,
        address,
        run=RUN,
        secret=SECRET,
        patience=PATIENCE,
        anchor_every=3,
        keep_versions=4,
        piece_elements_max=3000,
    )
    while True:
        version += 1
        for name, array in weights_at(version).items():
            state[name][...] = array
        publisher.publish(version).result()
        print(version, flush=True)


def receive_for_ever(address: str) -> None:
    receiver = Receiver(address, RUN, secret=SECRET, patience=PATIENCE)
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
    command = [sys.executable, "-m", "tests.e2e.test_weights_cli", task, address, str(version)]
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
    store = TcpStore(tmp_path)
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
    last = Publisher(weights_at(version + 1), store.address, run=RUN, secret=SECRET, patience=PATIENCE)
    published = last.publish(version + 1).result()
    final = Receiver(store.address, RUN, secret=SECRET, patience=PATIENCE).fetch()
    assert final.hash == published.hash and equal(final.tensors, bits_at(version + 1))
    last.close()
    store.close()


def test_a_full_disk_under_the_relay_is_loud_and_harmless(tmp_path):
    relay = FilesystemRelay(tmp_path / "relay")
    state = weights_at(1)
    publisher = Publisher(state, relay, run=RUN, secret=SECRET, patience=Patience(limit_s=0.0), piece_elements_max=5000)
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
