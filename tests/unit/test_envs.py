"""Environments: FrozenLake in text, the guard around any environment, and episodes played token by token."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest

from rose.envs import base
from rose.envs.base import EnvironmentFailed, Guarded, Outcome, Patience
from rose.envs.frozenlake import ACTIONS, FrozenLake, LakeSettings
from rose.envs.play import Answer, ChatFrame, Episode, TurnSampling, VersionSpan, play, play_again
from rose.envs.registry import ENVIRONMENTS, find_environment, make_environment
from rose.errors import ConfigError, Unavailable
from rose.models.folder import load_model_folder
from rose.models.presets import write_preset

QUICK = Patience(reset_s_max=0.05, step_s_max=0.05, resets_max=3)


def answer_text(action: str) -> str:
    return f"<answer>{action}</answer>"


# FrozenLake


def test_a_lake_in_one_line():
    lake = FrozenLake()
    assert lake.reset(3) == "0,0 L#D_R_U#"  # the map of seed 3 is SFHF FFFF FFFF FFFG
    assert lake.step(answer_text("Right")) == Outcome("0,1 L_D_ROU#")
    fallen = lake.step(answer_text("Right"))
    assert fallen.is_done and not fallen.is_success and fallen.reward == 0.0


def test_a_lake_as_a_grid():
    lake = FrozenLake(LakeSettings(view="grid"))
    assert lake.reset(3) == "P_O_\n____\n____\n___G"
    assert lake.step(answer_text("Down")).observation == "__O_\nP___\n____\n___G"


@pytest.mark.parametrize("size", [4, 8])
def test_the_expert_always_arrives(size):
    for seed in range(25):
        lake = FrozenLake(LakeSettings(size=size, turns_max=30))
        lake.reset(seed)
        outcome = Outcome("")
        while not outcome.is_done:
            outcome = lake.step(answer_text(lake.best_action()))
        assert outcome.is_success and outcome.reward == 1.0


def test_the_same_seed_is_the_same_game_even_when_slippery():
    def game(seed: int) -> list[Outcome]:
        lake = FrozenLake(LakeSettings(is_slippery=True, turns_max=12))
        lake.reset(seed)
        outcomes = [lake.step(answer_text("Right"))]
        while not outcomes[-1].is_done:
            outcomes.append(lake.step(answer_text(ACTIONS[len(outcomes) % 4])))
        return outcomes

    assert all(game(seed) == game(seed) for seed in range(20))
    assert len({tuple(outcome.observation for outcome in game(seed)) for seed in range(20)}) > 10


@pytest.mark.parametrize(
    "text, is_valid",
    [
        ("<answer>Down</answer>", True),
        ("I see ice. <answer> Down </answer> \n", True),
        ("Up ice. <answer>Up</answer> no: <answer>Down</answer>", True),
        ("<answer>down</answer>", False),
        ("<answer>Down</answer> I hope", False),
        ("<answer>Down", False),
        ("Down", False),
        ("", False),
    ],
)
def test_what_counts_as_an_answer(text, is_valid):
    lake = FrozenLake()
    lake.reset(3)
    outcome = lake.step(text)
    assert outcome.is_valid is is_valid
    assert (outcome.observation, outcome.reward) == (("1,0 L#D_R_U_", 0.0) if is_valid else ("0,0 L#D_R_U#", -0.1))


def test_a_game_ends_after_its_turns():
    lake = FrozenLake(LakeSettings(turns_max=3))
    lake.reset(3)
    assert [lake.step("").is_done for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("settings", [{"size": 5}, {"view": "map"}, {"turns_max": 0}, {"frozen_share": 0.0}])
def test_bad_lakes_are_refused(settings):
    with pytest.raises(ConfigError):
        LakeSettings(**settings)


def test_environments_by_name():
    for name in (name for name in ENVIRONMENTS if name.startswith("frozenlake")):
        assert make_environment(name).reset(1)
    assert make_environment("frozenlake", size=8).reset(1)
    with pytest.raises(ConfigError, match="did you mean frozenlake"):
        find_environment("frozenlak")
    with pytest.raises(ConfigError, match=r"did you mean turns_max\? there are size, "):
        make_environment("frozenlake", turn_max=3)
    with pytest.raises(ConfigError, match="`is_slippery` must be true or false, not 'no'"):
        make_environment("frozenlake", is_slippery="no")


# The guard


@dataclass
class Scripted:
    """Fails, hangs or answers, call by call."""

    script: list[str]
    is_quick: bool = False
    release: threading.Event = field(default_factory=threading.Event)

    def _act(self) -> None:
        deed = self.script.pop(0) if self.script else "answer"
        if deed == "hang":
            self.release.wait()
        elif deed == "raise":
            raise ValueError("no such room")

    def reset(self, seed: int) -> str:
        self._act()
        return f"seed {seed}"

    def step(self, action: str) -> Outcome:
        self._act()
        return Outcome(f"did {action}", reward=1.0, is_done=True, is_success=True)

    def close(self) -> None:
        self.release.set()


@pytest.mark.parametrize("trouble", ["raise", "hang"])
@pytest.mark.parametrize("is_quick", [False, True])
def test_a_failed_reset_is_tried_again(trouble, is_quick):
    if is_quick and trouble == "hang":
        return  # an environment that says it never waits is taken at its word
    scripted = Scripted([trouble, trouble], is_quick)
    guarded = Guarded(lambda: scripted, QUICK)
    assert asyncio.run(guarded.reset(5)) == "seed 5"
    assert scripted.script == []
    guarded.close()
    assert scripted.release.wait(10), "closing is done apart, and done"


def test_resets_are_bounded_and_say_what_happened():
    scripted = Scripted(["raise"] * 9)
    with pytest.raises(EnvironmentFailed, match=r"Scripted: reset\(5\) failed: ValueError: no such room"):
        asyncio.run(Guarded(lambda: scripted, QUICK).reset(5))
    assert len(scripted.script) == 6


def test_a_failed_step_is_not_repeated():
    async def run() -> None:
        guarded = Guarded(lambda: scripted, QUICK)
        await guarded.reset(1)
        await guarded.step("a")

    scripted = Scripted(["answer", "hang"])
    with pytest.raises(EnvironmentFailed, match=r"step took over 0.05 s"):
        asyncio.run(run())
    assert scripted.script == []
    scripted.release.set()


def test_an_environment_that_cannot_be_made():
    def make() -> Scripted:
        raise OSError("no display")

    with pytest.raises(EnvironmentFailed, match="no display"):
        asyncio.run(Guarded(make, QUICK).reset(1))


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize(
    "answer, word",
    [
        (None, "it answered None, which is no Outcome"),
        (("text", 1.0, True), "which is no Outcome"),
        (Outcome("x", math.nan), "its reward is nan"),
        (Outcome("x", -math.inf), "its reward is -inf"),
        (Outcome("x", "1.0"), "its reward is '1.0', which is no number"),
        (Outcome("x", True), "which is no number"),
        (Outcome("x", 1.0, is_done="yes"), "not true or false"),
        (Outcome(b"bytes", 1.0), "which is no text"),
        (Outcome("\ud800", 1.0), "UnicodeEncodeError"),
        (Outcome("x" * (base.OBSERVATION_CHARACTERS_MAX + 1)), "characters"),
        (SystemExit(3), "SystemExit: 3"),
        (StopIteration(), "StopIteration"),
        (asyncio.CancelledError(), "CancelledError"),
        (TimeoutError("of its own"), "of its own"),
    ],
)
def test_nonsense_is_a_failure_in_words(answer, word, is_quick):
    if is_quick and isinstance(answer, asyncio.CancelledError):
        return  # in place nobody can tell it from the loop's own word
    closed = threading.Event()

    class Nonsense(Scripted):
        def step(self, action: str) -> Outcome:
            if isinstance(answer, BaseException):
                raise answer
            return answer

        def close(self) -> None:
            closed.set()

    async def run() -> None:
        guarded = Guarded(lambda: Nonsense([], is_quick), Patience(step_s_max=10.0))
        await guarded.reset(1)
        await guarded.step("a")

    with pytest.raises(EnvironmentFailed, match="Nonsense: step failed") as failed:
        asyncio.run(run())
    assert word in failed.value.what and closed.wait(10)


def test_a_first_observation_that_is_no_text_is_asked_for_again():
    class Mute(Scripted):
        def reset(self, seed: int) -> str:
            return self.script.pop(0)

    mute = Mute([None, 7, "hello"])
    assert asyncio.run(Guarded(lambda: mute, QUICK).reset(1)) == "hello"


def test_numbers_of_numpy_are_numbers():
    given = Outcome("x", np.float32(0.5), np.bool_(True), np.bool_(False))
    assert base.sensible_outcome(given) == Outcome("x", 0.5, True, False)


def test_an_episode_that_is_stopped_leaves_its_environment_to_the_call_that_runs():
    entered, closed = threading.Event(), threading.Event()

    class Slow(Scripted):
        def step(self, action: str) -> Outcome:
            entered.set()
            self.release.wait()
            assert not closed.is_set(), "closed under its feet"
            return Outcome("late")

        def close(self) -> None:
            closed.set()

    async def run() -> bool:
        guarded = Guarded(lambda: slow, Patience())
        await guarded.reset(1)
        playing = asyncio.create_task(guarded.step("a"))
        await asyncio.to_thread(entered.wait)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        guarded.close()
        return closed.is_set()

    slow = Slow([])
    assert asyncio.run(run()) is False
    slow.release.set()
    assert closed.wait(10), "it closes once the call has come back"


@pytest.mark.parametrize("is_quick", [False, True])
def test_an_environment_that_cannot_even_be_closed_harms_nobody(is_quick):
    called = threading.Event()

    class Stubborn(Scripted):
        def close(self) -> None:
            called.set()
            raise OSError("no")

    async def run() -> str:
        guarded = Guarded(lambda: Stubborn([], is_quick), QUICK)
        seen = await guarded.reset(1)
        guarded.close()
        return seen

    assert asyncio.run(run()) == "seed 1" and called.wait(10)


def test_too_many_hung_calls_are_an_error_of_their_own(monkeypatch):
    monkeypatch.setattr(base, "_left", {})
    monkeypatch.setattr(base, "HUNG_THREADS_MAX", 2)
    scripted = Scripted(["hang"] * 3)
    with pytest.raises(EnvironmentFailed, match="2 calls to environments never came back"):
        asyncio.run(Guarded(lambda: scripted, QUICK).reset(1))
    scripted.release.set()


# Playing


@pytest.fixture(scope="module")
def frame(tmp_path_factory) -> ChatFrame:
    folder = load_model_folder(write_preset("frozenlake-1m", tmp_path_factory.mktemp("model") / "m"))
    return ChatFrame(folder.tokenizer, folder.spec.eos_token_ids)


class ScriptedModel:
    """Says what it was told to say, and remembers what it was asked."""

    def __init__(self, frame: ChatFrame, texts: list[str], cut: bool = False) -> None:
        self.frame, self.texts, self.cut = frame, list(texts), cut
        self.prompts: list[tuple[int, ...]] = []

    async def __call__(self, token_ids, sampling) -> Answer:
        self.prompts.append(tuple(token_ids))
        ids = self.frame.tokenizer.encode(self.texts.pop(0), add_special_tokens=False)
        ids = ids if self.cut else [*ids, self.frame.end_id]
        turn = str(len(self.prompts))
        spans = (VersionSpan(f"{turn}b", 1, len(ids)), VersionSpan(turn, 0, 1))  # in any order
        return Answer(tuple(ids), tuple(-0.5 for _ in ids), spans, "length" if self.cut else "stop")


def episode(seed: int = 3, **changes: int) -> Episode:
    return Episode("0/1", "0", seed, TurnSampling(max_tokens=8), **changes)


def played(frame: ChatFrame, model: ScriptedModel, environment: Guarded | None = None, **changes: int):
    return asyncio.run(play(episode(**changes), environment or Guarded(FrozenLake), frame, model))


def test_an_episode_is_recorded_token_by_token(frame):
    model = ScriptedModel(frame, [answer_text("Right"), answer_text("Right")])
    found = played(frame, model)
    text = frame.tokenizer.decode(found.token_ids, skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\n0,0 L#D_R_U#<|im_end|>\n<|im_start|>assistant\n<answer>Right</answer><|im_end|>\n"
        "<|im_start|>user\n0,1 L_D_ROU#<|im_end|>\n<|im_start|>assistant\n<answer>Right</answer><|im_end|>"
    )
    own = [token for token, is_own in zip(found.token_ids, found.loss_mask) if is_own]
    assert frame.tokenizer.decode(own, skip_special_tokens=False) == "<answer>Right</answer><|im_end|>" * 2
    assert [version for version in found.versions if version] == ["1", "1b", "1b", "1b", "2", "2b", "2b", "2b"]
    assert found.versions_used() == ("1", "1b", "2", "2b")
    assert [p for p, is_own in zip(found.logprobs, found.loss_mask) if is_own] == [-0.5] * 8
    assert (found.reward, found.is_success, found.turns, found.invalid_turns) == (0.0, False, 2, 0)
    first, second = model.prompts
    assert second[: len(first)] == first, "a conversation is only ever extended"
    assert found.token_ids[: len(second)] == second


def test_the_goal_is_a_success(frame):
    moves = ["Down", "Down", "Down", "Right", "Right", "Right"]
    found = played(frame, ScriptedModel(frame, [answer_text(move) for move in moves]))
    assert found.is_success and found.reward == 1.0 and found.turns == 6


def test_an_answer_that_was_cut_off_is_ended_by_us(frame):
    found = played(frame, ScriptedModel(frame, ["<answer>"] * 10, cut=True))
    assert (found.turns, found.invalid_turns, found.reward) == (10, 10, pytest.approx(-1.0))
    ends = [is_own for token, is_own in zip(found.token_ids, found.loss_mask) if token == frame.end_id]
    assert len(ends) == 19 and not any(ends), "no end token was the model's own"


def test_sampled_ids_are_kept_even_if_their_text_would_be_tokenised_otherwise(frame):
    letters = [frame.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "Right"]
    begin, end = (frame.tokenizer.encode(tag, add_special_tokens=False)[0] for tag in ("<answer>", "</answer>"))
    ids = (begin, *letters, end, frame.end_id)

    async def spells(token_ids, sampling) -> Answer:
        return Answer(ids, (-1.0,) * len(ids), (VersionSpan("7", 0, len(ids)),), "stop")

    found = asyncio.run(play(episode(), Guarded(FrozenLake), frame, spells))
    own = tuple(token for token, is_own in zip(found.token_ids, found.loss_mask) if is_own)
    assert own == ids * 2 and found.invalid_turns == 0
    assert frame.tokenizer.encode("<answer>Right</answer>", add_special_tokens=False) != list(ids[:-1])


def test_an_episode_too_long_for_the_model_is_over(frame):
    found = played(frame, ScriptedModel(frame, [answer_text("Up")] * 10), context_tokens_max=80)
    assert 1 < found.turns < 10 and len(found.token_ids) <= 80 and not found.is_success


def test_a_first_prompt_that_leaves_no_room_for_an_answer_loses_the_episode(frame):
    tokens = len(frame.first("0,0 L#D_R_U#"))
    model = ScriptedModel(frame, [answer_text("Up")])
    words = f"first prompt has {tokens} tokens and an answer up to 8, together more than the context of {tokens + 7}"
    with pytest.raises(EnvironmentFailed, match=words):
        played(frame, model, context_tokens_max=tokens + 7)
    assert model.prompts == []
    assert played(frame, model, context_tokens_max=tokens + 8).turns == 1


def test_an_episode_whose_environment_failed_is_played_anew(frame):
    scripted = Scripted(["answer", "raise", "answer", "answer"])
    model = ScriptedModel(frame, ["a", "b"])
    found = asyncio.run(play_again(episode(), Guarded(lambda: scripted, QUICK), frame, model))
    assert found.is_success and found.turns == 1 and len(model.prompts) == 2


def test_an_environment_that_keeps_failing_loses_the_episode(frame):
    scripted = Scripted(["answer", "raise"] * 9)
    model = ScriptedModel(frame, ["a"] * 9)
    with pytest.raises(EnvironmentFailed):
        asyncio.run(play_again(episode(), Guarded(lambda: scripted, QUICK), frame, model, tries_max=2))
    assert len(model.prompts) == 2


@pytest.mark.parametrize(
    "answer",
    [
        Answer((), (), (), "stop"),
        Answer((1, 2), (-1.0,), (VersionSpan("0", 0, 2),), "stop"),
        Answer((1, 2), (-1.0, -1.0), (VersionSpan("0", 0, 1),), "stop"),
    ],
)
def test_an_answer_that_does_not_add_up_is_refused(frame, answer):
    async def generate(token_ids, sampling) -> Answer:
        return answer

    with pytest.raises(Unavailable, match="a worker answered with"):
        asyncio.run(play(episode(), Guarded(FrozenLake), frame, generate))


def test_a_template_that_does_not_end_answers_is_refused(frame):
    with pytest.raises(ConfigError, match="does not end an answer"):
        ChatFrame(frame.tokenizer, [0])
