"""The aiohttp application of a device: its routes, checks of the caller, and errors turned into responses.

The table of routes is read by the application and by the OpenAPI document alike. A lent device adds admin routes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web

from rose.openai import chat, completions, generate, information, responses_api, responses_api_schemas
from rose.openai import response_schemas as schemas
from rose.openai.access import CallerCheck, brake, check_bearer
from rose.openai.http_context import HttpContext
from rose.openai.http_errors import Failure, RequestHandler, shutting_down, with_failures
from rose.openai.http_server import InFlight
from rose.openai.openapi import HttpRoute, get, openapi_document, post
from rose.openai.response_rendering import ARRIVAL

logger = logging.getLogger("rose.openai")

OPENAPI_PATH = "/openapi.json"
GENERATES = (400, 404, 408, 409, 413, 429, 503)
COMPUTES = (400, 404, 408, 413)
# Routes for monitors, and the admin routes, which have a token of their own.
WITHOUT_KEY = ("/health", "/version", "/metrics", "/rose/")

ROUTES = (
    post(
        "/v1/completions", completions.completions, "Complete one or several prompts.",
        reader=completions.READER, reply=schemas.Completion, chunk=schemas.Completion, statuses=GENERATES,
    ),
    post(
        "/v1/chat/completions", chat.chat_completions, "Answer a conversation.",
        reader=chat.READER, reply=schemas.ChatCompletion, chunk=schemas.ChatChunk, statuses=GENERATES,
    ),
    post(
        responses_api.RESPONSES_PATH, responses_api.responses, "Answer a conversation in OpenAI's Responses API.",
        reader=responses_api.READER, reply=responses_api_schemas.ResponseObject, events=responses_api_schemas.EVENTS,
        statuses=GENERATES,
    ),
    post(
        "/inference/v1/generate", generate.generate, "Token ids in, token ids out.",
        reader=generate.READER, reply=schemas.Generated, chunk=schemas.Generated, statuses=GENERATES,
    ),
    post(
        "/tokenize", information.tokenize, "Token ids of a text or a conversation.",
        reader=information.TOKENIZE_READER, reply=schemas.Tokenized, statuses=COMPUTES,
    ),
    post(
        "/detokenize", information.detokenize, "The text of token ids.",
        reader=information.DETOKENIZE_READER, reply=schemas.Detokenized, statuses=COMPUTES,
    ),
    get("/v1/models", information.models, "The model this device serves.", reply=schemas.ModelList),
    get("/v1/models/{model}", information.model, "One model.", reply=schemas.Model, statuses=(404,)),
    get("/health", information.health, "Whether requests are taken.", reply=schemas.Health, statuses=(503,)),
    get("/version", information.version, "The version of ROSE.", reply=schemas.Version),
    get("/metrics", information.metrics, "Metrics for Prometheus, under vLLM's names."),
)  # fmt: skip


def application(context: HttpContext, in_flight: InFlight, more_routes: Sequence[HttpRoute] = ()) -> web.Application:
    """Return the application of a device, with the admin routes `more_routes` if it is lent."""
    callers = CallerCheck(context.settings)
    routes = (*ROUTES, *more_routes)

    @web.middleware
    async def guard(request: web.Request, handler: RequestHandler) -> web.StreamResponse:
        request[ARRIVAL] = time.monotonic()
        in_flight.count += 1
        try:
            if in_flight.draining:
                raise shutting_down("the device")
            callers.check(request)
            if context.token is not None:
                check_bearer(request, context.token)
            elif context.api_key is not None and not request.path.startswith(WITHOUT_KEY):
                check_bearer(request, context.api_key)
            return await with_failures(request, handler, "device", logger)
        except Failure as failure:
            await brake(request, failure)
            return failure.response()
        finally:
            in_flight.count -= 1

    async def openapi(request: web.Request) -> web.StreamResponse:
        return web.json_response(document_of(context.model_name, routes))

    app = web.Application(middlewares=[guard], client_max_size=context.settings.max_body_bytes)
    for route in routes:
        path = route.path.replace("{model}", "{model:.+}")  # names may have slashes
        app.router.add_route(route.method, path, partial(route.handler, context))
    app.router.add_get(OPENAPI_PATH, openapi)
    return app


def document_of(model_name: str, routes: Sequence[HttpRoute] = ROUTES) -> dict[str, Any]:
    """Return the OpenAPI document of a device with these routes."""
    return openapi_document(routes, [generate.SAMPLING_READER], model_name)
