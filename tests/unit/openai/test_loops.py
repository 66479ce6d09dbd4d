"""No request keeps the event loop of a server from its other work, whatever its body, and memory goes back.

A heartbeat runs on the loop beside the request. The test counts the beats that the loop missed because of its own
process; a loaded machine does not count. The best of a few attempts counts: work on the loop delays every attempt.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from tests.fuzz.heartbeat import BEAT_S, Heartbeat
from tests.unit.front_world import FrontWorld, front_world

from rose.config.server_settings import FrontSettings
from rose.models.model_folder import ModelFolder
from rose.openai import loops
from rose.openai.application import ROUTES
from rose.openai.loops import settle_process
from rose.openai.request_parsing import INLINE_BYTES

BODY_BYTES = 4 << 20

BLOCK_MS = 100.0  # 50 on a machine of one's own; the tests share theirs

ATTEMPTS = 4

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"

RESPONSES = "/v1/responses"

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
    "items": (RESPONSES, lambda: filled(b'{"input":[', b'{"role":"user"}', b"]}"), {400}),
    "as many items as allowed": (
        RESPONSES,
        lambda: filled(b'{"max_output_tokens":1,"input":[', b'{"role":"user","content":"x"}', b"]}", 29 * 4096),
        {400},
    ),
    "calls of one answer": (
        RESPONSES,
        lambda: filled(b'{"input":[', b'{"type":"function_call","name":"f","arguments":"{}"}', b"]}", 51 * 4096),
        {400},
    ),
    "tools of another type": (
        RESPONSES,
        lambda: filled(b'{"input":"x","tools":[{"type":"x","y":[', b"[]", b"]}]}"),
        {400},
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


@pytest.fixture(scope="module", autouse=True)
def as_in_a_front(folder: ModelFolder) -> Iterator[None]:
    """The collector looks at this process, with all its tests, as little as at a front."""
    before, interval_s = gc.get_threshold(), sys.getswitchinterval()
    settle_process()
    yield
    sys.setswitchinterval(interval_s)
    gc.unfreeze()
    gc.set_threshold(*before)


async def missed_beats(world: FrontWorld, path: str, body: bytes, headers: dict[str, Any] | None = None) -> int:
    """Return the fewest beats that one of a few attempts cost, and check that every attempt is answered alike."""
    statuses, fewest = set(), 1 << 30
    for _ in range(ATTEMPTS):
        heart = Heartbeat(BLOCK_MS)
        status, _ = await world.ask_raw("POST", path, body, headers)
        await asyncio.sleep(2 * BEAT_S)  # the last gap is judged by the beat after it
        heart.close()
        statuses.add(status)
        fewest = min(fewest, heart.missed())
        if not fewest:
            break
    world.statuses = statuses  # type: ignore[attr-defined]
    return fewest


@pytest.mark.parametrize("name", WORST)
def test_no_body_blocks_the_loop(folder: ModelFolder, name: str) -> None:
    path, make, statuses = WORST[name]

    async def story() -> None:
        async with front_world(folder) as world:
            missed = await missed_beats(world, path, make())
            assert world.statuses <= statuses  # type: ignore[attr-defined]
            assert missed == 0

    asyncio.run(story())


def test_a_compressed_body_does_not_block_the_loop(folder: ModelFolder) -> None:
    async def story() -> None:
        async with front_world(folder) as world:
            bomb = gzip.compress(bytes(256 << 20))
            missed = await missed_beats(world, COMPLETIONS, bomb, {"Content-Encoding": "gzip"})
            assert world.statuses == {413}  # type: ignore[attr-defined]
            assert missed == 0

    asyncio.run(story())


def test_a_long_context_does_not_block_the_loop(folder: ModelFolder) -> None:
    async def story() -> None:
        async with front_world(folder, FrontSettings(max_body_bytes=16 << 20), context_tokens=1 << 20) as world:
            ids = msgspec.json.encode({"token_ids": [7] * 1_000_000, "sampling_params": {"max_tokens": 1}})
            assert await missed_beats(world, GENERATE, ids) == 0
            tokens = msgspec.json.encode({"tokens": [7] * 1_000_000})
            assert await missed_beats(world, DETOKENIZE, tokens) == 0
            text = msgspec.json.encode({"prompt": "x" * 1_000_000, "max_tokens": 1})
            assert await missed_beats(world, COMPLETIONS, text) == 0

    asyncio.run(story())


def test_every_route_with_a_body_is_tried() -> None:
    with_body = {route.path for route in ROUTES if route.reader is not None}
    assert {path for path, _, _ in WORST.values()} == with_body


def test_memory_of_large_requests_is_returned_once_for_many(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[None] = []
    monkeypatch.setattr(loops, "trim_heap", lambda: trimmed.append(None))
    monkeypatch.setattr(loops, "RELEASE_S", 0.2)
    monkeypatch.setattr(loops, "_release_due_s", 0.0)

    async def ask(prompt_characters: int, times: int, until: int) -> None:
        async with front_world(folder) as world:
            for _ in range(times):
                await world.post("/v1/completions", {"prompt": "x" * prompt_characters, "max_tokens": 1})
            async with asyncio.timeout(30):
                while len(trimmed) < until:
                    await asyncio.sleep(0.01)

    asyncio.run(ask(10, times=3, until=0))
    assert not trimmed
    asyncio.run(ask(INLINE_BYTES + 1, times=2, until=1))
    assert 1 <= len(trimmed) <= 2


def test_trimming_returns_what_freed_buffers_leave_in_the_heap() -> None:
    """In a process of its own, set up as a server is."""
    program = """
from pathlib import Path
from rose.openai.loops import settle_process, trim_heap
def resident_kb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4
settle_process()
buffers = [bytes(600) for _ in range(100_000)]  # too large for Python's own allocator
held = buffers[::500]
del buffers
before_kb = resident_kb()
trim_heap()
print(before_kb - resident_kb())
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(said) > 30_000
