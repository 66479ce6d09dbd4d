"""Who is asked: what a server says of itself, and which of vLLM's extra parameters it understands.

Any server with OpenAI's `/v1/completions` will do. One short request is sent before the run, which nobody counts: it
shows that prompts of token ids are taken and streamed, and it finds the best dialect. With vLLM's `ignore_eos`,
`min_tokens` and `return_token_ids` (which ROSE speaks) answers have the length asked for and tokens are counted
exactly; without them an answer may be short, and a report says how many were. Two runs of one seed send the same
prompts; a `cache_salt` of its own keeps the second from finding them in the server's prefix cache.
"""

from __future__ import annotations

import asyncio
import difflib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np

from rose.errors import ConfigError, RoseError, Unavailable
from rose.load.events import NOT_JSON, EventReader, message_of
from rose.load.records import Failed

ANSWER_S_MAX = 30.0
PROBE_TOKENS = 2
VOCABULARIES = (256, 64)  # bytes come first in every vocabulary we know; a very small one has at least some letters
BUSY = (429, 503)

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Dialect:
    """Which parameters beyond OpenAI's go with a request."""

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
    """A server that answered, and how to speak to it."""

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
        """Seeded random ids for request `index` of a run: no two requests begin alike."""
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


def base_url(text: str) -> str:
    """`localhost:8000`, `http://localhost:8000/` and `http://localhost:8000/v1` are the same server."""
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
    """The server at `url`, tried out. ConfigError or Unavailable say in plain words why it cannot be used."""
    url = base_url(url)
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            known = await _models(session, url)
            name, context = _chosen(known, url, model)
            context = context_tokens or context
            if context is None:
                raise ConfigError(f"{url} does not say how long its context is", hint="give it with --context N")
            wanted = (vocabulary,) if vocabulary else VOCABULARIES
            salt = f"rose-load-{secrets.token_hex(8)}"
            candidates = [
                Server(url, name, context, size, dialect, seed, salt) for dialect in DIALECTS for size in wanted
            ]
            return await _first_that_works(session, candidates)
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
        found = msgspec.json.decode(body)["data"] if response.status == 200 else []
        models = [model for model in found if isinstance(model["id"], str)]
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


async def _first_that_works(session: aiohttp.ClientSession, candidates: list[Server]) -> Server:
    """The first candidate whose probe is answered; if none is, what the server said to the first."""
    refusals = []
    for server in candidates:
        refusal = await _refusal(session, server)
        if refusal is None:
            return server
        refusals.append(refusal)
    raise refusals[0]


async def _refusal(session: aiohttp.ClientSession, server: Server) -> RoseError | None:
    """What is wrong with a probe; None if nothing is. What another candidate would not mend is raised."""
    body = server.body([0, server.vocabulary - 1], PROBE_TOKENS)
    async with session.post(server.completions_url, data=body) as response:
        answer = await response.read()
    said = message_of(answer) if response.status != 200 else ""
    if response.status in (401, 403):
        raise _locked(server.url, response.status)
    if response.status in BUSY:
        raise Unavailable(f"{server.url} takes no requests now: {said}", hint="wait until it is ready")
    if response.status == 404:
        raise ConfigError(f"{server.url} has no /v1/completions: {said}", hint="is it a server of completions?")
    if response.status != 200:
        hint = "the ids of prompts are 0..255 unless --vocabulary N says otherwise"
        return ConfigError(f"{server.url} refuses a plain completion ({response.status}): {said}", hint=hint)
    try:
        reader = EventReader()
        reader.feed(answer + b"\n")
        reader.finish()
    except Failed as error:
        return ConfigError(f"{server.url} does not stream completions: {error}")
    return None


def _locked(url: str, status: int) -> ConfigError:
    hint = "put the key into an environment variable and name it with --api-key-env NAME"
    return ConfigError(f"{url} wants a key ({status})", hint=hint)
