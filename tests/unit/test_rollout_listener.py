"""The socket at which the rollouts' front reaches the engine: its own user only, and commands only."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import msgspec
import pytest

from rose.coserve.door import Door, address_of, open_door
from rose.coserve.link import Closed, EngineLink

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


def test_a_process_of_the_same_user_is_let_in() -> None:
    with open_door() as listener:
        friend = caller(address_of(listener), os.getuid())
        link = Door(listener).accept()
        assert link is not None
        link.close()
        end(friend)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_process_of_another_user_is_turned_away() -> None:
    with open_door() as listener:
        stranger = caller(address_of(listener), OTHER_UID)
        assert Door(listener).accept() is None
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
def test_what_is_no_command_closes_the_link(words: bytes) -> None:
    ours, theirs = socket.socketpair()
    link = EngineLink(ours)
    theirs.sendall(words)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(Closed) as refused:
        list(link.receive())
    assert refused.value.__cause__ is not None, "because of what was sent, not because it ended"
    link.close()
    theirs.close()
