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

from rose.config.device import EngineSettings
from rose.core.admission import Admission
from rose.core.latency import LatencyModel
from rose.core.memory import MemoryPolicy
from rose.core.slo import Budgets
from rose.coserve import messages
from rose.coserve.lending import Lender
from rose.coserve.lent import LentExecutor
from rose.coserve.link import Closed, EngineLink
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
def device(folders: tuple[Path, Path], latencies: list[LatencyModel]) -> Iterator[Device]:
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
    executor = LentExecutor(lender, *links, budget=Budget(128, 8), memory=memory)
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            executor.run()
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    made = Device(End(pairs[0][0]), End(pairs[1][0]), lender, memory, thread, outcome)
    thread.start()
    yield made
    for ours, _ in pairs:
        ours.close()
    thread.join(30)
    assert not thread.is_alive()
    for _, theirs in pairs:
        theirs.close()


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


def test_the_owner_stops_and_resumes(device: Device) -> None:
    device.lender.stop("the owner said so")
    device.rollout.send(*map(messages.Add, requests_of("r")))
    device.serving.send(messages.Add(requests_of("s")[0]))
    device.serving.until(lambda: bool(device.serving.finished))
    assert device.lender.lent_steps == 0 and not device.rollout.said
    device.lender.resume()
    device.rollout.until(lambda: len(device.rollout.finished) == 6)


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


def test_a_rollout_model_that_leaves_gives_up_every_page(device: Device) -> None:
    device.rollout.send(*map(messages.Add, long_requests("r", 4, 200, 200)))
    device.rollout.until(lambda: len(device.rollout.said) == 4)
    device.rollout.connection.close()
    device.serving.send(messages.Add(long_requests("s", 1, 20, 5)[0]))
    device.serving.until(lambda: bool(device.serving.finished))
    assert device.memory.rollout.share.held == 0
    assert device.memory.serving.share.budget_pages == PAGES
