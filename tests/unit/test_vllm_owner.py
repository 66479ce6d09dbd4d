"""What an agent beside a `vllm serve` shows its owner, by a seat that has what a real one has."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from tests.unit.test_vllm_board import about

from rose.coserve import messages
from rose.coserve.guest import UNWANTED
from rose.coserve.owner import PAUSED
from rose.engines.vllm.board import BoardWriter
from rose.engines.vllm.desk import Lent, Status
from rose.engines.vllm.starting import RolloutEngine
from rose.engines.vllm.worker import engine_facts
from rose.errors import Unavailable
from rose.front.control import ControlBody
from rose.rollout import vllm_agent
from rose.rollout.vllm_agent import VllmLending, VllmSeat
from rose.rollout.vllm_owner import VllmOwner
from rose.rollout.vllm_status import LendingTally
from rose.weights.metrics import ReceiveMetrics

LENT = Lent(steps=3, tokens=70, seconds=0.25, breaches={"ttft": 2}, doubtful=1, breaker_trips=4)
STATUS = Status(
    7,
    gate_open=True,
    running=2,
    waiting=1,
    kv_blocks_limit=8,
    kv_blocks_used=4,
    generated_tokens=50,
    evictions=5,
    lent=LENT,
)


def seat(status: Status | None) -> Any:
    lending = VllmLending(RolloutEngine(Path("models/rollout")), "http://127.0.0.1:1")
    return SimpleNamespace(
        lending=lending, status=status, facts=engine_facts(status or Status(0)), trouble=None, stopped="", wishes={},
        restarts=6, shut_s=None, is_wanted=True, memory_share=1.0, activation_s=None, parking_s=None,
        gave_up=asyncio.get_running_loop().create_future(), lending_tally=LendingTally(),
    )  # fmt: skip


def scraped(status: Status | None, lag_versions: int = 0) -> dict[str, float]:
    return asyncio.run(_scraped(status, lag_versions))


async def _scraped(status: Status | None, lag_versions: int) -> dict[str, float]:
    owner = VllmOwner(seat(status), "a-token")
    ReceiveMetrics(owner.metrics).looked(lag_versions, refused_new=0)
    async with TestClient(TestServer(owner.application())) as client:
        async with client.get("/metrics") as answer:
            assert answer.status == 200, "without a token, as at any device"
            lines = (await answer.text()).splitlines()
        async with client.get("/rose/lending") as refused:
            assert refused.status == 401
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def test_the_figures_of_a_lent_device_are_scraped() -> None:
    found = scraped(STATUS, lag_versions=9)
    for name, value in {
        "rose_gate_open": 1,
        "rose_lending": 1,
        "rose_rollout_tokens_total": 70,
        "rose_rollout_steps_total": 3,
        "rose_lent_seconds_total": 0.25,
        "rose_rollout_evictions_total": 5,
        "rose_breaker_trips_total": 4,
        "rose_engine_restarts_total": 6,
        "rose_weights_lag_versions": 9,
    }.items():
        assert found[name] == value, name
    breaches = {kind: found[f'rose_slo_breaches_total{{kind="{kind}"}}'] for kind in ("step", "ttft", "tpot")}
    assert breaches == {"step": 0, "ttft": 2, "tpot": 0}
    assert found['vllm:num_requests_running{model_name="rollout"}'] == 2
    assert found['vllm:generation_tokens_total{model_name="rollout"}'] == 50


@pytest.mark.parametrize(
    "status, is_open",
    [pytest.param(None, 0, id="no engine"), pytest.param(Status(7, why="serving has work"), 0, id="closed")],
)
def test_a_closed_gate_is_seen_with_and_without_an_engine(status: Status | None, is_open: int) -> None:
    found = scraped(status)
    assert found["rose_gate_open"] == is_open
    assert ("rose_rollout_tokens_total" in found) == (status is not None), "nothing is made up without an engine"


@pytest.mark.parametrize(
    "shown, shut_s",
    [
        pytest.param([{"steps": 1}, {"steps": 2}, {"steps": 3}], None, id="it steps"),
        pytest.param([{"steps": 1}, {}, {}], 1.0, id="turns wait, and no step is made"),
        pytest.param([{"steps": 1}, {}, {"steps": 2}], None, id="open again"),
        pytest.param([{"steps": 1}, {}, {"gate_open": True, "until_s": 9.0}], None, id="open, and about to step"),
        pytest.param([{"steps": 1}, {}, {"gate_open": True, "until_s": 1.5}], 1.0, id="open until a while ago"),
        pytest.param([{"steps": 1}, {"running": 0}, {}], None, id="nobody waits"),
        pytest.param([{"steps": 1}, {}, {"running": 0}], 1.0, id="all have left a shut gate"),
        pytest.param([{"steps": 1}, {}, {"running": 0, "gate_open": True}], None, id="and would find it open again"),
        pytest.param([{"steps": 1}, {}, {"running": 0, "steps": 2}], None, id="all have left after a step"),
        pytest.param([{"steps": 1}, *[{}] * 5], 4.0, id="it has been silent for a while"),
        pytest.param([{"steps": 1}, *[{}] * 6], None, id="it hangs"),
        pytest.param([{"steps": 1}, *[{}] * 5, {"at_s": 5.0}], 5.0, id="it does not, and waits"),
        pytest.param([{"steps": 1}, {}, {"lent": Lent(resting="three deadlines lost")}], None, id="lending rests"),
        pytest.param([{"steps": 1}, {}, None], None, id="it has died"),
    ],
)
def test_a_seat_knows_for_how_long_serving_has_shut_its_gate(
    shown: list[dict[str, Any] | None], shut_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at once a second."""

    async def look() -> float | None:
        monkeypatch.setattr(vllm_agent, "own_folder", lambda: tmp_path)
        seat = VllmSeat(VllmLending(RolloutEngine(Path("models/rollout")), "http://127.0.0.1:1"))
        status, found = Status(7, running=1), None
        for now_s, changes in enumerate(shown):
            status = msgspec.structs.replace(status, **(changes or {}))
            seat._worker = None if changes is None else SimpleNamespace(status=lambda status=status: status)
            seat._look_at_gate(float(now_s))
            found = seat.shut_s
        seat._locks.close()
        return found

    assert asyncio.run(look()) == shut_s


