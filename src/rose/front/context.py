"""What every handler of one device works with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from aiohttp import hdrs, web

from rose.config.device import FrontSettings
from rose.errors import ContextTooLong, RequestRefused
from rose.front.compression import decompressed
from rose.front.failures import Failure, bad_request
from rose.front.generation import Choice, Generation
from rose.front.handle import EngineHandle
from rose.front.lending import LendingDesk
from rose.front.metrics import FrontMetrics
from rose.front.offload import offload, release_memory_soon
from rose.front.requests import ChatBody, ChatMessage, TokenizeBody, Tool
from rose.front.structure import is_surely_small, too_large
from rose.front.tools import plain_calls, plain_tools
from rose.models.tokenizer import Tokenizer

INLINE_CHARACTERS = 8192  # tokenised in a millisecond or two; more is done in a thread, beside the other requests
INLINE_BYTES = 1 << 16  # of a body: decoded in a millisecond or two
INLINE_MESSAGES = 64  # messages, calls and tools: rendered in a few milliseconds
SHRINK = 4  # normalising a text may shorten it, but never this much


@dataclass(frozen=True)
class Front:
    """One device as its handlers see it."""

    model_name: str
    vocabulary: int
    tokenizer: Tokenizer
    engine: EngineHandle
    metrics: FrontMetrics
    settings: FrontSettings
    longest_token_bytes: int
    token: str | None = None  # that every request must bear, on the rollouts' door
    api_key: str | None = None  # that requests must bear on the serving port, if there is one
    desk: LendingDesk | None = None  # the owner's controls, on the door of a device that is lent
    large_bodies: asyncio.Lock = field(default_factory=asyncio.Lock)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def context_tokens(self) -> int:
        """The longest sequence; a device that may hold less of it for a while says so when it is asked to."""
        return self.engine.facts.max_context_tokens

    def generate(self, choices: Sequence[Choice]) -> Generation:
        return Generation(self.engine, self.metrics, choices)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            message = f"model `{name[:80]}` is not here; this device serves `{self.model_name}`"
            raise Failure(404, message, param="model", code="model_not_found")

    async def read(self, request: web.Request) -> bytes:
        """The body, within the limits of size, time and structure."""
        try:
            if request.content.is_eof():  # it came with the headers, as most do
                data = await request.read()
            else:
                async with asyncio.timeout(self.settings.read_timeout_s):
                    data = await request.read()
        except TimeoutError as error:
            message = f"the body did not arrive within {self.settings.read_timeout_s:g} s"
            raise Failure(408, message, code="request_timeout", headers={"Connection": "close"}) from error
        except web.RequestPayloadError as error:
            raise bad_request("the body is not what its headers say", code="invalid_body") from error
        if hdrs.CONTENT_ENCODING in request.headers:
            data = await decompressed(request, data, self.settings.max_body_bytes)
        if not is_surely_small(data) and (much := await offload(too_large, data)):
            raise bad_request(f"the body has {much}", code="body_too_complex")
        if len(data) > INLINE_BYTES:
            release_memory_soon()
            async with self.large_bodies:  # each takes a while to decode: between two of them, others have a turn
                await asyncio.sleep(0)
        return data

    def priority_of(self, wanted: int | None) -> int:
        """The priority of a request; users may not choose it unless a setting lets them."""
        return wanted or 0 if self.settings.obey_priority else 0

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; one that cannot fit is refused before it costs anything."""
        [ids] = await self.encode_many([text], add_special_tokens)
        return ids

    async def encode_many(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of several texts, in a thread unless they are short together."""
        least = max(map(len, texts)) // (SHRINK * self.longest_token_bytes)
        if least > self.context_tokens:
            raise ContextTooLong(f"the prompt has at least {least} tokens, the context {self.context_tokens}")
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return [self.tokenizer.encode(text, add_special_tokens) for text in texts]
        return await offload(self.tokenizer.encode_many, texts, add_special_tokens)

    async def render_apart(self, body: ChatBody | TokenizeBody) -> str:
        """The prompt of a conversation, as `render` makes it; in a thread if there is much to render."""
        assert body.messages is not None
        given = body.messages, body.add_generation_prompt, body.chat_template_kwargs, body.tools
        calls = sum(len(message.tool_calls) for message in body.messages if message.tool_calls)
        if len(body.messages) + calls + len(body.tools or ()) <= INLINE_MESSAGES:
            return self.render(*given)
        return await offload(self.render, *given)

    def render(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool | None,
        variables: dict[str, Any] | None,
        tools: Sequence[Tool] | None = None,
    ) -> str:
        """The prompt of a conversation, by the model's own template."""
        if tools and not self.takes_tools:
            message = "this model's chat template has no place for tools: it would never know of them"
            raise bad_request(message, param="tools", code="unsupported_parameter")
        plain = [_plain(message, number) for number, message in enumerate(messages)]
        try:
            return self.tokenizer.render_chat(plain, add_generation_prompt is not False, plain_tools(tools), variables)
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


def _plain(message: ChatMessage, number: int) -> dict[str, Any]:
    content = message.content
    text = "\n".join(part.text for part in content) if isinstance(content, list) else content or ""
    # `developer` is OpenAI's newer word for `system`, and the only one of the two that templates do not know.
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": text, "name": message.name, "tool_call_id": message.tool_call_id}
    found |= {"reasoning_content": message.reasoning_content or message.reasoning}
    if message.tool_calls:
        found |= {"tool_calls": plain_calls(message.tool_calls, f"messages[{number}]")}
    return {key: value for key, value in found.items() if value is not None}
