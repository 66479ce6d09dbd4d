"""What a handler may ask of the model: priorities, prompts, conversations."""

from __future__ import annotations

import pytest
from tests.unit.front_world import FrontWorld, run_with_server

from rose.config.server_settings import FrontSettings, RolloutFrontSettings
from rose.errors import ContextTooLong
from rose.models.model_folder import ModelFolder
from rose.openai.http_context import INLINE_CHARACTERS, INLINE_MESSAGES, SHRINK
from rose.openai.http_errors import Failure
from rose.openai.request_schemas import ChatBody, ChatMessage

COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"


@pytest.mark.parametrize(
    "settings, priority", [(FrontSettings(), 0), (FrontSettings(obey_priority=True), -5), (RolloutFrontSettings(), -5)]
)
def test_users_choose_a_priority_only_if_a_setting_lets_them(
    folder: ModelFolder, settings: FrontSettings, priority: int
) -> None:
    async def story(world: FrontWorld) -> None:
        assert (await world.post(COMPLETIONS, {"prompt": [1], "priority": -5}))[0] == 200
        assert (await world.post(GENERATE, {"token_ids": [1], "priority": -5}))[0] == 200
        assert [request.priority for request in world.engine.requests] == [priority] * 2

    run_with_server(folder, story, settings)


def test_a_long_text_is_refused_before_it_is_tokenised(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        characters = world.front.context_tokens * SHRINK * world.front.longest_token_bytes * 2
        with pytest.raises(ContextTooLong, match="at least"):
            await world.front.encode("x" * characters, True)

    run_with_server(folder, story, context_tokens=16)


def test_long_texts_have_the_same_tokens_in_a_thread(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        text = "some words " * INLINE_CHARACTERS
        [ids] = await world.front.encode_many([text], False)
        assert ids == world.front.tokenizer.encode(text, False)

    run_with_server(folder, story, context_tokens=1 << 20)


def test_a_conversation_is_rendered_as_the_template_expects(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        developer = ChatBody(messages=[ChatMessage("developer", "be kind"), ChatMessage("user", "hi")])
        system = ChatBody(messages=[ChatMessage("system", "be kind"), ChatMessage("user", "hi")])
        opened = await world.front.render(developer)
        assert opened == await world.front.render(system)
        closed = ChatBody(messages=developer.messages, add_generation_prompt=False)
        assert opened.startswith(await world.front.render(closed))
        many = ChatBody(messages=[ChatMessage("user", "hi")] * (INLINE_MESSAGES + 1))
        assert (await world.front.render(many)).count("hi") == INLINE_MESSAGES + 1

    run_with_server(folder, story)


def test_another_model_and_unknown_tokens_are_refused(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        world.front.check_model(None)
        world.front.check_model(world.front.model_name)
        with pytest.raises(Failure, match="this device serves") as refused:
            world.front.check_model("another")
        assert refused.value.status == 404
        world.front.check_token_ids([world.front.vocabulary - 1], "stop")
        with pytest.raises(Failure, match="counted from 0"):
            world.front.check_token_ids([world.front.vocabulary], "stop")

    run_with_server(folder, story)
