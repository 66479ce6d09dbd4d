"""Whatever fits our OpenAPI document, and whatever does not: no 5xx, and answers that the document describes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import positive_data_acceptance
from tests.integration import devices

from rose.openai.application import document_of

NAME = "tests/a-small-model"
# Too large is a refusal as good as any: a list that is one item too long may also be more bytes than a body may have.
REFUSALS = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "5xx"]
CONFIG = schemathesis.Config.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": REFUSALS}}})
schema = schemathesis.openapi.from_dict(document_of(NAME), config=CONFIG)


@pytest.fixture(scope="module")
def small_device(model_folder: Path) -> Iterator[devices.Device]:
    """The embedded engine with a short context, so that no request takes long."""
    arguments = ["-m", "rose", "serve", str(model_folder), "--port", "0"]
    arguments += ["--device", devices.DEVICE, "--name", NAME, "--set", "engine.max_context_tokens=128"]
    found = devices.start(arguments, model_folder)
    yield found
    devices.end(found)


@schema.parametrize()
@hypothesis.settings(max_examples=12, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_answers_are_what_the_document_says(case: schemathesis.Case, small_device: devices.Device) -> None:
    response = case.call(base_url=small_device.url, timeout=60)
    # Every check but one: a valid body may still be refused, such as a prompt longer than the context.
    case.validate_response(response, excluded_checks=[positive_data_acceptance])
    assert response.status_code < 500


def test_the_document_is_served(small_device: devices.Device) -> None:
    assert small_device.ask("GET", "/openapi.json").json == document_of(NAME)


def test_a_name_may_have_slashes(small_device: devices.Device) -> None:
    assert small_device.ask("GET", f"/v1/models/{NAME}").json["id"] == NAME
    assert small_device.complete(model=NAME, prompt="x", max_tokens=1).json["model"] == NAME


def test_the_device_is_well_after_all_that(small_device: devices.Device) -> None:
    assert small_device.complete(prompt="x", max_tokens=1).status == 200
    devices.eventually(small_device.is_idle)
