"""Asks an OpenAI-compatible server over HTTP and stamps every token as it comes.

One session for the whole run, so that connections are used again. Idle ones are closed before common servers do it
(uvicorn after 5 s), since a request sent into a closing connection is lost through nobody's fault.
"""

from __future__ import annotations

from collections.abc import Callable

import aiohttp

from rose.load.events import EventReader, message_of
from rose.load.records import Failed, Record, Rejected
from rose.load.server import BUSY, Server

IDLE_S_MAX = 4.0


def open_session(api_key: str | None = None) -> aiohttp.ClientSession:
    """To be used with `async with`. The driver bounds how many connections there are, and how long they may take."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S_MAX),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers=headers,
        auto_decompress=False,
        trust_env=False,
    )


class HttpExchange:
    """The driver's way to a server."""

    def __init__(self, session: aiohttp.ClientSession, server: Server) -> None:
        self._session = session
        self._server = server

    async def ask(self, record: Record, now_s: Callable[[], float]) -> None:
        prompt_ids = self._server.prompt_ids(record.index, record.prompt_tokens)
        body = self._server.body(prompt_ids, record.wanted_tokens, record.index)
        try:
            async with self._session.post(self._server.completions_url, data=body) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.read())
                await _follow(response.content, record, now_s)
        except aiohttp.ClientError as error:
            raise Failed(str(error) or type(error).__name__) from error


async def _follow(content: aiohttp.StreamReader, record: Record, now_s: Callable[[], float]) -> None:
    reader = EventReader()
    while data := await content.readany():
        moment_s = now_s()
        tokens = reader.feed(data)
        if tokens:
            record.saw(tokens, moment_s)
    record.tokens_counted = reader.tokens_counted
    reader.finish()
    if not record.token_s:
        raise Failed("the answer ended without a token")


def _refusal(status: int, body: bytes) -> Rejected | Failed:
    words = f"{status}: {message_of(body)}"
    return Rejected(words) if status in BUSY else Failed(words)
