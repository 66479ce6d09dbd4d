"""The routes that generate: token ids in and out, conversations, and plain prompts.

A request that names its trajectory is a turn of it and is kept; any other is answered as a device would answer it.
Clients differ in where they can put the name: the header X-Session-ID, the path `/sessions/NAME/v1/...`, the API key
`TOKEN/NAME`, or `trajectory` or `program_id` in the body. The turns of a trajectory to train on are sampled from the
whole distribution, since their log-probabilities are learnt from.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from msgspec import structs

from rose.api.requests import SESSION_HEADER
from rose.bounds import SESSION_CHARACTERS_MAX
from rose.engines.base import Sampling
from rose.gateway.auth import KEY_SESSION, is_trusted
from rose.gateway.conversation import plain_prompt_of, prompt_of
from rose.gateway.gateway_server import Gateway, TurnReader
from rose.gateway.sessions import KeptTurn, Message, Session
from rose.openai import anthropic_messages, responses_api
from rose.openai import chat as device_chat
from rose.openai import completions as device_completions
from rose.openai import generate as device_generate
from rose.openai.anthropic_messages import MessageRenderer
from rose.openai.chat import ChatRenderer
from rose.openai.completions import CompletionRenderer
from rose.openai.conversation_answering import ConversationRenderer, check_chat
from rose.openai.generate import GenerateRenderer, checked_sampling
from rose.openai.generation import Choice
from rose.openai.http_errors import bad_request
from rose.openai.prompts import choices_of, prompts_of, request_of
from rose.openai.request_schemas import ChatBody, CompletionBody, GenerateBody, GeneratingBody
from rose.openai.response_rendering import ARRIVAL, ResponseRenderer, answer, check_stream, new_id
from rose.openai.response_schemas import PlacementInfo
from rose.openai.responses_api import ItemRenderer

WHOLE = Sampling()

Route = Callable[[Gateway, web.Request], Awaitable[web.StreamResponse]]
_TurnHandler = Callable[[Gateway, web.Request, Any, str], Awaitable[web.StreamResponse]]


def _route(
    read: Callable[[bytes], GeneratingBody],
    respond: Callable[..., Awaitable[web.StreamResponse]],
    turn: _TurnHandler,
) -> Route:
    """Return a route that runs requests that name a trajectory by `turn`, and others by the device's `respond`."""

    async def route(gateway: Gateway, request: web.Request) -> web.StreamResponse:
        body = read(await gateway.context.read(request))
        name = session_name(request, body)
        if name is None:
            return await respond(gateway.context, request, body)
        return await turn(gateway, request, body, name)

    return route


async def _generate(gateway: Gateway, request: web.Request, body: GenerateBody, name: str) -> web.StreamResponse:
    context = gateway.context
    wanted, sampling = checked_sampling(context, body)
    session = gateway.core.trajectories.open(name, gateway.now_s(), is_trusted=is_trusted(request))
    check_training(session, sampling)
    turn, seed = session.turn_of(tuple(body.token_ids), sampling, wanted.seed)
    engine_request = request_of(
        context, body, turn.prompt_ids, sampling, seed, request_id="", arrival_s=request[ARRIVAL]
    )
    priority = priority_of(request, body.priority or 0)
    engine_request = structs.replace(engine_request, priority=priority)
    form = GenerateRenderer(context, body, wanted.logprobs, turn.key, place_of(session, turn))
    return await _answer(gateway, request, session, turn, Choice(0, engine_request, None), form)


async def _chat(gateway: Gateway, request: web.Request, body: ChatBody, name: str) -> web.StreamResponse:
    return await _converse(gateway, request, body, name, new_id("chatcmpl", body.request_id), ChatRenderer)


async def _message(gateway: Gateway, request: web.Request, body: ChatBody, name: str) -> web.StreamResponse:
    return await _converse(gateway, request, body, name, new_id("msg"), MessageRenderer)


async def _response(gateway: Gateway, request: web.Request, body: ChatBody, name: str) -> web.StreamResponse:
    return await _converse(gateway, request, body, name, new_id("resp"), ItemRenderer)


async def _converse(
    gateway: Gateway,
    request: web.Request,
    body: ChatBody,
    name: str,
    reply_id: str,
    renderer: type[ConversationRenderer],
) -> web.StreamResponse:
    """Answer a conversation, in the form of one API."""
    context = gateway.context
    check_chat(context, body)
    _check_one_answer(body)
    session = gateway.core.trajectories.open(name, gateway.now_s(), is_trusted=is_trusted(request))
    prompt, messages = await prompt_of(context, session, body)
    context.check_prompt(prompt, "messages")

    def form(turn: KeptTurn) -> ResponseRenderer[Any]:
        return renderer(context, body, reply_id, calls_key=turn.key, place=place_of(session, turn))

    return await _answer_text(gateway, request, session, body, prompt, messages, form)


