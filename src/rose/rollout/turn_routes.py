"""The routes that generate: token ids in, token ids out; conversations; and plain prompts.

A request that names its trajectory is a turn of it and is kept; one that does not is answered as a device would answer
it. The name may come in the header X-Session-ID, or in the body as `trajectory` or `program_id`: clients differ. The
turns of a trajectory to train on are drawn from the whole distribution, since their log-probabilities are learnt from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiohttp import web
from msgspec import structs

from rose.bounds import SESSION_CHARACTERS_MAX
from rose.engines.base import Request, Sampling
from rose.front import chat as device_chat
from rose.front import completions as device_completions
from rose.front import generate as device_generate
from rose.front.answering import ARRIVAL, Form, answer, check_stream, new_id
from rose.front.chat import ChatForm, check_chat
from rose.front.completions import CompletionForm
from rose.front.failures import bad_request
from rose.front.generate import DEFAULT_MAX_TOKENS, SAMPLING_READER, GenerateForm
from rose.front.generation import Choice
from rose.front.prompts import check_prompt, choices_of, max_tokens_of, prompts_of, sampling_of
from rose.front.replies import Placed
from rose.front.requests import ChatBody, CompletionBody, GenerateBody, SamplingBody
from rose.rollout.conversation import plain_prompt_of, prompt_of
from rose.rollout.gateway import Gateway
from rose.rollout.roles import is_trusted
from rose.rollout.sessions import KeptTurn, Message, Session

SESSION_HEADER = "X-Session-ID"
WHOLE = Sampling()


async def generate(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """`POST /inference/v1/generate`"""
    front = gateway.front
    body = device_generate.READER.read(await front.read(request))
    name = session_name(request, body)
    if name is None:
        return await device_generate.respond(front, request, body)
    wanted = SAMPLING_READER.read(body.sampling_params)
    front.check_model(body.model)
    check_stream(body.stream, body.stream_options)
    check_prompt(front, body.token_ids, "token_ids")
    max_tokens = max_tokens_of(front, len(body.token_ids), wanted.max_tokens, DEFAULT_MAX_TOKENS)
    top = wanted.logprobs or 0
    sampling = sampling_of(front, wanted, max_tokens=max_tokens, top_logprobs=top if top > 1 else 0)
    session = gateway.trajectories.open(name, gateway.now_s(), is_trusted=is_trusted(request))
    check_training(session, sampling)
    turn, seed = session.turn_of(tuple(body.token_ids), sampling, wanted.seed)
    engine_request = Request(
        request_id="",
        prompt_ids=turn.prompt_ids,
        sampling=structs.replace(sampling, seed=seed),
        tenant=body.cache_salt or "",
        priority=priority_of(request, body.priority or 0),
        arrival_s=request[ARRIVAL],
    )
    form = GenerateForm(front, body, wanted.logprobs, turn.key, place_of(session, turn))
    return await _answer(gateway, request, session, turn, Choice(0, engine_request, None), form, bool(body.stream))


async def chat_completions(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """`POST /v1/chat/completions`"""
    front = gateway.front
    body = device_chat.READER.read(await front.read(request))
    name = session_name(request, body)
    if name is None:
        return await device_chat.respond(front, request, body)
    check_chat(front, body)
    _check_one_answer(body)
    session = gateway.trajectories.open(name, gateway.now_s(), is_trusted=is_trusted(request))
    prompt, messages = await prompt_of(front, session, body)
    check_prompt(front, prompt, "messages")
    asked = _Asked(prompt, messages, body.max_completion_tokens or body.max_tokens, None, body.top_logprobs or 0)
    reply_id = new_id("chatcmpl", body.request_id)

    def form(turn: KeptTurn) -> Form:
        return ChatForm(front, body, reply_id, calls_key=turn.key, place=place_of(session, turn))

    return await _answer_in_words(gateway, request, session, body, asked, form)


async def completions(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """`POST /v1/completions`: as many prompts as one likes without a trajectory, one with it."""
    front = gateway.front
    body = device_completions.READER.read(await front.read(request))
    name = session_name(request, body)
    if name is None:
        return await device_completions.respond(front, request, body)
    front.check_model(body.model)
    check_stream(body.stream, body.stream_options)
    _check_one_answer(body)
    prompts = prompts_of(body.prompt)
    if len(prompts) > 1:
        raise bad_request("a turn of a trajectory has one prompt", param="prompt")
    session = gateway.trajectories.open(name, gateway.now_s(), is_trusted=is_trusted(request))
    prompt, messages = prompts[0], None
    if isinstance(prompt, str):
        prompt, messages = await plain_prompt_of(front, session, prompt)
    check_prompt(front, prompt, "prompt")
    most = device_completions.DEFAULT_MAX_TOKENS
    asked = _Asked(prompt, messages, body.max_tokens, most, body.logprobs or 0)
    reply_id = new_id("cmpl", body.request_id)

    def form(turn: KeptTurn) -> Form:
        return CompletionForm(front, body, reply_id, place_of(session, turn))

    return await _answer_in_words(gateway, request, session, body, asked, form)


def session_name(request: web.Request, body: SamplingBody | GenerateBody) -> str | None:
    """The trajectory that a request names, however it does; None for a single turn."""
    header = request.headers.get(SESSION_HEADER)
    if header and len(header) > SESSION_CHARACTERS_MAX:
        raise bad_request(f"{SESSION_HEADER} has more than {SESSION_CHARACTERS_MAX} characters", param=SESSION_HEADER)
    if header and not body.trajectory and not body.program_id and header.isprintable():
        return header
    given = {SESSION_HEADER: header, "trajectory": body.trajectory, "program_id": body.program_id}
    names = {where: name for where, name in given.items() if name}
    for where, name in names.items():
        if not name.isprintable():  # among them bytes that are not UTF-8
            raise bad_request(f"{where} has characters that cannot be printed", param=where)
    if len(set(names.values())) > 1:
        shown = " and ".join(f"`{name[:80]}` in {where}" for where, name in names.items())
        raise bad_request(f"one turn belongs to one trajectory, not to {shown}", param=list(names)[-1])
    return next(iter(names.values()), None)


def priority_of(request: web.Request, wanted: int) -> int:
    """The trainer's word; an agent may only stand back (a larger number runs later), never before others."""
    return wanted if is_trusted(request) else max(0, wanted)


