"""What is said of a cluster that cannot be joined, before anything of Ray is asked; work that may hang has limits."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import sys
import threading
import types

import pytest

import rose
from rose.errors import Unavailable
from rose.run.ray_site import RaySite, in_thread, probe
from rose.run.run_settings import load_run_settings


@pytest.fixture(autouse=True)
def ray_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def opened(address: str) -> None:
    asyncio.run(RaySite(load_run_settings(None, ["cluster.kind=ray", f"cluster.address={address}"])).open())


def test_an_address_where_nothing_listens_is_said() -> None:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{probe_socket.getsockname()[1]}"
        with pytest.raises(Unavailable, match=f"no Ray cluster answers at {address}") as caught:
            opened(address)
    assert "ray start --head" in str(caught.value)


@pytest.mark.parametrize(
    "address, words",
    [("ray://here:10001", "Ray's client"), ("here", "is not an address"), ("here:x", "write it like")],
)
def test_an_address_that_is_none_is_said(address: str, words: str) -> None:
    with pytest.raises(Exception, match="address") as caught:
        opened(address)
    assert words in str(caught.value)


def test_the_address_of_the_environment_is_what_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        opened("auto")


def test_work_that_hangs_is_left_behind() -> None:
    ends = threading.Event()
    with pytest.raises(Unavailable, match=r"Ray does not answer within 0\.01 s"):
        asyncio.run(in_thread(ends.wait, 0.01, "Ray does not answer"))
    ends.set()


def test_work_in_a_thread_returns_and_raises() -> None:
    assert asyncio.run(in_thread(lambda: 7, 60, "never")) == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(lambda: 1 // 0, 60, "never"))


def test_a_node_says_what_it_is() -> None:
    version, python, cores, niceness = probe()()
    assert (version, python) == (rose.__version__, platform.python_version())
    assert set(cores) == os.sched_getaffinity(0) and niceness == os.getpriority(os.PRIO_PROCESS, 0)


def test_what_asks_a_node_needs_no_rose_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rose", None)
    assert probe()()[0] is None
    assert probe().__closure__ is None
