"""A lent device in trouble: whatever the rollouts' side does, serving gets its tokens and the owner is obeyed."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.e2e.scripted_engine import ScriptedEngine
from tests.unit import test_lent as whole
from tests.unit.test_lent import Device, End, alone, ask, long_requests, requests_of

from rose.config.device import EngineSettings
from rose.core.latency import LatencyModel
from rose.coserve import link, messages
from rose.coserve.lent import LentExecutor
from rose.engines.base import Budget, Request, Sampling
from rose.errors import ModelError

folders, device = whole.folders, whole.device


@pytest.fixture(scope="module")
def latencies() -> list[LatencyModel]:
    """Near enough for budgets of seconds, and nobody waits for a profile."""
    return [LatencyModel((0.001, 1e-4, 0.0, 0.0, 0.0)) for _ in range(2)]


def wordy(tag: str, count: int) -> list[Request]:
    """Each answer is some fifty thousand bytes on the socket."""
    sampling = Sampling(max_tokens=200, ignore_eos=True, seed=5, top_logprobs=20)
    return [Request(f"{tag}{i}", tuple((5 * i + j) % 90 for j in range(20)), sampling) for i in range(count)]


def still_serves(device: Device, folders: tuple[Path, Path]) -> None:
    serving = requests_of("s")
    device.serving.send(*map(messages.Add, serving))
    device.serving.until(lambda: len(device.serving.finished) == 6)
    assert device.serving.said == alone(folders[0], serving)
    assert not device.outcome, "the engine's loop has ended"


@pytest.mark.parametrize("buffer_bytes", [20_000, 8 << 20], ids=["held up half-way", "with all of it made"])
def test_a_rollout_front_that_never_reads_is_given_up_alone(
    device: Device, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, buffer_bytes: int
) -> None:
    """It was the end of the engine, if serving had no work for a minute and the front's answers were all made."""
    monkeypatch.setattr(link, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(link, "STALL_S", 0.3)
    device.rollout.send(*map(messages.Add, wordy("r", 8)))
    device.rollout.until(lambda: len(device.rollout.said) == 8)
    status = ask(device, "status")
    while device.guest.port is not None:
        status = ask(device, "status")
    if buffer_bytes < 1 << 20:
        assert status.lent_tokens < 8 * 200, "nothing more was made for it"
        assert ask(device, "status").evicted_tokens > 0
    assert ask(device, "status").running == 0
    still_serves(device, folders)


def test_a_failure_in_the_rollouts_memory_is_not_servings(device: Device, folders: tuple[Path, Path]) -> None:
    def broken() -> None:
        raise AssertionError("rollouts hold more than their budget")

    device.memory.observe = broken  # type: ignore[method-assign, assignment]
    device.rollout.send(*map(messages.Add, requests_of("r")))
    device.rollout.until(lambda: device.rollout.failed is not None)
    still_serves(device, folders)
    status = ask(device, "status")
    assert (status.state, status.rollout_pages, status.rollout_pages_max) == ("failed", 0, 0)


def fails(*_: Any) -> Any:
    raise AssertionError("a page with two owners")


@pytest.mark.parametrize(
    "before, action, broken",
    [("status", "limits", "observe"), ("status", "drain", "remove_rollouts"), ("drain", "resume", "lend_to")],
)
def test_a_word_of_the_owner_that_fails_on_the_rollouts_side_is_refused(
    device: Device, folders: tuple[Path, Path], before: str, action: Any, broken: str
) -> None:
    """It was the end of the engine, with every user's request."""
    memory, observe = device.memory, device.memory.observe

    def fails_at_a_limit(*asked: int) -> None:
        (observe if memory.owner_limit_pages is None else fails)(*asked)

    ask(device, before)
    setattr(memory, broken, fails_at_a_limit if broken == "observe" else fails)
    device.serving.send(messages.Control(action, memory_share=0.5, tag=9))
    device.serving.until(lambda: device.serving.replies[-1].tag == 9)
    fault = device.serving.replies[-1].fault
    assert fault is not None and "a page with two owners" in fault.what and "restart" in (fault.hint or "")
    still_serves(device, folders)
    assert ask(device, "status").state == "failed"


def test_a_rollout_engine_that_cannot_say_how_it_is_is_not_servings(device: Device, folders: tuple[Path, Path]) -> None:
    """Every reply to serving tells how lending goes."""
    device.guest.engine.facts = fails  # type: ignore[method-assign]
    status = ask(device, "status")
    assert (status.state, status.model, status.running) == ("failed", "absent", 0)
    assert "a page with two owners" in status.why
    still_serves(device, folders)


def test_serving_is_answered_even_if_nobody_can_say_how_lending_goes(
    device: Device, folders: tuple[Path, Path]
) -> None:
    device.memory.policy.status = fails  # type: ignore[method-assign]
    device.serving.send(messages.GetFacts(8), messages.GetFacts(9))
    device.serving.until(lambda: len(device.serving.replies) == 2)
    assert [(reply.lending, reply.fault) for reply in device.serving.replies] == [(None, None)] * 2
    assert "a page with two owners" in device.guest.failure
    still_serves(device, folders)


def test_a_rollout_engine_that_fails_before_the_loop_sleeps_is_not_servings(
    device: Device, folders: tuple[Path, Path]
) -> None:
    device.guest.engine.facts = fails  # type: ignore[method-assign]
    device.rollout.send(messages.Cancel("nobody"))  # not answered: its front hears the facts when the loop has no work
    device.rollout.until(lambda: device.rollout.failed is not None)
    assert "a page with two owners" in device.guest.failure
    still_serves(device, folders)


def test_a_failure_while_an_engine_takes_over_is_not_servings() -> None:
    ours, theirs = socket.socketpair()
    lender: Any = SimpleNamespace(serving=ScriptedEngine(EngineSettings()), serving_added=None)
    failures: list[Exception] = []
    guest: Any = SimpleNamespace(fail=failures.append)
    owner: Any = SimpleNamespace(take_over=fails)
    executor = LentExecutor(lender, guest, owner, link.EngineLink(theirs), budget=Budget(128, 8))
    executor.take_over(whole.earlier(messages.Control("drain")))
    assert "a page with two owners" in str(failures[0])
    for connection in (ours, theirs):
        connection.close()


def test_a_rollout_engine_that_cannot_even_leave_is_not_servings(device: Device, folders: tuple[Path, Path]) -> None:
    engine: Any = device.guest.engine
    engine.limit_kv = engine.release_weights = device.memory.remove_rollouts = fails  # type: ignore[method-assign]
    engine.step = fails
    device.rollout.send(*map(messages.Add, requests_of("r")))
    device.rollout.until(lambda: device.rollout.failed is not None)
    still_serves(device, folders)
    assert ask(device, "status").state == "failed" and device.guest.port is None


def test_a_dry_run_ends_with_what_fails_in_it(device: Device, folders: tuple[Path, Path]) -> None:
    ask(device, "dry_run")
    device.lender.dry_run.decide = fails  # type: ignore[method-assign, union-attr]
    still_serves(device, folders)
    status = ask(device, "status")
    assert status.state == "failed" and status.dry_run is None
    device.serving.send(messages.Control("dry_run", tag=9))
    device.serving.until(lambda: device.serving.replies[-1].tag == 9)
    fault = device.serving.replies[-1].fault
    assert fault is not None and "restart the device" in (fault.hint or "")


def test_a_failure_while_a_rollout_front_goes_is_not_servings(device: Device, folders: tuple[Path, Path]) -> None:
    device.rollout.send(*map(messages.Add, long_requests("r", 4, 100, 200)))
    device.rollout.until(lambda: len(device.rollout.said) == 4)
    device.guest.engine.limit_kv = fails  # type: ignore[method-assign]
    device.rollout.connection.close()
    still_serves(device, folders)
    assert ask(device, "status").state == "failed"


def test_a_rollout_front_that_asks_and_never_reads_is_given_up(
    device: Device, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command was answered into a buffer without a limit, for as long as it took something now and then."""
    monkeypatch.setattr(link, "BUFFER_BYTES", 20_000)
    for _ in range(100):
        with suppress(OSError):
            device.rollout.send(*[messages.GetFacts(tag=1)] * 100)
        ask(device, "status")
        if device.guest.port is None:
            break
    assert device.guest.port is None and not device.guest.failure
    still_serves(device, folders)


def test_servings_words_go_out_while_rollouts_keep_the_loop_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the kernel takes at once, and no further word of serving's that would take the rest along."""
    monkeypatch.setattr(LentExecutor, "_hear_rollouts", lambda self: None)
    monkeypatch.setattr(LentExecutor, "_step", lambda self: True)
    ours, theirs = socket.socketpair()
    front, serving = End(ours), link.EngineLink(theirs)
    lender: Any = SimpleNamespace(serving=ScriptedEngine(EngineSettings()), serving_added=None)
    owner: Any = SimpleNamespace(status=None)
    executor = LentExecutor(lender, owner, owner, serving, budget=Budget(128, 8))
    serving.send(messages.Noted(b"x" * (4 << 20)))
    serving.send(messages.Failed(messages.Fault("Unavailable", "it ends")))

    def run() -> None:
        with suppress(link.Closed):
            executor.run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        front.until(lambda: front.failed is not None)
    finally:
        ours.close()
        thread.join(30)
    assert not thread.is_alive()


def test_a_decision_knows_of_everybody_who_has_come(device: Device) -> None:
    """A user who comes while a rollout's command is taken goes before that rollout."""
    lender, order = device.lender, list[str]()
    lender.admission.mode = "idle"
    add, serving_step, rollout_step = lender.rollout.add, lender.serving.step, lender.rollout.step

    def user_comes(rollout: Request) -> None:
        device.serving.send(messages.Add(requests_of("s")[0]))
        add(rollout)

    def noted(side: str, step: Any) -> Any:
        def run(plan: Any) -> Any:
            order.append(side)
            return step(plan)

        return run

    lender.rollout.add = user_comes  # type: ignore[method-assign]
    lender.serving.step = noted("serving", serving_step)  # type: ignore[method-assign]
    lender.rollout.step = noted("rollout", rollout_step)  # type: ignore[method-assign]
    device.rollout.send(messages.Add(requests_of("r")[0]))
    device.rollout.until(lambda: bool(device.rollout.finished))
    assert order[:24] == ["serving"] * 24 and "rollout" in order


class SlowReading:
    """Weights that are read until somebody says so, by a thread whose priority is kept."""

    def __init__(self, device: Device) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.niceness: list[int] = []
        self._stage = device.guest.engine.stage
        device.guest.engine.stage = self.stage  # type: ignore[method-assign]

    def stage(self, version: str, source: Any) -> Any:
        self.niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        self.begun.set()
        assert self.may_end.wait(30)
        return self._stage(version, source)


@pytest.mark.parametrize("action, place", [("drain", "parked"), ("remove", "absent")])
def test_the_owner_may_take_back_a_model_that_is_still_being_read(device: Device, action: str, place: str) -> None:
    reading = SlowReading(device)
    ask(device, "remove")
    assert ask(device, "resume").state == "activating"
    assert reading.begun.wait(30)
    assert ask(device, action).state == "drained"
    reading.may_end.set()
    while device.guest.is_coming:
        ask(device, "status")
    status = ask(device, "status")
    assert (status.state, status.model, status.rollout_pages) == ("drained", place, 0)
    assert (status.model_bytes == 0) == (place == "absent")
    device.rollout.send(messages.Add(requests_of("late")[0]))
    device.rollout.until(lambda: "late0" in device.rollout.refused)
    ask(device, "resume")
    while ask(device, "status").state != "lending":
        pass
    device.rollout.send(messages.Add(requests_of("again")[0]))
    device.rollout.until(lambda: "again0" in device.rollout.finished)


def test_a_model_that_was_taken_back_and_called_again_comes(device: Device) -> None:
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


def new_weights(device: Device, folders: tuple[Path, Path], version: str) -> None:
    for tag, command in (
        (20, messages.Stage(version, str(folders[1]), tag=20)),
        (21, messages.Commit(version, tag=21)),
    ):
        device.rollout.send(command)
        device.rollout.until(lambda: any(reply.tag == tag for reply in device.rollout.replies))  # noqa: B023
        assert next(reply for reply in device.rollout.replies if reply.tag == tag).fault is None


def test_weights_whose_folder_is_gone_do_not_matter_once_there_are_newer_ones(
    device: Device, folders: tuple[Path, Path]
) -> None:
    engine, begun, is_gone = device.guest.engine, threading.Event(), threading.Event()
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
def test_weights_that_come_while_it_is_away_are_those_it_comes_back_with(
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
    assert device.guest.engine.facts().version == "7" and device.guest.engine.weights_bytes > 0


def test_weights_are_read_behind_servings_back(device: Device, folders: tuple[Path, Path]) -> None:
    reading, own = SlowReading(device), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    device.rollout.send(messages.Stage("7", str(folders[1]), tag=20))
    assert reading.begun.wait(30)
    still_serves(device, folders)
    reading.may_end.set()
    device.rollout.until(lambda: any(reply.tag == 20 for reply in device.rollout.replies))
    assert reading.niceness == [max(10, own)]
    assert device.rollout.replies[-1].staged_version == "7"


def test_neither_side_finds_the_others_prefixes(device: Device) -> None:
    same = long_requests("same", 1, 200, 4)[0]
    device.serving.send(messages.Add(same))
    device.serving.until(lambda: bool(device.serving.finished))
    device.rollout.send(messages.Add(same))
    device.rollout.until(lambda: bool(device.rollout.finished))
    assert device.lender.serving.facts().kv_blocks_cached > 0
    assert device.lender.rollout.facts().prefix_hit_tokens == 0
    device.rollout.send(messages.Add(same.named("again")))
    device.rollout.until(lambda: "again" in device.rollout.finished)
    assert device.lender.rollout.facts().prefix_hit_tokens > 0, "its own are found"


def test_rollouts_find_no_room_that_their_front_could_make(device: Device) -> None:
    """A KV budget is a rollout's own wish: however large, the pages are the policy's to give."""
    device.rollout.send(messages.KvBudget(1 << 40, tag=20), *map(messages.Add, long_requests("r", 8, 300, 200)))
    device.rollout.until(lambda: len(device.rollout.said) == 8)
    status = ask(device, "limits", memory_share=0.25)
    assert status.rollout_pages <= status.rollout_pages_max <= whole.PAGES // 4
    device.rollout.until(lambda: len(device.rollout.finished) == 8)
    device.memory.pages.check()
