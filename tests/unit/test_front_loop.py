"""No request keeps the event loop of a front from its other work, whatever its body.

A heartbeat runs on the loop beside the request. The test counts the beats that one request cost. A loaded machine
delays beats too, so the best of a few attempts counts: work on the loop delays every attempt.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from tests.unit.front_world import FrontWorld, Heartbeat, front_world

from rose.config.device import FrontSettings
from rose.front.loops import settle_process
from rose.front.routes import ROUTES
from rose.models.folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset

BODY_BYTES = 4 << 20
MISSED_S = 0.1
ATTEMPTS = 4
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


def filled(head: bytes, unit: bytes, tail: bytes, bytes_max: int = BODY_BYTES) -> bytes:
    """As many units as fit, with commas between them."""
    count = (bytes_max - len(head) - len(tail)) // (len(unit) + 1)
    return head + b",".join([unit] * count) + tail


USER = b'"messages":[{"role":"user","content":"x"}]'
TOOL = b"{" + USER + b',"tools":[{"type":"function","function":{"name":"f","parameters":'
CALL = b'{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":'
WORST: dict[str, tuple[str, Callable[[], bytes], set[int]]] = {
    # What it is, its route, its body, the statuses that may come of it.
    "prompts": (COMPLETIONS, lambda: filled(b'{"prompt":[', b'"a"', b"]}"), {400}),
    "prompts of one token": (COMPLETIONS, lambda: filled(b'{"prompt":[', b"[1]", b"]}"), {400}),
    "empty prompts": (COMPLETIONS, lambda: filled(b'{"prompt":[', b"[]", b"]}"), {400}),
    "tokens": (COMPLETIONS, lambda: filled(b'{"prompt":[', b"7", b"]}"), {400}),
    "long prompts": (COMPLETIONS, lambda: msgspec.json.encode({"prompt": ["é" * 16_000] * 128}), {400}),
    "one text": (COMPLETIONS, lambda: filled(b'{"prompt":"', b"a b c", b'"}'), {400}),
    "a text that might fit": (COMPLETIONS, lambda: msgspec.json.encode({"prompt": "é" * 400_000}), {400}),
    "a text of brackets": (COMPLETIONS, lambda: filled(b'{"prompt":"', rb"[{\"", b'"}'), {400}),
    "escapes": (COMPLETIONS, lambda: filled(b'{"prompt":"', b"\\u00e9\\n", b'"}'), {400}),
    "an unknown key": (COMPLETIONS, lambda: b'{"' + bytes(range(97, 123)) * 150_000 + b'":1}', {400}),
    "a value that is not neutral": (COMPLETIONS, lambda: filled(b'{"logit_bias":[', b"[]", b"]}"), {400}),
    "a repeated key": (COMPLETIONS, lambda: filled(b'{"prompt":"x",', b'"user":"a"', b"}"), {400}),
    "nesting": (COMPLETIONS, lambda: b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", {400}),
    "log-probabilities": (
        COMPLETIONS,
        lambda: b'{"prompt":[1],"n":128,"max_tokens":400,"logprobs":20,"return_token_ids":true}',
        {200},
    ),
    "stop strings": (
        COMPLETIONS,
        lambda: msgspec.json.encode({"prompt": [1], "max_tokens": 4000, "stop": ["a" * 999 + "b"] * 4}),
        {200},
    ),
    "messages": (CHAT, lambda: filled(b'{"messages":[', b'{"role":"user"}', b"]}"), {400}),
    "as many messages as allowed": (
        CHAT,
        lambda: filled(b'{"max_tokens":1,"messages":[', b'{"role":"user","content":"x"}', b"]}", 29 * 4096),
        {400},
    ),
    "parts": (
        CHAT,
        lambda: filled(b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]}"),
        {400},
    ),
    "an empty schema": (CHAT, lambda: filled(TOOL + b'{"a":[', b"[]", b"]}}}]}"), {400}),
    "keys of a schema": (CHAT, lambda: filled(TOOL + b'{"a":[', b'{"b":1}', b"]}}}]}"), {400}),
    "a nested schema": (CHAT, lambda: TOOL + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}}]}", {400}),
    "arguments": (
        CHAT,
        lambda: CALL + msgspec.json.encode('{"a":[' + ",".join(["[]"] * 300_000) + "]}") + b"}}]}]}",
        {400},
    ),
    "many arguments": (
        CHAT,
        lambda: filled(CALL[: CALL.index(b'{"function"')], b'{"function":{"name":"f","arguments":"{}"}}', b"]}]}"),
        {400},
    ),
    "template variables": (
        CHAT,
        lambda: filled(b"{" + USER + b',"chat_template_kwargs":{"a":[', b"[[[[[[[[]]]]]]]]", b"]}}"),
        {400},
    ),
    "chat log-probabilities": (
        CHAT,
        lambda: b"{" + USER + b',"n":128,"max_tokens":200,"logprobs":true,"top_logprobs":20}',
        {200},
    ),
    "token ids": (GENERATE, lambda: filled(b'{"token_ids":[', b"7", b"]}"), {400}),
    "sampling": (GENERATE, lambda: filled(b'{"token_ids":[1],"sampling_params":{"a":[', b"[]", b"]}}"), {400}),
    "token log-probabilities": (
        GENERATE,
        lambda: b'{"token_ids":[1],"sampling_params":{"max_tokens":8000,"logprobs":20}}',
        {200},
    ),
    "a text": (TOKENIZE, lambda: filled(b'{"prompt":"', b"a b c", b'"}'), {400}),
    "strings of tokens": (
        TOKENIZE,
        lambda: msgspec.json.encode({"prompt": "x" * 400_000, "return_token_strs": True}),
        {200},
    ),
    "ids": (DETOKENIZE, lambda: filled(b'{"tokens":[', b"7", b"]}"), {400}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("qwen3-3m", tmp_path_factory.mktemp("models") / "m", seed=0))


@pytest.fixture(scope="module", autouse=True)
def as_in_a_front(folder: ModelFolder) -> Iterator[None]:
    """The collector looks at this process, with all its tests, as little as at a front."""
    before, interval_s = gc.get_threshold(), sys.getswitchinterval()
    settle_process()
    yield
    sys.setswitchinterval(interval_s)
    gc.unfreeze()
    gc.set_threshold(*before)


async def longest_block(found: FrontWorld, path: str, body: bytes, headers: dict[str, Any] | None = None) -> float:
    """The shortest of the longest blocks of a few attempts, and that every attempt is answered alike."""
    statuses, longest = set(), []
    for _ in range(ATTEMPTS):
        heart = Heartbeat()
        beating = asyncio.create_task(heart.beat())
        await asyncio.sleep(0)
        status, _ = await found.ask_raw("POST", path, body, headers)
        beating.cancel()
        statuses.add(status)
        longest.append(heart.longest_s)
        if heart.longest_s < MISSED_S:
            break
    found.statuses = statuses  # type: ignore[attr-defined]
    return min(longest)


@pytest.mark.parametrize("name", WORST)
def test_no_body_blocks_the_loop(folder: ModelFolder, name: str) -> None:
    path, make, statuses = WORST[name]

    async def story() -> None:
        async with front_world(folder) as found:
            missed = int(await longest_block(found, path, make()) / MISSED_S)
            assert found.statuses <= statuses  # type: ignore[attr-defined]
            assert missed == 0

    asyncio.run(story())


def test_a_compressed_body_does_not_block_the_loop(folder: ModelFolder) -> None:
    async def story() -> None:
        async with front_world(folder) as found:
            bomb = gzip.compress(bytes(256 << 20))
            missed = int(await longest_block(found, COMPLETIONS, bomb, {"Content-Encoding": "gzip"}) / MISSED_S)
            assert found.statuses == {413}  # type: ignore[attr-defined]
            assert missed == 0

    asyncio.run(story())


def test_a_long_context_does_not_block_the_loop(folder: ModelFolder) -> None:
    async def story() -> None:
        async with front_world(folder, FrontSettings(max_body_bytes=16 << 20), context_tokens=1 << 20) as found:
            ids = msgspec.json.encode({"token_ids": [7] * 1_000_000, "sampling_params": {"max_tokens": 1}})
            assert int(await longest_block(found, GENERATE, ids) / MISSED_S) == 0
            tokens = msgspec.json.encode({"tokens": [7] * 1_000_000})
            assert int(await longest_block(found, DETOKENIZE, tokens) / MISSED_S) == 0
            text = msgspec.json.encode({"prompt": "x" * 1_000_000, "max_tokens": 1})
            assert int(await longest_block(found, COMPLETIONS, text) / MISSED_S) == 0

    asyncio.run(story())


def test_every_route_with_a_body_is_tried() -> None:
    with_body = {route.operation.path for route in ROUTES if route.operation.reader is not None}
    assert {path for path, _, _ in WORST.values()} == with_body
