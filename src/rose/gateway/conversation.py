"""Turns messages into token ids, without ever tokenising again what the model generated.

A conversation that begins with the messages and the answer of an earlier turn continues from that turn's ids: only what
is new is tokenised. To find where the new text begins, the conversation is rendered with a mark in the place of the
answer. An answer that called tools comes back as calls, which are compared by name and arguments. Any other
conversation (edited, shortened, with other tools) is a fork and rendered whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rose.gateway.sessions import KeptTurn, Message, Session
from rose.openai.http_context import HttpContext
from rose.openai.request_schemas import ChatBody, ChatMessage
from rose.openai.tools import arguments_of, parse_text, plain_tools

MARK = "\u241e"
"""Stands for the answer while a conversation is rendered; if the conversation has one itself, it is rendered whole."""


async def prompt_of(context: HttpContext, session: Session, body: ChatBody) -> tuple[list[int], Sequence[Message]]:
    """Return the ids of the prompt, and the messages as they are kept."""
    messages = [plain(message, number) for number, message in enumerate(body.messages)]
    tools = plain_tools(body.tools)
    kept = [{"role": "tools", "tools": tools}, *messages] if tools else messages
    for turn in reversed(session.turns):
        if _continues(context, turn, kept):
            following = await _following(context, turn, body, len(kept) - len(messages))
            if following is not None:
                return [*turn.prompt_ids, *turn.produced.token_ids, *following], kept
    text = await context.render(body)
    return await context.encode(text, add_special_tokens=False), kept


async def plain_prompt_of(context: HttpContext, session: Session, text: str) -> tuple[list[int], Sequence[Message]]:
    """Return the same for a prompt that is a text."""
    kept = [{"role": "prompt", "content": text}]
    for turn in reversed(session.turns):
        if not turn.messages or turn.messages[0]["role"] != "prompt" or turn.finish_reason is None:
            continue
        before = turn.messages[0]["content"] + _reply_of(context, turn)
        if len(text) > len(before) and text.startswith(before):
            ids = await context.encode(text[len(before) :], add_special_tokens=False)
            return [*turn.prompt_ids, *turn.produced.token_ids, *_after(turn, ids)], kept
    return await context.encode(text, add_special_tokens=True), kept


def plain(message: ChatMessage, number: int = 0) -> Message:
    """Return what makes two messages equal: role, text, and calls by name and arguments."""
    content = message.content
    text = "\n".join(part.text for part in content) if isinstance(content, list) else content or ""
    fields: dict[str, Any] = {"role": message.role, "content": text}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [
            {"name": call.function.name, "arguments": arguments_of(call, f"messages[{number}].tool_calls[{place}]")}
            for place, call in enumerate(message.tool_calls)
        ]
    return fields


def _continues(context: HttpContext, turn: KeptTurn, kept: Sequence[Message]) -> bool:
    if turn.messages is None or turn.finish_reason is None:
        return False
    count = len(turn.messages)
    return (
        len(kept) > count + 1
        and list(kept[:count]) == list(turn.messages)
        and _is_answer(kept[count], _reply_of(context, turn))
    )


def _reply_of(context: HttpContext, turn: KeptTurn) -> str:
    """Return the text that the client got; decoded from the ids if the gateway died before it noted the text."""
    if turn.reply_text is not None:
        return turn.reply_text
    ids = turn.produced.token_ids
    stream = context.tokenizer.stream()
    return stream.push(ids[:-1] if turn.finish_reason == "stop" else ids) + stream.finish()


def _is_answer(message: Message, text: str) -> bool:
    """Return whether a message is this answer, as text or with its calls apart."""
    if "tool_calls" not in message:
        return message == {"role": "assistant", "content": text}
    parsed = parse_text(text)
    calls = [{"name": call.name, "arguments": call.arguments} for call in parsed.calls]
    return message == {"role": "assistant", "content": parsed.text, "tool_calls": calls}


async def _following(context: HttpContext, turn: KeptTurn, body: ChatBody, offset: int) -> list[int] | None:
    """Return the ids after the answer; None if the template does not show where it ends."""
    assert turn.messages is not None
    marked = list(body.messages)
    marked[len(turn.messages) - offset] = ChatMessage(role="assistant", content=MARK)
    text = await context.render(msgspec.structs.replace(body, messages=marked))
    if text.count(MARK) != 1:
        return None
    return _after(turn, await context.encode(text.partition(MARK)[2], add_special_tokens=False))


def _after(turn: KeptTurn, ids: list[int]) -> list[int]:
    """Return the ids without the end of the answer, if the turn has sampled it itself."""
    last = turn.produced.token_ids[-1] if turn.produced.token_ids else None
    return ids[1:] if ids and turn.finish_reason == "stop" and ids[0] == last else ids
