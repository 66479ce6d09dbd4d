"""Devices: cores that exist, on Linux."""

from __future__ import annotations

import os
import sys

import pytest

from rose.device.os_process import check_device, lower_priority, thread_environment
from rose.errors import ConfigError

CORES = sorted(os.sched_getaffinity(0))


def test_the_cores_of_this_process_are_a_device() -> None:
    assert check_device(f"cpu:{CORES[0]}") == (CORES[0],)
    assert check_device("cpu:" + ",".join(map(str, CORES))) == tuple(CORES)


def test_a_core_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(ConfigError) as caught:
        check_device("cpu:4095")
    assert "core 4095" in caught.value.what
    assert str(CORES[-1]) in caught.value.what
    assert f"cpu:{CORES[0]}" in (caught.value.hint or "")


def test_other_systems_than_linux_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="needs Linux"):
        check_device("cpu:0")


def test_one_thread_per_core() -> None:
    assert thread_environment((0, 3))["OMP_NUM_THREADS"] == "2"


def test_a_denied_priority_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def denied(*how: int) -> None:
        asked.append(how)
        raise PermissionError("setpriority")

    monkeypatch.setattr(os, "setpriority", denied)
    lower_priority()
    assert len(asked) == 1
