"""The OpenAPI 3.1 document, made from the structs that check requests and shape replies.

Three things msgspec cannot know are added: the neutral parameters with the values they may have, the two kinds of list
a prompt may be, and what is only known when a model is loaded (its name and vocabulary).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rose import __version__
from rose.front.bodies import BodyReader
from rose.front.failures import ErrorBody
from rose.front.requests import CompletionBody, GenerateBody

REF = "#/components/schemas/{name}"
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """What the document says of one route. `reply` None means text; `chunk` is what its stream is made of."""

    method: str
    path: str
    name: str
    what: str
    reply: type[msgspec.Struct] | None = None
    chunk: type[msgspec.Struct] | None = None
    reader: BodyReader[Any] | None = None
    statuses: Sequence[int] = ()


ERRORS = {
    400: "The request is at fault; the message says how.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests are waiting; Retry-After says when to come back.",
    503: "The engine is not running; Retry-After says when to come back.",
}


def document(operations: Iterable[Operation], inner_readers: Iterable[BodyReader[Any]], model_name: str) -> Schema:
    """The whole document. `inner_readers` read objects inside a body, such as `sampling_params`."""
    operations = list(operations)
    readers = [operation.reader for operation in operations if operation.reader is not None] + list(inner_readers)
    schemas = _components(operations, readers)
    for reader in readers:
        _close(schemas[reader.kind.__name__], reader, model_name)
    _refine(schemas)
    paths: Schema = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, model_name)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ROSE device", "version": __version__, "description": "OpenAI-compatible inference."},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _components(operations: Iterable[Operation], readers: Iterable[BodyReader[Any]]) -> Schema:
    kinds: list[type] = [ErrorBody, *(reader.kind for reader in readers)]
    for operation in operations:
        kinds += [kind for kind in (operation.reply, operation.chunk) if kind is not None]
    _, schemas = msgspec.json.schema_components(list(dict.fromkeys(kinds)), ref_template=REF)
    return schemas


def _close(schema: Schema, reader: BodyReader[Any], model_name: str) -> None:
    """No other keys than the fields and the neutral parameters, these only at their neutral values."""
    properties = schema["properties"]
    for name, accepted in reader.neutral.items():
        properties[name] = {
            "enum": [None, *accepted],
            "description": "Not implemented; accepted where it changes nothing.",
        }
    if "model" in properties:
        properties["model"] = {"enum": [None, model_name], "description": "The model this device serves."}
    schema["additionalProperties"] = False


def _refine(schemas: Schema) -> None:
    text, ids = {"type": "string"}, {"type": "array", "minItems": 1, "items": {"$ref": REF.format(name="TokenId")}}
    schemas["TokenId"] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
    lists = [{"type": "array", "minItems": 1, "items": text}, {"type": "array", "minItems": 1, "items": ids}]
    schemas[CompletionBody.__name__]["properties"]["prompt"] = {"anyOf": [text, ids, *lists]}
    schemas[GenerateBody.__name__]["properties"]["sampling_params"] = {"$ref": REF.format(name="GenerateSampling")}


def _operation(operation: Operation, model_name: str) -> Schema:
    found: Schema = {
        "operationId": operation.name,
        "summary": operation.what,
        "responses": {"200": _success(operation)} | {str(status): _error(status) for status in operation.statuses},
    }
    if "{model}" in operation.path:
        schema = {"type": "string", "examples": [model_name]}
        found["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": schema}]
    if operation.reader is not None:
        content = {"application/json": {"schema": {"$ref": REF.format(name=operation.reader.kind.__name__)}}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _success(operation: Operation) -> Schema:
    if operation.reply is None:
        return {"description": "Text.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    content: Schema = {"application/json": {"schema": {"$ref": REF.format(name=operation.reply.__name__)}}}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": _event(operation.chunk)}
    return {"description": "The answer.", "content": content}


def _event(chunk: type[msgspec.Struct]) -> Schema:
    """One event of a stream: a chunk, an error, or the last one."""
    kinds = [{"$ref": REF.format(name=kind.__name__)} for kind in (chunk, ErrorBody)]
    json_text = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    data = {"anyOf": [{"const": "[DONE]"}, json_text]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _error(status: int) -> Schema:
    content = {"application/json": {"schema": {"$ref": REF.format(name=ErrorBody.__name__)}}}
    found: Schema = {"description": ERRORS[status], "content": content}
    if status in (429, 503):
        found["headers"] = {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}}
    return found
