"""The official client works unchanged."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from tests.integration.devices import Device, eventually

LONG = "A device lends what it does not need. " * 10
WORDS: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 24, "seed": 7, "extra_body": {"ignore_eos": True}}
TALK: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}],
    "max_completion_tokens": 24,
    "seed": 7,
    "extra_body": {"ignore_eos": True},
}


def test_models(client: openai.OpenAI, device: Device) -> None:
    [model] = client.models.list().data
    assert model.id == device.model
    assert model.max_model_len == 8192  # type: ignore[attr-defined]
    assert client.models.retrieve(device.model).id == device.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_completion(client: openai.OpenAI, device: Device) -> None:
    reply = client.completions.create(model=device.model, **WORDS)
    assert reply.object == "text_completion"
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].text
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(WORDS["prompt"])
    assert reply.usage.completion_tokens == 24
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 24


def test_default_max_tokens_is_16(client: openai.OpenAI, device: Device) -> None:
    reply = client.completions.create(model=device.model, prompt="x", extra_body={"ignore_eos": True})
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16


def test_streamed_text_is_the_whole_text(client: openai.OpenAI, device: Device) -> None:
    whole = client.completions.create(model=device.model, **WORDS)
    chunks = list(client.completions.create(model=device.model, stream=True, **WORDS))
    assert len(chunks) > 2
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_options(client: openai.OpenAI, device: Device) -> None:
    options: Any = {"include_usage": True}
    chunks = list(client.completions.create(model=device.model, stream=True, stream_options=options, **WORDS))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_a_seed_gives_the_same_again_and_none_gives_another(client: openai.OpenAI, device: Device) -> None:
    def text(**changes: Any) -> str:
        return client.completions.create(model=device.model, **WORDS | changes).choices[0].text

    assert text() == text()
    assert text() != text(seed=8)
    assert text(seed=None) != text(seed=None)
    assert text(temperature=0, seed=1) == text(temperature=0, seed=2)


def test_choice_i_uses_seed_plus_i(client: openai.OpenAI, device: Device) -> None:
    reply = client.completions.create(model=device.model, n=3, **WORDS)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    for choice in reply.choices:
        alone = client.completions.create(model=device.model, **WORDS | {"seed": 7 + choice.index})
        assert alone.choices[0].text == choice.text
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3 * 24
    assert reply.usage.prompt_tokens == len(WORDS["prompt"])


def test_n_streamed_choices_interleave(client: openai.OpenAI, device: Device) -> None:
    texts, reasons = ["", ""], [None, None]
    for chunk in client.completions.create(model=device.model, n=2, stream=True, **WORDS):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason  # type: ignore[call-overload]
    whole = client.completions.create(model=device.model, n=2, **WORDS)
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == ["length", "length"]


def test_prompts_of_every_kind_mean_the_same(client: openai.OpenAI, device: Device) -> None:
    text = WORDS["prompt"]
    ids = device.post("/tokenize", {"prompt": text}).json["tokens"]
    alone = client.completions.create(model=device.model, **WORDS).choices[0].text
    for prompt in (ids, [text, text], [ids, ids]):
        reply = client.completions.create(model=device.model, **WORDS | {"prompt": prompt})
        assert {choice.text for choice in reply.choices} == {alone}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_and_are_not_in_it(client: openai.OpenAI, device: Device, stream: bool) -> None:
    free = client.completions.create(model=device.model, **WORDS).choices[0].text
    stop = free[9:12]
    wanted = free[: free.index(stop)]
    reply = client.completions.create(model=device.model, stop=["never there", stop], stream=stream, **WORDS)
    choices = [chunk.choices[0] for chunk in reply] if stream else [reply.choices[0]]
    assert "".join(choice.text for choice in choices) == wanted
    assert choices[-1].finish_reason == "stop"
    eventually(device.is_idle)


@pytest.mark.parametrize("top", [0, 3])
def test_completion_logprobs(client: openai.OpenAI, device: Device, top: int) -> None:
    reply = client.completions.create(model=device.model, logprobs=top, **WORDS).choices[0]
    found: Any = reply.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 24
    assert all(value <= 0 for value in found.token_logprobs)
    assert found.text_offset[0] == 0
    if top:
        assert all(1 <= len(best) <= top + 1 for best in found.top_logprobs)
        for token, value, best in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
            assert best[token] >= value
    else:
        assert found.top_logprobs is None


def test_streamed_logprobs_are_the_whole_ones(client: openai.OpenAI, device: Device) -> None:
    whole: Any = client.completions.create(model=device.model, logprobs=2, **WORDS).choices[0].logprobs
    chunks = list(client.completions.create(model=device.model, logprobs=2, stream=True, **WORDS))
    parts: list[Any] = [chunk.choices[0].logprobs for chunk in chunks]
    assert [value for part in parts for value in part.token_logprobs] == whole.token_logprobs
    assert [value for part in parts for value in part.text_offset] == whole.text_offset


def test_chat(client: openai.OpenAI, device: Device) -> None:
    reply = client.chat.completions.create(model=device.model, **TALK)
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "length"
    chunks = list(client.chat.completions.create(model=device.model, stream=True, **TALK))
    assert chunks[0].choices[0].delta.role == "assistant"
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == reply.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat_goes_on_with_the_message_it_got(client: openai.OpenAI, device: Device) -> None:
    reply = client.chat.completions.create(model=device.model, **TALK)
    parts: Any = [{"type": "text", "text": "And"}, {"type": "text", "text": "then?"}]
    turns: Any = [*TALK["messages"], reply.choices[0].message, {"role": "user", "content": parts}]
    second = client.chat.completions.create(model=device.model, **TALK | {"messages": turns})
    assert second.usage is not None
    assert reply.usage is not None
    assert second.usage.prompt_tokens > reply.usage.total_tokens


def test_chat_logprobs(client: openai.OpenAI, device: Device) -> None:
    reply = client.chat.completions.create(model=device.model, logprobs=True, top_logprobs=4, **TALK)
    found = reply.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert len(found.content) == 24
    for entry in found.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 4
        assert entry.top_logprobs[0].logprob >= entry.logprob


def test_cached_tokens_are_reported(client: openai.OpenAI, device: Device) -> None:
    ask: Any = {"model": device.model, "prompt": f"cached tokens: {LONG}", "max_tokens": 1}
    client.completions.create(**ask)
    usage = client.completions.create(**ask).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None  # type: ignore[attr-defined]
    assert usage.prompt_tokens_details.cached_tokens > len(LONG) // 2  # type: ignore[attr-defined]
    salted = client.completions.create(**ask, extra_body={"cache_salt": "somebody else"}).usage
    assert salted is not None
    assert salted.prompt_tokens_details.cached_tokens == 0  # type: ignore[attr-defined]


def test_errors_have_the_types_of_the_client(client: openai.OpenAI, device: Device) -> None:
    with pytest.raises(openai.NotFoundError, match="another"):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError, match=r"9000.*8192"):
        client.completions.create(model=device.model, prompt="x" * 9000)
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        client.completions.create(model=device.model, prompt="x", presence_penalty=1)


def test_many_at_once(device: Device) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{device.url}/v1", api_key="none", max_retries=0) as client:

            async def ask(seed: int) -> str:
                text = ""
                stream = await client.completions.create(model=device.model, stream=True, **WORDS | {"seed": seed})
                async for chunk in stream:
                    text += chunk.choices[0].text
                return text

            return await asyncio.gather(*(ask(seed) for seed in range(24)))

    together = asyncio.run(ask_all())
    assert len(set(together)) == 24
    for seed in (0, 11, 23):
        alone = device.complete(prompt=WORDS["prompt"], max_tokens=24, seed=seed, ignore_eos=True)
        assert alone.json["choices"][0]["text"] == together[seed]
    eventually(device.is_idle)
