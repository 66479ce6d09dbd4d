"""The routes that generate nothing."""

from __future__ import annotations

from tests.unit.front_world import FrontWorld, run_with_server

from rose import __version__
from rose.errors import Unavailable
from rose.models.model_folder import ModelFolder


def test_no_more_text_is_detokenised_than_a_context_holds(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        assert (await world.post("/detokenize", {"tokens": [97] * 64}))[1] == {"prompt": "a" * 64}
        status, answer = await world.post("/detokenize", {"tokens": [97] * 65})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    run_with_server(folder, story, context_tokens=64)


def test_models_health_and_version(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        [model] = (await world.ask("GET", "/v1/models"))[1]["data"]
        assert (model["id"], model["max_model_len"]) == (folder.name, 64)
        assert (await world.ask("GET", f"/v1/models/{folder.name}"))[1] == model
        assert (await world.ask("GET", "/v1/models/another"))[0] == 404
        assert (await world.ask("GET", "/version"))[1] == {"version": __version__}
        assert (await world.ask("GET", "/health")) == (200, {"status": "ok"})
        world.engine.trouble = Unavailable("the engine is starting", retry_after_s=3)
        status, answer = await world.ask("GET", "/health")
        assert (status, answer["error"]["message"]) == (503, "the engine is starting")

    run_with_server(folder, story, context_tokens=64)


def test_metrics_are_those_of_the_model(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        page = (await world.ask("GET", "/metrics"))[1].decode()
        assert f'vllm:num_requests_running{{model_name="{folder.name}"}} 0.0' in page

    run_with_server(folder, story)


def test_a_text_and_a_conversation_are_tokenised(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        tokenizer = world.front.tokenizer
        answer = (await world.post("/tokenize", {"prompt": "ab", "return_token_strs": True}))[1]
        assert answer["tokens"] == tokenizer.encode("ab", True) and answer["count"] == len(answer["tokens"])
        assert "".join(answer["token_strs"]) == tokenizer.decode(answer["tokens"], skip_special_tokens=False)
        messages = [{"role": "user", "content": "x"}]
        rendered = tokenizer.render_chat(messages, False)
        closed = (await world.post("/tokenize", {"messages": messages, "add_generation_prompt": False}))[1]
        assert closed["tokens"] == tokenizer.encode(rendered, False)
        for body in ({}, {"prompt": "x", "messages": messages}):
            status, refusal = await world.post("/tokenize", body)
            assert status == 400 and "either `prompt` or `messages`" in refusal["error"]["message"]

    run_with_server(folder, story)
