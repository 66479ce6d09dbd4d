"""The parts of a simulated world: its network, its processes, its model, its command."""

from __future__ import annotations

import asyncio
import random

import pytest

from rose.cli.main import _run as run_command
from rose.clock import VirtualClock, run_virtual
from rose.engines.base import Budget, Request, Sampling
from rose.engines.profiles import load_profile
from rose.errors import ConfigError
from rose.sim import world
from rose.sim.gate import Gate
from rose.sim.law import LawfulEngine, drawn, is_whole
from rose.sim.story import Story
from rose.sim.wire import Frame, Place, Wire


def test_a_stopped_process_does_everything_later_in_order():
    gate, done = Gate(), []
    gate.enter(lambda: done.append(1))
    gate.stop()
    gate.enter(lambda: done.append(2))
    gate.enter(lambda: done.append(3))
    assert done == [1]
    gate.go_on()
    assert done == [1, 2, 3]


def test_a_dead_process_does_nothing_later():
    gate, done = Gate(), []
    gate.stop()
    gate.enter(lambda: done.append(1))
    gate.clear()
    gate.go_on()
    assert done == []


def heard_by_the_gateway(*frames: Frame, cut_s: float = 0.0, ends_by: str = "") -> list[Frame]:
    heard: list[Frame] = []

    async def talk() -> None:
        place = Place()
        wire = Wire(place, random.Random(1), heard.append, lambda frame: None)
        if cut_s:
            place.cut_off()
            asyncio.get_running_loop().call_later(cut_s, place.heal)
        for frame in frames:
            wire.up.send(frame)
        if ends_by == "agent":
            wire.ended_by_agent()
        elif ends_by == "power":
            wire.ended_by_agent(silently=True)
        elif ends_by == "gateway":
            wire.ended_by_gateway()
        await asyncio.sleep(10)

    run_virtual(talk(), VirtualClock())
    return heard


@pytest.mark.parametrize(
    "cut_s, ends_by, heard",
    [
        (0.0, "", [b"a", b"b", b"c"]),
        (5.0, "", [b"a", b"b", b"c"]),
        (50.0, "", []),
        (0.0, "agent", [b"a", b"b", b"c", None]),
        (0.0, "power", [b"a", b"b", b"c"]),
        (0.0, "gateway", []),
    ],
)
def test_frames_arrive_in_order_while_the_connection_lives(cut_s, ends_by, heard):
    assert heard_by_the_gateway(b"a", b"b", b"c", cut_s=cut_s, ends_by=ends_by) == heard


def answer(weights: int, *, seed: int = 3) -> list[int]:
    engine = LawfulEngine(load_profile("cpu"))
    engine.weights = weights
    engine.add(Request("a", (9, 9, 9), Sampling(max_tokens=20, seed=seed)))
    found: list[int] = []
    while (plan := engine.plan(Budget(512, 8))) is not None:
        found += [token_id for event in engine.step(plan) for token_id in event.token_ids]
    return found


def test_a_lawful_engine_draws_by_seed_position_and_weights():
    found = answer(weights=4)
    assert found == [drawn(3, 3 + index, 4)[0] for index in range(len(found))]
    assert is_whole(found, Sampling(max_tokens=20))
    assert not is_whole(found[:-1], Sampling(max_tokens=20))
    assert found != answer(weights=5) and found != answer(weights=4, seed=2)


def test_a_story_is_told_the_same_way_or_has_another_digest():
    stories = [Story(lambda: 1.0) for _ in range(3)]
    for story, word in zip(stories, ("one", "one", "two"), strict=True):
        story.tell("somebody", word)
    digests = [story.digest for story in stories]
    assert digests[0] == digests[1] != digests[2]


def test_the_command_shows_a_world(capsys):
    assert run_command("sim", ["--seed", "12", "--minutes", "0.05"]) == 0
    shown = capsys.readouterr().out
    assert "seed     12  fine" in shown and "Next: rose sim --seed 12 --story" in shown


def test_the_command_tells_the_story(capsys):
    assert run_command("sim", ["--seeds", "12..12", "--minutes", "0.05", "--story"]) == 0
    assert "published version 1" in capsys.readouterr().out


def test_the_command_says_what_did_not_hold_and_how_to_see_it_again(capsys, monkeypatch):
    class Blind(world.Judge):
        def check_all_done(self) -> None:
            raise world.Violation("the judge is in a bad mood")

    monkeypatch.setattr(world, "Judge", Blind)
    assert run_command("sim", ["--seed", "12", "--minutes", "0.05"]) == 1
    shown = capsys.readouterr().out
    assert "what did not hold: the judge is in a bad mood" in shown
    assert "the last events before it" in shown
    assert "try: rose sim --seed 12 --minutes 0.05 --story" in shown


@pytest.mark.parametrize(
    "words, why", [(["--seeds", "5"], "names no seeds"), (["--minutes", "-1"], "cannot be simulated")]
)
def test_bad_words_are_explained(words, why):
    with pytest.raises(ConfigError, match=why):
        run_command("sim", words)
