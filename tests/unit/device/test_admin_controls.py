"""Admin commands on a co-serving device: what they change, what they report, and what the next engine takes over."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.device import coserving_device
from tests.unit.device.coserving_device import (
    PAGES,
    Device,
    alone,
    ask,
    earlier,
    fails,
    last_lending,
    long_requests,
    requests_of,
    still_serves,
    wish,
)

from rose.core.history import HistorySnapshot
from rose.device import engine_messages

folders, device = coserving_device.folders, coserving_device.device
latencies = coserving_device.quick_latencies


def test_the_owner_pauses_and_resumes(device: Device) -> None:
    assert ask(device, "pause").state == "paused"
    device.rollout.send(*map(engine_messages.Add, requests_of("r")))
    device.serving.send(engine_messages.Add(requests_of("s")[0]))
    device.serving.until(lambda: bool(device.serving.finished))
    assert device.arbiter.lent_steps == 0 and not device.rollout.said
    assert ask(device, "resume").state == "lending"
    device.rollout.until(lambda: len(device.rollout.finished) == 6)
    assert ask(device, "status").lent_tokens > 0


@pytest.mark.parametrize("action, place", [("drain", "parked"), ("remove", "absent")])
def test_drain_and_remove_end_rollouts_at_once_and_resume_restores(
    device: Device, folders: tuple[Path, Path], action: str, place: str
) -> None:
    rollouts = long_requests("r", 4, 100, 200)
    device.rollout.send(*map(engine_messages.Add, rollouts))
    device.rollout.until(lambda: len(device.rollout.said) == 4)
    status = ask(device, action)
    assert (status.state, status.model, status.rollout_pages, status.running) == ("drained", place, 0, 0)
    assert status.parking_s is not None and (status.model_bytes == 0) == (place == "absent")
    device.rollout.until(lambda: len(device.rollout.finished) == 4)
    assert set(device.rollout.finished.values()) == {"abort"}, "they keep what they have and can go on elsewhere"
    device.rollout.send(engine_messages.Add(requests_of("late")[0]))
    device.rollout.until(lambda: "late0" in device.rollout.refused)
    assert "drained" in device.rollout.refused["late0"]
    ask(device, "resume")
    while ask(device, "status").state != "lending":
        time.sleep(0.01)
    again = requests_of("again")
    device.rollout.send(*map(engine_messages.Add, again))
    device.rollout.until(lambda: all(request.request_id in device.rollout.finished for request in again))
    whole = alone(folders[1], again)
    assert {name: device.rollout.said[name] for name in whole} == whole
    assert ask(device, "status").activation_s is not None
    device.memory.pages.check()


def test_the_rollout_front_gets_the_status_after_admin_commands(device: Device) -> None:
    for action, state in (("pause", "paused"), ("drain", "drained"), ("resume", "lending")):
        ask(device, action)
        device.rollout.until(lambda: last_lending(device.rollout) == state)  # noqa: B023
    assert all(reply.tag == 0 for reply in device.rollout.replies), "nobody asked"


@pytest.mark.parametrize(
    "device, state, place",
    [
        (earlier(engine_messages.AdminCommand("pause")), "paused", "resident"),
        (earlier(engine_messages.AdminCommand("drain")), "drained", "parked"),
        (earlier(engine_messages.AdminCommand("remove")), "drained", "absent"),
        (earlier(engine_messages.AdminCommand("drain"), engine_messages.AdminCommand("pause")), "paused", "parked"),
        (earlier(engine_messages.AdminCommand("dry_run")), "dry_run", "resident"),
        (earlier(held_back="rollouts are held back"), "drained", "parked"),
    ],
    indirect=["device"],
)
def test_a_new_engine_takes_over_the_desired_state(device: Device, state: str, place: str) -> None:
    device.rollout.send(*map(engine_messages.Add, requests_of("r")))
    device.serving.send(engine_messages.Add(requests_of("s")[0]))
    device.serving.until(lambda: bool(device.serving.finished))
    status = ask(device, "status")
    assert (status.state, status.model, status.lent_steps) == (state, place, 0) and not device.rollout.said
    ask(device, "resume")
    while ask(device, "status").state != "lending":
        time.sleep(0.01)
    device.rollout.send(engine_messages.Add(requests_of("again")[0]))
    device.rollout.until(lambda: "again0" in device.rollout.finished)


@pytest.mark.parametrize("device", [earlier(held_back="rollouts are held back")], indirect=True)
def test_requests_held_back_are_refused_with_the_reason(device: Device) -> None:
    assert ask(device, "status").why == "rollouts are held back"
    device.rollout.send(engine_messages.Add(requests_of("r")[0]))
    device.rollout.until(lambda: "r0" in device.rollout.refused)
    assert device.rollout.refused["r0"] == "rollouts are held back"
    assert wish(device, True).state == "drained", "it is the owner's to let them in"


@pytest.mark.parametrize("device", [earlier(engine_messages.AdminCommand("limits", 0.25, 0.0))], indirect=True)
def test_a_new_engine_takes_over_the_limits(device: Device) -> None:
    status = ask(device, "status")
    assert (status.state, status.memory_share, status.compute_share) == ("lending", 0.25, 0.0)
    assert status.rollout_pages_max <= PAGES // 4


def test_the_owner_limits_memory_and_time(device: Device) -> None:
    status = ask(device, "limits", memory_share=0.25, compute_share=0.0)
    assert status.rollout_pages_max <= PAGES // 4 and status.compute_share == 0.0
    device.rollout.send(*map(engine_messages.Add, requests_of("r")))
    device.serving.send(*map(engine_messages.Add, requests_of("s")))
    device.serving.until(lambda: len(device.serving.finished) == 6)
    assert device.arbiter.lent_steps == 0
    told = device.rollout.replies
    device.rollout.until(lambda: any(one.lending is not None and one.lending.shut_s is not None for one in told))
    assert ask(device, "status").shut_s is not None
    ask(device, "limits", compute_share=1.0)
    device.rollout.until(lambda: len(device.rollout.finished) == 6)
    assert ask(device, "status").shut_s is None
    device.serving.send(engine_messages.AdminCommand("limits", memory_share=1.5, tag=9))
    device.serving.until(lambda: device.serving.replies[-1].tag == 9)
    assert device.serving.replies[-1].fault is not None


def test_a_dry_run_lends_nothing_and_reports_what_it_would_lend(device: Device) -> None:
    ask(device, "dry_run")
    device.rollout.send(*map(engine_messages.Add, requests_of("r")))
    device.serving.send(*map(engine_messages.Add, requests_of("s")))
    device.serving.until(lambda: len(device.serving.finished) == 6)
    time.sleep(0.1)  # without serving work: all of it could have been lent
    status = ask(device, "status")
    assert status.state == "dry_run" and status.dry_run is not None and status.dry_run.tokens > 0
    assert device.arbiter.lent_steps == 0 and not device.rollout.said


@pytest.mark.parametrize("action, state", [("pause", "paused"), ("drain", "drained")])
def test_a_dry_run_counts_while_lending_is_stopped(device: Device, action: str, state: str) -> None:
    ask(device, action)
    ask(device, "dry_run")
    device.serving.send(*map(engine_messages.Add, requests_of("s")))
    device.serving.until(lambda: len(device.serving.finished) == 6)
    time.sleep(0.1)  # without serving work
    status = ask(device, "status")
    assert status.state == state and status.dry_run is not None and status.dry_run.tokens > 0
    assert device.arbiter.lent_steps == 0
    status = ask(device, "resume")
    assert status.state == "lending" and status.dry_run is None


@pytest.mark.parametrize(
    "before, action, broken",
    [("status", "limits", "observe"), ("status", "drain", "remove_rollouts"), ("drain", "resume", "lend_to")],
)
def test_an_admin_command_that_fails_on_the_rollout_side_is_refused(
    device: Device, folders: tuple[Path, Path], before: str, action: Any, broken: str
) -> None:
    """It was the end of the engine, with every user's request."""
    memory, observe = device.memory, device.memory.observe

    def fails_at_a_limit(*asked: int) -> None:
        (observe if memory.owner_limit_pages is None else fails)(*asked)

    ask(device, before)
    setattr(memory, broken, fails_at_a_limit if broken == "observe" else fails)
    device.serving.send(engine_messages.AdminCommand(action, memory_share=0.5, tag=9))
    device.serving.until(lambda: device.serving.replies[-1].tag == 9)
    fault = device.serving.replies[-1].fault
    assert fault is not None and "a page with two owners" in fault.what and "restart" in (fault.hint or "")
    still_serves(device, folders)
    assert ask(device, "status").state == "failed"


