"""A lent device in one process: two real engines, two sockets, one loop. Serving gets its tokens whatever happens."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integration.scripted_engine import ScriptedEngine
from tests.unit.device import coserving_device
from tests.unit.device.coserving_device import (
    PAGES,
    Device,
    End,
    alone,
    ask,
    earlier,
    fails,
    long_requests,
    requests_of,
    still_serves,
    wordy,
)

from rose.api.faults import Fault
from rose.config.server_settings import EngineSettings
from rose.core.memory import MemorySampled
from rose.device import engine_messages, transport
from rose.device.coserving_executor import CoServingExecutor
from rose.device.transport import Closed
from rose.engines.base import Budget, Request

folders, device = coserving_device.folders, coserving_device.device
latencies = coserving_device.latencies


def test_both_sides_produce_the_tokens_they_produce_alone(device: Device, folders: tuple[Path, Path]) -> None:
    serving, rollouts = requests_of("s"), requests_of("r")
    device.rollout.send(*map(engine_messages.Add, rollouts))
    device.serving.send(*map(engine_messages.Add, serving))
    device.serving.until(lambda: len(device.serving.finished) == 6)
    device.rollout.until(lambda: len(device.rollout.finished) == 6)
    assert device.serving.said == alone(folders[0], serving)
    assert device.rollout.said == alone(folders[1], rollouts)
    assert device.arbiter.lent_tokens > 0
    assert device.arbiter.accountant.open_accounts == 0


def test_an_exception_in_the_rollout_engine_leaves_serving_running(device: Device, folders: tuple[Path, Path]) -> None:
    def broken(_: Any) -> Any:
        raise RuntimeError("a broken rollout engine")

    device.arbiter.rollout.step = broken  # type: ignore[method-assign]
    serving = requests_of("s")
    device.rollout.send(*map(engine_messages.Add, requests_of("r")))
    device.rollout.until(lambda: device.rollout.failed is not None)
    device.serving.send(*map(engine_messages.Add, serving))
    device.serving.until(lambda: len(device.serving.finished) == 6)
    assert device.serving.said == alone(folders[0], serving)
    assert device.rollout.failed is not None and "broken rollout engine" in device.rollout.failed.fault.what
    assert device.arbiter.stopped
    status = ask(device, "status")
    assert status.state == "failed" and "broken rollout engine" in status.why and status.rollout_pages == 0
    device.serving.send(engine_messages.AdminCommand("resume", tag=9))
    device.serving.until(lambda: device.serving.replies[-1].tag == 9)
    fault = device.serving.replies[-1].fault
    assert fault is not None and "restart the device" in (fault.hint or "")


def test_serving_goes_on_when_the_rollout_front_disconnects(device: Device, folders: tuple[Path, Path]) -> None:
    serving = requests_of("s")
    device.rollout.send(*map(engine_messages.Add, requests_of("r")))
    device.rollout.connection.close()
    device.serving.send(*map(engine_messages.Add, serving))
    device.serving.until(lambda: len(device.serving.finished) == 6)
    assert device.serving.said == alone(folders[0], serving)


def test_the_loop_ends_with_the_serving_front(device: Device) -> None:
    device.serving.connection.close()
    device.thread.join(30)
    assert isinstance(device.outcome[0], Closed)


def test_a_step_whose_grant_expired_while_planning_is_not_run(device: Device, folders: tuple[Path, Path]) -> None:
    plan, ran, slept_s = device.arbiter.rollout.plan, device.arbiter.rollout.step, 0.3  # longer than any grant here
    late: list[Any] = []

    def slow(budget: Budget) -> Any:
        made = plan(budget)
        if not late:
            late.append(made)
            time.sleep(slept_s)
        return made

    def run(made: Any) -> Any:
        assert made is not late[0]
        return ran(made)

    device.arbiter.rollout.plan, device.arbiter.rollout.step = slow, run  # type: ignore[method-assign]
    device.rollout.send(*map(engine_messages.Add, requests_of("r")))
    device.rollout.until(lambda: len(device.rollout.finished) == 6)
    assert device.rollout.said == alone(folders[1], requests_of("r"))
    assert device.arbiter.dropped_steps >= 1 and device.arbiter.accountant.total_lent_s >= slept_s
    device.memory.pages.check()


def test_a_step_far_longer_than_predicted_is_a_breach(device: Device, folders: tuple[Path, Path]) -> None:
    step = device.arbiter.rollout.step

    def slow(plan: Any) -> Any:
        time.sleep(0.3)
        return step(plan)

    device.arbiter.rollout.step = slow  # type: ignore[method-assign]
    device.rollout.send(*map(engine_messages.Add, requests_of("r", 1)))
    device.serving.until(lambda: bool(device.serving.breaches))
    device.serving.send(*map(engine_messages.Add, requests_of("s")))
    device.serving.until(lambda: len(device.serving.finished) == 6)
    assert device.serving.said == alone(folders[0], requests_of("s"))
    breach = device.serving.breaches[0].breach
    assert breach.objective == "step" and breach.actual_s > breach.limit_s
    assert ask(device, "status").breaches["step"] >= 1


def test_a_burst_takes_the_rollouts_pages_and_they_keep_their_tokens(
    device: Device, folders: tuple[Path, Path]
) -> None:
    rollouts = long_requests("r", 8, 300, 200)
    device.rollout.send(*map(engine_messages.Add, rollouts))
    device.rollout.until(lambda: len(device.rollout.said) == 8)
    burst = long_requests("s", 8, 150, 40)  # 12 blocks each: together all of the pool
    device.serving.send(*map(engine_messages.Add, burst))
    device.serving.until(lambda: len(device.serving.finished) == 8)
    device.rollout.until(lambda: len(device.rollout.finished) == 8)
    assert device.serving.said == alone(folders[0], burst)
    assert device.arbiter.serving.facts().preemptions == 0, "serving waited for a page while a rollout held one"
    whole = alone(folders[1], rollouts)
    aborted = [name for name, reason in device.rollout.finished.items() if reason == "abort"]
    assert aborted
    for name, tokens in device.rollout.said.items():
        assert tokens == whole[name][: len(tokens)] and (len(tokens) == 200) == (name not in aborted)
    device.memory.pages.check()


def test_many_prompts_at_once_are_planned_smaller_until_they_fit(device: Device) -> None:
    """Admission thinks of one prompt; a plan of many costs more, and must not be dropped for ever."""
    device.serving.send(engine_messages.AdminCommand("pause", tag=1))
    device.serving.until(lambda: bool(device.serving.replies))
    device.rollout.send(*map(engine_messages.Add, long_requests("r", 8, 100, 4)))
    upper, real = device.arbiter.admission.rollout.upper, device.arbiter.admission.block_s
    device.arbiter.admission.rollout.upper = lambda features: (  # type: ignore[method-assign]
        upper(features) if features.sequences < 2 else real + upper(features)
    )
    ask(device, "resume")
    device.rollout.until(lambda: len(device.rollout.finished) == 8)
    assert set(device.rollout.finished.values()) == {"length"}


@pytest.mark.parametrize("buffer_bytes", [20_000, 8 << 20], ids=["held up half-way", "with all of it made"])
def test_a_rollout_front_that_never_reads_is_given_up_alone(
    device: Device, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, buffer_bytes: int
) -> None:
    """It was the end of the engine, if serving had no work for a minute and the front's answers were all made."""
    monkeypatch.setattr(transport, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(transport, "STALL_S", 0.3)
    device.rollout.send(*map(engine_messages.Add, wordy("r", 8)))
    device.rollout.until(lambda: len(device.rollout.said) == 8)
    status = ask(device, "status")
    while device.residency.server is not None:
        status = ask(device, "status")
    if buffer_bytes < 1 << 20:
        assert status.lent_tokens < 8 * 200, "nothing more was made for it"
        assert ask(device, "status").evicted_tokens > 0
    assert ask(device, "status").running == 0
    still_serves(device, folders)


def test_a_failure_in_rollout_memory_leaves_serving_running(device: Device, folders: tuple[Path, Path]) -> None:
    def broken() -> None:
        raise AssertionError("rollouts hold more than their budget")

    device.memory.observe = broken  # type: ignore[method-assign, assignment]
    device.rollout.send(*map(engine_messages.Add, requests_of("r")))
    device.rollout.until(lambda: device.rollout.failed is not None)
    still_serves(device, folders)
    status = ask(device, "status")
    assert (status.state, status.rollout_pages, status.rollout_pages_max) == ("failed", 0, 0)


def test_a_rollout_engine_whose_facts_fail_leaves_serving_running(device: Device, folders: tuple[Path, Path]) -> None:
    """Every reply to serving tells how lending goes."""
    device.residency.engine.facts = fails  # type: ignore[method-assign]
    status = ask(device, "status")
    assert (status.state, status.model, status.running) == ("failed", "absent", 0)
    assert "a page with two owners" in status.why
    still_serves(device, folders)


def test_serving_is_answered_even_if_the_lending_status_fails(device: Device, folders: tuple[Path, Path]) -> None:
    device.memory.policy.status = fails  # type: ignore[method-assign]
    device.serving.send(engine_messages.GetFacts(8), engine_messages.GetFacts(9))
    device.serving.until(lambda: len(device.serving.replies) == 2)
    assert [(reply.lending, reply.fault) for reply in device.serving.replies] == [(None, None)] * 2
    assert "a page with two owners" in device.residency.failure
    still_serves(device, folders)


def test_a_failure_before_the_loop_sleeps_leaves_serving_running(device: Device, folders: tuple[Path, Path]) -> None:
    device.residency.engine.facts = fails  # type: ignore[method-assign]
    device.rollout.send(
        engine_messages.CancelRequest("nobody")
    )  # not answered: its front hears the facts when the loop has no work
    device.rollout.until(lambda: device.rollout.failed is not None)
    assert "a page with two owners" in device.residency.failure
    still_serves(device, folders)


def test_a_failure_while_taking_over_leaves_serving_running() -> None:
    ours, theirs = socket.socketpair()
    arbiter: Any = SimpleNamespace(serving=ScriptedEngine(EngineSettings()), on_serving_added=None)
    failures: list[Exception] = []
    residency: Any = SimpleNamespace(fail=failures.append)
    controls: Any = SimpleNamespace(take_over=fails)
    executor = CoServingExecutor(arbiter, residency, controls, transport.EngineLink(theirs))
    executor.take_over(earlier(engine_messages.AdminCommand("drain")))
    assert "a page with two owners" in str(failures[0])
    for connection in (ours, theirs):
        connection.close()


def test_a_rollout_engine_that_fails_to_leave_leaves_serving_running(
    device: Device, folders: tuple[Path, Path]
) -> None:
    engine: Any = device.residency.engine
    engine.limit_kv = engine.release_weights = device.memory.remove_rollouts = fails  # type: ignore[method-assign]
    engine.step = fails
    device.rollout.send(*map(engine_messages.Add, requests_of("r")))
    device.rollout.until(lambda: device.rollout.failed is not None)
    still_serves(device, folders)
    assert ask(device, "status").state == "failed" and device.residency.server is None


def test_a_failure_while_a_rollout_front_disconnects_spares_serving(device: Device, folders: tuple[Path, Path]) -> None:
    device.rollout.send(*map(engine_messages.Add, long_requests("r", 4, 100, 400)))
    device.rollout.until(lambda: len(device.rollout.said) == 4)
    device.residency.engine.limit_kv = fails  # type: ignore[method-assign]
    device.rollout.connection.close()
    still_serves(device, folders)
    assert ask(device, "status").state == "failed"


def test_a_rollout_front_that_asks_and_never_reads_is_given_up(
    device: Device, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command was answered into a buffer without a limit, for as long as it took something now and then."""
    monkeypatch.setattr(transport, "BUFFER_BYTES", 20_000)
    for _ in range(100):
        with suppress(OSError):
            device.rollout.send(*[engine_messages.GetFacts(tag=1)] * 100)
        ask(device, "status")
        if device.residency.server is None:
            break
    assert device.residency.server is None and not device.residency.failure
    still_serves(device, folders)


def test_events_of_serving_go_out_while_rollouts_keep_the_loop_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the kernel takes at once, and no further word of serving's that would take the rest along."""
    monkeypatch.setattr(CoServingExecutor, "_handle_rollouts", lambda self: None)
    monkeypatch.setattr(CoServingExecutor, "_step", lambda self: True)
    ours, theirs = socket.socketpair()
    front, serving = End(ours), transport.EngineLink(theirs)
    arbiter: Any = SimpleNamespace(serving=ScriptedEngine(EngineSettings()), on_serving_added=None)
    controls: Any = SimpleNamespace(status=None)
    executor = CoServingExecutor(arbiter, controls, controls, serving)
    serving.send(engine_messages.Noted(b"x" * (4 << 20)))
    serving.send(engine_messages.EngineFailed(Fault("Unavailable", "it ends")))

    def run() -> None:
        with suppress(transport.Closed):
            executor.run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        front.until(lambda: front.failed is not None)
    finally:
        ours.close()
        thread.join(30)
    assert not thread.is_alive()


def test_a_decision_knows_of_every_request_that_has_arrived(device: Device) -> None:
    """A user who comes while a rollout's command is taken goes before that rollout."""
    arbiter, order = device.arbiter, list[str]()
    arbiter.admission.mode = "idle"
    add, serving_step, rollout_step = arbiter.rollout.add, arbiter.serving.step, arbiter.rollout.step

    def user_comes(rollout: Request) -> None:
        device.serving.send(engine_messages.Add(requests_of("s")[0]))
        add(rollout)

    def noted(side: str, step: Any) -> Any:
        def run(plan: Any) -> Any:
            order.append(side)
            return step(plan)

        return run

    arbiter.rollout.add = user_comes  # type: ignore[method-assign]
    arbiter.serving.step = noted("serving", serving_step)  # type: ignore[method-assign]
    arbiter.rollout.step = noted("rollout", rollout_step)  # type: ignore[method-assign]
    device.rollout.send(engine_messages.Add(requests_of("r")[0]))
    device.rollout.until(lambda: bool(device.rollout.finished))
    assert order[:24] == ["serving"] * 24 and "rollout" in order


def test_neither_side_finds_prefixes_of_the_other(device: Device) -> None:
    same = long_requests("same", 1, 200, 4)[0]
    device.serving.send(engine_messages.Add(same))
    device.serving.until(lambda: bool(device.serving.finished))
    device.rollout.send(engine_messages.Add(same))
    device.rollout.until(lambda: bool(device.rollout.finished))
    assert device.arbiter.serving.facts().kv_blocks_cached > 0
    assert device.arbiter.rollout.facts().prefix_hit_tokens == 0
    device.rollout.send(engine_messages.Add(same.named("again")))
    device.rollout.until(lambda: "again" in device.rollout.finished)
    assert device.arbiter.rollout.facts().prefix_hit_tokens > 0, "its own are found"


def test_rollouts_never_get_more_pages_than_the_policy_allows(device: Device) -> None:
    """However much they ask for, the pages are the policy's to give."""
    device.rollout.send(*map(engine_messages.Add, long_requests("r", 8, 300, 200)))
    device.rollout.until(lambda: len(device.rollout.said) == 8)
    status = ask(device, "limits", memory_share=0.25)
    assert status.rollout_pages <= status.rollout_pages_max <= PAGES // 4
    device.rollout.until(lambda: len(device.rollout.finished) == 8)
    device.memory.pages.check()


def test_a_failure_while_serving_waits_for_a_page_spares_serving(device: Device, folders: tuple[Path, Path]) -> None:
    """It enters in the middle of serving's plan, when the request's prefix was found already."""
    policy, observe = device.memory.policy, device.memory.policy.observe

    def fails_when_serving_asks(sample: MemorySampled, now_s: float) -> Any:
        return (fails if sample.serving_asks_pages else observe)(sample, now_s)

    policy.observe = fails_when_serving_asks  # type: ignore[method-assign]
    requests = long_requests("short", 1, 60, 2) + long_requests("long", 1, 400, 8)
    for request in requests:
        device.serving.send(engine_messages.Add(request))
        device.serving.until(lambda: request.request_id in device.serving.finished)  # noqa: B023
    device.rollout.until(lambda: device.rollout.failed is not None)
    assert ask(device, "status").state == "failed"
    assert device.serving.said == alone(folders[0], requests)
    assert device.arbiter.serving.facts().prefix_hit_tokens > 0
    device.arbiter.serving.scheduler.check()
    assert device.arbiter.serving.facts().kv_blocks_used == 0, "blocks that nobody holds are pinned"
