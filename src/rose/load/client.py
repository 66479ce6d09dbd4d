"""The client of an OpenAI-compatible server: finds its model, sends requests, and counts tokens as they come.

Any server with `/v1/completions` will do. One short request is sent before the run and not counted. It shows that the
server takes prompts of token ids and streams, and which of vLLM's extra parameters it understands. With `ignore_eos`,
`min_tokens` and `return_token_ids` (which ROSE speaks) answers have the length asked for and tokens are counted
exactly. Without them an answer may be short, and one event with text counts as one token; the usage at the end says
how many there were. Two runs of one seed send the same prompts; a `cache_salt` of its own keeps the second from finding
them in the server's prefix cache.

A load generator that is slower than the server measures itself. So bytes are cut into lines by hand, and only the few
fields of a chunk that count are decoded.
"""

from __future__ import annotations

import asyncio
import difflib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
from msgspec import Meta

from rose.bounds import ITEMS_MAX, TOKENS_MAX, Count, Integer, Label
from rose.errors import ConfigError, RoseError, Unavailable
from rose.load.driver import Record, Rejected, RequestFailed

ANSWER_S_MAX = 30.0
IDLE_S_MAX = 4.0  # common servers close idle connections after 5 s; a request sent into a closing one would be lost
PROBE_TOKENS = 2
VOCABULARIES = (256, 64)  # bytes come first in every vocabulary we know; a very small one has at least some letters
BUSY = (429, 503)
LINE_BYTES_MAX = 64 << 20  # far above any chunk: an endless line is not a stream of events
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError)  # msgspec lets the second one through

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Dialect:
    """A set of parameters beyond OpenAI's that go with a request."""

    forces_length: bool
    returns_ids: bool
    salts_cache: bool

    def parameters(self, tokens: int, salt: str) -> dict[str, Any]:
        forced = {"ignore_eos": True, "min_tokens": tokens} if self.forces_length else {}
        counted = {"return_token_ids": True} if self.returns_ids else {"stream_options": {"include_usage": True}}
        salted = {"cache_salt": salt} if self.salts_cache else {}
        return forced | counted | salted


DIALECTS = (Dialect(True, True, True), Dialect(True, False, False), Dialect(False, False, False))


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answered, and the dialect that it understands."""

    url: str
    model: str
    context_tokens: int
    vocabulary: int
    dialect: Dialect
    seed: int = 0
    salt: str = ""

    @property
    def completions_url(self) -> str:
        return f"{self.url}/v1/completions"

    def prompt_ids(self, index: int, tokens: int) -> list[int]:
        """Return seeded random ids for request `index` of a run: no two requests begin alike."""
        return np.random.default_rng([self.seed, index]).integers(self.vocabulary, size=tokens).tolist()

    def body(self, prompt_ids: Sequence[int], output_tokens: int, index: int = 0) -> bytes:
        fields = {
            "model": self.model,
            "prompt": prompt_ids,
            "max_tokens": output_tokens,
            "temperature": 1.0,
            "seed": index,
            "stream": True,
        }
        return _encoder.encode(fields | self.dialect.parameters(output_tokens, self.salt))


def open_session(api_key: str | None = None) -> aiohttp.ClientSession:
    """Return a session for `async with`. The driver bounds the connections and how long they may take."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S_MAX),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers=headers,
        auto_decompress=False,
        trust_env=False,
    )


class HttpExchange:
    """An exchange with a server over HTTP."""

    def __init__(self, session: aiohttp.ClientSession, server: Server) -> None:
        self._session = session
        self._server = server

    async def ask(self, record: Record, now_s: Callable[[], float]) -> None:
        prompt_ids = self._server.prompt_ids(record.index, record.prompt_tokens)
        body = self._server.body(prompt_ids, record.wanted_tokens, record.index)
        reader = EventReader()
        try:
            async with self._session.post(self._server.completions_url, data=body) as response:
                if response.status != 200:
                    reason = f"{response.status}: {message_of(await response.read())}"
                    raise Rejected(reason) if response.status in BUSY else RequestFailed(reason)
                while data := await response.content.readany():
                    moment_s = now_s()
                    if tokens := reader.feed(data):
                        record.saw(tokens, moment_s)
        except aiohttp.ClientError as error:
            raise RequestFailed(str(error) or type(error).__name__) from error
        record.tokens_counted = reader.tokens_counted
        reader.finish()
        if not record.token_s:
            raise RequestFailed("the answer ended without a token")