def test_a_dry_run_ends_with_what_fails_in_it(device: Device, folders: tuple[Path, Path]) -> None:
    ask(device, "dry_run")
    device.arbiter.dry_run.decide = fails  # type: ignore[method-assign, union-attr]
    still_serves(device, folders)
    status = ask(device, "status")
    assert status.state == "failed" and status.dry_run is None
    device.serving.send(engine_messages.AdminCommand("dry_run", tag=9))
    device.serving.until(lambda: device.serving.replies[-1].tag == 9)
    fault = device.serving.replies[-1].fault
    assert fault is not None and "restart the device" in (fault.hint or "")


LEARNT = HistorySnapshot(60.0, (500, 20, *[0] * 29, 40), (9000,), (1.5,), ((0.02,),), 500, 8.0, 300.0)


@pytest.mark.parametrize("device", [earlier(history=LEARNT)], indirect=True)
def test_a_new_engine_takes_over_the_learnt_history(device: Device) -> None:
    device.serving.until(lambda: bool(device.serving.learnt))
    told = device.serving.learnt[0]
    assert (told.slots, told.token_rises, told.first_tokens) == (LEARNT.slots, (9000,), (1.5,))
    assert 60.0 <= told.observed_s < 1e6


def test_residence_inflation_widens_the_headroom_of_serving(device: Device) -> None:
    before = ask(device, "status")
    device.arbiter.inflation.on_finished(life_s=2.0, lent_s=1.0)
    after = ask(device, "limits", memory_share=1.0)
    assert (before.lending_stretch, after.lending_stretch) == (1.0, 2.0)
    assert after.headroom_pages > before.headroom_pages


def test_recorded_steps_are_for_the_owner_only(device: Device) -> None:
    device.serving.send(engine_messages.Add(requests_of("s")[0]))
    device.serving.until(lambda: bool(device.serving.finished))
    device.serving.send(engine_messages.GetSteps(tag=5))
    device.serving.until(lambda: any(reply.steps is not None for reply in device.serving.replies))
    steps = next(reply.steps for reply in device.serving.replies if reply.steps is not None)
    assert steps.serving.seen > 0 and steps.serving.drawn and steps.serving.kv_bytes_per_token > 0
    assert steps.rollout.seen == len(steps.rollout.drawn)
    device.rollout.send(engine_messages.GetSteps(tag=6))
    device.rollout.until(lambda: any(reply.tag == 6 for reply in device.rollout.replies))
    assert all(reply.steps is None for reply in device.rollout.replies)
