"""Episodes are recorded token by token, as they were sampled."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.scripted_environment import QUICK, Scripted, answer_text

from rose.api.requests import TurnAnswer, TurnSampling, VersionSpan
from rose.envs.environment import EnvironmentFailed, TimedEnvironment
from rose.envs.frozenlake import FrozenLake
from rose.envs.play import ChatFrame, Episode, play, play_again
from rose.errors import ConfigError, Unavailable
from rose.models.model_folder import load_model_folder
from rose.models.presets import write_preset


@pytest.fixture(scope="module")
def frame(tmp_path_factory) -> ChatFrame:
    folder = load_model_folder(write_preset("frozenlake-1m", tmp_path_factory.mktemp("model") / "m"))
    return ChatFrame(folder.tokenizer, folder.spec.eos_token_ids)


class ScriptedModel:
    """Says what it was told to say, and remembers what it was asked."""

    def __init__(self, frame: ChatFrame, texts: list[str], cut: bool = False) -> None:
        self.frame, self.texts, self.cut = frame, list(texts), cut
        self.prompts: list[tuple[int, ...]] = []

    async def __call__(self, token_ids, sampling) -> TurnAnswer:
        self.prompts.append(tuple(token_ids))
        ids = self.frame.tokenizer.encode(self.texts.pop(0), add_special_tokens=False)
        ids = ids if self.cut else [*ids, self.frame.end_id]
        turn = str(len(self.prompts))
        spans = (VersionSpan(f"{turn}b", 1, len(ids)), VersionSpan(turn, 0, 1))  # in any order
        return TurnAnswer(tuple(ids), tuple(-0.5 for _ in ids), spans, "length" if self.cut else "stop")


def episode(seed: int = 3, **changes: int) -> Episode:
    return Episode("0/1", "0", seed, TurnSampling(max_tokens=8), **changes)


def played(frame: ChatFrame, model: ScriptedModel, environment: TimedEnvironment | None = None, **changes: int):
    return asyncio.run(play(episode(**changes), environment or TimedEnvironment(FrozenLake), frame, model))


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


def test_an_answer_that_was_cut_off_is_ended_with_an_unsampled_token(frame):
    found = played(frame, ScriptedModel(frame, ["<answer>"] * 10, cut=True))
    assert (found.turns, found.invalid_turns, found.reward) == (10, 10, pytest.approx(-1.0))
    ends = [is_own for token, is_own in zip(found.token_ids, found.loss_mask) if token == frame.end_id]
    assert len(ends) == 19 and not any(ends), "no end token was the model's own"


def test_sampled_ids_are_kept_though_their_text_tokenises_otherwise(frame):
    letters = [frame.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "Right"]
    begin, end = (frame.tokenizer.encode(tag, add_special_tokens=False)[0] for tag in ("<answer>", "</answer>"))
    ids = (begin, *letters, end, frame.end_id)

    async def spells(token_ids, sampling) -> TurnAnswer:
        return TurnAnswer(ids, (-1.0,) * len(ids), (VersionSpan("7", 0, len(ids)),), "stop")

    found = asyncio.run(play(episode(), TimedEnvironment(FrozenLake), frame, spells))
    own = tuple(token for token, is_own in zip(found.token_ids, found.loss_mask) if is_own)
    assert own == ids * 2 and found.invalid_turns == 0
    assert frame.tokenizer.encode("<answer>Right</answer>", add_special_tokens=False) != list(ids[:-1])


def test_an_episode_too_long_for_the_model_is_over(frame):
    found = played(frame, ScriptedModel(frame, [answer_text("Up")] * 10), context_tokens_max=80)
    assert 1 < found.turns < 10 and len(found.token_ids) <= 80 and not found.is_success


def test_a_first_prompt_without_room_for_an_answer_fails(frame):
    tokens = len(frame.first("0,0 L#D_R_U#"))
    model = ScriptedModel(frame, [answer_text("Up")])
    words = f"first prompt has {tokens} tokens and an answer up to 8, together more than the context of {tokens + 7}"
    with pytest.raises(EnvironmentFailed, match=words):
        played(frame, model, context_tokens_max=tokens + 7)
    assert model.prompts == []
    assert played(frame, model, context_tokens_max=tokens + 8).turns == 1


def test_an_episode_whose_environment_failed_is_played_again(frame):
    scripted = Scripted(["answer", "raise", "answer", "answer"])
    model = ScriptedModel(frame, ["a", "b"])
    found = asyncio.run(play_again(episode(), TimedEnvironment(lambda: scripted, QUICK), frame, model))
    assert found.is_success and found.turns == 1 and len(model.prompts) == 2


def test_an_environment_that_keeps_failing_loses_the_episode(frame):
    scripted = Scripted(["answer", "raise"] * 9)
    model = ScriptedModel(frame, ["a"] * 9)
    with pytest.raises(EnvironmentFailed):
        asyncio.run(play_again(episode(), TimedEnvironment(lambda: scripted, QUICK), frame, model, tries_max=2))
    assert len(model.prompts) == 2


@pytest.mark.parametrize(
    "answer",
    [
        TurnAnswer((), (), (), "stop"),
        TurnAnswer((1, 2), (-1.0,), (VersionSpan("0", 0, 2),), "stop"),
        TurnAnswer((1, 2), (-1.0, -1.0), (VersionSpan("0", 0, 1),), "stop"),
    ],
)
def test_an_answer_with_inconsistent_lengths_is_refused(frame, answer):
    async def generate(token_ids, sampling) -> TurnAnswer:
        return answer

    with pytest.raises(Unavailable, match="a worker answered with"):
        asyncio.run(play(episode(), TimedEnvironment(FrozenLake), frame, generate))


def test_a_template_that_does_not_end_answers_is_refused(frame):
    with pytest.raises(ConfigError, match="does not end an answer"):
        ChatFrame(frame.tokenizer, [0])
