"""A gateway with real devices behind it: nothing is lost, nothing is done twice, and every token is the right one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.integration import gateways
from tests.integration.devices import eventually
from tests.integration.gateways import AGENT, ROLLOUTS, TRAINER, WORKER, RunningGateway, Stream
from tests.integration.lent import lent

from rose.api.requests import TurnSampling
from rose.api.trajectories import BeginBody, FinishBody
from rose.client import GatewayClient
from rose.core.trajectory import Trajectory
from rose.envs.environment import TimedEnvironment
from rose.envs.environment_registry import make_environment
from rose.envs.play import ChatFrame, Episode, play
from rose.models.model_folder import load_model_folder
from rose.models.presets import write_preset

PROMPT = [5, 6, 7, 8, 9]
LONG = 3500  # a second and more: what is done to a turn is done while it runs


@pytest.fixture(scope="module")
def rollout_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("models") / "frozenlake-1m", seed=0)


@pytest.fixture(scope="module")
def found(rollout_model: Path) -> Iterator[RunningGateway]:
    """A gateway with one worker, for all tests that leave them whole."""
    with gateways.gateway(rollout_model, "beat_s=0.2") as running:
        with gateways.worker(rollout_model, running.url, "steady"):
            running.has_open(1)
            yield running


def tokens_of(answer: Any) -> list[int]:
    assert answer.status == 200, answer.body
    ids: list[int] = answer.json["choices"][0]["token_ids"]
    return ids


def logprobs_of(answer: Any) -> list[float]:
    return [entry["logprob"] for entry in answer.json["choices"][0]["logprobs"]["content"]]


def test_a_turn_moves_twice_and_nobody_can_tell(found: RunningGateway, rollout_model: Path) -> None:
    alone = found.turn(PROMPT, max_tokens=LONG, seed=7)
    with gateways.gateway(rollout_model) as running:
        with (
            gateways.worker(rollout_model, running.url, "a") as first,
            gateways.worker(rollout_model, running.url, "b") as second,
            gateways.worker(rollout_model, running.url, "c") as third,
        ):
            workers = {"a": first, "b": second, "c": third}
            running.has_open(3)
            stream = Stream(running, "moves", PROMPT, max_tokens=LONG, seed=7)
            stream.read(50)
            [evicts] = running.members(turns=1)
            assert running.ask("POST", f"/v1/pool/{evicts}/drain").status == 200
            eventually(lambda: evicts not in running.members() and len(running.members(turns=1)) == 1)
            [dies] = running.members(turns=1)
            os.kill(workers[dies].process.pid, signal.SIGKILL)
            stream.read()
            counts = running.pool()["counts"]
            eventually(lambda: len(running.members(state="open")) == 1)
            [lasts] = running.members(state="open")
            repeated = running.turn(PROMPT, "moves", max_tokens=LONG, seed=7)
            again = running.pool()["counts"]
    assert {evicts, dies, lasts} == {"a", "b", "c"}
    assert stream.token_ids == tokens_of(alone) and stream.logprobs == logprobs_of(alone)
    assert stream.finish_reason == "length" and (counts["evicted"], counts["lost"]) == (1, 1)
    assert tokens_of(repeated) == stream.token_ids and again["begun"] == 1, "a repeated request is not run again"


def test_a_worker_killed_in_mid_turn(found: RunningGateway, rollout_model: Path) -> None:
    alone = found.turn(PROMPT, max_tokens=LONG, seed=8)
    with gateways.gateway(rollout_model) as running:
        with gateways.worker(rollout_model, running.url, "dies") as dies:
            running.has_open(1)
            stream = Stream(running, "killed", PROMPT, max_tokens=LONG, seed=8)
            stream.read(50)
            os.kill(dies.process.pid, signal.SIGKILL)
            eventually(lambda: not running.members())
            assert running.pool()["waiting_turns"] == 1, "it waits with what it has"
            with gateways.worker(rollout_model, running.url, "lives"):
                stream.read()
                assert running.pool()["counts"]["lost"] == 1
    assert stream.token_ids == tokens_of(alone) and stream.logprobs == logprobs_of(alone)


def test_new_weights_in_mid_turn_make_two_spans(rollout_model: Path, tmp_path: Path) -> None:
    newer = write_preset("frozenlake-1m", tmp_path / "frozenlake-1m", seed=1)
    with gateways.gateway(rollout_model) as running, gateways.worker(rollout_model, running.url, "a") as device:
        running.has_open(1)
        stream = Stream(running, "swapped", PROMPT, max_tokens=LONG, seed=3)
        stream.read(50)
        published = running.ask("POST", "/v1/versions", {"version": "1", "folder": str(newer), "wait_s": 60}).json
        assert published.items() >= {"version": "1", "ready": ["a"], "behind": {}}.items()
        assert published["sync_s"]["a"] >= published["pause_s"]["a"] > 0
        shown = device.ask("GET", "/metrics", headers={"Authorization": f"Bearer {ROLLOUTS}"}).body.decode()
        assert "rose_weights_pause_seconds_count 1.0" in shown and "vllm:generation_tokens_total" in shown
        stream.read()
        assert list(dict.fromkeys(stream.versions)) == ["0", "1"] and len(stream.versions) == LONG
        whole = running.turn(PROMPT, "swapped", max_tokens=LONG, seed=3).json["choices"][0]
        assert [span["version"] for span in whole["weight_versions"]] == ["0", "1"]
        after = running.turn(PROMPT, max_tokens=4).json
        assert after["weight_version"] == "1"
        bad = running.ask("POST", "/v1/versions", {"version": "2", "folder": str(tmp_path / "none"), "wait_s": 0.5})
        assert bad.json["ready"] == [] and bad.json["behind"]
        running.ask("POST", "/v1/versions", {"version": "1", "folder": str(newer)})
        assert running.turn(PROMPT, max_tokens=4).status == 200, "back to what the worker has"


def test_without_workers_turns_wait_a_bounded_time(rollout_model: Path) -> None:
    with gateways.gateway(rollout_model, "wait_s=1", "max_waiting=1") as running:
        with concurrent.futures.ThreadPoolExecutor() as threads:
            waiting = threads.submit(running.turn, PROMPT, "waits")
            eventually(lambda: running.pool()["waiting_turns"] == 1)
            refused = running.turn(PROMPT, "too many")
            assert refused.status == 429 and "Retry-After" in refused.headers and refused.error
            gave_up = waiting.result()
        assert gave_up.status == 503 and "Retry-After" in gave_up.headers
        assert "no worker has joined" in gave_up.error["message"]
        assert running.ask("GET", "/health").status == 200


@pytest.mark.parametrize(
    "method, path, token, status",
    [
        ("POST", gateways.GENERATE, "wrong", 401),
        ("POST", gateways.GENERATE, WORKER, 403),
        ("GET", "/v1/batches/next", AGENT, 403),
        ("POST", "/v1/versions", AGENT, 403),
        ("GET", "/v1/workers/connect", AGENT, 403),
        ("GET", "/v1/workers/connect", "", 401),
        ("GET", "/v1/nothing", TRAINER, 404),
        ("GET", gateways.GENERATE, TRAINER, 405),
        ("POST", "/v1/trajectories/unknown/finish", AGENT, 404),
        ("GET", "/v1/batches/next?groups=-1", TRAINER, 400),
    ],
)
def test_who_may_not_do_what(found: RunningGateway, method: str, path: str, token: str, status: int) -> None:
    answer = found.ask(method, path, {} if method == "POST" else None, token=token)
    assert answer.status == status and answer.error


def test_bad_turns_are_refused_in_words(found: RunningGateway) -> None:
    assert found.turn([10**6], "s").status == 400
    assert found.turn(PROMPT, "s", max_tokens=10**6).status == 400
    assert found.turn(PROMPT, "x" * 400).status == 400
    begun = found.ask("POST", "/v1/trajectories", {"id": "trained", "group": "g"}).json
    assert found.turn(PROMPT, begun["session"], top_p=0.5).error["param"] == "top_p"
    assert found.ask("POST", "/v1/trajectories", {"grup": "g"}).error["code"] == "unknown_parameter"


def test_a_reader_that_left_finds_its_answer(found: RunningGateway) -> None:
    alone = found.turn(PROMPT, max_tokens=LONG, seed=11)
    begun = found.pool()["counts"]["begun"]
    hasty = Stream(found, "left", PROMPT, max_tokens=LONG, seed=11)
    hasty.read(20)
    hasty.leave()
    answer = found.turn(PROMPT, "left", max_tokens=LONG, seed=11)
    assert tokens_of(answer) == tokens_of(alone) and logprobs_of(answer) == logprobs_of(alone)
    assert found.pool()["counts"]["begun"] == begun + 1


def test_the_openai_client_talks_and_its_words_are_never_tokenised_again(found: RunningGateway) -> None:
    with openai.OpenAI(base_url=f"{found.url}/v1", api_key=AGENT, max_retries=0, timeout=60) as client:
        assert [model.id for model in client.models.list()] == ["frozenlake-1m"]

        def say(messages: list[Any], **more: Any) -> Any:
            more = {"extra_headers": {"X-Session-ID": "talk"}, "extra_body": {"return_token_ids": True}} | more
            return client.chat.completions.create(model="frozenlake-1m", messages=messages, max_tokens=8, **more)

        messages: list[Any] = [{"role": "user", "content": "Where am I?"}]
        first = say(messages)
        held = [*first.prompt_token_ids, *first.choices[0].token_ids]
        assert say(messages).choices[0].token_ids == first.choices[0].token_ids, "the same request, the same answer"
        messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "And now?"}]
        second = say(messages)
        assert second.prompt_token_ids[: len(held)] == held
        chunks = list(say(messages, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == second.choices[0].message.content
        messages[0] = {"role": "user", "content": "Somebody changed this"}
        forked = say(messages)
        assert forked.prompt_token_ids[: len(held)] != held
        with pytest.raises(openai.BadRequestError):
            say(messages, n=2)
        single = say(messages, extra_headers={}, n=2)
        assert len(single.choices) == 2
    assert found.ask("POST", "/v1/trajectories/talk/finish", {}).json == {"id": "talk", "turns": 3, "forks": 1}


def test_episodes_by_the_gateway_come_back_as_a_batch(found: RunningGateway, rollout_model: Path) -> None:
    folder = load_model_folder(rollout_model)
    frame = ChatFrame(folder.tokenizer, folder.spec.eos_token_ids)

    async def one(client: GatewayClient, number: int) -> Trajectory:
        name = f"episode-{number}"
        await client.begin(BeginBody(id=name, group="lake", group_size=4, task="frozenlake", seed=1))
        episode = Episode(name, "lake", 1, TurnSampling(max_tokens=6, seed=number))
        environment = TimedEnvironment(lambda: make_environment("frozenlake"))
        played = await play(episode, environment, frame, client.trajectory(name))
        environment.close()
        body = FinishBody(reward=played.reward, is_success=played.is_success, invalid_turns=played.invalid_turns)
        for _ in range(2):
            assert (await client.finish(name, body)).turns == played.turns
        return played

    async def story() -> None:
        async with GatewayClient(found.url, TRAINER) as client:
            waiting = asyncio.create_task(client.next_batch(1, 0))
            played = await asyncio.gather(*(one(client, number) for number in range(4)))
            batch = await waiting
            [group] = batch.groups
            assert (group.group, group.task, group.lost) == ("lake", "frozenlake", 0)
            by_name = {trajectory.trajectory_id: trajectory for trajectory in group.trajectories}
            assert [by_name[trajectory.trajectory_id] for trajectory in played] == played

    asyncio.run(story())


def test_a_borrowed_device_works_too(model_folder: Path, rollout_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_WORKER_TOKEN", WORKER)
    with gateways.gateway(rollout_model) as running:
        more = ("--gateway", running.url, "--worker-name", "lent", "--ttft-ms", "4000", "--tpot-ms", "2000")
        with lent(model_folder, rollout_model, *more) as device:
            eventually(lambda: running.members(state="open", kind="borrowed") == ["lent"])
            alone = device.rollout(PROMPT, max_tokens=64, seed=5)
            assert tokens_of(running.turn(PROMPT, "s", max_tokens=64, seed=5)) == tokens_of(alone)
            os.kill(device.process("rose.device.rollout_front"), signal.SIGKILL)
            eventually(lambda: not running.members())
            eventually(lambda: running.members(state="open") == ["lent"])
            assert running.turn(PROMPT, "s2", max_tokens=8).status == 200