async def _completion(gateway: Gateway, request: web.Request, body: CompletionBody, name: str) -> web.StreamResponse:
    """Answer one prompt. Without a trajectory a request may have many."""
    context = gateway.context
    context.check_model(body.model)
    check_stream(body)
    _check_one_answer(body)
    prompts = prompts_of(body.prompt)
    if len(prompts) > 1:
        raise bad_request("a turn of a trajectory has one prompt", param="prompt")
    session = gateway.core.trajectories.open(name, gateway.now_s(), is_trusted=is_trusted(request))
    prompt, messages = prompts[0], None
    if isinstance(prompt, str):
        prompt, messages = await plain_prompt_of(context, session, prompt)
    context.check_prompt(prompt, "prompt")
    reply_id = new_id("cmpl", body.request_id)

    def form(turn: KeptTurn) -> CompletionRenderer:
        return CompletionRenderer(context, body, reply_id, place_of(session, turn))

    return await _answer_text(gateway, request, session, body, prompt, messages, form)


def _read_message(data: bytes) -> ChatBody:
    return anthropic_messages.chat_of(anthropic_messages.READER.read(data))


generate = _route(device_generate.READER.read, device_generate.respond, _generate)
chat_completions = _route(device_chat.READER.read, device_chat.respond, _chat)
completions = _route(device_completions.READER.read, device_completions.respond, _completion)
responses = _route(responses_api.read, responses_api.respond, _response)
messages = _route(_read_message, anthropic_messages.respond, _message)


def _check_one_answer(body: ChatBody | CompletionBody) -> None:
    if (body.n or 1) > 1:
        raise bad_request("a turn of a trajectory has one answer: `n` must be 1", param="n")


def session_name(request: web.Request, body: GeneratingBody) -> str | None:
    """Return the trajectory that a request names, in whatever way; None for a single turn."""
    fields = {
        SESSION_HEADER: request.headers.get(SESSION_HEADER),
        "the path": request.match_info.get("session"),
        "the API key": request.get(KEY_SESSION),
        "trajectory": body.trajectory,
        "program_id": body.program_id,
    }
    names = {where: name for where, name in fields.items() if name}
    for where, name in names.items():
        if len(name) > SESSION_CHARACTERS_MAX:
            raise bad_request(f"{where} has more than {SESSION_CHARACTERS_MAX} characters", param=where)
        if not name.isprintable():  # among them bytes that are not UTF-8
            raise bad_request(f"{where} has characters that cannot be printed", param=where)
    if len(set(names.values())) > 1:
        listed = " and ".join(f"`{name[:80]}` in {where}" for where, name in names.items())
        raise bad_request(f"one turn belongs to one trajectory, not to {listed}", param=list(names)[-1])
    return next(iter(names.values()), None)


def priority_of(request: web.Request, wanted: int) -> int:
    """Return the priority of a turn. Only a trainer may raise it: to a smaller number, which runs earlier."""
    return wanted if is_trusted(request) else max(0, wanted)


def place_of(session: Session, turn: KeptTurn) -> PlacementInfo:
    """Return what a response says of its turn. A later turn without a parent has begun another branch."""
    return PlacementInfo([], session.trajectory_id, turn.ordinal, turn.parent is None and turn.ordinal > 0)


def check_training(session: Session, sampling: Sampling) -> None:
    """Raise Failure if a turn to train on is not sampled from the whole distribution."""
    if session.group_id is None:
        return
    for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
        if getattr(sampling, name) != getattr(WHOLE, name):
            message = f"a turn to train on is sampled from the whole distribution: leave out `{name}`"
            raise bad_request(message, param=name)


async def _answer_text(
    gateway: Gateway,
    request: web.Request,
    session: Session,
    body: ChatBody | CompletionBody,
    prompt: Sequence[int],
    messages: Sequence[Message] | None,
    form_of: Callable[[KeptTurn], ResponseRenderer[Any]],
) -> web.StreamResponse:
    """Answer a turn whose tokens are decoded."""
    [choice] = choices_of(gateway.context, body, [prompt], reply_id="", arrival_s=request[ARRIVAL])
    check_training(session, choice.request.sampling)
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    # As asked: what "as much as fits" comes to may change with the pool between a request and its repetition.
    wanted = structs.replace(choice.request.sampling, max_tokens=body.wanted_tokens or 0)
    turn, seed = session.turn_of(tuple(prompt), wanted, body.seed, stops)
    if messages is not None:
        turn.hold_messages(messages, len(await request.read()))
    sampling = structs.replace(choice.request.sampling, seed=seed)
    priority = priority_of(request, choice.request.priority)
    choice.request = structs.replace(choice.request, sampling=sampling, priority=priority)
    response = await _answer(gateway, request, session, turn, choice, form_of(turn))
    if choice.finish_reason is not None:  # else the reader left in the middle
        if (choice.has_stop_strings and len(choice.token_ids) < len(turn.produced)) or turn.finish_reason is None:
            gateway.core.cut(turn, len(choice.token_ids), gateway.now_s())
        turn.reply_text = choice.text  # calls and all: the client will quote it as the assistant's message
    return response


async def _answer(
    gateway: Gateway,
    request: web.Request,
    session: Session,
    turn: KeptTurn,
    choice: Choice,
    form: ResponseRenderer[Any],
) -> web.StreamResponse:
    """Answer with the tokens of a turn, as one more reader of it."""
    whole = not form.body.stream and not choice.has_stop_strings
    reader = TurnReader(gateway.core, turn, session.trajectory_id, gateway.now_s, whole=whole)
    choice.request = choice.request.named(reader.request_id)
    return await answer(gateway.context, request, [choice], form, reader)
