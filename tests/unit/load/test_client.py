"""The client of `rose load` against a scripted server: what it counts, when it stamps, and how it reports errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ConfigError, Unavailable
from rose.load.client import (
    DIALECTS,
    EventReader,
    HttpExchange,
    Server,
    base_url,
    find_server,
    message_of,
    open_session,
)
from rose.load.driver import Record, Rejected, RequestFailed

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
EVENTS = {"Content-Type": "text/event-stream"}
DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def tokens(*ids: int, text: str = "x", reason: str | None = None, **more: Any) -> bytes:
    """An event with token ids, as ROSE and vLLM send it."""
    return event(choices=[{"index": 0, "text": text, "token_ids": list(ids), "finish_reason": reason, **more}])


def words(text: str, reason: str | None = None) -> bytes:
    """An event of a server that sends no ids."""
    return event(choices=[{"index": 0, "text": text, "finish_reason": reason}])


def read(*parts: bytes) -> tuple[int, EventReader]:
    reader = EventReader()
    return sum(reader.feed(part) for part in parts), reader


# --- events


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["", "a", "é\\n", '"'])), max_size=12),
    st.sampled_from([b"\n", b"\r\n"]),
    st.lists(st.integers(0, 4000), max_size=10),
)
def test_tokens_do_not_depend_on_how_the_bytes_are_split(batches, line_end, cuts):
    stream = b": a comment\n\n"
    for number, (count, text) in enumerate(batches):
        prompt = {"prompt_token_ids": list(range(50))} if number == 0 else {}
        stream += tokens(*range(count), text=text, **prompt)
    stream = (stream + tokens(text="", reason="length") + DONE).replace(b"\n", line_end)
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    found, reader = read(*(stream[begin:end] for begin, end in pairwise(places)))
    reader.finish()
    assert found == sum(count for count, _ in batches)
    assert reader.finish_reason == "length"


def test_without_ids_events_are_counted_and_the_usage_is_exact():
    usage = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10})
    found, reader = read(words("a"), words(""), words("bc"), words("", "length"), usage, DONE)
    reader.finish()
    assert (found, reader.tokens_counted) == (2, 7)


def test_text_that_looks_like_a_field_is_not_decoded():
    found, _ = read(tokens(5, text='"token_ids":[1,2,3],"error":{"message":"no"}'))
    assert found == 1


@pytest.mark.parametrize(
    "parts, message",
    [
        ([tokens(1), event(error={"message": "the engine died", "type": "x"})], "the engine died"),
        ([event(error="plain words")], "plain words"),
        ([b"data: {oops\n\n"], "not a completion's"),
        ([b"data: [1, 2]\n\n"], "not a completion's"),
        ([b'data: {"choices":[{"text":"\xff\xfe"}]}\n\n'], "not a completion's"),
        ([tokens(1, reason="abort"), DONE], "ended with `abort`"),
        ([tokens(1)], "broke off"),
        ([tokens(1), DONE], "broke off"),
        ([b'{"choices":[{"text":"whole"}]}\n'], "not a stream"),
        ([], "not a stream"),
    ],
)
def test_a_broken_stream_fails_with_the_reason(parts, message):
    with pytest.raises(RequestFailed, match=message):
        read(*parts)[1].finish()


@pytest.mark.parametrize(
    "body, message",
    [
        (b'{"error": {"message": "too long", "code": null}}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"message": "too long"}', "too long"),
        (b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
        (b'["x"]', '["x"]'),
        (b'{"error": {"message": "\xff"}}', "error"),
        (b"", "(no message)"),
    ],
)
def test_the_message_of_an_error_is_found(body, message):
    assert message in message_of(body)


# --- a scripted server


class Scripted:
    """Answers completions with what the test says, and remembers what it was asked."""

    def __init__(self, completion: Handler | None = None, models: Any = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.peers: set[Any] = set()
        self.metrics: list[str | int] = []
        self._completion = completion or streaming(tokens(1), tokens(2, reason="length"), DONE)
        self._models = {"data": [{"id": "m", "max_model_len": 4096}]} if models is None else models

    async def models(self, request: web.Request) -> web.StreamResponse:
        return self._models if isinstance(self._models, web.StreamResponse) else web.json_response(self._models)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        return await self._completion(request)

    async def show(self, request: web.Request) -> web.StreamResponse:
        page = self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]
        return web.Response(status=page) if isinstance(page, int) else web.Response(text=page)


def streaming(*parts: bytes, status: int = 200) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers=EVENTS)
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        return response

    return handler


def answering(status: int, message: str = "no") -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": message}}, status=status)

    return handler


@asynccontextmanager
async def served(script: Scripted) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/v1/models", script.models)
    app.router.add_post("/v1/completions", script.complete)
    app.router.add_get("/metrics", script.show)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def against(
    script: Scripted, use: Callable[[aiohttp.ClientSession, str], Coroutine[Any, Any, Any]], key: str | None = None
) -> Any:
    """What `use` returns, given a session and the address of the scripted server."""

    async def run() -> Any:
        async with served(script) as url, open_session(key) as session:
            return await use(session, url)

    return asyncio.run(run())


def server_at(url: str, **more: Any) -> Server:
    return Server(url, "m", 4096, 256, DIALECTS[0], **more)


def ask(script: Scripted, record: Record, now_s: Callable[[], float] = lambda: 0.0, **more: Any) -> None:
    against(script, lambda session, url: HttpExchange(session, server_at(url, **more)).ask(record, now_s))


# --- one request


def test_every_token_is_stamped_when_its_bytes_are_read():
    record = Record(0, 0.0, prompt_tokens=4, wanted_tokens=6)
    moments = {1.0: (7,), 1.5: (8, 9, 10), 4.0: (11,), 4.25: (12,)}
    now = [0.0]

    async def paced(request: web.Request) -> web.StreamResponse:
        """Waits after every event until the client has read it: the clock then stands where it should."""
        response = web.StreamResponse(headers=EVENTS)
        await response.prepare(request)
        for moment, ids in moments.items():
            now[0], seen = moment, len(record.token_s)
            await response.write(tokens(*ids, reason="length" if moment == 4.25 else None))
            while len(record.token_s) < seen + len(ids):
                await asyncio.sleep(0)
        await response.write(DONE)
        return response

    ask(Scripted(paced), record, lambda: now[0])
    assert record.token_s.tolist() == [1.0, 1.5, 1.5, 1.5, 4.0, 4.25]
    assert record.tokens == 6


def test_a_request_forces_its_length_and_seed_and_index_make_its_prompt():
    script = Scripted()
    for index, seed in ((3, 1), (3, 1), (4, 1), (3, 2)):
        ask(script, Record(index, 0.0, prompt_tokens=40, wanted_tokens=9), seed=seed, salt="s")
    first, again, other, reseeded = script.bodies
    assert first == again and first["prompt"] not in (other["prompt"], reseeded["prompt"])
    assert len(first["prompt"]) == 40 and all(0 <= token < 256 for token in first["prompt"])
    assert (first["max_tokens"], first["min_tokens"], first["ignore_eos"], first["stream"]) == (9, 9, True, True)
    assert first["return_token_ids"] is True and first["cache_salt"] == "s"


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_rejects(status):
    with pytest.raises(Rejected, match=f"{status}: full"):
        ask(Scripted(answering(status, "full")), Record(0, 0.0, 1, 1))


@pytest.mark.parametrize("status", [400, 404, 500])
def test_another_error_status_is_a_failure(status):
    with pytest.raises(RequestFailed, match=f"{status}: wrong"):
        ask(Scripted(answering(status, "wrong")), Record(0, 0.0, 1, 1))


def test_tokens_before_a_failure_stay_in_the_record():
    record = Record(0, 0.0, 1, 5)

    async def dying(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=EVENTS)
        await response.prepare(request)
        await response.write(tokens(1, 2))
        while len(record.token_s) < 2:
            await asyncio.sleep(0)
        await response.write(event(error={"message": "the engine died"}))
        return response

    with pytest.raises(RequestFailed, match="the engine died"):
        ask(Scripted(dying), record)
    assert record.tokens == 2


def test_a_connection_that_is_cut_is_a_failure():
    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=EVENTS)
        await response.prepare(request)
        await response.write(tokens(1))
        assert request.transport is not None
        request.transport.abort()
        return response

    with pytest.raises(RequestFailed):
        ask(Scripted(cut), Record(0, 0.0, 1, 5))


def test_an_answer_without_tokens_is_a_failure():
    with pytest.raises(RequestFailed, match="without a token"):
        ask(Scripted(streaming(tokens(text="", reason="length"), DONE)), Record(0, 0.0, 1, 5))


def test_a_server_that_is_gone_is_a_failure():
    async def run() -> None:
        async with served(Scripted()) as url:
            pass
        async with open_session() as session:
            await HttpExchange(session, server_at(url)).ask(Record(0, 0.0, 1, 1), lambda: 0.0)

    with pytest.raises(RequestFailed, match=r"[Cc]onnect"):
        asyncio.run(run())


def test_connections_are_reused():
    script = Scripted()

    async def five(session: aiohttp.ClientSession, url: str) -> None:
        exchange = HttpExchange(session, server_at(url))
        for index in range(5):
            await exchange.ask(Record(index, 0.0, 4, 2), lambda: 0.0)

    against(script, five)
    assert len(script.bodies) == 5 and len(script.peers) == 1


@pytest.mark.parametrize("key, sent", [(None, None), ("secret", "Bearer secret")])
def test_a_key_is_sent_only_when_there_is_one(key, sent):
    script = Scripted()
    against(script, lambda session, url: HttpExchange(session, server_at(url)).ask(Record(0, 0.0, 1, 1), float), key)
    assert script.headers[0].get("Authorization") == sent


# --- which server


@pytest.mark.parametrize("text", ["h:80", "http://h:80", "http://h:80/", "http://h:80/v1", "http://h:80/v1/"])
def test_spellings_of_one_url_are_the_same_server(text):
    assert base_url(text) == "http://h:80"


@pytest.mark.parametrize("text", ["", "http://", "ftp://h", "http://h:port", "http://h:99999", "http://:80"])
def test_a_bad_url_is_refused(text):
    with pytest.raises(ConfigError, match="not the URL of a server"):
        base_url(text)


def found(script: Scripted, **more: Any) -> Server:
    return against(script, lambda session, url: find_server(session, url, **more))


def refusing(is_refused: Callable[[dict[str, Any]], bool]) -> Handler:
    """A server that says 400 to some bodies and streams an answer to the others."""

    async def handler(request: web.Request) -> web.StreamResponse:
        answer = (
            answering(400, "what is that?") if is_refused(await request.json()) else streaming(words("a", "length"))
        )
        return await answer(request)

    return handler


def test_probing_finds_model_and_context_and_draws_a_new_salt():
    servers = [found(Scripted()) for _ in range(2)]
    assert all((server.model, server.context_tokens, server.vocabulary) == ("m", 4096, 256) for server in servers)
    assert servers[0].dialect == DIALECTS[0] and servers[0].salt != servers[1].salt


@pytest.mark.parametrize(
    "unknown, forces_length", [("return_token_ids", True), ("cache_salt", True), ("ignore_eos", False)]
)
def test_unknown_parameters_are_left_out(unknown, forces_length):
    script = Scripted(refusing(lambda body: unknown in body))
    dialect = found(script).dialect
    assert dialect.forces_length is forces_length and not dialect.returns_ids
    assert script.bodies[-1]["stream_options"] == {"include_usage": True}


def test_a_small_vocabulary_is_found_and_a_given_one_is_kept():
    script = Scripted(refusing(lambda body: max(body["prompt"]) >= 110))
    assert found(script).vocabulary == 64
    assert found(script, vocabulary=100).vocabulary == 100
    with pytest.raises(ConfigError, match=r"refuses a plain completion .*what is that"):
        found(script, vocabulary=200)


def test_a_given_model_and_context_come_first():
    script = Scripted(models={"data": [{"id": "a"}, {"id": "b", "max_model_len": 512}]})
    assert found(script, model="b").context_tokens == 512
    assert found(script, model="b", context_tokens=100).context_tokens == 100
    assert found(script, context_tokens=100).model == "a"


@pytest.mark.parametrize(
    "script, options, message",
    [
        (Scripted(models={"data": []}), {}, "not as an OpenAI server"),
        (Scripted(models=["x"]), {}, "not as an OpenAI server"),
        (
            Scripted(models={"data": [{"id": "qwen", "max_model_len": 9}]}),
            {"model": "qwne"},
            "did you mean `--model qwen",
        ),
        (Scripted(models={"data": [{"id": "m"}]}), {}, "--context N"),
        (Scripted(answering(404)), {}, "has no /v1/completions"),
        (Scripted(answering(401)), {}, "wants a key"),
        (Scripted(answering(400, "bad")), {}, "bad"),
        (Scripted(streaming(b'{"choices": []}')), {}, "does not stream"),
    ],
)
def test_a_server_that_cannot_be_used_is_a_config_error(script, options, message):
    with pytest.raises(ConfigError) as refused:
        found(script, **options)
    assert message in str(refused.value)


@pytest.mark.parametrize("page", ["<html>hello</html>", "\xff\xfe"])
def test_a_web_site_is_not_an_openai_server(page):
    async def use(session: aiohttp.ClientSession, url: str) -> Server:
        return await find_server(session, url)

    class Site(Scripted):
        async def models(self, request: web.Request) -> web.StreamResponse:
            return web.Response(body=page.encode("latin-1"))

    with pytest.raises(ConfigError, match="not as an OpenAI server: /v1/models gave 200"):
        against(Site(), use)


def test_a_busy_or_absent_server_is_unavailable():
    with pytest.raises(Unavailable, match="takes no requests now: starting"):
        found(Scripted(answering(503, "starting")))

    async def run() -> None:
        async with served(Scripted()) as url:
            pass
        async with open_session() as session:
            await find_server(session, url)

    with pytest.raises(Unavailable, match="nothing answers at http"):
        asyncio.run(run())
