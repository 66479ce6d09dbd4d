"""A lent device in trouble: whatever the rollouts' side does, serving gets its tokens and the owner is obeyed."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.unit.device import coserving_device
from tests.unit.device.coserving_device import (
    PAGES,
    Device,
    ask,
    long_requests,
    new_weights,
    requests_of,
    still_serves,
    wish,
)

from rose.core.memory import MemoryLimits
from rose.device import engine_messages
from rose.errors import ModelError

folders, device = coserving_device.folders, coserving_device.device
latencies = coserving_device.quick_latencies


class SlowReading:
    """Weights that are read until somebody says so, by a thread whose priority is kept."""

    def __init__(self, device: Device) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.niceness: list[int] = []
        self._stage = device.residency.engine.stage
        device.residency.engine.stage = self.stage  # type: ignore[method-assign]

    def stage(self, version: str, source: Any) -> Any:
        self.niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        self.begun.set()
        assert self.may_end.wait(30)
        return self._stage(version, source)


@pytest.mark.parametrize("action, place", [("drain", "parked"), ("remove", "absent")])
def test_a_model_that_is_still_loading_can_be_drained_or_removed(device: Device, action: str, place: str) -> None:
    reading = SlowReading(device)
    ask(device, "remove")
    assert ask(device, "resume").state == "activating"
    assert reading.begun.wait(30)
    assert ask(device, action).state == "drained"
    reading.may_end.set()
    while device.residency.is_loading:
        ask(device, "status")
    status = ask(device, "status")
    assert (status.state, status.model, status.rollout_pages) == ("drained", place, 0)
    assert (status.model_bytes == 0) == (place == "absent")
    device.rollout.send(engine_messages.Add(requests_of("late")[0]))
    device.rollout.until(lambda: "late0" in device.rollout.refused)
    ask(device, "resume")
    while ask(device, "status").state != "lending":
        pass
    device.rollout.send(engine_messages.Add(requests_of("again")[0]))
    device.rollout.until(lambda: "again0" in device.rollout.finished)


def test_a_loading_model_that_is_resumed_becomes_resident(device: Device) -> None:
    reading = SlowReading(device)
    ask(device, "remove")
    ask(device, "resume")
    assert reading.begun.wait(30)
    ask(device, "drain")
    assert ask(device, "resume").state == "activating"
    reading.may_end.set()
    while ask(device, "status").state != "lending":
        pass
    assert len(reading.niceness) == 1, "it was read once"


def test_newer_weights_replace_those_whose_folder_is_gone(device: Device, folders: tuple[Path, Path]) -> None:
    engine, begun, is_gone = device.residency.engine, threading.Event(), threading.Event()
    stage = engine.stage

    def reading(version: str, source: Any) -> Any:
        if version == "7":
            return stage(version, source)
        begun.set()
        assert is_gone.wait(30)
        raise ModelError("no such folder")

    engine.stage = reading  # type: ignore[method-assign]
    ask(device, "remove")
    ask(device, "resume")
    assert begun.wait(30)
    new_weights(device, folders, "7")
    is_gone.set()
    while ask(device, "status").state == "activating":
        pass
    status = ask(device, "status")
    assert (status.state, status.model, engine.facts().version) == ("lending", "resident", "7")


@pytest.mark.parametrize("before, after", [(["remove"], []), (["drain"], ["remove"])], ids=["absent", "parked"])
def test_weights_that_arrive_while_absent_are_loaded_on_resume(
    device: Device, folders: tuple[Path, Path], before: list[Any], after: list[Any]
) -> None:
    for action in before:
        ask(device, action)
    new_weights(device, folders, "7")
    for action in after:
        ask(device, action)
    status = ask(device, "status")
    assert (status.model, status.model_bytes) == ("absent", 0), "the owner has its memory, whatever is published"
    ask(device, "resume")
    while ask(device, "status").state != "lending":
        pass
    assert device.residency.engine.facts().version == "7" and device.residency.engine.weights_bytes > 0


def test_weights_are_read_at_low_priority_while_serving_goes_on(device: Device, folders: tuple[Path, Path]) -> None:
    reading, own = SlowReading(device), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    device.rollout.send(engine_messages.Stage("7", str(folders[1]), tag=20))
    assert reading.begun.wait(30)
    still_serves(device, folders)
    reading.may_end.set()
    device.rollout.until(lambda: any(reply.tag == 20 for reply in device.rollout.replies))
    assert reading.niceness == [max(10, own)]
    assert device.rollout.replies[-1].fault is None


def test_without_work_the_model_is_parked_unless_stopped_by_the_owner(device: Device) -> None:
    rollout = device.rollout
    rollout.send(*map(engine_messages.Add, long_requests("r", 2, 100, 200)))
    rollout.until(lambda: len(rollout.said) == 2)
    assert wish(device, False).state == "parked"
    rollout.until(lambda: len(rollout.finished) == 2)
    assert set(rollout.finished.values()) == {"abort"} and ask(device, "status").rollout_pages == 0
    rollout.send(engine_messages.Add(requests_of("late")[0]))
    rollout.until(lambda: "late0" in rollout.refused)
    assert "no work" in rollout.refused["late0"]
    ask(device, "drain")
    assert wish(device, True).state == "drained", "the owner holds it back, whatever is wanted"
    assert ask(device, "resume").state == "lending"
    ask(device, "pause")
    assert wish(device, False).state == "paused"
    assert ask(device, "resume").state == "parked", "lent again, and there is no work"
    back = wish(device, True)
    assert (back.state, back.model) == ("lending", "resident") and back.slack_s is not None and not back.is_resting
    rollout.send(engine_messages.Add(requests_of("again")[0]))
    rollout.until(lambda: "again0" in rollout.finished)
    device.memory.pages.check()


def test_a_rollout_front_that_goes_leaves_no_request_behind(device: Device) -> None:
    device.rollout.send(*map(engine_messages.Add, long_requests("r", 4, 200, 200)))
    device.rollout.until(lambda: len(device.rollout.said) == 4)
    device.rollout.connection.close()
    device.serving.send(engine_messages.Add(long_requests("s", 1, 20, 5)[0]))
    device.serving.until(lambda: bool(device.serving.finished))
    status = ask(device, "status")
    assert (status.model, status.running, status.waiting) == ("resident", 0, 0)


def test_new_weights_give_rollouts_their_memory_back(device: Device, folders: tuple[Path, Path]) -> None:
    device.memory.policy.limits = MemoryLimits(regrowth="swap")
    most = ask(device, "status").rollout_pages_max
    ask(device, "limits", memory_share=0.25)
    assert ask(device, "limits", memory_share=1.0).rollout_pages_max == PAGES // 4 < most
    new_weights(device, folders, "7")
    assert ask(device, "limits", memory_share=1.0).rollout_pages_max == most
