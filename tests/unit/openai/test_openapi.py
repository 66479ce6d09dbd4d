"""The OpenAPI document names every route and every parameter."""

from __future__ import annotations

import json
import re

import pytest
from tests.unit.openai.readers import READERS

from rose.device.admin_routes import ADMIN_ROUTES
from rose.openai.application import ROUTES, document_of
from rose.openai.openapi import HttpRoute


def test_the_document_names_every_route_and_every_parameter() -> None:
    document = document_of("some-model")
    assert json.loads(json.dumps(document)) == document, "clients get what this process has"
    assert set(document["paths"]) == {route.path for route in ROUTES}
    schemas = document["components"]["schemas"]
    for reader in READERS.values():
        properties = schemas[reader.kind.__name__]["properties"]
        assert set(properties) == {*reader.kind.__struct_fields__, *reader.ignored}
        assert schemas[reader.kind.__name__]["additionalProperties"] is False
    assert schemas["CompletionBody"]["required"] == ["prompt"]
    assert schemas["CompletionBody"]["properties"]["model"]["enum"] == [None, "some-model"]


@pytest.mark.parametrize("route", [*ROUTES, *ADMIN_ROUTES], ids=lambda route: route.path)
def test_every_route_of_a_lent_device_is_described(route: HttpRoute) -> None:
    operation = document_of("m", (*ROUTES, *ADMIN_ROUTES))["paths"][route.path][route.method.lower()]
    assert set(operation["responses"]) == {"200", *map(str, route.statuses)}
    assert [one["name"] for one in operation.get("parameters", [])] == re.findall(r"{(\w+)}", route.path)
