"""Admin controls in the serving front: which commands are kept, the figures, and the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.unit.device import fake_engines
from tests.unit.device.fake_engines import DRAIN, PAUSE, RESUME, Engines
from tests.unit.rollout_world import LENDING

from rose.config.server_settings import LendSettings
from rose.core.accountant import Breach
from rose.core.lending_state import LendingState
from rose.device import engine_messages
from rose.device.admin_routes import BREACHES_LOGGED, LendingControls, mirror_lending, without_rollouts
from rose.device.engine_channel import DeviceEvents
from rose.device.engine_messages import AdminCommand
from rose.engines.base import LendingStatus
from rose.errors import RequestRefused, Unavailable
from rose.observe.journal import Journal, read
from rose.observe.metrics import Metrics

run_story = fake_engines.run_story


def test_a_command_counts_even_if_the_client_leaves_before_the_reply(run_story: Callable[..., None]) -> None:
    async def story(engines: Engines) -> None:
        engines.newest.may_answer.clear()
        saying = asyncio.create_task(engines.send(AdminCommand("limits", 0.5)))
        await asyncio.sleep(0)
        saying.cancel()
        await asyncio.gather(saying, return_exceptions=True)
        engines.newest.may_answer.set()
        await asyncio.sleep(0.01)
        await engines.die()
        assert engines.lend.commands == (AdminCommand("limits", 0.5),)

    run_story(story)


@pytest.mark.parametrize(
    "word, words", [(DRAIN, (PAUSE, DRAIN)), (RESUME, (PAUSE,)), (AdminCommand("limits", 2.0), (PAUSE,))]
)
def test_of_refused_commands_only_those_that_stop_lending_are_kept(
    run_story: Callable[..., None], word: AdminCommand, words: tuple[AdminCommand, ...]
) -> None:
    async def story(engines: Engines) -> None:
        await engines.send(PAUSE)
        engines.newest.refuses = True
        with pytest.raises(RequestRefused):
            await engines.send(word)
        await engines.die()
        assert engines.lend.commands == words

    run_story(story)


def engine_of_events() -> Any:
    """Return what controls need of a supervisor to get notices."""
    return SimpleNamespace(client=SimpleNamespace(events=DeviceEvents()))


def breached(objective: Any) -> engine_messages.Breached:
    return engine_messages.Breached(Breach(objective, "a late step", 1.0, 0.2, 0.3, 0.1))


def test_breaches_are_journaled_and_the_first_missed_deadlines_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = engine_of_events()
    with Journal(tmp_path / "journal.jsonl") as journal:
        LendingControls(supervisor, "token", Metrics(process_facts=False), journal)
        publish = supervisor.client.events.notices.publish
        publish(breached("step"))
        for _ in range(BREACHES_LOGGED + 5):
            publish(breached("ttft"))
    assert len(list(read(tmp_path / "journal.jsonl"))) == BREACHES_LOGGED + 6
    logged = [record.message for record in caplog.records if "breach (" in record.message]
    assert len(logged) == BREACHES_LOGGED and all("(ttft)" in message for message in logged)


def test_a_journal_that_cannot_be_written_is_closed_and_lending_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def append(at_s: float, fact: Any) -> None:
        raise Unavailable("the disk is full")

    supervisor, journal = engine_of_events(), cast(Any, SimpleNamespace(append=append))
    LendingControls(supervisor, "token", Metrics(process_facts=False), journal)
    for _ in range(2):
        supervisor.client.events.notices.publish(breached("ttft"))
    assert [record.message for record in caplog.records].count("the journal is closed: the disk is full") == 1


def test_metrics_show_the_newest_status_and_nothing_without_one() -> None:
    metrics, newest = Metrics(process_facts=False), list[LendingStatus]()
    mirror_lending(metrics, lambda: newest[-1] if newest else None)
    assert "rose_rollout_tokens_total" not in metrics.exposition().decode()
    newest.append(
        msgspec.structs.replace(
            LENDING, lent_tokens=7, breaches={"ttft": 2, "ambiguous": 3}, state=LendingState.LENDING
        )
    )
    text = metrics.exposition().decode()
    for line in (
        "rose_rollout_tokens_total 7.0",
        'rose_slo_breaches_total{kind="ttft"} 2.0',
        "rose_slo_doubtful_total 3.0",
        "rose_lending 1.0",
    ):
        assert line in text
    newest.append(msgspec.structs.replace(LENDING, state=LendingState.PAUSED))
    assert "rose_lending 0.0" in metrics.exposition().decode()


def test_a_device_without_its_rollout_model_reports_the_limits_in_force() -> None:
    limits = AdminCommand("limits", memory_share=0.5)
    lend = engine_messages.Lend("rollouts", LendSettings(compute_share=0.7), (PAUSE, limits))
    status = without_rollouts(lend, "the folder is gone")
    assert (status.state, status.model, status.why) == ("failed", "absent", "the folder is gone")
    assert (status.memory_share, status.compute_share) == (0.5, 0.7)


def test_a_device_that_lends_nothing_records_no_steps(run_story: Callable[..., None]) -> None:
    async def story(engines: Engines) -> None:
        with pytest.raises(Unavailable, match="records no steps"):
            await engines.controls.steps()

    run_story(story)
