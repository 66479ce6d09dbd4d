"""The OpenAPI 3.1 document, made from the routes and from the structs that check requests and shape responses.

Three things msgspec cannot know are added: the ignored parameters with the values they may have, the two kinds of list
a prompt may be, and what is only known when a model is loaded (its name and vocabulary).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from rose import __version__
from rose.openai.http_context import HttpContext
from rose.openai.http_errors import ErrorBody
from rose.openai.request_parsing import BodyReader
from rose.openai.request_schemas import CompletionBody, GenerateBody

REF = "#/components/schemas/{name}"
ERRORS = {
    400: "The request is at fault; the message says how.",
    401: "The request does not bear the token that this route needs.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    409: "The engine does not run the weights that the request demands.",
    413: "The body is too large.",
    429: "Too many requests are waiting; Retry-After says when to come back.",
    503: "The engine is not running; Retry-After says when to come back.",
}

Schema = dict[str, Any]
Handler = Callable[[HttpContext, web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """One route. `reply` None means text; `chunk` is the type of its stream's events, `events` those with names."""

    method: str
    path: str
    handler: Handler
    what: str
    reply: type[msgspec.Struct] | None = None
    chunk: type[msgspec.Struct] | None = None
    events: Sequence[type[msgspec.Struct]] = ()
    reader: BodyReader[Any] | None = None
    statuses: Sequence[int] = ()


def post(path: str, handler: Handler, what: str, **known: Any) -> HttpRoute:
    return HttpRoute("POST", path, handler, what, **known)


def get(path: str, handler: Handler, what: str, **known: Any) -> HttpRoute:
    return HttpRoute("GET", path, handler, what, **known)


def openapi_document(routes: Sequence[HttpRoute], inner_readers: Iterable[BodyReader[Any]], model_name: str) -> Schema:
    """Return the document of these routes. `inner_readers` read objects inside a body, such as `sampling_params`."""
    readers = [route.reader for route in routes if route.reader is not None] + list(inner_readers)
    kinds: list[type] = [ErrorBody, *(reader.kind for reader in readers)]
    for route in routes:
        kinds += [kind for kind in (route.reply, route.chunk, *route.events) if kind is not None]
    _, schemas = msgspec.json.schema_components(list(dict.fromkeys(kinds)), ref_template=REF)
    for reader in readers:
        _close(schemas[reader.kind.__name__], reader, model_name)
    text, ids = {"type": "string"}, {"type": "array", "minItems": 1, "items": _ref("TokenId")}
    schemas["TokenId"] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
    lists = [{"type": "array", "minItems": 1, "items": text}, {"type": "array", "minItems": 1, "items": ids}]
    schemas[CompletionBody.__name__]["properties"]["prompt"] = {"anyOf": [text, ids, *lists]}
    schemas[GenerateBody.__name__]["properties"]["sampling_params"] = _ref("GenerateSampling")
    paths: Schema = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, model_name)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ROSE device", "version": __version__, "description": "OpenAI-compatible inference."},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _close(schema: Schema, reader: BodyReader[Any], model_name: str) -> None:
    """Allow no other keys than the fields and the ignored parameters, these only at the values that change nothing."""
    properties = schema["properties"]
    for name, accepted in reader.ignored.items():
        properties[name] = {
            "enum": [None, *accepted],
            "description": "Not implemented; accepted where it changes nothing.",
        }
    if "model" in properties:
        properties["model"] = {"enum": [None, model_name], "description": "The model this device serves."}
    schema["additionalProperties"] = False


def _ref(name: str) -> Schema:
    return {"$ref": REF.format(name=name)}


def _operation(route: HttpRoute, model_name: str) -> Schema:
    entry: Schema = {
        "operationId": route.handler.__name__,
        "summary": route.what,
        "responses": {"200": _success(route)} | {str(status): _error(status) for status in route.statuses},
    }
    for name in re.findall(r"{(\w+)}", route.path):
        schema = {"type": "string", "examples": [model_name]} if name == "model" else {"type": "string"}
        entry.setdefault("parameters", []).append({"name": name, "in": "path", "required": True, "schema": schema})
    if route.reader is not None:
        content = {"application/json": {"schema": _ref(route.reader.kind.__name__)}}
        entry["requestBody"] = {"required": True, "content": content}
    return entry


def _success(route: HttpRoute) -> Schema:
    if route.reply is None:
        return {"description": "Text.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    content: Schema = {"application/json": {"schema": _ref(route.reply.__name__)}}
    if route.chunk is not None:  # an event is a chunk, an error, or the last one
        data = {"anyOf": [{"const": "[DONE]"}, _json_text((route.chunk, ErrorBody))]}
        schema = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        content["text/event-stream"] = {"schema": schema}
    if route.events:
        properties = {"event": {"type": "string"}, "data": _json_text(route.events)}
        schema = {"type": "object", "properties": properties, "required": ["event", "data"]}
        content["text/event-stream"] = {"schema": schema}
    return {"description": "The answer.", "content": content}


def _json_text(kinds: Iterable[type[msgspec.Struct]]) -> Schema:
    refs = [_ref(kind.__name__) for kind in kinds]
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": refs}}


def _error(status: int) -> Schema:
    response: Schema = {
        "description": ERRORS[status],
        "content": {"application/json": {"schema": _ref(ErrorBody.__name__)}},
    }
    if status in (429, 503):
        response["headers"] = {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}}
    return response
