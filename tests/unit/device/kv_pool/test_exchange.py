"""How processes join a pool: what a borrower refuses, and what does not stop serving."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.device.kv_pool import exchange, host_memory
from rose.device.kv_pool.exchange import MAGIC, SOCKET_NAME, WELCOME, create_pool, join_pool
from rose.device.kv_pool.ledger import PAGES_MAX, PageLedger
from rose.errors import ConfigError, RoseError, Unavailable

PAGES, PAGE_BYTES = 4, 4096


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "pool"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def ledger(folder: Path) -> Iterator[PageLedger]:
    made = PageLedger(folder / exchange.LEDGER_NAME, PAGES, page_bytes=PAGE_BYTES, create=True)
    yield made
    made.close()


class ScriptedServer:
    """A socket at the pool's place that sends these bytes and descriptors to the first that connects."""

    def __init__(self, folder: Path, messages: list[tuple[bytes, list[int]]]) -> None:
        self._listener = exchange._listen(folder)
        self._messages = messages
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        peer, _ = self._listener.accept()
        with peer:
            for message, descriptors in self._messages:
                socket.send_fds(peer, [message], descriptors)

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


def welcome(ledger: PageLedger, **changed: object) -> bytes:
    fields: dict[str, object] = {
        "magic": MAGIC, "version": exchange.EXCHANGE_VERSION, "pool_id": ledger.header.pool_id, "kind": b"memfd",
        "device_id": b"host", "pages": PAGES, "page_bytes": PAGE_BYTES,
    }  # fmt: skip
    return WELCOME.pack(*(fields | changed).values())


@pytest.mark.parametrize("depth", [0, 3])
def test_a_pool_is_created_joined_and_closed(tmp_path: Path, depth: int) -> None:
    folder = tmp_path.joinpath(*["a-folder-with-a-name-of-forty-letters---"] * depth, "pool")
    before = open_files()
    ledger, backend, server = create_pool(folder, PAGES, page_bytes=PAGE_BYTES)
    assert folder.stat().st_mode & 0o777 == 0o700
    joined, adopted = join_pool(folder, timeout_s=10)
    assert (adopted.kind, adopted.pages, adopted.page_bytes) == ("memfd", PAGES, PAGE_BYTES) and joined.pages == PAGES
    for one in (server, adopted, backend, joined, ledger):
        one.close()
    assert open_files() == before
    with pytest.raises(Unavailable, match="no serving engine offers"):
        join_pool(folder, timeout_s=0)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"magic": b"OTHER"}, "not a serving engine's"),
        ({"version": 99}, "version 99"),
        ({"pool_id": b"12345678"}, "just being replaced"),
        ({"kind": b"tape"}, "no KV pool of the kind 'tape'"),
        ({"pages": 0}, "not possible"),
        ({"pages": PAGES_MAX + 1}, "not possible"),
        ({"pages": PAGES + 1}, f"has {PAGES} pages"),
        ({"page_bytes": 1 << 40}, "not possible"),
    ],
)
def test_a_bad_welcome_is_refused(folder: Path, ledger: PageLedger, changed: dict[str, object], message: str) -> None:
    before = open_files()
    server = ScriptedServer(folder, [(welcome(ledger, **changed), [])])
    with pytest.raises(RoseError, match=message):
        join_pool(folder, timeout_s=10)
    server.close()
    assert open_files() == before


@pytest.mark.parametrize("message", [b"", b"short", bytes(WELCOME.size + 1)])
def test_a_welcome_of_another_length_is_refused(folder: Path, ledger: PageLedger, message: bytes) -> None:
    server = ScriptedServer(folder, [(message, [])])
    with pytest.raises(RoseError, match=r"not a serving engine's|does not hand over"):
        join_pool(folder, timeout_s=10)
    server.close()


@pytest.mark.parametrize(
    "pages, message", [(0, "ended while it handed over"), (PAGES + 1, "the memory of the KV pool")]
)
def test_bad_memory_is_refused_and_closed(folder: Path, ledger: PageLedger, pages: int, message: str) -> None:
    descriptors = [host_memory.sealed_file(pages * PAGE_BYTES)] if pages else []
    before = open_files()
    server = ScriptedServer(folder, [(welcome(ledger), []), (b".", descriptors * 3)])
    with pytest.raises(RoseError, match=message):
        join_pool(folder, timeout_s=10)
    server.close()
    assert open_files() == before
    for descriptor in descriptors:
        os.close(descriptor)


def test_serving_that_ends_before_the_pages_came_is_said(folder: Path, ledger: PageLedger) -> None:
    server = ScriptedServer(folder, [(welcome(ledger), [])])
    with pytest.raises(Unavailable, match="ended while it handed over"):
        join_pool(folder, timeout_s=10)
    server.close()


def test_a_folder_that_others_may_read_is_refused(folder: Path) -> None:
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="only this user"):
        join_pool(folder, timeout_s=0)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot hold a KV pool"):
        create_pool(tmp_path / "file", PAGES)


def test_a_process_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair()
    with one, other:
        exchange._check_peer(one)
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        with pytest.raises(ConfigError, match="a process of user"):
            exchange._check_peer(one)


def test_a_kind_that_does_not_exist_leaves_no_serving_engine_behind(folder: Path) -> None:
    before = open_files()
    with pytest.raises(ConfigError, match="take one of"):
        create_pool(folder, PAGES, "tape", page_bytes=PAGE_BYTES)
    assert open_files() == before
    for one in reversed(create_pool(folder, PAGES, page_bytes=PAGE_BYTES)):
        one.close()


def test_a_socket_that_accepts_nothing_is_not_waited_for_without_end(folder: Path) -> None:
    listener = exchange._listen(folder)
    waiting = []
    for _ in range(exchange.BACKLOG + 1):  # as many as the kernel lets wait
        waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        waiting[-1].connect(str(folder / SOCKET_NAME))
    with pytest.raises(Unavailable, match="no serving engine offers"):
        join_pool(folder, timeout_s=0)
    for one in (*waiting, listener):
        one.close()


def test_borrowers_that_hang_or_leave_keep_no_other_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PEER_TIMEOUT_S", 0.05)
    serving = create_pool(folder, PAGES, page_bytes=PAGE_BYTES)
    hanging = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    for number, peer in enumerate(hanging):
        peer.connect(str(folder / SOCKET_NAME))
        if number == 1:
            peer.close()
    joined = join_pool(folder, timeout_s=10)
    assert joined[1].pages == PAGES
    for one in (*hanging, *joined, *reversed(serving)):
        one.close()
