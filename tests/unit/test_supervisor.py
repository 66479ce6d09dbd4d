"""Engines that die behind a front: the owner's word outlives them, and what rollouts break is not serving's end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.rollout_world import LENDING

from rose.config.device import EngineSettings, LendSettings
from rose.coserve import messages
from rose.coserve.messages import Control
from rose.engines.base import EngineFacts
from rose.errors import ModelError, RequestRefused, Unavailable
from rose.front import supervisor
from rose.front.lending import LendingDesk
from rose.front.standing import HELD_BACK
from rose.front.supervisor import QUICK_DEATHS_MAX, Supervisor
from rose.observe.metrics import Metrics

FACTS = EngineFacts("0", 0, 0, 100, 0, 0, 16, 1024, 512)
ALONE = messages.Start("m:f", "folder", "cpu:0", EngineSettings())
LENT = messages.Start("m:f", "folder", "cpu:0", EngineSettings(), lend=messages.Lend("rollouts", LendSettings()))


class FakeChannel:
    """One engine process, as its supervisor sees it."""

    def __init__(self) -> None:
        self.facts, self.lending, self.process_id = FACTS, LENDING, 1
        self.gone: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self.refuses = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def ask(self, command: Any) -> messages.Reply:
        await self.may_answer.wait()
        if self.refuses:
            raise RequestRefused("the rollout model was removed after a failure")
        return messages.Reply(1, FACTS, lending=LENDING)

    async def close(self) -> None:
        return


class Engines:
    """Every engine of one device, the start command of each, and the owner's desk."""

    def __init__(self, command: messages.Start) -> None:
        self.starts: list[messages.Start] = []
        self.unable: Callable[[messages.Start], bool] = lambda command: False
        self.supervisor = Supervisor(command, on_progress=lambda what: None)
        self.desk = LendingDesk(self.supervisor, "token", Metrics(process_facts=False))
        self.newest: FakeChannel

    async def start(self, command: messages.Start, **_: Any) -> FakeChannel:
        self.starts.append(command)
        if self.unable(command):
            raise ModelError("there is no such folder")
        self.newest = FakeChannel()
        return self.newest

    @property
    def lend(self) -> messages.Lend:
        """On what terms the newest engine was started."""
        assert self.starts[-1].lend is not None
        return self.starts[-1].lend

    @property
    def has_given_up(self) -> bool:
        return self.supervisor.gave_up.done()

    async def die(self) -> None:
        """Until there is another engine, or there will be none."""
        known = len(self.starts)
        self.newest.gone.set_result(Unavailable("killed"))
        async with asyncio.timeout(30):
            while not self.has_given_up and (len(self.starts) == known or self.supervisor.trouble is not None):
                await asyncio.sleep(0)

    async def say(self, *words: Control) -> None:
        for word in words:
            await self.desk.ask(word)


Story = Callable[[Engines], Awaitable[None]]


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def told(story: Story, command: messages.Start = LENT) -> None:
        async def whole() -> None:
            engines = Engines(command)
            monkeypatch.setattr(supervisor, "DeviceChannel", SimpleNamespace(start=engines.start))
            await engines.supervisor.start()
            await story(engines)
            await engines.supervisor.close()

        asyncio.run(whole())

    monkeypatch.setattr(supervisor, "PAUSE_FIRST_S", 0.0)
    return told


PAUSE, DRAIN, REMOVE, DRY_RUN, RESUME = map(Control, cast(list[Any], ["pause", "drain", "remove", "dry_run", "resume"]))


@pytest.mark.parametrize(
    "said, words",
    [
        ([], ()),
        ([Control("status")], ()),
        ([PAUSE], (PAUSE,)),
        ([DRAIN], (DRAIN,)),
        ([REMOVE], (REMOVE,)),
        ([DRY_RUN], (DRY_RUN,)),
        ([PAUSE, DRAIN, PAUSE], (DRAIN, PAUSE)),
        ([DRAIN, RESUME], ()),
        ([DRAIN, RESUME, PAUSE], (PAUSE,)),
        ([Control("limits", 0.5), Control("limits", None, 0.3)], (Control("limits", 0.5, 0.3),)),
        ([Control("limits", 0.5), Control("limits", 0.7)], (Control("limits", 0.7),)),
        ([Control("limits", 0.5), DRAIN, RESUME], (Control("limits", 0.5),)),
    ],
)
def test_the_next_engine_hears_what_the_owner_said_with_its_start_command(
    tell: Callable[..., None], said: list[Control], words: tuple[Control, ...]
) -> None:
    async def story(engines: Engines) -> None:
        assert engines.lend == LENT.lend
        await engines.say(*said)
        await engines.die()
        assert engines.lend.words == words
        await engines.die()
        assert engines.lend.words == words, "nor is it forgotten by the one after that"

    tell(story)


