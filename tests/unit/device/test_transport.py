"""The socket at which the rollouts' front reaches the engine: its own user only, and commands only."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time

import msgspec
import pytest
from tests.unit.device import engine_loop
from tests.unit.device.engine_loop import Start, finishes, request, tokens_of

from rose.device import engine_messages, transport
from rose.device.transport import Closed, EngineLink, RolloutListener, address_of, open_rollout_listener
from rose.errors import Unavailable

start = engine_loop.start


OTHER_UID = 65534  # nobody's, on every Linux
CALLER = """
import os, socket, sys
uid, address = int(sys.argv[1]), sys.argv[2]
if uid != os.getuid():
    os.setresuid(uid, uid, uid)
caller = socket.socket(socket.AF_UNIX)
caller.connect("\\0" + address)
print("connected", flush=True)
print(caller.recv(1) or "closed", flush=True)
"""


def caller(address: str, uid: int) -> subprocess.Popen[str]:
    """A process of this user id that has connected."""
    found = subprocess.Popen([sys.executable, "-c", CALLER, str(uid), address], stdout=subprocess.PIPE, text=True)
    assert found.stdout is not None and found.stdout.readline() == "connected\n"
    return found


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_process_of_the_same_user_is_accepted() -> None:
    with open_rollout_listener() as listener:
        friend = caller(address_of(listener), os.getuid())
        link = RolloutListener(listener).accept()
        assert link is not None
        link.close()
        end(friend)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_process_of_another_user_is_rejected() -> None:
    with open_rollout_listener() as listener:
        stranger = caller(address_of(listener), OTHER_UID)
        assert RolloutListener(listener).accept() is None
        assert stranger.communicate()[0] == "closed\n"


@pytest.mark.parametrize(
    "words",
    [
        b"\xff\xff\xff\xff",  # a length that no front sends
        b"\x01\x00\x00\x00\xc1",  # not msgpack
        b"\x08\x00\x00\x00" + msgspec.msgpack.encode({"type": "no"})[:8],
        b"\x14\x00\x00\x00\x82\xa4type\xa6Cancel\xaarequest_id\xa2\xff\xfe"[:24],
    ],
    ids=["length", "junk", "unknown", "no text"],
)
def test_a_malformed_command_closes_the_link(words: bytes) -> None:
    ours, theirs = socket.socketpair()
    link = EngineLink(ours)
    theirs.sendall(words)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(Closed) as refused:
        list(link.receive())
    assert refused.value.__cause__ is not None, "because of what was sent, not because it ended"
    link.close()
    theirs.close()


def test_steps_stop_while_the_front_does_not_read(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BUFFER_BYTES", 50_000)
    peer = start()
    peer.send(engine_messages.Add(request(max_tokens=4000, top_logprobs=20)))
    while peer.engine.facts().steps < 10:
        time.sleep(0.001)
    steps = -1
    while steps != peer.engine.facts().steps:
        steps = peer.engine.facts().steps
        time.sleep(0.05)
    assert steps < 4000, "everything fitted; the test proves nothing"
    events = peer.until(finishes("r"))
    assert len(tokens_of(events, "r")) == 4000


def test_a_front_that_never_reads_is_given_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BUFFER_BYTES", 50_000)
    monkeypatch.setattr(transport, "STALL_S", 0.05)
    peer = start()
    peer.send(engine_messages.Add(request(max_tokens=4000, top_logprobs=20)))
    assert isinstance(peer.end(), Unavailable)


def test_wake_on_a_closed_link_wakes_no_other_link() -> None:
    """A thread that reads weights may outlive its front, and the descriptor's number be another link's by then."""
    pairs = [socket.socketpair() for _ in range(2)]
    closed = transport.EngineLink(pairs[0][1])
    closed.close()
    other, poll = transport.EngineLink(pairs[1][1]), select.poll()
    closed.wake()
    closed.close()
    other.register(poll)
    assert poll.poll(0) == []
    other.close()
    for ours, _ in pairs:
        ours.close()
