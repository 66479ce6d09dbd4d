"""A co-serving device in one process, for tests: two real engines, two sockets, one loop in a thread."""

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

from rose.api.frames import FrameReader
from rose.config.server_settings import EngineSettings, LendSettings
from rose.core.admission import Admission
from rose.core.history import HistorySnapshot
from rose.core.latency import LatencyModel
from rose.core.memory import MemoryPolicy
from rose.core.slo import Budgets
from rose.device import engine_messages
from rose.device.admin_controls import AdminControls
from rose.device.coserving_executor import CoServingExecutor
from rose.device.coserving_factory import profile
from rose.device.pages import PagePool
from rose.device.residency import RolloutResidency
from rose.device.step_arbiter import StepArbiter
from rose.device.tenancy import SharedMemory
from rose.device.transport import EngineLink
from rose.engines.base import Budget, LendingStatus, Request, Sampling, Stepped
from rose.engines.embedded.engine import EmbeddedEngine
from rose.engines.embedded.runner import block_bytes
from rose.models.model_folder import served_spec
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
    failed: engine_messages.EngineFailed | None = None
    replies: list[engine_messages.Reply] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    breaches: list[engine_messages.Breached] = field(default_factory=list)
    learnt: list[HistorySnapshot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.connection.settimeout(30)
        self._reader = FrameReader()

    def send(self, *commands: engine_messages.Command) -> None:
        self.connection.sendall(b"".join(map(engine_messages.frame, commands)))

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            data = self.connection.recv(1 << 16)
            assert data, "the executor closed the socket"
            for body in self._reader.push(data):
                self._take(engine_messages.decode_event(body))

    def _take(self, event: engine_messages.Event) -> None:
        if isinstance(event, engine_messages.EngineFailed):
            self.failed = event
        if isinstance(event, engine_messages.Reply):
            self.replies.append(event)
        if isinstance(event, engine_messages.RequestRejected):
            self.refused[event.request_id] = event.fault.what
        if isinstance(event, engine_messages.Breached):
            self.breaches.append(event)
        if isinstance(event, engine_messages.Learnt):
            self.learnt.append(event.history)
        if isinstance(event, Stepped):
            for token in event.events:
                self.said.setdefault(token.request_id, []).extend(token.token_ids)
                if token.finish_reason:
                    self.finished[token.request_id] = token.finish_reason


@dataclass
class Device:
    serving: End
    rollout: End
    arbiter: StepArbiter
    residency: RolloutResidency
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
    admission.history.bursts.restore(1e6, (), (), time.monotonic())
    arbiter = StepArbiter(*engines, admission, serving_budget=Budget(128, 8))
    pairs = [socket.socketpair() for _ in range(2)]
    links = [EngineLink(theirs) for _, theirs in pairs]
    residency = RolloutResidency(
        arbiter, engines[1], memory, folder=str(folders[1]), now_s=time.monotonic, wake=links[0].wake
    )
    residency.attach(links[1])
    controls = AdminControls(arbiter, residency, memory, time.monotonic)
    executor = CoServingExecutor(arbiter, residency, controls, links[0])
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
    made = Device(End(pairs[0][0]), End(pairs[1][0]), arbiter, residency, memory, thread, outcome)
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


def ask(device: Device, action: Any, **limits: float) -> LendingStatus:
    """The owner's word, and the status it is answered with."""
    before = len(device.serving.replies)
    device.serving.send(engine_messages.AdminCommand(action, tag=7, **limits))
    device.serving.until(lambda: len(device.serving.replies) > before)
    reply = device.serving.replies[-1]
    assert reply.fault is None and reply.lending is not None, reply.fault
    return reply.lending


def last_lending(end: End) -> str | None:
    told = [reply.lending for reply in end.replies if reply.lending is not None]
    return told[-1].state if told else None


def wish(device: Device, is_wanted: bool) -> LendingStatus:
    """The gateway's, by way of the rollouts' front."""
    device.rollout.send(engine_messages.Want(is_wanted, tag=11))
    before = len([reply for reply in device.rollout.replies if reply.tag == 11])
    device.rollout.until(lambda: len([reply for reply in device.rollout.replies if reply.tag == 11]) > before)
    reply = [reply for reply in device.rollout.replies if reply.tag == 11][-1]
    assert reply.fault is None and reply.lending is not None
    return reply.lending


def earlier(
    *words: engine_messages.AdminCommand, held_back: str = "", history: HistorySnapshot | None = None
) -> engine_messages.Lend:
    return engine_messages.Lend("folder", LendSettings(), words, held_back, history)


@pytest.fixture(scope="module")
def quick_latencies() -> list[LatencyModel]:
    """Near enough for budgets of seconds, and nobody waits for a profile."""
    return [LatencyModel((0.001, 1e-4, 0.0, 0.0, 0.0)) for _ in range(2)]


def wordy(tag: str, count: int) -> list[Request]:
    """Each answer is some fifty thousand bytes on the socket."""
    sampling = Sampling(max_tokens=200, ignore_eos=True, seed=5, top_logprobs=20)
    return [Request(f"{tag}{i}", tuple((5 * i + j) % 90 for j in range(20)), sampling) for i in range(count)]


def still_serves(device: Device, folders: tuple[Path, Path]) -> None:
    serving = requests_of("s")
    device.serving.send(*map(engine_messages.Add, serving))
    device.serving.until(lambda: len(device.serving.finished) == 6)
    assert device.serving.said == alone(folders[0], serving)
    assert not device.outcome, "the engine's loop has ended"


def fails(*_: Any) -> Any:
    raise AssertionError("a page with two owners")


def new_weights(device: Device, folders: tuple[Path, Path], version: str) -> None:
    for tag, command in (
        (20, engine_messages.Stage(version, str(folders[1]), tag=20)),
        (21, engine_messages.Commit(version, tag=21)),
    ):
        device.rollout.send(command)
        device.rollout.until(lambda: any(reply.tag == tag for reply in device.rollout.replies))  # noqa: B023
        assert next(reply for reply in device.rollout.replies if reply.tag == tag).fault is None
