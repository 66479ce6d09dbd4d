"""A lent device in one process: two real engines, two sockets, one loop. Serving gets its tokens whatever happens."""

from __future__ import annotations

import copy
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rose.config.device import EngineSettings, LendSettings
from rose.core.admission import Admission
from rose.core.latency import LatencyModel
from rose.core.memory import MemoryPolicy
from rose.core.slo import Budgets
from rose.coserve import messages
from rose.coserve.guest import Guest
from rose.coserve.lending import Lender
from rose.coserve.lent import LentExecutor
from rose.coserve.link import Closed, EngineLink
from rose.coserve.owner import Owner
from rose.coserve.pages import PagePool
from rose.coserve.profiling import profile
from rose.coserve.tenancy import SharedMemory
from rose.engines.base import Budget, Request, Sampling
from rose.engines.embedded.engine import EmbeddedEngine
from rose.engines.embedded.memory import block_bytes
from rose.models.folder import served_spec
from rose.models.presets import write_preset

PAGES, PAGE_BYTES = 24, 256 << 10  # 96 blocks of the serving model, or 384 of the rollout model
SETTINGS = EngineSettings(kv_memory_mb=64, max_context_tokens=512, max_step_tokens=128, max_sequences=8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("models")
    for name in ("qwen3-3m", "frozenlake-1m"):
        write_preset(name, place / name, seed=1)
    return place / "qwen3-3m", place / "frozenlake-1m"


@dataclass
class End:
    """A front's end of one socket, blocking."""

    connection: socket.socket
    said: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    failed: messages.Failed | None = None
    replies: list[messages.Reply] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    breaches: list[messages.Breached] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.connection.settimeout(30)
        self._reader = messages.FrameReader()

    def send(self, *commands: messages.Command) -> None:
        self.connection.sendall(b"".join(map(messages.frame, commands)))

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            data = self.connection.recv(1 << 16)
            assert data, "the executor closed the socket"
            for body in self._reader.push(data):
                self._take(messages.decode_event(body))

    def _take(self, event: messages.Event) -> None:
        if isinstance(event, messages.Failed):
            self.failed = event
        if isinstance(event, messages.Reply):
            self.replies.append(event)
        if isinstance(event, messages.Refused):
            self.refused[event.request_id] = event.fault.what
        if isinstance(event, messages.Breached):
            self.breaches.append(event)
        if isinstance(event, messages.Stepped):
            for token in event.events:
                self.said.setdefault(token.request_id, []).extend(token.token_ids)
                if token.finish_reason:
                    self.finished[token.request_id] = token.finish_reason


@dataclass
class Device:
    serving: End
    rollout: End
    lender: Lender
    guest: Guest
    memory: SharedMemory
    thread: threading.Thread
    outcome: list[BaseException | None]


@pytest.fixture(scope="module")
def latencies(folders: tuple[Path, Path]) -> list[LatencyModel]:
    models = [LatencyModel(), LatencyModel()]
    for folder, model in zip(folders, models, strict=True):
        profile(EmbeddedEngine.load(folder, SETTINGS), model, SETTINGS.max_step_tokens)
        assert model.is_calibrated
    return models


@pytest.fixture
def device(
    folders: tuple[Path, Path], latencies: list[LatencyModel], request: pytest.FixtureRequest
) -> Iterator[Device]:
    """By parameter, what held in the engine before this one."""
    sizes = [block_bytes(served_spec(folder)) for folder in folders]
    memory = SharedMemory(
        PagePool(PAGES, PAGE_BYTES),
        MemoryPolicy(PAGES),
        serving_block_bytes=sizes[0],
        rollout_block_bytes=sizes[1],
        now_s=time.monotonic,
    )
    tenants = (memory.serving, memory.rollout)
    engines = [EmbeddedEngine.load(f, SETTINGS, memory=t.memory) for f, t in zip(folders, tenants, strict=True)]
    admission = Admission("decode", Budgets(2.0, 1.0), *copy.deepcopy(latencies))
    lender = Lender(*engines, admission, serving_budget=Budget(128, 8))
    pairs = [socket.socketpair() for _ in range(2)]
    links = [EngineLink(theirs) for _, theirs in pairs]
    budget = Budget(128, 8)
    guest = Guest(
        lender, engines[1], memory, folder=str(folders[1]), budget=budget, now_s=time.monotonic, wake=links[0].wake
    )
    guest.attach(links[1])
    owner = Owner(lender, guest, memory, time.monotonic)
    executor = LentExecutor(lender, guest, owner, links[0], budget=budget)
    if hasattr(request, "param"):
        executor.take_over(request.param)
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            executor.run()
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    made = Device(End(pairs[0][0]), End(pairs[1][0]), lender, guest, memory, thread, outcome)
    thread.start()
    yield made
    for ours, _ in pairs:
        ours.close()
    thread.join(30)
    assert not thread.is_alive()


def requests_of(tag: str, count: int = 6) -> list[Request]:
    sampling = Sampling(max_tokens=24, ignore_eos=True, seed=5)
    return [Request(f"{tag}{i}", tuple((3 * i + j) % 90 for j in range(20 + 9 * i)), sampling) for i in range(count)]


def long_requests(tag: str, count: int, tokens: int, max_tokens: int) -> list[Request]:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, seed=5)
    return [Request(f"{tag}{i}", tuple((5 * i + j) % 90 for j in range(tokens)), sampling) for i in range(count)]


