"""The routes that generate: token ids in, token ids out; and conversations.

A request that names its trajectory, in the header X-Session-ID, is a turn of it and is kept; one that does not is
answered as a device would answer it. The turns of a trajectory to train on are drawn from the whole distribution, since
their log-probabilities are learnt from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web

from rose.engines.base import Request, Sampling
from rose.front import chat as device_chat
from rose.front import completions as device_completions
from rose.front import generate as device_generate
from rose.front.answering import ARRIVAL, Form, answer, check_stream, new_id
from rose.front.chat import ChatForm
from rose.front.failures import bad_request
from rose.front.generate import DEFAULT_MAX_TOKENS, SAMPLING_READER, GenerateForm
from rose.front.generation import Choice
from rose.front.prompts import check_prompt, choices_of, max_tokens_of, sampling_of
from rose.front.requests import ChatBody
from rose.rollout.conversation import prompt_of
from rose.rollout.gateway import Gateway
from rose.rollout.trajectories import KeptTurn, Session

SESSION_HEADER = "X-Session-ID"
SESSION_CHARACTERS_MAX = 256
WHOLE = Sampling()


async def generate(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """`POST /inference/v1/generate`"""
    session = session_of(gateway, request)
    if session is None:
        return await device_generate.generate(gateway.front, request)
    front = gateway.front
    body = device_generate.READER.read(await front.read(request))
    wanted = SAMPLING_READER.read(body.sampling_params)
    front.check_model(body.model)
    check_stream(body.stream, body.stream_options)
    check_prompt(front, body.token_ids, "token_ids")
    max_tokens = max_tokens_of(front, len(body.token_ids), wanted.max_tokens, DEFAULT_MAX_TOKENS)
    top = wanted.logprobs or 0
    sampling = sampling_of(front, wanted, max_tokens=max_tokens, top_logprobs=top if top > 1 else 0)
    check_training(session, sampling)
    turn, seed = session.turn_of(tuple(body.token_ids), sampling, wanted.seed)
    engine_request = Request(
        request_id="",
        prompt_ids=turn.prompt_ids,
        sampling=replace(sampling, seed=seed),
        tenant=body.cache_salt or "",
        priority=body.priority or 0,
        arrival_s=request[ARRIVAL],
    )
    form = GenerateForm(front, body, wanted.logprobs, turn.key)
    return await _answer(gateway, request, session, turn, Choice(0, engine_request, None), form, bool(body.stream))


async def chat_completions(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """`POST /v1/chat/completions`"""
    session = session_of(gateway, request)
    if session is None:
        return await device_chat.chat_completions(gateway.front, request)
    front = gateway.front
    body = device_chat.READER.read(await front.read(request))
    front.check_model(body.model)
    check_stream(body.stream, body.stream_options)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    if (body.n or 1) > 1:
        raise bad_request("a turn of a trajectory has one answer: `n` must be 1", param="n")
    prompt, messages = await prompt_of(front, session, body)
    check_prompt(front, prompt, "messages")
    choice = _chat_choice(gateway, request, body, prompt)
    check_training(session, choice.request.sampling)
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    # As asked: what "as much as fits" comes to may change with the pool between a request and its repetition.
    asked = replace(choice.request.sampling, max_tokens=body.max_completion_tokens or body.max_tokens or 0)
    turn, seed = session.turn_of(tuple(prompt), asked, body.seed, stops)
    turn.messages = messages
    choice.request = replace(choice.request, sampling=replace(choice.request.sampling, seed=seed))
    form = ChatForm(front, body, new_id("chatcmpl", body.request_id))
    response = await _answer(gateway, request, session, turn, choice, form, bool(body.stream))
    _note_reply(gateway, turn, choice)
    return response


async def completions(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """`POST /v1/completions`: single turns only; what is trained on goes by the other two."""
    if request.headers.get(SESSION_HEADER):
        raise bad_request(f"completions are single turns; send {SESSION_HEADER} to the token route", param="prompt")
    return await device_completions.completions(gateway.front, request)


def session_of(gateway: Gateway, request: web.Request) -> Session | None:
    name = request.headers.get(SESSION_HEADER)
    if not name:
        return None
    if len(name) > SESSION_CHARACTERS_MAX:
        raise bad_request(f"{SESSION_HEADER} has more than {SESSION_CHARACTERS_MAX} characters", param=SESSION_HEADER)
    return gateway.trajectories.open(name, gateway.now_s())


def check_training(session: Session, sampling: Sampling) -> None:
    if session.group_id is None:
        return
    for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
        if getattr(sampling, name) != getattr(WHOLE, name):
            message = f"a turn to train on is drawn from the whole distribution: leave out `{name}`"
            raise bad_request(message, param=name)


def _chat_choice(gateway: Gateway, request: web.Request, body: ChatBody, prompt: Sequence[int]) -> Choice:
    [choice] = choices_of(
        gateway.front,
        body,
        [prompt],
        reply_id="",
        arrival_s=request[ARRIVAL],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        default_max_tokens=None,
        top_logprobs=body.top_logprobs or 0,
    )
    return choice


async def _answer(
    gateway: Gateway,
    request: web.Request,
    session: Session,
    turn: KeptTurn,
    choice: Choice,
    form: Form,
    stream: bool,
) -> web.StreamResponse:
    whole = not stream and not choice.has_stop_strings
    request_id = gateway.desk.expect(turn, session.trajectory_id, whole=whole)
    choice.request = replace(choice.request, request_id=request_id)
    try:
        return await answer(gateway.front, request, [choice], form, stream=stream)
    finally:
        gateway.desk.forget(request_id)


def _note_reply(gateway: Gateway, turn: KeptTurn, choice: Choice) -> None:
    """What the client was told, which is what it will say the assistant said."""
    if choice.finish_reason is None:  # the reader left in the middle
        return
    if (choice.has_stop_strings and len(choice.token_ids) < len(turn.produced)) or turn.finish_reason is None:
        gateway.desk.cut(turn, len(choice.token_ids))
    turn.reply_text = choice.text
