"""Who may call: tokens, names of the server, pages of other sites."""

from __future__ import annotations

import asyncio
import base64
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.front_world import FrontWorld, run_with_server

from rose.config.server_settings import DeviceSettings, FrontSettings, RolloutFrontSettings
from rose.device import device_service as service
from rose.errors import ConfigError
from rose.models.model_folder import ModelFolder
from rose.openai import access
from rose.openai.access import (
    API_KEY_VARIABLE,
    OWNER_VARIABLE,
    ROLLOUT_VARIABLE,
    SHORTEST,
    check_bearer,
    check_distinct,
    optional_token_from,
    token_from,
)
from rose.openai.http_errors import Failure

COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"

KEY = "a-key-of-the-serving-port"

LOOPBACK = ["localhost", "localhost:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:8000", "LOCALHOST", "a.localhost"]

FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "", "[", "127.0.0.1.evil.example"]

TOKEN = "a-good-token"


def basic(credentials: str) -> str:
    return f"Basic {base64.b64encode(credentials.encode()).decode()}"


WRONG = {
    "none": "",
    "bare": TOKEN,
    "another kind": f"Digest {TOKEN}",
    "basic, bare": f"Basic {TOKEN}",
    "basic, no base64": "Basic =a",
    "basic, no colon": basic(TOKEN),
    "basic, the token as user": basic(f"{TOKEN}:"),
    "basic, wrong": basic(":a-bad-token"),
    "basic, with spaces": basic(f": {TOKEN}"),
    "basic, a token with a tail": basic(f":{TOKEN}:"),
    "basic, no text": "Basic \udcff",
    "no token": "Bearer",
    "wrong": "Bearer a-bad-token",
    "longer": f"Bearer {TOKEN}2",
    "no text at all": "Bearer \udcff\udcfe",
}


def asking(header: str) -> Any:
    return SimpleNamespace(headers={"Authorization": header} if header else {}, protocol=None)


@pytest.mark.parametrize("header", WRONG.values(), ids=WRONG)
def test_a_request_without_the_token_is_401(header: str) -> None:
    with pytest.raises(Failure) as refused:
        check_bearer(asking(header), TOKEN)
    assert refused.value.status == 401


RIGHT = {
    "plain": f"Bearer {TOKEN}",
    "with spaces": f"bearer  {TOKEN} ",
    "basic": basic(f":{TOKEN}"),
    "basic with a user": basic(f"anyone:{TOKEN}"),
    "basic in small letters": basic(f":{TOKEN}").replace("Basic", "basic"),
}


@pytest.mark.parametrize("header", RIGHT.values(), ids=RIGHT)
def test_a_request_with_the_token_is_accepted(header: str) -> None:
    check_bearer(asking(header), TOKEN)
    with pytest.raises(Failure):
        check_bearer(asking(header), TOKEN + "2")


@pytest.mark.parametrize("key", [TOKEN, f" {TOKEN} "])
def test_a_token_may_come_as_anthropics_clients_send_it(key: str) -> None:
    asked: Any = SimpleNamespace(headers={"x-api-key": key}, protocol=None)
    check_bearer(asked, TOKEN)
    with pytest.raises(Failure):
        check_bearer(asked, TOKEN + "2")


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": ""},
        {"x-api-key": f"Bearer {TOKEN}"},
        {"x-api-key": basic(f":{TOKEN}")},
        {"x-api-key": "\udcff"},
        {"x-api-key": TOKEN, "Authorization": "Bearer a-bad-token"},
        {"x-api-key": TOKEN, "Authorization": ""},
    ],
    ids=str,
)
def test_a_wrong_api_key_or_one_beside_another_is_401(headers: dict[str, str]) -> None:
    asked: Any = SimpleNamespace(headers=headers, protocol=None)
    with pytest.raises(Failure) as refused:
        check_bearer(asked, TOKEN)
    assert refused.value.status == 401


STRONG = "sixteen-letters."


@pytest.mark.parametrize("variable", [ROLLOUT_VARIABLE, OWNER_VARIABLE])
def test_a_token_has_at_least_sixteen_characters(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, STRONG)
    assert token_from(variable) == STRONG
    for weak in (STRONG[:-1], "", "sixteen letters.", STRONG + "\u00e9", STRONG + "\n"):
        monkeypatch.setenv(variable, weak)
        with pytest.raises(ConfigError, match=variable):
            token_from(variable)
    monkeypatch.delenv(variable)
    assert len(token_from(variable)) >= SHORTEST


def test_the_key_of_the_serving_port_is_as_strong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert optional_token_from(API_KEY_VARIABLE) is None
    monkeypatch.setenv(API_KEY_VARIABLE, STRONG[:-1])
    with pytest.raises(ConfigError, match=API_KEY_VARIABLE):
        optional_token_from(API_KEY_VARIABLE)