def alone(folder: Path, requests: list[Request]) -> dict[str, list[int]]:
    engine: Any = EmbeddedEngine.load(folder, SETTINGS)
    said: dict[str, list[int]] = {}
    for request in requests:
        engine.add(request)
    while (plan := engine.plan(Budget(128, 8))) is not None:
        for event in engine.step(plan):
            said.setdefault(event.request_id, []).extend(event.token_ids)
    return said


def test_both_sides_say_what_they_say_alone(device: Device, folders: tuple[Path, Path]) -> None:
    serving, rollouts = requests_of("s"), requests_of("r")
    device.rollout.send(*map(messages.Add, rollouts))
    device.serving.send(*map(messages.Add, serving))
    device.serving.until(lambda: len(device.serving.finished) == 6)
    device.rollout.until(lambda: len(device.rollout.finished) == 6)
    assert device.serving.said == alone(folders[0], serving)
    assert device.rollout.said == alone(folders[1], rollouts)
    assert device.lender.lent_tokens > 0
    assert device.lender.ledger.open_accounts == 0


def test_an_exception_in_the_rollout_engine_is_not_servings(device: Device, folders: tuple[Path, Path]) -> None:
    def broken(_: Any) -> Any:
        raise RuntimeError("a broken rollout engine")

    device.lender.rollout.step = broken  # type: ignore[method-assign]
    serving = requests_of("s")
    device.rollout.send(*map(messages.Add, requests_of("r")))
    device.rollout.until(lambda: device.rollout.failed is not None)
    device.serving.send(*map(messages.Add, serving))
    device.serving.until(lambda: len(device.serving.finished) == 6)
    assert device.serving.said == alone(folders[0], serving)
    assert device.rollout.failed is not None and "broken rollout engine" in device.rollout.failed.fault.what
    assert device.lender.stopped
    status = ask(device, "status")
    assert status.state == "failed" and "broken rollout engine" in status.why and status.rollout_pages == 0
    device.serving.send(messages.Control("resume", tag=9))
    device.serving.until(lambda: device.serving.replies[-1].tag == 9)
    fault = device.serving.replies[-1].fault
    assert fault is not None and "restart the device" in (fault.hint or "")


def test_a_rollout_front_that_goes_leaves_serving_alone(device: Device, folders: tuple[Path, Path]) -> None:
    serving = requests_of("s")
    device.rollout.send(*map(messages.Add, requests_of("r")))
    device.rollout.connection.close()
    device.serving.send(*map(messages.Add, serving))
    device.serving.until(lambda: len(device.serving.finished) == 6)
    assert device.serving.said == alone(folders[0], serving)


def test_it_ends_with_the_serving_front(device: Device) -> None:
    device.serving.connection.close()
    device.thread.join(30)
    assert isinstance(device.outcome[0], Closed)


def ask(device: Device, action: Any, **limits: float) -> messages.LendingStatus:
    """The owner's word, and the status it is answered with."""
    before = len(device.serving.replies)
    device.serving.send(messages.Control(action, tag=7, **limits))
    device.serving.until(lambda: len(device.serving.replies) > before)
    reply = device.serving.replies[-1]
    assert reply.fault is None and reply.lending is not None, reply.fault
    return reply.lending