def story(tell: Callable[[VllmSeat], None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def told() -> None:
        monkeypatch.setattr(vllm_agent, "own_folder", lambda: folder)
        seat = VllmSeat(VllmLending(RolloutEngine(Path("models/rollout")), "http://127.0.0.1:1"))
        tell(seat)
        seat._locks.close()

    asyncio.run(told())


def test_a_gate_in_a_dry_run_is_not_shut_by_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(seat: VllmSeat) -> None:
        seat._worker = SimpleNamespace(status=lambda: Status(7, running=1))  # type: ignore[assignment]
        for now_s in (0.0, 1.0):
            seat._look_at_gate(now_s)
        assert seat.shut_s == 1.0
        seat.wishes["dry_run"] = True
        seat._look_at_gate(2.0)
        assert seat.shut_s is None

    story(tell, tmp_path, monkeypatch)


class DyingEngine:
    @property
    def behind_s(self) -> float:
        raise Unavailable("the rollout engine is gone")


def test_an_engine_that_dies_while_it_is_looked_at_is_not_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(seat: VllmSeat) -> None:
        seat._process, seat._worker = SimpleNamespace(is_running=True), DyingEngine()  # type: ignore[assignment]
        assert not seat._is_well()

    story(tell, tmp_path, monkeypatch)


def test_a_beat_that_nobody_can_be_told_of_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = list[int]()

    def fail() -> None:
        tries.append(1)
        raise RuntimeError("no gateway")

    def tell(seat: VllmSeat) -> None:
        seat.on_lending = fail
        seat._beat()
        assert tries

    story(tell, tmp_path, monkeypatch)


def test_a_board_whose_process_id_was_taken_over_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / f"{os.getpid()}.board", tmp_path / "other.board"
    monkeypatch.setattr(vllm_agent, "board_of", lambda url: other)

    def tell(seat: VllmSeat) -> None:
        seat._board = path
        for changes, found in (({}, path), ({"started": 1}, other)):
            BoardWriter(path, about(**changes))
            seat._find_board()
            assert seat._board == found

    story(tell, tmp_path, monkeypatch)


class Engine:
    """What a seat has in place of a worker: it does at once whatever is wanted of it."""

    def __init__(self) -> None:
        self.control: dict[str, Any] = {}

    async def want(self, **changes: Any) -> None:
        self.control |= changes

    def status(self) -> Status:
        return msgspec.structs.replace(STATUS, kv_blocks_limit=8 if self.control.get("kv_bytes") is None else 0)


def test_a_seat_is_parked_and_called_back_as_the_gateway_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(vllm_agent, "own_folder", lambda: tmp_path)
        seat = VllmSeat(VllmLending(RolloutEngine(Path("models/rollout")), "http://127.0.0.1:1"))
        seat._board, engine, heard = tmp_path / "board", Engine(), list[object]()
        seat._worker, seat.on_lending = engine, lambda: heard.append(seat.lending_status)  # type: ignore[assignment]
        await seat.want()
        assert place(seat) == ("lending", "resident", True)
        await seat.ask(messages.Want(False))
        assert place(seat) == ("parked", "parked", False)
        assert (engine.control["tokens"], engine.control["kv_bytes"], engine.control["stopped"]) == (0, 0, UNWANTED)
        await seat.want(kv_bytes=4000)  # a limit of the owner's does not call it back
        assert engine.control["kv_bytes"] == 0
        await seat.want(kv_bytes=None)
        await seat.ask(messages.Want(True))
        assert place(seat) == ("lending", "resident", True)
        status = seat.lending_status
        assert status is not None and status.activation_s is not None and status.parking_s is not None
        assert len(heard) == 2, "the gateway hears of both at once"
        seat.stopped = PAUSED
        await seat.ask(messages.Want(False))
        assert place(seat) == ("paused", "parked", False), "the owner's word goes before"
        seat._locks.close()

    asyncio.run(story())


def place(seat: VllmSeat) -> tuple[str, str, bool]:
    status = seat.lending_status
    assert status is not None
    return status.state, status.model, seat.trouble is None


def test_a_dedicated_worker_is_not_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(vllm_agent, "own_folder", lambda: tmp_path)
        seat = VllmSeat(VllmLending(RolloutEngine(Path("models/rollout"))))
        assert seat.lending_status is None
        seat._locks.close()

    asyncio.run(story())


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OSError(12, "Cannot allocate memory"), id="no room"),
        pytest.param(subprocess.SubprocessError("Exception occurred in preexec_fn."), id="not its core"),
    ],
)
def test_a_machine_without_room_for_an_engine_is_said_and_not_died_of(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = list[int]()

    def no_room(engine: RolloutEngine) -> None:
        tries.append(1)
        raise error

    async def story() -> None:
        monkeypatch.setattr(vllm_agent, "own_folder", lambda: tmp_path)
        monkeypatch.setattr(vllm_agent, "EngineProcess", no_room)
        for name in ("BEAT_S", "PAUSE_S"):
            monkeypatch.setattr(vllm_agent, name, 0.001)
        seat = VllmSeat(VllmLending(RolloutEngine(Path("models/rollout"))))
        async with asyncio.timeout(10):
            await seat._keep()
        assert str(error) in seat.gave_up.result().what
        assert len(tries) == vllm_agent.QUICK_DEATHS_MAX - 1, "and it was tried again before"
        seat._locks.close()

    asyncio.run(story())


def test_a_keeper_that_dies_of_anything_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def up() -> None:
        return

    def fail() -> bool:
        raise RuntimeError("nobody thought of this")

    async def story() -> None:
        monkeypatch.setattr(vllm_agent, "own_folder", lambda: tmp_path)
        monkeypatch.setattr(vllm_agent, "BEAT_S", 0.001)
        seat = VllmSeat(VllmLending(RolloutEngine(Path("models/rollout"))))
        monkeypatch.setattr(seat, "_start_engine", up)
        monkeypatch.setattr(seat, "_is_well", fail)
        await seat.start()
        async with asyncio.timeout(10):
            why = await seat.gave_up
        assert "nobody thought of this" in why.what
        await seat.close()

    asyncio.run(story())


def test_figures_go_on_where_an_engine_or_its_terms_end() -> None:
    tally = LendingTally()

    def told(process_id: int, evictions: int, **lent: Any) -> tuple[Any, ...]:
        found = tally.total(Status(process_id, evictions=evictions, lent=Lent(**lent)))
        return found.evictions, found.lent.steps, found.lent.seconds, found.lent.breaches, found.lent.missing

    assert told(7, 5, steps=3, seconds=0.25, breaches={"ttft": 2}) == (5, 3, 0.25, {"ttft": 2}, "")
    assert told(7, 6, missing="64 steps") == (6, 3, 0.25, {"ttft": 2}, "64 steps"), "new terms"
    assert told(7, 6, steps=1, seconds=0.5, breaches={"step": 1}) == (6, 4, 0.75, {"ttft": 2, "step": 1}, "")
    assert told(0, 0) == (6, 4, 0.75, {"ttft": 2, "step": 1}, ""), "no engine"
    assert told(8, 1, steps=9) == (7, 13, 0.75, {"ttft": 2, "step": 1}, ""), "another one"


def test_what_was_lent_before_a_restart_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(seat: VllmSeat) -> None:
        for process_id in (7, 8):
            status = msgspec.structs.replace(STATUS, process_id=process_id)
            engine: Any = SimpleNamespace(status=lambda status=status: status, wish=lambda **wishes: 0)
            seat._worker = engine
            seat._beat()
        told = seat.lending_status
        assert told is not None
        assert (told.lent_steps, told.lent_s, told.breaches["ttft"], told.evictions) == (6, 0.5, 4, 10)

    story(tell, tmp_path, monkeypatch)


def test_figures_are_scraped_before_there_is_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(seat: VllmSeat) -> None:
        assert b"rose_gate_open 0.0" in VllmOwner(seat, "a-token").metrics.exposition()

    story(tell, tmp_path, monkeypatch)


def test_memory_that_was_drained_is_not_given_back_by_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(vllm_agent, "own_folder", lambda: tmp_path)
        seat = VllmSeat(VllmLending(RolloutEngine(Path("models/rollout")), "http://127.0.0.1:1"))
        seat._board, engine, owner = tmp_path / "board", Engine(), VllmOwner(seat, "a-token")
        seat._worker = engine  # type: ignore[assignment]
        for action in ("drain", "limits", "pause", "limits"):
            told = await owner.obey(action, ControlBody(memory_share=0.5))
            assert (engine.control["kv_bytes"], told.memory_share) == (0, 1.0 if action == "drain" else 0.5)
        await owner.obey("resume", ControlBody())
        assert engine.control["kv_bytes"] == seat.lending.engine.kv_memory_mb << 19
        seat._locks.close()

    asyncio.run(story())


def test_it_is_said_that_vllm_keeps_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(vllm_agent, "own_folder", lambda: tmp_path)
        seat = VllmSeat(VllmLending(RolloutEngine(Path("models/rollout")), "http://127.0.0.1:1"))
        seat._board, seat._worker = tmp_path / "board", Engine()  # type: ignore[assignment]
        told = await VllmOwner(seat, "a-token").obey("remove", ControlBody())
        assert told.state == "drained" and "vLLM keeps the weights" in told.why
        seat._locks.close()

    asyncio.run(story())
