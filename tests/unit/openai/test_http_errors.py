"""Errors in OpenAI's shape, whatever they quote."""

from __future__ import annotations

import pytest
from tests.unit.front_world import FrontWorld, run_with_server

from rose.errors import ContextTooLong, ModelError, QueueFull, RequestRefused, RoseError, Unavailable
from rose.models.model_folder import ModelFolder
from rose.openai.http_errors import bad_request, failure_of, shutting_down

COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"


def test_bytes_that_are_no_text_are_never_a_500(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        for headers in (
            {"Host": b"\xff"},
            {"Origin": b"http://\xff"},
            {"Content-Encoding": b"\xff"},
            {"X-Odd": b"\xff"},
        ):
            status, answer = await world.ask("POST", COMPLETIONS, b'{"prompt":[1]}', dict(headers))
            assert status in (200, 400, 403, 415) and answer
        for path in ("/v1/models/%ff", "/v1/models/%00", "/%ff", "/v1/models/\u00e9"):
            assert (await world.ask("GET", path))[0] in (400, 404)

    run_with_server(folder, story)


@pytest.mark.parametrize(
    "error, status, code, wait",
    [
        (ContextTooLong("too long"), 400, "context_length_exceeded", None),
        (RequestRefused("no", hint="do this"), 400, "invalid_value", None),
        (QueueFull("full", retry_after_s=2.5), 429, "queue_full", "3"),
        (Unavailable("gone", retry_after_s=0.0), 503, "engine_unavailable", "1"),
        (ModelError("broken"), 503, None, "1"),
    ],
)
def test_errors_of_rose_have_a_status_and_a_time_to_retry(
    error: RoseError, status: int, code: str | None, wait: str | None
) -> None:
    failure = failure_of(error)
    assert (failure.status, failure.body.error.code, failure.headers.get("Retry-After")) == (status, code, wait)
    assert failure.body.error.message == (f"{error.what} ({error.hint})" if error.hint else error.what)


def test_a_response_that_closes_says_so_and_does() -> None:
    response = shutting_down("the device").response()
    assert (response.status, response.headers["Connection"], response.keep_alive) == (503, "close", False)
    assert bad_request("no", param="n").response().headers["Content-Type"] == "application/json"