def test_the_owner_pauses_and_resumes(device: Device) -> None:
    assert ask(device, "pause").state == "paused"
    device.rollout.send(*map(messages.Add, requests_of("r")))
    device.serving.send(messages.Add(requests_of("s")[0]))
    device.serving.until(lambda: bool(device.serving.finished))
    assert device.lender.lent_steps == 0 and not device.rollout.said
    assert ask(device, "resume").state == "lending"
    device.rollout.until(lambda: len(device.rollout.finished) == 6)
    assert ask(device, "status").lent_tokens > 0


@pytest.mark.parametrize("action, place", [("drain", "parked"), ("remove", "absent")])
def test_the_owner_has_rollouts_out_at_once_and_back(
    device: Device, folders: tuple[Path, Path], action: str, place: str
) -> None:
    rollouts = long_requests("r", 4, 100, 200)
    device.rollout.send(*map(messages.Add, rollouts))
    device.rollout.until(lambda: len(device.rollout.said) == 4)
    status = ask(device, action)
    assert (status.state, status.model, status.rollout_pages, status.running) == ("drained", place, 0, 0)
    assert status.parking_s is not None and (status.model_bytes == 0) == (place == "absent")
    device.rollout.until(lambda: len(device.rollout.finished) == 4)
    assert set(device.rollout.finished.values()) == {"abort"}, "they keep what they have and can go on elsewhere"
    device.rollout.send(messages.Add(requests_of("late")[0]))
    device.rollout.until(lambda: "late0" in device.rollout.refused)
    assert "drained" in device.rollout.refused["late0"]
    ask(device, "resume")
    while ask(device, "status").state != "lending":
        time.sleep(0.01)
    again = requests_of("again")
    device.rollout.send(*map(messages.Add, again))
    device.rollout.until(lambda: all(request.request_id in device.rollout.finished for request in again))
    whole = alone(folders[1], again)
    assert {name: device.rollout.said[name] for name in whole} == whole
    assert ask(device, "status").activation_s is not None
    device.memory.pages.check()


def test_without_work_the_model_is_parked_and_the_owner_goes_before(device: Device) -> None:
    rollout = device.rollout
    rollout.send(*map(messages.Add, long_requests("r", 2, 100, 200)))
    rollout.until(lambda: len(rollout.said) == 2)
    assert wish(device, False).state == "parked"
    rollout.until(lambda: len(rollout.finished) == 2)
    assert set(rollout.finished.values()) == {"abort"} and ask(device, "status").rollout_pages == 0
    rollout.send(messages.Add(requests_of("late")[0]))
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
    rollout.send(messages.Add(requests_of("again")[0]))
    rollout.until(lambda: "again0" in rollout.finished)
    device.memory.pages.check()


def test_the_rollouts_front_is_told_what_the_owner_did(device: Device) -> None:
    for action, state in (("pause", "paused"), ("drain", "drained"), ("resume", "lending")):
        ask(device, action)
        device.rollout.until(lambda: _last_lending(device.rollout) == state)  # noqa: B023
    assert all(reply.tag == 0 for reply in device.rollout.replies), "nobody asked"


def _last_lending(end: End) -> str | None:
    told = [reply.lending for reply in end.replies if reply.lending is not None]
    return told[-1].state if told else None


def wish(device: Device, is_wanted: bool) -> messages.LendingStatus:
    """The gateway's, by way of the rollouts' front."""
    device.rollout.send(messages.Want(is_wanted, tag=11))
    before = len([reply for reply in device.rollout.replies if reply.tag == 11])
    device.rollout.until(lambda: len([reply for reply in device.rollout.replies if reply.tag == 11]) > before)
    reply = [reply for reply in device.rollout.replies if reply.tag == 11][-1]
    assert reply.fault is None and reply.lending is not None
    return reply.lending


def earlier(*words: messages.Control, held_back: str = "") -> messages.Lend:
    return messages.Lend("folder", LendSettings(), words, held_back)


