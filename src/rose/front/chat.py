"""`POST /v1/chat/completions`: a conversation, rendered by the model's own template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from rose.front.answering import ARRIVAL, answer, check_stream, new_id, now_unix_s, usage_of, wants_usage
from rose.front.bodies import BodyReader
from rose.front.context import Front
from rose.front.failures import bad_request
from rose.front.generation import Choice, Piece
from rose.front.logprobs import chat_logprobs
from rose.front.neutral import NEUTRAL_CHAT
from rose.front.prompts import check_prompt, choices_of
from rose.front.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    Usage,
)
from rose.front.requests import ChatBody

READER = BodyReader(ChatBody, NEUTRAL_CHAT)


class ChatForm:
    """Answers to one chat request."""

    def __init__(self, front: Front, body: ChatBody, reply_id: str) -> None:
        self._front = front
        self._body = body
        self._id = reply_id
        self._created = now_unix_s()

    def whole(self, choices: Sequence[Choice]) -> ChatCompletion:
        reply = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._front.model_name,
            choices=[self._whole_choice(choice) for choice in choices],
            usage=usage_of(choices, len(choices)),
        )
        if self._body.return_token_ids:
            reply.prompt_token_ids = list(choices[0].request.prompt_ids)
        return reply

    def opening(self, choices: Sequence[Choice]) -> Iterable[msgspec.Struct]:
        for choice in choices:
            chunk = self._chunk([ChatChunkChoice(index=choice.index, delta=Delta("assistant", ""))])
            if self._body.return_token_ids:
                chunk.prompt_token_ids = list(choice.request.prompt_ids)
            yield chunk

    def chunk(self, piece: Piece) -> ChatChunk | None:
        body = self._body
        if not piece.text and piece.finish_reason is None and not body.logprobs and not body.return_token_ids:
            return None
        choice = ChatChunkChoice(
            index=piece.choice.index,
            delta=Delta(content=piece.text or None),
            logprobs=self._logprobs([piece]),
            finish_reason=piece.finish_reason,  # type: ignore[arg-type]
        )
        if piece.finish_reason is not None:
            choice.stop_reason = piece.choice.stop_reason
        if body.return_token_ids:
            choice.token_ids = list(piece.token_ids)
        return self._chunk([choice])

    def closing(self, choices: Sequence[Choice]) -> Iterable[msgspec.Struct]:
        if wants_usage(self._body.stream_options):
            yield self._chunk([], usage_of(choices, len(choices)))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        shown: Usage | UnsetType | None = usage if wants_usage(self._body.stream_options) else UNSET
        return ChatChunk(id=self._id, created=self._created, model=self._front.model_name, choices=choices, usage=shown)

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        shown = ChatChoice(
            index=choice.index,
            message=AssistantMessage(content=choice.text),
            logprobs=self._logprobs(choice.pieces),
            finish_reason=choice.finish_reason,  # type: ignore[arg-type]
            stop_reason=choice.stop_reason,
        )
        if self._body.return_token_ids:
            shown.token_ids = choice.token_ids
        return shown

    def _logprobs(self, pieces: Sequence[Piece]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._front.tokenizer, pieces, self._body.top_logprobs or 0)


async def chat_completions(front: Front, request: web.Request) -> web.StreamResponse:
    body = READER.read(await front.read(request))
    front.check_model(body.model)
    check_stream(body.stream, body.stream_options)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    text = front.render(body.messages, body.add_generation_prompt, body.chat_template_kwargs)
    prompt = await front.encode(text, add_special_tokens=False)
    check_prompt(front, prompt, "messages")
    reply_id = new_id("chatcmpl", body.request_id)
    choices = choices_of(
        front,
        body,
        [prompt],
        reply_id=reply_id,
        arrival_s=request[ARRIVAL],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        default_max_tokens=None,
        top_logprobs=body.top_logprobs or 0,
    )
    return await answer(front, request, choices, ChatForm(front, body, reply_id), stream=bool(body.stream))
