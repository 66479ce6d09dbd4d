"""The table of routes, read by the application and by the OpenAPI document alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rose.coserve.messages import LendingStatus
from rose.front import chat, completions, control, generate, information, replies
from rose.front.context import Front
from rose.front.openapi import Operation, document

Handler = Callable[[Front, web.Request], Awaitable[web.StreamResponse]]

GENERATES = (400, 404, 408, 413, 429, 503)
COMPUTES = (400, 404, 408, 413)


@dataclass(frozen=True, slots=True)
class Route:
    operation: Operation
    handler: Handler


async def openapi(front: Front, request: web.Request) -> web.Response:
    return web.json_response(openapi_document(front.model_name, routes_of(front)))


def openapi_document(model_name: str, routes: Sequence[Route] | None = None) -> dict[str, Any]:
    return document([route.operation for route in routes or ROUTES], [generate.SAMPLING_READER], model_name)


def routes_of(front: Front) -> Sequence[Route]:
    """Those of every device, and the owner's if it is lent."""
    return ROUTES if front.desk is None else (*ROUTES, *OWNER_ROUTES)


def _post(path: str, handler: Handler, what: str, **known: Any) -> Route:
    return Route(Operation("POST", path, handler.__name__, what, **known), handler)


def _get(path: str, handler: Handler, what: str, **known: Any) -> Route:
    return Route(Operation("GET", path, handler.__name__, what, **known), handler)


ROUTES = (
    _post(
        "/v1/completions",
        completions.completions,
        "Complete one or several prompts.",
        reader=completions.READER,
        reply=replies.Completion,
        chunk=replies.Completion,
        statuses=GENERATES,
    ),
    _post(
        "/v1/chat/completions",
        chat.chat_completions,
        "Answer a conversation.",
        reader=chat.READER,
        reply=replies.ChatCompletion,
        chunk=replies.ChatChunk,
        statuses=GENERATES,
    ),
    _post(
        "/inference/v1/generate",
        generate.generate,
        "Token ids in, token ids out.",
        reader=generate.READER,
        reply=replies.Generated,
        chunk=replies.Generated,
        statuses=GENERATES,
    ),
    _post(
        "/tokenize",
        information.tokenize,
        "Token ids of a text or a conversation.",
        reader=information.TOKENIZE_READER,
        reply=replies.Tokenized,
        statuses=COMPUTES,
    ),
    _post(
        "/detokenize",
        information.detokenize,
        "The text of token ids.",
        reader=information.DETOKENIZE_READER,
        reply=replies.Detokenized,
        statuses=COMPUTES,
    ),
    _get("/v1/models", information.models, "The model this device serves.", reply=replies.ModelList),
    _get("/v1/models/{model}", information.model, "One model.", reply=replies.Model, statuses=(404,)),
    _get("/health", information.health, "Whether requests are taken.", reply=replies.Health, statuses=(503,)),
    _get("/version", information.version, "The version of ROSE.", reply=replies.Version),
    _get("/metrics", information.metrics, "Metrics for Prometheus, under vLLM's names."),
)
OWNER_ROUTES = (
    _get("/rose/lending", control.status, "How lending goes.", reply=LendingStatus, statuses=(401, 503)),
    _post(
        "/rose/lending/{action}",
        control.control,
        "pause, resume, drain, remove, dry-run or limits.",
        reader=control.READER,
        reply=LendingStatus,
        statuses=(400, 401, 404, 408, 413, 503),
    ),
)
OPENAPI_PATH = "/openapi.json"