def base_url(text: str) -> str:
    """Return the same address for `localhost:8000`, `http://localhost:8000/` and `http://localhost:8000/v1`."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(f"`{text}` is not the URL of a server", hint="write it like --url http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


async def find_server(
    session: aiohttp.ClientSession,
    url: str,
    *,
    model: str | None = None,
    context_tokens: int | None = None,
    vocabulary: int | None = None,
    seed: int = 0,
) -> Server:
    """Probe the server at `url` and return it. Raises ConfigError or Unavailable if it cannot be used."""
    url = base_url(url)
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            name, context = _chosen(await _models(session, url), url, model)
            context = context_tokens or context
            if context is None:
                raise ConfigError(f"{url} does not say how long its context is", hint="give it with --context N")
            wanted = (vocabulary,) if vocabulary else VOCABULARIES
            salt = f"rose-load-{secrets.token_hex(8)}"
            candidates = [
                Server(url, name, context, size, dialect, seed, salt) for dialect in DIALECTS for size in wanted
            ]
            refusals = []
            for server in candidates:
                refusal = await _refusal(session, server)
                if refusal is None:
                    return server
                refusals.append(refusal)
            raise refusals[0]
    except TimeoutError as error:
        raise Unavailable(f"{url} took more than {ANSWER_S_MAX:.0f} s to answer", hint="is it overloaded?") from error
    except aiohttp.ClientError as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        hint = "start a server, for instance `rose serve MODEL`, or correct --url"
        raise Unavailable(f"nothing answers at {url}: {reason}", hint=hint) from error


async def _models(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    async with session.get(f"{url}/v1/models") as response:
        body = await response.read()
    if response.status in (401, 403):
        raise _locked(url, response.status)
    try:
        listed = msgspec.json.decode(body)["data"] if response.status == 200 else []
        models = [model for model in listed if isinstance(model["id"], str)]
    except (*NOT_JSON, KeyError, TypeError):
        models = []
    if not models:
        what = f"{url} answers, but not as an OpenAI server: /v1/models gave {response.status}"
        raise ConfigError(what, hint="--url is the address of a server like `rose serve` or `vllm serve`")
    return models


def _chosen(models: list[dict[str, Any]], url: str, wanted: str | None) -> tuple[str, int | None]:
    by_name = {model["id"]: model for model in models}
    if wanted is not None and wanted not in by_name:
        near = difflib.get_close_matches(wanted, by_name, n=1) or sorted(by_name)[:1]
        raise ConfigError(f"{url} has no model `{wanted}`", hint=f"did you mean `--model {near[0]}`?")
    name = wanted or models[0]["id"]
    context = by_name[name].get("max_model_len")
    return name, context if isinstance(context, int) and context > 0 else None


async def _refusal(session: aiohttp.ClientSession, server: Server) -> RoseError | None:
    """Return the error of a probe, or None; raise an error that every other candidate would meet too."""
    body = server.body([0, server.vocabulary - 1], PROBE_TOKENS)
    async with session.post(server.completions_url, data=body) as response:
        answer = await response.read()
    message = message_of(answer) if response.status != 200 else ""
    if response.status in (401, 403):
        raise _locked(server.url, response.status)
    if response.status in BUSY:
        raise Unavailable(f"{server.url} takes no requests now: {message}", hint="wait until it is ready")
    if response.status == 404:
        raise ConfigError(f"{server.url} has no /v1/completions: {message}", hint="is it a server of completions?")
    if response.status != 200:
        hint = "the ids of prompts are 0..255 unless --vocabulary N says otherwise"
        return ConfigError(f"{server.url} refuses a plain completion ({response.status}): {message}", hint=hint)
    try:
        reader = EventReader()
        reader.feed(answer + b"\n")
        reader.finish()
    except RequestFailed as error:
        return ConfigError(f"{server.url} does not stream completions: {error}")
    return None


def _locked(url: str, status: int) -> ConfigError:
    hint = "put the key into an environment variable and name it with --api-key-env NAME"
    return ConfigError(f"{url} wants a key ({status})", hint=hint)


class _Choice(msgspec.Struct):
    text: Annotated[str, Meta(max_length=LINE_BYTES_MAX)] | None = None
    token_ids: Annotated[list[Integer], Meta(max_length=TOKENS_MAX)] | None = None
    finish_reason: Label | None = None


class _Usage(msgspec.Struct):
    completion_tokens: Count = 0


class _Error(msgspec.Struct):
    """Any object; its message is read by `message_of`."""


class _Chunk(msgspec.Struct):
    choices: Annotated[list[_Choice], Meta(max_length=ITEMS_MAX)] = []
    usage: _Usage | None = None
    error: _Error | Annotated[str, Meta(max_length=LINE_BYTES_MAX)] | None = None


_decoder = msgspec.json.Decoder(_Chunk)


class EventReader:
    """Reader of the answer to one request, a stream of server-sent events."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.tokens_counted = 0
        self._is_stream = False
        self._rest = b""

    def feed(self, data: bytes) -> int:
        """Return how many tokens these bytes bring. Raises RequestFailed for an error event or anything else."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise RequestFailed("the server streams something without line ends")
        return sum(self._tokens(line[5:].strip()) for line in lines if line.startswith(b"data:"))

    def finish(self) -> None:
        """Raise RequestFailed unless the stream ended as it should."""
        if self.finish_reason is None:
            raise RequestFailed("the answer broke off" if self._is_stream else "the answer is not a stream of events")
        if self.finish_reason not in ("stop", "length"):
            raise RequestFailed(f"the answer ended with `{self.finish_reason}`")

    def _tokens(self, payload: bytes) -> int:
        self._is_stream = True
        if payload == b"[DONE]":
            return 0
        try:
            chunk = _decoder.decode(payload)
        except NOT_JSON as error:
            raise RequestFailed(f"the server sent an event that is not a completion's: {error}") from error
        if chunk.error is not None:
            raise RequestFailed(f"the server broke off the answer: {message_of(bytes(payload))}")
        if chunk.usage is not None:
            self.tokens_counted = chunk.usage.completion_tokens
        tokens = 0
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            tokens += len(choice.token_ids) if choice.token_ids is not None else bool(choice.text)
        return tokens


def message_of(body: bytes) -> str:
    """Return the message in an error of OpenAI's shape, else the start of the text."""
    try:
        tree = msgspec.json.decode(body)
        error = tree.get("error", tree)
        message = error.get("message") if isinstance(error, dict) else error
    except (*NOT_JSON, AttributeError):
        message = None
    return str(message or body[:200].decode(errors="replace").strip() or "(no message)")
