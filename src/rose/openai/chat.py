"""`POST /v1/chat/completions`: a conversation, rendered by the model's own template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from rose.openai.conversation_answering import ConversationRenderer, answer_single
from rose.openai.generation import Choice, ChoiceDelta
from rose.openai.http_context import HttpContext
from rose.openai.request_parsing import BodyReader
from rose.openai.request_schemas import IGNORED_CHAT, ChatBody
from rose.openai.response_rendering import chat_logprobs, new_id, prompt_logprobs, usage_of
from rose.openai.response_schemas import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatFinish,
    ChatLogprobs,
    Delta,
    ToolCallDelta,
    Usage,
)

READER = BodyReader(ChatBody, IGNORED_CHAT)


class ChatRenderer(ConversationRenderer):
    """Responses to one chat request, in the form of chat completions."""

    def whole(self, choices: Sequence[Choice]) -> ChatCompletion:
        reply = ChatCompletion(
            id=self.reply_id,
            created=self.created,
            model=self.context.model_name,
            choices=[self._whole_choice(choice) for choice in choices],
            usage=usage_of(choices, len(choices)),
            rose=self.placement_of(choices),
        )
        if self.body.return_token_ids:
            reply.prompt_token_ids = list(choices[0].request.prompt_ids)
        reply.prompt_logprobs = prompt_logprobs(choices[0], self.context.tokenizer)
        return reply

    def opening(self, choices: Sequence[Choice]) -> Iterable[msgspec.Struct]:
        for choice in choices:
            chunk = self._chunk([ChatChunkChoice(index=choice.index, delta=Delta("assistant", ""))])
            if self.body.return_token_ids:
                chunk.prompt_token_ids = list(choice.request.prompt_ids)
            yield chunk

    def chunks(self, choice: Choice, delta: ChoiceDelta) -> Sequence[ChatChunk]:
        body = self.body
        added, finish_reason = self._added(choice, delta)
        is_empty = not added.content and not added.tool_calls and finish_reason is None
        if is_empty and not body.logprobs and not body.return_token_ids:
            return ()
        part = ChatChunkChoice(
            index=choice.index, delta=added, logprobs=self._logprobs([delta]), finish_reason=finish_reason
        )
        part.weight_versions = self.versions_of(choice, delta)
        if body.return_token_ids:
            part.token_ids = list(delta.token_ids)
        chunk = self._chunk([part])
        if finish_reason is not None:
            part.stop_reason = choice.stop_reason
            chunk.rose = self.placement_of([choice])
        return (chunk,)

    def usage_chunk(self, choices: Sequence[Choice]) -> ChatChunk:
        return self._chunk([], usage_of(choices, len(choices)))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        counts: Usage | UnsetType | None = usage if self.wants_usage else UNSET
        model = self.context.model_name
        return ChatChunk(id=self.reply_id, created=self.created, model=model, choices=choices, usage=counts)

    def _added(self, choice: Choice, delta: ChoiceDelta) -> tuple[Delta, ChatFinish | None]:
        """Return what a delta adds to the message, and how the choice ended if it did."""
        parsed = self.added(choice, delta)
        calls: list[ToolCallDelta] = []
        for call in parsed.calls:
            whole = self.call_of(choice, call)
            calls.append(ToolCallDelta(call.number, whole.id, whole.function))
        return Delta(content=parsed.text or None, tool_calls=calls or None), _finish_of(delta, self.has_called(choice))

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        parsed = self.parsed(choice)
        message = AssistantMessage(content=parsed.text or None if parsed.calls else parsed.text)
        if parsed.calls:
            message.tool_calls = [self.call_of(choice, call) for call in parsed.calls]
        whole = ChatChoice(
            index=choice.index,
            message=message,
            logprobs=self._logprobs(choice.deltas),
            finish_reason=_finish_of(choice, bool(parsed.calls)),
            stop_reason=choice.stop_reason,
        )
        whole.weight_versions = self.versions_of(choice, choice)
        if self.body.return_token_ids:
            whole.token_ids = choice.token_ids
        return whole

    def _logprobs(self, deltas: Sequence[ChoiceDelta]) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return chat_logprobs(self.context.tokenizer, deltas, self.body.top_logprobs or 0, as_ids=as_ids)


def _finish_of(output: Choice | ChoiceDelta, has_called: bool) -> ChatFinish | None:
    return "tool_calls" if output.finish_reason == "stop" and has_called else output.finish_reason


async def chat_completions(context: HttpContext, request: web.Request) -> web.StreamResponse:
    return await respond(context, request, READER.read(await context.read(request)))


async def respond(context: HttpContext, request: web.Request, body: ChatBody) -> web.StreamResponse:
    return await answer_single(context, request, body, new_id("chatcmpl", body.request_id), ChatRenderer)