def place_of(session: Session, turn: KeptTurn) -> Placed:
    """What a reply says of its turn. One that goes on from none, and is not the first, began another branch."""
    return Placed([], session.trajectory_id, turn.ordinal, turn.parent is None and turn.ordinal > 0)


def check_training(session: Session, sampling: Sampling) -> None:
    if session.group_id is None:
        return
    for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
        if getattr(sampling, name) != getattr(WHOLE, name):
            message = f"a turn to train on is drawn from the whole distribution: leave out `{name}`"
            raise bad_request(message, param=name)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a turn in words comes to. `most` are the tokens asked for, if any."""

    prompt: Sequence[int]
    messages: Sequence[Message] | None
    most: int | None
    default_most: int | None
    top_logprobs: int


def _check_one_answer(body: ChatBody | CompletionBody) -> None:
    if (body.n or 1) > 1:
        raise bad_request("a turn of a trajectory has one answer: `n` must be 1", param="n")


async def _answer_in_words(
    gateway: Gateway,
    request: web.Request,
    session: Session,
    body: ChatBody | CompletionBody,
    asked: _Asked,
    form_of: Callable[[KeptTurn], Form],
) -> web.StreamResponse:
    [choice] = choices_of(
        gateway.front,
        body,
        [asked.prompt],
        reply_id="",
        arrival_s=request[ARRIVAL],
        max_tokens=asked.most,
        default_max_tokens=asked.default_most,
        top_logprobs=asked.top_logprobs,
    )
    check_training(session, choice.request.sampling)
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    # As asked: what "as much as fits" comes to may change with the pool between a request and its repetition.
    wanted = structs.replace(choice.request.sampling, max_tokens=asked.most or 0)
    turn, seed = session.turn_of(tuple(asked.prompt), wanted, body.seed, stops)
    if asked.messages is not None:
        turn.hold_messages(asked.messages, len(await request.read()))
    sampling = structs.replace(choice.request.sampling, seed=seed)
    priority = priority_of(request, choice.request.priority)
    choice.request = structs.replace(choice.request, sampling=sampling, priority=priority)
    response = await _answer(gateway, request, session, turn, choice, form_of(turn), bool(body.stream))
    _note_reply(gateway, turn, choice)
    return response


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
    choice.request = choice.request.named(request_id)
    try:
        return await answer(gateway.front, request, [choice], form, stream=stream)
    finally:
        gateway.desk.forget(request_id)


def _note_reply(gateway: Gateway, turn: KeptTurn, choice: Choice) -> None:
    """What the client was told, calls and all, which is what it will say the assistant said."""
    if choice.finish_reason is None:  # the reader left in the middle
        return
    if (choice.has_stop_strings and len(choice.token_ids) < len(turn.produced)) or turn.finish_reason is None:
        gateway.desk.cut(turn, len(choice.token_ids))
    turn.reply_text = choice.text
