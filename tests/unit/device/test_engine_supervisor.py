"""Engines that die behind a front: the owner's word outlives them, and what rollouts break is not serving's end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.unit.device import fake_engines
from tests.unit.device.fake_engines import DRAIN, DRY_RUN, LENT, PAUSE, REMOVE, RESUME, Engines
from tests.unit.device.test_supervision import broken

from rose.config.server_settings import EngineSettings
from rose.core.history import HistorySnapshot
from rose.device import engine_messages
from rose.device import engine_supervisor as supervisor
from rose.device.engine_messages import AdminCommand
from rose.device.engine_supervisor import HELD_BACK, RESTARTS, Supervisor
from rose.errors import RequestRefused

run_story = fake_engines.run_story


DEATHS_MAX = int(RESTARTS.deaths_max)
ALONE = engine_messages.StartEngine("m:f", "folder", "cpu:0", EngineSettings())


@pytest.mark.parametrize(
    "said, words",
    [
        ([], ()),
        ([AdminCommand("status")], ()),
        ([PAUSE], (PAUSE,)),
        ([DRAIN], (DRAIN,)),
        ([REMOVE], (REMOVE,)),
        ([DRY_RUN], (DRY_RUN,)),
        ([PAUSE, DRAIN, PAUSE], (DRAIN, PAUSE)),
        ([DRAIN, RESUME], ()),
        ([DRAIN, RESUME, PAUSE], (PAUSE,)),
        ([AdminCommand("limits", 0.5), AdminCommand("limits", None, 0.3)], (AdminCommand("limits", 0.5, 0.3),)),
        ([AdminCommand("limits", 0.5), AdminCommand("limits", 0.7)], (AdminCommand("limits", 0.7),)),
        ([AdminCommand("limits", 0.5), DRAIN, RESUME], (AdminCommand("limits", 0.5),)),
    ],
)
def test_the_next_engine_gets_admin_commands_with_its_start(
    run_story: Callable[..., None], said: list[AdminCommand], words: tuple[AdminCommand, ...]
) -> None:
    async def story(engines: Engines) -> None:
        assert engines.lend == LENT.lend
        await engines.send(*said)
        await engines.die()
        assert engines.lend.commands == words
        await engines.die()
        assert engines.lend.commands == words, "nor is it forgotten by the one after that"

    run_story(story)


def test_the_next_engine_gets_the_learnt_history(run_story: Callable[..., None]) -> None:
    learnt = HistorySnapshot(60.0, (40,), (9000,), (0.3,), ((0.02,),), 500, 8.0, 300.0)

    async def story(engines: Engines) -> None:
        engines.supervisor.client.events.history.publish(learnt)
        for _ in range(2):
            await engines.die()
            assert engines.lend.history == learnt

    run_story(story)


def test_rollouts_are_held_back_after_two_quick_deaths_of_a_lent_engine(
    run_story: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async def story(engines: Engines) -> None:
        await engines.die()
        assert not engines.lend.held_back and HELD_BACK not in caplog.text
        await engines.die()
        assert engines.lend.held_back == HELD_BACK
        assert "held back" in HELD_BACK and "rose lend resume" in HELD_BACK
        assert [record.message for record in caplog.records].count(HELD_BACK) == 1
        await engines.die()
        assert engines.lend.held_back == HELD_BACK, "until the owner says so"
        await engines.send(RESUME)
        await engines.die()
        assert not engines.lend.held_back, "and then they are tried again as before"
        await engines.die()
        assert engines.lend.held_back == HELD_BACK

    with caplog.at_level(logging.INFO, logger="rose.device"):
        run_story(story)


def test_serving_is_not_given_up_for_deaths_rollouts_may_have_caused(run_story: Callable[..., None]) -> None:
    async def story(engines: Engines) -> None:
        for _ in range(3 * DEATHS_MAX):
            await engines.die()
            if engines.lend.held_back:
                await engines.send(RESUME)
        assert not engines.has_given_up and engines.supervisor.client.trouble is None

    run_story(story)


@pytest.mark.parametrize(
    "command, word, deaths",
    [(ALONE, None, DEATHS_MAX), (LENT, DRAIN, DEATHS_MAX), (LENT, None, 2 + DEATHS_MAX)],
    ids=["alone", "drained", "lent, then held back"],
)
def test_an_engine_that_dies_without_lending_is_given_up(
    run_story: Callable[..., None], command: engine_messages.StartEngine, word: AdminCommand | None, deaths: int
) -> None:
    async def story(engines: Engines) -> None:
        if word is not None:
            await engines.send(word)
        for _ in range(deaths - 1):
            await engines.die()
            assert not engines.has_given_up
        await engines.die()
        assert engines.has_given_up

    run_story(story, command)


def is_lent(command: engine_messages.StartEngine) -> bool:
    return command.lend is not None


@pytest.mark.parametrize(
    "said", [[], [DRAIN], [PAUSE, AdminCommand("limits", 0.5)]], ids=["lent", "drained", "limited"]
)
def test_an_engine_that_fails_with_the_rollout_model_starts_without_it(
    run_story: Callable[..., None], said: list[AdminCommand]
) -> None:
    async def story(engines: Engines) -> None:
        await engines.send(*said)
        engines.unable = is_lent
        await engines.die()
        assert engines.supervisor.client.trouble is None
        assert [is_lent(start) for start in engines.starts] == [True, True, False]
        status = await engines.controls.ask(AdminCommand("status"))
        assert (status.state, status.model, status.lent_steps) == ("failed", "absent", 0)
        assert "there is no such folder" in status.why and status.memory_share == (0.5 if len(said) == 2 else 1.0)
        for word in (RESUME, DRY_RUN, AdminCommand("limits", 2.0)):
            with pytest.raises(RequestRefused, match="restart the device"):
                await engines.send(word)
        await engines.send(PAUSE)
        await engines.die()
        assert not is_lent(engines.starts[-1]), "until the device is restarted"

    run_story(story)


def test_an_engine_that_starts_neither_way_does_not_blame_rollouts(run_story: Callable[..., None]) -> None:
    async def story(engines: Engines) -> None:
        engines.unable = lambda command: len(engines.starts) < 5
        await engines.die()
        assert [is_lent(start) for start in engines.starts] == [True, True, False, True, False]
        assert not engines.supervisor.desired.is_lending
        engines.unable = lambda command: len(engines.starts) < 7
        await engines.die()
        assert is_lent(engines.starts[-1]) and engines.lend == LENT.lend, "tried again, and nothing is held back"
        engines.unable = lambda command: True
        await engines.die()
        assert engines.has_given_up

    run_story(story)


def test_deaths_after_a_long_life_hold_nothing_back(
    run_story: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(engines: Engines) -> None:
        for _ in range(2 * DEATHS_MAX):
            await engines.die()
            assert not engines.lend.held_back and not engines.has_given_up

    monkeypatch.setattr(supervisor, "RESTARTS", replace(supervisor.RESTARTS, healthy_s=0.0))
    run_story(story)


def test_a_supervisor_that_fails_ends_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        command = engine_messages.StartEngine("m:f", "folder", "cpu:0", EngineSettings())
        found = Supervisor(command, on_progress=lambda what: None)
        monkeypatch.setattr(found, "_start_engine", lambda: asyncio.sleep(0))
        monkeypatch.setattr(found, "_keep", broken)
        await found.start()
        async with asyncio.timeout(10):
            assert "KeyError" in (await found.client.gave_up).what

    asyncio.run(story())
