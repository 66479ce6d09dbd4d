"""From messages to token ids, without ever tokenising again what the model said.

A conversation that begins with what a turn of the trajectory was asked and answered goes on from that turn's ids: only
what is new is tokenised. What stands between an answer and the next words is taken from the model's own template: the
conversation is rendered with a mark in the place of that answer, and what follows the mark is new. An answer that
called tools comes back as its calls, which are compared with those in the stored text, by name and arguments. Anything
else is a fork: a conversation that was edited, or shortened, or given other tools, or comes from elsewhere, is rendered
whole. A plain prompt is treated alike: one that begins with an earlier prompt and its answer goes on from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rose.front.context import Front
from rose.front.requests import ChatBody, ChatMessage
from rose.front.tools import arguments_of, plain_tools, said_in
from rose.rollout.sessions import KeptTurn, Message, Session

MARK = "\u241e"
"""Stands for the answer while a conversation is rendered; if the conversation has one itself, it is rendered whole."""


async def prompt_of(front: Front, session: Session, body: ChatBody) -> tuple[list[int], Sequence[Message]]:
    """The ids of the prompt, and the messages as they are kept."""
    messages = [plain(message, number) for number, message in enumerate(body.messages)]
    tools = plain_tools(body.tools)
    kept = [{"role": "tools", "tools": tools}, *messages] if tools else messages
    for turn in reversed(session.turns):
        if _goes_on(front, turn, kept):
            following = await _following(front, turn, body, len(kept) - len(messages))
            if following is not None:
                return [*turn.prompt_ids, *turn.produced.token_ids, *following], kept
    text = await front.render_apart(body)
    return await front.encode(text, add_special_tokens=False), kept


async def plain_prompt_of(front: Front, session: Session, text: str) -> tuple[list[int], Sequence[Message]]:
    """The same for a prompt that is a text."""
    kept = [{"role": "prompt", "content": text}]
    for turn in reversed(session.turns):
        before = _text_of(front, turn)
        if before is not None and len(text) > len(before) and text.startswith(before):
            ids = await front.encode(text[len(before) :], add_special_tokens=False)
            return [*turn.prompt_ids, *turn.produced.token_ids, *_after(turn, ids)], kept
    return await front.encode(text, add_special_tokens=True), kept


def plain(message: ChatMessage, number: int = 0) -> Message:
    """What makes two messages the same: who speaks, the words, and the calls by name and arguments."""
    content = message.content
    text = "\n".join(part.text for part in content) if isinstance(content, list) else content or ""
    found: dict[str, Any] = {"role": message.role, "content": text}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {"name": call.function.name, "arguments": arguments_of(call, f"messages[{number}].tool_calls[{place}]")}
            for place, call in enumerate(message.tool_calls)
        ]
    return found


def _goes_on(front: Front, turn: KeptTurn, kept: Sequence[Message]) -> bool:
    if turn.messages is None or turn.finish_reason is None:
        return False
    count = len(turn.messages)
    return (
        len(kept) > count + 1
        and list(kept[:count]) == list(turn.messages)
        and _is_answer(kept[count], _reply_of(front, turn))
    )


def _reply_of(front: Front, turn: KeptTurn) -> str:
    """What its reader was told. If that was not noted, the gateway having died just then, it is told by the ids."""
    if turn.reply_text is not None:
        return turn.reply_text
    ids = turn.produced.token_ids
    stream = front.tokenizer.stream()
    return stream.push(ids[:-1] if turn.finish_reason == "stop" else ids) + stream.finish()


def _is_answer(message: Message, text: str) -> bool:
    """Whether a message is this answer, as text or with its calls apart."""
    if "tool_calls" not in message:
        return message == {"role": "assistant", "content": text}
    said = said_in(text)
    calls = [{"name": call.name, "arguments": call.arguments} for call in said.calls]
    return message == {"role": "assistant", "content": said.text, "tool_calls": calls}


def _text_of(front: Front, turn: KeptTurn) -> str | None:
    """Prompt and answer of a turn that was asked with a plain text."""
    if not turn.messages or turn.messages[0]["role"] != "prompt" or turn.finish_reason is None:
        return None
    prompt: str = turn.messages[0]["content"]
    return prompt + _reply_of(front, turn)


async def _following(front: Front, turn: KeptTurn, body: ChatBody, offset: int) -> list[int] | None:
    """The ids after the answer; None if the template does not show where that is."""
    assert turn.messages is not None
    marked = list(body.messages)
    marked[len(turn.messages) - offset] = ChatMessage(role="assistant", content=MARK)
    text = await front.render_apart(msgspec.structs.replace(body, messages=marked))
    if text.count(MARK) != 1:
        return None
    return _after(turn, await front.encode(text.partition(MARK)[2], add_special_tokens=False))


def _after(turn: KeptTurn, ids: list[int]) -> list[int]:
    """Without the end of the answer, if the turn has sampled it itself."""
    last = turn.produced.token_ids[-1] if turn.produced.token_ids else None
    return ids[1:] if ids and turn.finish_reason == "stop" and ids[0] == last else ids
