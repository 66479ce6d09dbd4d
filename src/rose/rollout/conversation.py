"""From messages to token ids, without ever tokenising again what the model said.

A conversation that begins with what a turn of the trajectory was asked and answered goes on from that turn's ids: only
what is new is tokenised. What stands between an answer and the next words is taken from the model's own template: the
conversation is rendered with a mark in the place of that answer, and what follows the mark is new. Anything else is a
fork: a conversation that was edited, or shortened, or comes from elsewhere, is rendered whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rose.front.context import Front
from rose.front.requests import ChatBody, ChatMessage
from rose.rollout.trajectories import KeptTurn, Message, Session

MARK = "\u241e"
"""Stands for the answer while a conversation is rendered; if the conversation has one itself, it is rendered whole."""


async def prompt_of(front: Front, session: Session, body: ChatBody) -> tuple[list[int], Sequence[Message]]:
    """The ids of the prompt, and the messages as they are kept."""
    messages = [plain(message) for message in body.messages]
    for turn in reversed(session.turns):
        if _goes_on(turn, messages):
            following = await _following(front, turn, body)
            if following is not None:
                return [*turn.prompt_ids, *turn.produced.token_ids, *following], messages
    text = front.render(body.messages, body.add_generation_prompt, body.chat_template_kwargs)
    return await front.encode(text, add_special_tokens=False), messages


def plain(message: ChatMessage) -> Message:
    """What makes two messages the same: who speaks, and the words."""
    content = message.content
    text = "\n".join(part.text for part in content) if isinstance(content, list) else content or ""
    found: dict[str, Any] = {"role": message.role, "content": text}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def _goes_on(turn: KeptTurn, messages: Sequence[Message]) -> bool:
    if turn.messages is None or turn.reply_text is None or turn.finish_reason is None:
        return False
    count = len(turn.messages)
    return (
        len(messages) > count + 1
        and messages[count] == {"role": "assistant", "content": turn.reply_text}
        and list(messages[:count]) == list(turn.messages)
    )


async def _following(front: Front, turn: KeptTurn, body: ChatBody) -> list[int] | None:
    """The ids after the answer; None if the template does not show where that is."""
    assert turn.messages is not None
    marked = list(body.messages)
    marked[len(turn.messages)] = ChatMessage(role="assistant", content=MARK)
    text = front.render(marked, body.add_generation_prompt, body.chat_template_kwargs)
    if text.count(MARK) != 1:
        return None
    ids = await front.encode(text.partition(MARK)[2], add_special_tokens=False)
    last = turn.produced.token_ids[-1] if turn.produced.token_ids else None
    return ids[1:] if ids and turn.finish_reason == "stop" and ids[0] == last else ids
