"""verl's pool without verl: settings, the steps of a turn's tokens, and versions that are in force once announced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.adapters.trl_world import SECRET
from tests.unit.test_client import TURN, Reply, ScriptedGateway, play

from rose import client as client_module
from rose.adapters import turn_watch
from rose.adapters.rose_pool import TOKEN
from rose.adapters.verl_pool import VerlSettings, VerlTurns, VerlWeights, epoch_and_step, label_of, turn_sampling
from rose.core.versions import VersionId
from rose.errors import ConfigError, ModelError, RequestRefused, RoseError, Unavailable
from rose.models.tensors import open_tensors
from rose.weights.manifest import Fenced, folder_hash
from rose.weights.publish import PublishedVersion

Story = Callable[[VerlTurns], Awaitable[None]]
OLD, MINE, NEXT = "11.4-0123abcd", "12.5-0123abcd", "12.6-4567cdef"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "a-token")
    monkeypatch.setattr(client_module, "PAUSE_S", 0.01)
    monkeypatch.setattr(turn_watch, "WATCH_S", 0.02)


def settings(gateway: str = "http://nowhere", **changes: Any) -> VerlSettings:
    return VerlSettings(**({"model": "m", "gateway": gateway, "relay": "r", "run": "run"} | changes))


def turn(*versions: str) -> Reply:
    """Return the reply to a turn with one token of each version."""
    spans = [{"version": version, "start": n, "end": n + 1} for n, version in enumerate(versions)]
    choice = TURN["choices"][0] | {
        "token_ids": [7] * len(spans),
        "logprobs": {"content": [{"logprob": -0.5}] * len(spans)},
        "weight_versions": spans,
    }
    return 200, {"choices": [choice]}, {}


def pool(version: str | None, **more: Any) -> Reply:
    return 200, {"version": version, "waiting_turns": 3, "members": [], **more}, {}


def refused(status: int, message: str) -> Reply:
    return status, {"error": {"message": message}}, {"Retry-After": "0"}


def tell(story: Story, *replies: Reply, **changes: Any) -> list[Any]:
    """Play a story at a gateway that gives these replies, and return the requests that it got."""
    gateway = ScriptedGateway(*replies)

    async def run(client: Any) -> None:
        turns = VerlTurns(settings(client._url, patience_s=0.1, **changes))
        try:
            await story(turns)
        finally:
            await turns.close()

    play(gateway, run)
    return gateway.requests


def test_settings_that_are_missing_or_unknown_are_named() -> None:
    values = {"model": "m", "gateway": "http://g", "relay": "r", "run": "run"}
    assert VerlSettings.read(values) == settings("http://g")
    for wrong, name in ((values | {"gatway": "x"}, "gatway"), ({"model": "m"}, "'gateway', 'relay', and 'run'")):
        with pytest.raises(ConfigError, match=name):
            VerlSettings.read(wrong)


def test_the_name_of_a_version_has_its_epoch_and_step() -> None:
    published = PublishedVersion(VersionId(1763, 42), "0123456789abcdef", "delta", 1, 2)
    assert label_of(published) == "1763.42-01234567"
    assert epoch_and_step(label_of(published)) == (1763, 42)
    for other in ("", "42-01234567", "initial", "1.2-01234567x", "1.2-0123456", "-1.2-01234567"):
        assert epoch_and_step(other) == (-1, -1)


@pytest.mark.parametrize(
    "asked, prompt_tokens, max_model_len, expected",
    [
        ({}, 10, None, 8),  # the length of an answer
        ({}, 20, None, 4),  # what is left of prompt and answer
        ({}, 100, None, 1),
        ({}, 10, 15, 5),  # what is left of the model's context
        ({"max_tokens": 3}, 10, None, 3),
        ({"max_new_tokens": 2}, 10, None, 2),
        ({"max_tokens": 30}, 10, None, 30),
    ],
)
def test_the_number_of_tokens_is_that_of_verls_own_server(
    asked: dict[str, Any], prompt_tokens: int, max_model_len: int | None, expected: int
) -> None:
    rollout = SimpleNamespace(prompt_length=16, response_length=8, max_model_len=max_model_len, ignore_eos=False)
    params = turn_sampling(asked, prompt_tokens, rollout)
    assert params["max_tokens"] == expected and "max_new_tokens" not in params


def test_sampling_is_verls_and_each_call_has_its_own_seed() -> None:
    rollout = SimpleNamespace(prompt_length=16, response_length=8, max_model_len=None, ignore_eos=True)
    asked = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": False}
    first, second = (turn_sampling(asked, 4, rollout) for _ in range(2))
    assert first.pop("seed") != second.pop("seed")
    assert first == second == asked | {"ignore_eos": True, "logprobs": 1, "max_tokens": 8}
    assert (
        turn_sampling({"seed": 3, "ignore_eos": False}, 4, rollout).items() >= {"seed": 3, "ignore_eos": False}.items()
    )


def test_spans_become_steps_and_the_trainers_epoch_is_asked_for_once() -> None:
    async def story(turns: VerlTurns) -> None:
        answer, steps = await turns.play("s", [1, 2], {"temperature": 1.0})
        assert steps == [5, 6] and [span.version for span in answer.spans] == [MINE, NEXT]
        assert (await turns.play("s", [1, 2, 7], {}))[1] == [6]
        await turns.end(["s"])

    requests = tell(story, turn(MINE, NEXT), pool(NEXT), turn(NEXT), (200, FINISHED, {}))
    paths = [request[1] for request in requests]
    assert paths == ["/inference/v1/generate", "/v1/pool", "/inference/v1/generate", "/v1/trajectories/s/finish"]
    assert requests[0][2]["X-Session-ID"] == "s" and requests[0][3]["token_ids"] == [1, 2]


FINISHED = {"id": "s", "turns": 2, "forks": 0}


@pytest.mark.parametrize("foreign", [OLD, "initial"])
def test_tokens_of_other_weights_are_replaced_by_tokens_of_the_newest(foreign: str) -> None:
    async def story(turns: VerlTurns) -> None:
        assert (await turns.play("s", [1], {"seed": 4}))[1] == [5]

    requests = tell(story, turn(foreign, MINE), pool(MINE), turn(MINE))
    first, _, second = (request[3] for request in requests)
    assert "min_weight_version" not in first and second == first | {"min_weight_version": MINE}


@pytest.mark.parametrize(
    "replies, error, reason",
    [
        ([turn("initial"), pool(None), turn("initial")], Unavailable, "tokens are of version initial, not of this"),
        ([turn(OLD), pool(MINE), turn(OLD)], Unavailable, "tokens are of version 11.4-0123abcd, not of this"),
        (
            [turn(OLD), pool(MINE), refused(409, f"no worker ran version `{MINE}` within 30 s")],
            RequestRefused,
            f"answered 409: no worker ran version `{MINE}` within 30 s",
        ),
        ([refused(401, "no such token")], RequestRefused, "answered 401: no such token"),
        ([refused(400, "`top_p` is too large")], RequestRefused, "answered 400: `top_p` is too large"),
    ],
)
def test_a_turn_that_cannot_be_had_is_an_error_that_says_why(
    replies: list[Reply], error: type[RoseError], reason: str
) -> None:
    async def story(turns: VerlTurns) -> None:
        with pytest.raises(error, match=reason):
            await turns.play("s", [1], {})

    tell(story, *replies)


def test_a_gateway_that_is_away_fails_all_turns_that_wait() -> None:
    async def run() -> None:
        turns = VerlTurns(settings("http://127.0.0.1:1", patience_s=0.05))
        for end in await asyncio.gather(*(turns.play(name, [1], {}) for name in "abc"), return_exceptions=True):
            assert isinstance(end, Unavailable) and "http://127.0.0.1:1 cannot be reached" in end.what
        await turns.close()

    asyncio.run(run())


class FullPool(ScriptedGateway):
    """A gateway without a worker: turns get 503 for ever."""

    async def handle(self, request: Any) -> Any:
        self.replies = [pool(MINE)] if request.path == "/v1/pool" else [refused(503, "no worker took this turn")]
        return await super().handle(request)


def test_turns_wait_for_a_worker_and_a_pool_without_one_is_an_error_at_last(caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(turn_watch, "QUIET_S", 0.05)

    async def run(client: Any) -> None:
        turns = VerlTurns(settings(client._url, patience_s=0.1, stale_after_s=0.5))
        with pytest.raises(Unavailable, match=r"no turn has ended for .*: 3 turns wait .* there is none"):
            await turns.play("s", [1], {})
        await turns.close()

    play(FullPool(), run)
    assert [record.message for record in caplog.records if "no turn has ended" in record.message]


def test_a_session_that_cannot_be_ended_is_only_logged(caplog: Any) -> None:
    async def story(turns: VerlTurns) -> None:
        await turns.play("s", [1], {})
        await turns.end(["s"])

    tell(story, turn(MINE), pool(MINE), refused(404, "there is no trajectory"))
    assert "session s stays at the gateway" in caplog.text


# The transfer of weights


class Announcements(ScriptedGateway):
    """A gateway that keeps what is published; `ready` and `behind` are what it says of its workers."""

    def __init__(self, **workers: Any) -> None:
        super().__init__()
        self.workers = {"ready": ["a"], "behind": {}} | workers
        self.published: list[dict[str, Any]] = []

    async def handle(self, request: Any) -> Any:
        body = await request.json() if request.method == "POST" else None
        if body is not None:
            self.published.append(body)
        self.replies = [(200, {"version": (body or {}).get("version", ""), **self.workers}, {})]
        return await super().handle(request)


@pytest.fixture
def stream(folder: Path) -> Callable[[float], Iterator[tuple[str, torch.Tensor]]]:
    tensors = open_tensors(folder)
    return lambda factor=1.0: ((name, torch.from_numpy(tensors.float32(name) * factor)) for name in tensors.names())


def publishing(gateway: Announcements, folder: Path, relay: Path, story: Callable[[Any], Awaitable[None]]) -> None:
    """Run a story with a function that makes trainers of this gateway."""

    async def run(client: Any) -> None:
        made = []

        async def trainer() -> VerlWeights:
            where = settings(client._url, model=str(folder), relay=str(relay), first_wait_s=7.0)
            made.append(await asyncio.to_thread(VerlWeights, where, secret=SECRET))
            return made[-1]

        try:
            await story(trainer)
        finally:
            for weights in made:
                weights.publisher.close()

    play(gateway, run)


def test_the_gateway_is_told_each_version_and_only_the_first_is_waited_for(folder, tmp_path, stream):
    gateway = Announcements()

    async def story(trainer):
        weights = await trainer()
        for step, factor in ((0, 1.0), (3, 0.5)):
            await weights.announce(weights.publisher.publish(step, stream(factor)))

    publishing(gateway, folder, tmp_path, story)
    first, second = gateway.published
    assert first["hash"] == folder_hash(folder) != second["hash"]
    assert epoch_and_step(first["version"])[1] == 0 and epoch_and_step(second["version"])[1] == 3
    assert (first["wait_s"], second["wait_s"]) == (7.0, 0.0)
    assert (first["relay"], first["run"]) == (str(tmp_path), "run")


def test_a_trainer_that_dies_before_it_told_the_gateway_leaves_the_version_before(folder, tmp_path, stream):
    gateway = Announcements()

    async def story(trainer):
        weights = await trainer()
        await weights.announce(weights.publisher.publish(1, stream()))
        weights.publisher.publish(2, stream(0.5))  # and dies here
        successor = await trainer()
        await successor.announce(successor.publisher.publish(1, stream(0.25)))
        with pytest.raises(Fenced, match="another trainer has taken over"):
            weights.publisher.publish(3, stream())

    publishing(gateway, folder, tmp_path, story)
    (first_epoch, first), (later_epoch, later) = (epoch_and_step(found["version"]) for found in gateway.published)
    assert first == later == 1 and later_epoch > first_epoch


def test_weights_of_another_model_or_step_are_refused_and_the_next_ones_go_out(folder, tmp_path, stream):
    gateway = Announcements()

    async def story(trainer):
        weights = await trainer()
        await weights.announce(weights.publisher.publish(1, stream()))
        with pytest.raises(ModelError, match=r"the trainer's weights are not those of .*, in the folder"):
            weights.publisher.publish(2, ((name, value[:-1]) for name, value in stream()))
        with pytest.raises(RequestRefused, match="version 1 is not later than 1"):
            weights.publisher.publish(1, stream())
        await weights.announce(weights.publisher.publish(2, stream(0.5)))

    publishing(gateway, folder, tmp_path, story)
    assert [epoch_and_step(found["version"])[1] for found in gateway.published] == [1, 2]


def test_a_first_version_that_no_worker_loads_is_an_error_with_their_reasons(folder, tmp_path, stream):
    gateway = Announcements(ready=[], behind={"a": "the relay is away"})

    async def story(trainer):
        weights = await trainer()
        with pytest.raises(Unavailable, match=r"no worker loaded version .*\.1-.* in 7 s: a: the relay is away"):
            await weights.announce(weights.publisher.publish(1, stream()))
        gateway.workers = {"ready": [], "behind": {}}  # no worker at all: some may come later
        await weights.announce(weights.publisher.publish(2, stream()))

    publishing(gateway, folder, tmp_path, story)


def test_a_trainer_without_a_token_or_a_gateway_ends_before_its_first_step(folder, tmp_path, monkeypatch):
    where = {"model": str(folder), "relay": str(tmp_path), "patience_s": 0.05}
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:1 cannot be reached"):
        VerlWeights(settings("http://127.0.0.1:1", **where), secret=SECRET)
    monkeypatch.delenv(TOKEN)
    with pytest.raises(ConfigError, match="token for trainers"):
        VerlWeights(settings(**where), secret=SECRET)
    with pytest.raises(ConfigError, match="token for trainers"):
        VerlTurns(settings())