@pytest.mark.parametrize(
    "device, state, place",
    [
        (earlier(messages.Control("pause")), "paused", "resident"),
        (earlier(messages.Control("drain")), "drained", "parked"),
        (earlier(messages.Control("remove")), "drained", "absent"),
        (earlier(messages.Control("drain"), messages.Control("pause")), "paused", "parked"),
        (earlier(messages.Control("dry_run")), "dry_run", "resident"),
        (earlier(held_back="rollouts are held back"), "drained", "parked"),
    ],
    indirect=["device"],
)
def test_an_engine_takes_over_what_held_in_the_one_before(device: Device, state: str, place: str) -> None:
    device.rollout.send(*map(messages.Add, requests_of("r")))
    device.serving.send(messages.Add(requests_of("s")[0]))
    device.serving.until(lambda: bool(device.serving.finished))
    status = ask(device, "status")
    assert (status.state, status.model, status.lent_steps) == (state, place, 0) and not device.rollout.said
    ask(device, "resume")
    while ask(device, "status").state != "lending":
        time.sleep(0.01)
    device.rollout.send(messages.Add(requests_of("again")[0]))
    device.rollout.until(lambda: "again0" in device.rollout.finished)


@pytest.mark.parametrize("device", [earlier(held_back="rollouts are held back")], indirect=True)
def test_rollouts_that_are_held_back_are_told_why(device: Device) -> None:
    assert ask(device, "status").why == "rollouts are held back"
    device.rollout.send(messages.Add(requests_of("r")[0]))
    device.rollout.until(lambda: "r0" in device.rollout.refused)
    assert device.rollout.refused["r0"] == "rollouts are held back"
    assert wish(device, True).state == "drained", "it is the owner's to let them in"


@pytest.mark.parametrize("device", [earlier(messages.Control("limits", 0.25, 0.0))], indirect=True)
def test_an_engine_takes_over_the_limits_of_the_one_before(device: Device) -> None:
    status = ask(device, "status")
    assert (status.state, status.memory_share, status.compute_share) == ("lending", 0.25, 0.0)
    assert status.rollout_pages_max <= PAGES // 4


def test_the_owner_limits_memory_and_time(device: Device) -> None:
    status = ask(device, "limits", memory_share=0.25, compute_share=0.0)
    assert status.rollout_pages_max <= PAGES // 4 and status.compute_share == 0.0
    device.rollout.send(*map(messages.Add, requests_of("r")))
    device.serving.send(*map(messages.Add, requests_of("s")))
    device.serving.until(lambda: len(device.serving.finished) == 6)
    assert device.lender.lent_steps == 0
    told = device.rollout.replies
    device.rollout.until(lambda: any(one.lending is not None and one.lending.shut_s is not None for one in told))
    assert ask(device, "status").shut_s is not None
    ask(device, "limits", compute_share=1.0)
    device.rollout.until(lambda: len(device.rollout.finished) == 6)
    assert ask(device, "status").shut_s is None
    device.serving.send(messages.Control("limits", memory_share=1.5, tag=9))
    device.serving.until(lambda: device.serving.replies[-1].tag == 9)
    assert device.serving.replies[-1].fault is not None


def test_a_dry_run_runs_nothing_and_says_what_it_would_have_given(device: Device) -> None:
    ask(device, "dry_run")
    device.rollout.send(*map(messages.Add, requests_of("r")))
    device.serving.send(*map(messages.Add, requests_of("s")))
    device.serving.until(lambda: len(device.serving.finished) == 6)
    time.sleep(0.1)  # without serving work: all of it could have been lent
    status = ask(device, "status")
    assert status.state == "dry_run" and status.dry_run is not None and status.dry_run.tokens > 0
    assert device.lender.lent_steps == 0 and not device.rollout.said


@pytest.mark.parametrize("action, state", [("pause", "paused"), ("drain", "drained")])
def test_a_dry_run_counts_what_a_device_would_give_that_is_not_lent(device: Device, action: str, state: str) -> None:
    ask(device, action)
    ask(device, "dry_run")
    device.serving.send(*map(messages.Add, requests_of("s")))
    device.serving.until(lambda: len(device.serving.finished) == 6)
    time.sleep(0.1)  # without serving work
    status = ask(device, "status")
    assert status.state == state and status.dry_run is not None and status.dry_run.tokens > 0
    assert device.lender.lent_steps == 0
    status = ask(device, "resume")
    assert status.state == "lending" and status.dry_run is None