def test_who_says_it_may_leave_before_the_answer(tell: Callable[..., None]) -> None:
    async def story(engines: Engines) -> None:
        engines.newest.may_answer.clear()
        saying = asyncio.create_task(engines.say(Control("limits", 0.5)))
        await asyncio.sleep(0)
        saying.cancel()
        await asyncio.gather(saying, return_exceptions=True)
        engines.newest.may_answer.set()
        await asyncio.sleep(0.01)
        await engines.die()
        assert engines.lend.words == (Control("limits", 0.5),)

    tell(story)


@pytest.mark.parametrize(
    "word, words", [(DRAIN, (PAUSE, DRAIN)), (RESUME, (PAUSE,)), (Control("limits", 2.0), (PAUSE,))]
)
def test_of_words_that_an_engine_refuses_only_those_that_stop_lending_are_kept(
    tell: Callable[..., None], word: Control, words: tuple[Control, ...]
) -> None:
    async def story(engines: Engines) -> None:
        await engines.say(PAUSE)
        engines.newest.refuses = True
        with pytest.raises(RequestRefused):
            await engines.say(word)
        await engines.die()
        assert engines.lend.words == words

    tell(story)


def test_a_lent_engine_that_dies_twice_comes_back_with_rollouts_held_back(
    tell: Callable[..., None], caplog: pytest.LogCaptureFixture
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
        await engines.say(RESUME)
        await engines.die()
        assert not engines.lend.held_back, "and then they are tried again as before"
        await engines.die()
        assert engines.lend.held_back == HELD_BACK

    with caplog.at_level(logging.INFO, logger="rose.front"):
        tell(story)


def test_serving_is_not_given_up_for_deaths_that_rollouts_may_have_caused(tell: Callable[..., None]) -> None:
    async def story(engines: Engines) -> None:
        for _ in range(3 * QUICK_DEATHS_MAX):
            await engines.die()
            if engines.lend.held_back:
                await engines.say(RESUME)
        assert not engines.has_given_up and engines.supervisor.trouble is None

    tell(story)


@pytest.mark.parametrize(
    "command, word, deaths",
    [(ALONE, None, QUICK_DEATHS_MAX), (LENT, DRAIN, QUICK_DEATHS_MAX), (LENT, None, 2 + QUICK_DEATHS_MAX)],
    ids=["alone", "drained", "lent, then held back"],
)
def test_an_engine_that_dies_without_lending_is_given_up(
    tell: Callable[..., None], command: messages.Start, word: Control | None, deaths: int
) -> None:
    async def story(engines: Engines) -> None:
        if word is not None:
            await engines.say(word)
        for _ in range(deaths - 1):
            await engines.die()
            assert not engines.has_given_up
        await engines.die()
        assert engines.has_given_up

    tell(story, command)


def is_lent(command: messages.Start) -> bool:
    return command.lend is not None


@pytest.mark.parametrize("said", [[], [DRAIN], [PAUSE, Control("limits", 0.5)]], ids=["lent", "drained", "limited"])
def test_an_engine_that_does_not_start_with_the_rollout_model_is_started_without(
    tell: Callable[..., None], said: list[Control]
) -> None:
    async def story(engines: Engines) -> None:
        await engines.say(*said)
        engines.unable = is_lent
        await engines.die()
        assert engines.supervisor.trouble is None
        assert [is_lent(start) for start in engines.starts] == [True, True, False]
        status = await engines.desk.ask(Control("status"))
        assert (status.state, status.model, status.lent_steps) == ("failed", "absent", 0)
        assert "there is no such folder" in status.why and status.memory_share == (0.5 if len(said) == 2 else 1.0)
        for word in (RESUME, DRY_RUN, Control("limits", 2.0)):
            with pytest.raises(RequestRefused, match="restart the device"):
                await engines.say(word)
        await engines.say(PAUSE)
        await engines.die()
        assert not is_lent(engines.starts[-1]), "until the device is restarted"

    tell(story)


def test_an_engine_that_starts_neither_way_was_not_the_rollout_models_fault(tell: Callable[..., None]) -> None:
    async def story(engines: Engines) -> None:
        engines.unable = lambda command: len(engines.starts) < 5
        await engines.die()
        assert [is_lent(start) for start in engines.starts] == [True, True, False, True, False]
        assert not engines.supervisor.orders.is_lending
        engines.unable = lambda command: len(engines.starts) < 7
        await engines.die()
        assert is_lent(engines.starts[-1]) and engines.lend == LENT.lend, "tried again, and nothing is held back"
        engines.unable = lambda command: True
        await engines.die()
        assert engines.has_given_up

    tell(story)


def test_deaths_after_a_long_life_hold_nothing_back(tell: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(engines: Engines) -> None:
        for _ in range(2 * QUICK_DEATHS_MAX):
            await engines.die()
            assert not engines.lend.held_back and not engines.has_given_up

    monkeypatch.setattr(supervisor, "QUICK_DEATH_S", 0.0)
    tell(story)