def test_two_roles_with_the_same_token_are_refused(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = DeviceSettings(front=FrontSettings(port=0), rollout=RolloutFrontSettings(port=0))
    signals: Any = None  # nothing is started
    check_distinct({"A": "one", "B": "two", "C": None, "D": None})
    with pytest.raises(ConfigError, match="A and C"):
        check_distinct({"A": "one", "B": "two", "C": "one"})
    for one, other in (("one", "one/session"), ("one/session", "one")):  # a key may be a token and a session
        with pytest.raises(ConfigError, match="with a session"):
            check_distinct({"A": one, "B": other})
    check_distinct({"A": "one", "B": "one2/session"})
    for one, other in ((OWNER_VARIABLE, ROLLOUT_VARIABLE), (OWNER_VARIABLE, API_KEY_VARIABLE)):
        with monkeypatch.context() as scope:
            scope.setenv(one, STRONG)
            scope.setenv(other, STRONG)
            with pytest.raises(ConfigError, match="same token"):
                asyncio.run(service._serve_and_lend(folder.path, folder.path, settings, signals, print, None))


@pytest.mark.parametrize("host", [*LOOPBACK, *FOREIGN])
def test_a_loopback_server_answers_to_loopback_names_only(folder: ModelFolder, host: str) -> None:
    async def story(world: FrontWorld) -> None:
        for _ in range(2):
            status, _answer = await world.ask("GET", "/health", headers={"Host": host})
            assert status == (200 if host in LOOPBACK else 403)

    run_with_server(folder, story)


def test_a_setting_adds_names(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        assert (await world.ask("GET", "/health", headers={"Host": "models.example:80"}))[0] == 200
        assert (await world.ask("GET", "/health", headers={"Host": "evil.example"}))[0] == 403

    run_with_server(folder, story, FrontSettings(allowed_hosts=("Models.example",)))


def test_a_server_for_other_machines_answers_to_any_name(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        headers: dict[str, str | bytes] = {"Host": "models.example", "Origin": "http://models.example:3000"}
        assert (await world.ask("GET", "/health", headers=headers))[0] == 200
        assert (await world.ask("GET", "/health", headers=headers | {"Origin": "http://evil.example"}))[0] == 403

    run_with_server(folder, story, FrontSettings(host="0.0.0.0"))


@pytest.mark.parametrize(
    "origin, status",
    [("http://localhost:3000", 200), ("http://127.0.0.1", 200), ("http://evil.example", 403), ("null", 403), ("", 403)],
)
def test_pages_of_other_sites_are_refused(folder: ModelFolder, origin: str, status: int) -> None:
    async def story(world: FrontWorld) -> None:
        body = {"prompt": [1], "max_tokens": 1}
        found_status, answer = await world.post(COMPLETIONS, body, Origin=origin)
        assert found_status == status
        assert len(world.engine.requests) == (status == 200)
        if status == 403:
            assert answer["error"]["code"] == "origin_not_allowed"

    run_with_server(folder, story)


@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", "text/plain", ""])
def test_the_content_type_is_not_asked_for(folder: ModelFolder, kind: str) -> None:
    async def story(world: FrontWorld) -> None:
        assert (await world.post(COMPLETIONS, {"prompt": [1]}, **{"Content-Type": kind}))[0] == 200

    run_with_server(folder, story)


def test_a_key_guards_the_serving_port(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        for path in (COMPLETIONS, GENERATE, "/tokenize", "/detokenize", "/v1/models", "/openapi.json", "/v1/models/m"):
            method = "GET" if path.startswith(("/v1/models", "/openapi")) else "POST"
            for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
                assert (await world.ask(method, path, b"{}", dict(header)))[0] == 401, path
            assert (await world.ask(method, path, b"{}", {"Authorization": f"Bearer {KEY}"}))[0] in (200, 400)
        for path in ("/health", "/version", "/metrics"):
            assert (await world.ask("GET", path))[0] == 200

    run_with_server(folder, story, api_key=KEY)


@pytest.mark.parametrize("value", [b"Bearer \xff\xfe", b"\xff", b"Bearer ", b"Bearer", b"", b"Bearer \x80" * 100])
def test_a_malformed_authorization_is_401(folder: ModelFolder, value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: FrontWorld) -> None:
        assert (await world.ask("POST", GENERATE, b"{}", {"Authorization": value}))[0] == 401

    with caplog.at_level(logging.DEBUG):
        run_with_server(folder, story, RolloutFrontSettings(), token=KEY)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_wrong_token_is_answered_late_and_closes_the_connection(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: FrontWorld) -> None:
        waits: list[float] = []

        async def note(seconds: float) -> None:
            waits.append(seconds)

        monkeypatch.setattr(access, "BRAKE_S", 0.25)
        monkeypatch.setattr(access.asyncio, "sleep", note)
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer guess\r\n\r\n" * 2)
        said = await reader.read()
        assert said.count(b"HTTP/1.1 401") == 1 and waits == [0.25]
        writer.close()

    run_with_server(folder, story, RolloutFrontSettings(), token=KEY)