def test_a_grant_that_is_over_when_its_step_is_planned_is_a_closed_gate(
    device: Device, folders: tuple[Path, Path]
) -> None:
    plan, ran, slept_s = device.lender.rollout.plan, device.lender.rollout.step, 0.3  # longer than any grant here
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

    device.lender.rollout.plan, device.lender.rollout.step = slow, run  # type: ignore[method-assign]
    device.rollout.send(*map(messages.Add, requests_of("r")))
    device.rollout.until(lambda: len(device.rollout.finished) == 6)
    assert device.rollout.said == alone(folders[1], requests_of("r"))
    assert device.lender.dropped_steps >= 1 and device.lender.ledger.total_lent_s >= slept_s
    device.memory.pages.check()


def test_a_step_far_longer_than_predicted_is_a_breach_and_serving_goes_on(
    device: Device, folders: tuple[Path, Path]
) -> None:
    step = device.lender.rollout.step

    def slow(plan: Any) -> Any:
        time.sleep(0.3)
        return step(plan)

    device.lender.rollout.step = slow  # type: ignore[method-assign]
    device.rollout.send(*map(messages.Add, requests_of("r", 1)))
    device.serving.until(lambda: bool(device.serving.breaches))
    device.serving.send(*map(messages.Add, requests_of("s")))
    device.serving.until(lambda: len(device.serving.finished) == 6)
    assert device.serving.said == alone(folders[0], requests_of("s"))
    breach = device.serving.breaches[0].breach
    assert breach.objective == "step" and breach.actual_s > breach.limit_s
    assert ask(device, "status").breaches["step"] >= 1


def test_a_burst_takes_the_rollouts_pages_and_they_keep_their_tokens(
    device: Device, folders: tuple[Path, Path]
) -> None:
    rollouts = long_requests("r", 8, 300, 200)
    device.rollout.send(*map(messages.Add, rollouts))
    device.rollout.until(lambda: len(device.rollout.said) == 8)
    burst = long_requests("s", 8, 150, 40)  # 12 blocks each: together all of the pool
    device.serving.send(*map(messages.Add, burst))
    device.serving.until(lambda: len(device.serving.finished) == 8)
    device.rollout.until(lambda: len(device.rollout.finished) == 8)
    assert device.serving.said == alone(folders[0], burst)
    assert device.lender.serving.facts().preemptions == 0, "serving waited for a page while a rollout held one"
    whole = alone(folders[1], rollouts)
    aborted = [name for name, reason in device.rollout.finished.items() if reason == "abort"]
    assert aborted
    for name, tokens in device.rollout.said.items():
        assert tokens == whole[name][: len(tokens)] and (len(tokens) == 200) == (name not in aborted)
    device.memory.pages.check()


def test_a_rollout_front_that_goes_leaves_no_request_behind(device: Device) -> None:
    device.rollout.send(*map(messages.Add, long_requests("r", 4, 200, 200)))
    device.rollout.until(lambda: len(device.rollout.said) == 4)
    device.rollout.connection.close()
    device.serving.send(messages.Add(long_requests("s", 1, 20, 5)[0]))
    device.serving.until(lambda: bool(device.serving.finished))
    status = ask(device, "status")
    assert (status.model, status.running, status.waiting) == ("resident", 0, 0)


def test_many_prompts_at_once_are_planned_smaller_until_they_fit(device: Device) -> None:
    """Admission thinks of one prompt; a plan of many costs more, and must not be dropped for ever."""
    device.serving.send(messages.Control("pause", tag=1))
    device.serving.until(lambda: bool(device.serving.replies))
    device.rollout.send(*map(messages.Add, long_requests("r", 8, 100, 4)))
    upper, real = device.lender.admission.rollout.upper, device.lender.admission.block_s
    device.lender.admission.rollout.upper = lambda features: (  # type: ignore[method-assign]
        upper(features) if features.sequences < 2 else real + upper(features)
    )
    ask(device, "resume")
    device.rollout.until(lambda: len(device.rollout.finished) == 8)
    assert set(device.rollout.finished.values()) == {"length"}
