"""The context that every HTTP handler works with: one model, its tokenizer, the engine behind it, and limits.

Tokenising a long text or rendering a long conversation would hold the event loop for too long, so it runs in a thread,
and is bounded before it begins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from aiohttp import web

from rose.config.server_settings import FrontSettings
from rose.errors import ContextTooLong, RequestRefused, VersionUnavailable
from rose.models.model_folder import ModelFolder
from rose.models.tokenizer import Tokenizer
from rose.observe.metrics import Metrics
from rose.openai.generation import ServedEngine
from rose.openai.http_errors import Failure, bad_request
from rose.openai.http_metrics import HttpMetrics
from rose.openai.loops import offload
from rose.openai.request_parsing import read_body
from rose.openai.request_schemas import ChatBody, ChatMessage, TokenizeBody
from rose.openai.tools import plain_calls, plain_tools

INLINE_CHARACTERS = 8192  # tokenised in a millisecond or two; more is done in a thread, beside the other requests
INLINE_MESSAGES = 64  # messages, calls and tools: rendered in a few milliseconds
SHRINK = 4  # normalising a text may shorten it, but never this much


@dataclass(frozen=True, kw_only=True)
class HttpContext:
    """One served model as its handlers see it."""

    model_name: str
    vocabulary: int
    tokenizer: Tokenizer
    engine: ServedEngine
    metrics: HttpMetrics
    settings: FrontSettings
    longest_token_bytes: int
    token: str | None = None  # that every request must bear, on a port for rollouts
    api_key: str | None = None  # that requests must bear on the serving port, if there is one
    large_bodies: asyncio.Lock = field(default_factory=asyncio.Lock)
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def build(
        cls,
        folder: ModelFolder,
        name: str | None,
        settings: FrontSettings,
        engine: ServedEngine,
        *,
        metrics: HttpMetrics | Metrics | None = None,
        **more: Any,
    ) -> Self:
        """Return the context of a model folder; `more` are fields with a default, and those of a subclass."""
        name = name or folder.name
        tokenizer = folder.tokenizer
        longest = max((len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.size)), default=1)
        if not isinstance(metrics, HttpMetrics):
            metrics = HttpMetrics(name, lambda: engine.facts, metrics)
        return cls(
            model_name=name,
            vocabulary=folder.spec.vocabulary,
            tokenizer=tokenizer,
            engine=engine,
            metrics=metrics,
            settings=settings,
            longest_token_bytes=max(1, longest),
            **more,
        )

    @property
    def context_tokens(self) -> int:
        """Return the longest sequence. A device that holds less of it for a while refuses a request that is longer."""
        return self.engine.facts.max_context_tokens

    async def refresh(self) -> None:
        """Bring figures up to date before a scrape."""

    async def read(self, request: web.Request) -> bytes:
        """Return the body, within the limits of size, time and structure."""
        return await read_body(request, self.settings, self.large_bodies)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            message = f"model `{name[:80]}` is not here; this device serves `{self.model_name}`"
            raise Failure(404, message, param="model", code="model_not_found")

    def check_versions(self, exact: str, oldest: str) -> None:
        """Raise VersionUnavailable unless the engine runs the weights that a request demands.

        A device knows no order of versions: the oldest one that may run must be its own. A gateway knows it, and waits.
        """
        version = self.engine.facts.version
        if any(wanted and wanted != version for wanted in (exact, oldest)):
            what = f"this device runs version `{version}`, and the request demands `{(exact or oldest)[:80]}`"
            raise VersionUnavailable(what, newest=version)

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        if token_ids and max(token_ids) >= self.vocabulary:
            message = f"`{param}` has token id {max(token_ids)}; the vocabulary has {self.vocabulary}, counted from 0"
            raise bad_request(message, param=param)

    def check_prompt(self, token_ids: Sequence[int], param: str) -> None:
        if not token_ids:
            raise bad_request(f"`{param}` is empty; send at least one token", param=param)
        if len(token_ids) >= self.context_tokens:
            raise ContextTooLong(
                f"the prompt has {len(token_ids)} tokens and leaves no room in the context of {self.context_tokens}"
            )
        self.check_token_ids(token_ids, param)

    def priority_of(self, wanted: int | None) -> int:
        """Return the priority of a request; users may not choose it unless a setting lets them."""
        return wanted or 0 if self.settings.obey_priority else 0

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        [ids] = await self.encode_many([text], add_special_tokens)
        return ids

    async def encode_many(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return token ids of several texts; one that cannot fit is refused before it costs anything."""
        least = max(map(len, texts)) // (SHRINK * self.longest_token_bytes)
        if least > self.context_tokens:
            raise ContextTooLong(f"the prompt has at least {least} tokens, the context {self.context_tokens}")
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return [self.tokenizer.encode(text, add_special_tokens) for text in texts]
        return await offload(self.tokenizer.encode_many, texts, add_special_tokens)

    async def render(self, body: ChatBody | TokenizeBody) -> str:
        """Return the prompt of a conversation, by the model's own template."""
        assert body.messages is not None
        calls = sum(len(message.tool_calls) for message in body.messages if message.tool_calls)
        if len(body.messages) + calls + len(body.tools or ()) <= INLINE_MESSAGES:
            return self._render(body, body.messages)
        return await offload(self._render, body, body.messages)

    def _render(self, body: ChatBody | TokenizeBody, messages: Sequence[ChatMessage]) -> str:
        if body.tools and not self.takes_tools:
            message = "this model's chat template has no place for tools: it would never know of them"
            raise bad_request(message, param="tools", code="unsupported_parameter")
        plain = [_plain_message(message, number) for number, message in enumerate(messages)]
        is_open = body.add_generation_prompt is not False
        try:
            return self.tokenizer.render_chat(plain, is_open, plain_tools(body.tools), body.chat_template_kwargs)
        except RequestRefused as error:
            raise bad_request(str(error), param="messages") from error

    @cached_property
    def takes_tools(self) -> bool:
        """Whether tools change a prompt; a template that fails on this says more about it on a real conversation."""
        messages = [{"role": "user", "content": "hello"}]
        tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
        try:
            return self.tokenizer.render_chat(messages) != self.tokenizer.render_chat(messages, tools=[tool])
        except RequestRefused:
            return True


def _plain_message(message: ChatMessage, number: int) -> dict[str, Any]:
    """Return a message as chat templates get it."""
    plain: dict[str, Any] = {
        # `developer` is OpenAI's newer word for `system`, and the only one of the two that templates do not know.
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    if message.tool_calls:
        plain["tool_calls"] = plain_calls(message.tool_calls, f"messages[{number}]")
    return {key: value for key, value in plain.items() if value is not None}
