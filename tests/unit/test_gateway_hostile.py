"""What a hostile or broken peer cannot do to a gateway: each story was once a way to stop it, or to be believed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.unit.rollout_world import TOKENS, World, eventually, world
from tests.unit.test_gateway import PROMPT, scripted

from rose.models.folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset
from rose.rollout import outbox, proof
from rose.rollout.client import GatewayClient
from rose.rollout.gateway import Gateway
from rose.rollout.joining import WORK_AT_ONCE, WORK_OF_OTHERS
from rose.rollout.messages import CONNECT_PATH, FRAME_MESSAGES_MAX, Beat, Join, Leave, Tokens, Turn, decode_to_agent
from rose.rollout.messages import Piece as PieceOf
from rose.rollout.trainer_routes import BeginBody, FinishBody

Story = Callable[[World], Awaitable[None]]
NAN = float("nan")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("qwen3-3m", tmp_path_factory.mktemp("models") / "qwen3-3m", seed=0))


def tell(folder: ModelFolder, story: Story, **changes: Any) -> None:
    async def whole() -> None:
        async with world(folder, **changes) as found:
            await story(found)

    asyncio.run(whole())


class HostileWorker:
    """A connection with a worker's token that says whatever it is told to say."""

    def __init__(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        self._connection = connection
        self.turns: list[Turn] = []
        self.why = ""

    async def say(self, *messages: Any) -> None:
        await self._connection.send_bytes(msgspec.msgpack.encode(messages))

    async def send(self, frame: bytes) -> None:
        await self._connection.send_bytes(frame)

    async def turn(self) -> Turn:
        """The next turn that it gets."""
        while not self.turns:
            for message in await self._next():
                if isinstance(message, Turn):
                    self.turns.append(message)
        return self.turns.pop(0)

    async def is_cut_off(self) -> str:
        """Wait for the end; what the gateway said."""
        while True:
            messages = await self._next()
            if not messages:
                return self.why
            self.why = next((message.why for message in messages if isinstance(message, Leave)), self.why)

    async def _next(self) -> list[Any]:
        frame = await self._connection.receive(timeout=20)
        return decode_to_agent(frame.data) if frame.type is aiohttp.WSMsgType.BINARY else []


async def hostile(found: World, name: str = "hostile", **join: Any) -> HostileWorker:
    headers = {"Authorization": f"Bearer {TOKENS.worker}"}
    connection = await found.http.ws_connect(found.url + CONNECT_PATH, headers=headers)
    worker = HostileWorker(connection)
    await worker.say(Join(name, "dedicated", found.gateway.front.model_name, "v0", 8, 100_000, 4096, **join))
    await eventually(lambda: found.gateway.pool.get(name) is not None)
    return worker


async def begin(found: World, token: str = TOKENS.agent, **body: Any) -> tuple[int, Any]:
    return await found.ask("POST", "/v1/trajectories", body, token=token)


# Workers


@pytest.mark.parametrize("piece", [
    {"token_ids": (1, 2, 3), "logprobs": (-1.0, -1.0)},
    {"token_ids": (1 << 40,), "logprobs": (-1.0,)},
    {"token_ids": (-7,), "logprobs": (-1.0,)},
    {"token_ids": (100_000,), "logprobs": (-1.0,)},
    {"token_ids": (1,), "logprobs": (NAN,)},
    {"token_ids": (1,), "logprobs": (1e300,)},
    {"token_ids": (1,), "logprobs": (float("-inf"),)},
    {"token_ids": (1,) * 100, "logprobs": (-1.0,) * 100},
    {"token_ids": (1,), "logprobs": (-1.0,), "cached_tokens": 2**64 - 1},
    {"token_ids": (1,), "logprobs": (-1.0,), "top_logprobs": (((1, -1.0),), ((2, -1.0),))},
    {"token_ids": (1,), "logprobs": (-1.0,), "top_logprobs": (((999_999, -1.0),),)},
    {"token_ids": (), "logprobs": (), "finish_reason": "length"},
    {"token_ids": (1,), "logprobs": (-1.0,), "version": "v" * 1000},
    {"token_ids": (1,), "logprobs": (-1.0,), "ticket": 2**64 - 1},
])  # fmt: skip
def test_a_worker_whose_tokens_cannot_be_is_cut_off_and_its_turn_goes_on(
    folder: ModelFolder, piece: dict[str, Any], tmp_path: Path
) -> None:
    async def story(found: World) -> None:
        worker = await hostile(found)
        turn = asyncio.create_task(found.turn(PROMPT, "s", max_tokens=2))
        ticket = (await worker.turn()).ticket
        values = {"ticket": ticket, "version": "v0", "finish_reason": "stop"} | piece
        names = PieceOf.__struct_fields__
        defaults = {"cached_tokens": None, "top_logprobs": ()}
        said = [values.get(name, defaults.get(name)) for name in names]
        await worker.send(msgspec.msgpack.encode([{"type": "Tokens", "pieces": [said]}]))
        assert await worker.is_cut_off()
        await found.worker("honest")
        assert (await turn)["token_ids"] == scripted(PROMPT, 2)
        assert found.gateway.pool.get("hostile") is None and found.gateway.books.ledger.trouble is None

    tell(folder, story, ledger=str(tmp_path / "ledger.sqlite"))


@pytest.mark.parametrize("finish", [None, "abort", "length"])
def test_a_turn_with_all_its_tokens_has_ended_whatever_its_worker_says(folder: ModelFolder, finish: Any) -> None:
    async def story(found: World) -> None:
        worker = await hostile(found)
        turn = asyncio.create_task(found.turn(PROMPT, "s", max_tokens=2))
        ticket = (await worker.turn()).ticket
        await worker.say(Tokens((PieceOf(ticket, (3, 4), (-1.0, -1.0), "v0", finish),)))
        async with asyncio.timeout(20):
            answer = await turn
        assert (answer["token_ids"], answer["finish_reason"]) == ([3, 4], "length")

    tell(folder, story)


def test_a_worker_cannot_speak_of_anothers_turn(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        owner = await hostile(found, "owner")
        turn = asyncio.create_task(found.turn(PROMPT, "s", max_tokens=2))
        ticket = (await owner.turn()).ticket
        stranger = await hostile(found, "stranger")
        late = found.gateway.scheduler.counts.late
        await stranger.say(Tokens((PieceOf(ticket, (9, 9), (-1.0, -1.0), "v0", "length"),)))
        await eventually(lambda: found.gateway.scheduler.counts.late == late + 1)
        assert not turn.done()
        await owner.say(Tokens((PieceOf(ticket, (3, 4), (-1.0, -1.0), "v0", "length"),)))
        assert (await turn)["token_ids"] == [3, 4]

    tell(folder, story)


@pytest.mark.parametrize("frame", [
    msgspec.msgpack.encode([{"type": "Beat", "why": b"", "running": 0}]),
    b"\x91\x82\xa4type\xa6Beat\xa3why\xa1\xff",
    b"\x91" * 100_000,
    b"",
    b"\xc1",
    msgspec.msgpack.encode([Beat(0, 0, 0, 0, "v0", True)] * (FRAME_MESSAGES_MAX + 1)),
    msgspec.msgpack.encode([Beat(-1, 0, 0, 0, "v0", True)]),
    msgspec.msgpack.encode([Beat(0, 0, 0, 0, "v0", True, NAN)]),
    msgspec.msgpack.encode([{"type": "VersionReady", "version": "v0", "size_bytes": -5}]),
    msgspec.msgpack.encode([{"type": "VersionReady", "version": "v", "seconds": {str(n): 1.0 for n in range(999)}}]),
    msgspec.msgpack.encode([{"type": "z" * 10_000}]),
], ids=["types", "utf-8", "deep", "empty", "reserved", "many", "negative", "nan", "size", "phases", "tag"])  # fmt: skip
def test_a_frame_that_is_none_costs_only_its_worker(folder: ModelFolder, frame: bytes) -> None:
    async def story(found: World) -> None:
        worker = await hostile(found)
        await worker.send(frame)
        await worker.is_cut_off()
        await found.worker("honest")
        assert (await found.turn(PROMPT, max_tokens=3))["token_ids"] == scripted(PROMPT, 3)

    tell(folder, story)


def test_others_are_answered_between_the_messages_of_one_frame(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns_of_loop: list[int] = []

    async def story(found: World) -> None:
        worker = await hostile(found)
        loop, ticks = asyncio.get_running_loop(), 0

        def tick() -> None:
            nonlocal ticks
            ticks += 1
            loop.call_soon(tick)

        heard = Gateway.heard

        def counted(gateway: Gateway, *said: Any) -> None:
            turns_of_loop.append(ticks)
            heard(gateway, *said)

        monkeypatch.setattr(Gateway, "heard", counted)
        loop.call_soon(tick)
        for message, work in ((Beat(0, 0, 0, 0, "v0", True), WORK_OF_OTHERS), (Tokens(()), 1)):
            turns_of_loop.clear()
            await worker.say(*[message] * 256)
            await eventually(lambda: len(turns_of_loop) >= 256)
            assert turns_of_loop[255] - turns_of_loop[0] >= 256 * work // WORK_AT_ONCE - 1

    tell(folder, story)


def test_a_worker_that_does_not_read_is_cut_off(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "WAITING_MAX", 50)

    async def story(found: World) -> None:
        await hostile(found)
        member = found.gateway.pool.get("hostile")
        assert member is not None
        for _ in range(200):
            member.send(Leave("x" * 4000, 1.0))
        await eventually(lambda: found.gateway.pool.get("hostile") is None)

    tell(folder, story)


def test_tokens_that_wait_for_a_hash_are_bounded(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "WITHHELD_MAX", 10)

    async def story(found: World) -> None:
        version = {"version": "v1", "folder": str(folder.path), "hash": "right"}
        assert (await found.ask("POST", "/v1/versions", version))[0] == 200
        worker = await hostile(found)
        await worker.say(*(Tokens((PieceOf(number, (1,), (-1.0,), "v1"),)) for number in range(20)))
        assert "hash" in await worker.is_cut_off()

    tell(folder, story)


# Agents


@pytest.mark.parametrize("body, status", [
    ({"reward": 1, "invalid_turns": 1 << 64}, 400),
    ({"reward": 1, "invalid_turns": -1}, 400),
    ({"reward": 1e308}, 400),
    ({"reward": 1}, 200),
])  # fmt: skip
@pytest.mark.parametrize("with_ledger", [True, False])
def test_a_finish_that_cannot_be_is_refused_and_the_honest_one_counts(
    folder: ModelFolder, tmp_path: Path, body: dict[str, Any], status: int, with_ledger: bool
) -> None:
    async def story(found: World) -> None:
        await begin(found, TOKENS.trainer, id="t", group="g")
        assert (await found.ask("POST", "/v1/trajectories/t/finish", body))[0] == status
        assert (await found.ask("POST", "/v1/trajectories/t/finish", {"reward": 1}))[0] == 200
        for _ in range(2):
            assert (await found.ask("GET", "/v1/batches/next?wait_s=5"))[0] == 200

    tell(folder, story, ledger=str(tmp_path / "ledger.sqlite") if with_ledger else None)


@pytest.mark.parametrize("more", [
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "maximum": 2**70}}}]},
    {"messages": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 18446744073709551616}'}}
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]},
])  # fmt: skip
def test_a_conversation_with_large_integers_is_answered_as_often_as_it_is_asked(
    folder: ModelFolder, tmp_path: Path, more: dict[str, Any]
) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4} | more
        for _ in range(2):
            async with asyncio.timeout(20):
                status, reply = await found.ask("POST", "/v1/chat/completions", body, session="s")
            assert status == 200, reply

    tell(folder, story, ledger=str(tmp_path / "ledger.sqlite"))


def test_an_integer_of_thousands_of_digits_in_a_call_is_a_400(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1' + "0" * 6000 + "}"}}
        messages = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "done"},
        ]
        for _ in range(2):
            status, _ = await found.ask("POST", "/v1/chat/completions", {"messages": messages}, session="s")
            assert status == 400

    tell(folder, story, ledger=str(tmp_path / "ledger.sqlite"))


def test_what_an_agent_sends_with_begin_is_bounded(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        for body in (
            {"task": "x" * 5000},
            {"id": "i" * 257},
            {"group": "g" * 257},
            {"group_size": 1 << 40},
            {"seed": 1 << 63},
            {"secret": "short"},
            {"secret": "with spaces in it, long"},
            {"id": "run/0~1"},
        ):
            assert (await begin(found, **body))[0] == 400, body
        assert len(found.gateway.trajectories) == 0

    tell(folder, story)


@pytest.mark.parametrize("headers", [
    {"Authorization": "Bearer \xff"},
    {"Authorization": "Bearer"},
    {"Authorization": "\xff"},
    {"Authorization": "Basic YTpi"},
    {"Authorization": f"Digest {TOKENS.trainer}"},
    {},
])  # fmt: skip
def test_a_malformed_authorization_is_401_and_leaves_no_trace_in_the_log(
    folder: ModelFolder, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async def story(found: World) -> None:
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        host = found.url.removeprefix("http://")
        reader, writer = await asyncio.open_connection(*host.split(":"))
        writer.write(f"GET /v1/pool HTTP/1.1\r\nHost: {host}\r\n{head}\r\n".encode("latin-1"))
        assert (await reader.readline()).split()[1] == b"401"
        writer.close()
        assert not caplog.records

    tell(folder, story)


def test_a_session_name_that_is_not_text_is_400(folder: ModelFolder, caplog: pytest.LogCaptureFixture) -> None:
    async def story(found: World) -> None:
        host = found.url.removeprefix("http://")
        body = b'{"token_ids": [1], "sampling_params": {}}'
        head = (
            f"POST /inference/v1/generate HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKENS.agent}\r\n"
            f"Content-Type: application/json\r\nX-Session-ID: \xff\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(*host.split(":"))
        writer.write(head.encode("latin-1") + body)
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
        assert not caplog.records and len(found.gateway.trajectories) == 0

    tell(folder, story)


def test_an_agent_acts_only_on_trajectories_that_it_began(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        status, mine = await begin(found, id="run/7/0", group="run/7")
        assert status == 200 and mine["session"].startswith("run/7/0.")
        turn = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3}}
        as_agent = {"token": TOKENS.agent}
        for name in ("run/7/0", "run/7/0.0123456789abcdef0123"):
            status, reply = await found.ask("POST", "/inference/v1/generate", turn, session=name, **as_agent)
            assert status == 403 and "session" in reply["error"]["message"]
            path = f"/v1/trajectories/{name.replace('/', '%2F')}/finish"
            assert (await found.ask("POST", path, {"reward": 1e6}, **as_agent))[0] == 403
        session = found.gateway.trajectories.get("run/7/0")
        assert session is not None and not session.turns and session.finish is None
        assert (await begin(found, id="run/7/0", group="run/7"))[0] == 403, "its secret is not given to others"
        status, _ = await found.ask("POST", "/inference/v1/generate", turn, session=mine["session"], **as_agent)
        assert status == 200 and len(session.turns) == 1
        path = f"/v1/trajectories/{mine['session'].replace('/', '%2F')}/finish"
        status, reply = await found.ask("POST", path, {"reward": 0.5}, **as_agent)
        assert status == 200 and reply["id"] == "run/7/0" and session.finish is not None
        _, batch = await found.ask("GET", "/v1/batches/next?wait_s=5")
        [trajectory] = batch["groups"][0]["trajectories"]
        assert (trajectory["trajectory_id"], trajectory["reward"], trajectory["turns"]) == ("run/7/0", 0.5, 1)

    tell(folder, story)


def test_an_agent_cannot_take_an_id_before_its_owner_begins_it(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        turn = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3}}
        assert (await found.ask("POST", "/inference/v1/generate", turn, session="run/8/0", token=TOKENS.agent))[
            0
        ] == 200
        status, mine = await begin(found, TOKENS.trainer, id="run/8/0", group="run/8")
        assert status == 200
        session = found.gateway.trajectories.get("run/8/0")
        assert session is not None and not session.turns and session.name == mine["session"]

    tell(folder, story)


def test_an_agent_that_sends_its_own_secret_may_begin_again(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        async with GatewayClient(found.url, TOKENS.agent) as client, GatewayClient(found.url, TOKENS.agent) as other:
            body = BeginBody(id="t", group="g")
            first = await client.begin(body)
            assert await client.begin(body) == first and client.session("t") == first.session
            with pytest.raises(Exception, match="begun before"):
                await other.begin(body)
            with pytest.raises(Exception, match="belongs to the agent"):
                await other.finish("t", FinishBody(reward=1))
            assert (await client.finish("t", FinishBody(reward=1))).id == "t"

    tell(folder, story, ledger=str(tmp_path / "ledger.sqlite"))


def test_an_agent_cannot_push_its_turns_before_others(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        worker = await hostile(found)
        for token, wanted in ((TOKENS.agent, 0), (TOKENS.trainer, -5)):
            body = {"token_ids": [wanted + 9], "sampling_params": {"max_tokens": 3}, "priority": -5}
            asking = asyncio.create_task(
                found.ask("POST", "/inference/v1/generate", body, session=f"s{wanted}", token=token)
            )
            turn = await worker.turn()
            assert turn.request.priority == wanted
            await worker.say(Tokens((PieceOf(turn.ticket, (1, 2, 3), (-1.0,) * 3, "v0", "length"),)))
            assert (await asking)[0] == 200

    tell(folder, story)


def test_health_says_that_the_ledger_cannot_be_written(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(found: World) -> None:
        assert (await found.ask("GET", "/health"))[0] == 200
        database = found.gateway.books.ledger.file._database  # type: ignore[attr-defined]
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        database.execute(f"PRAGMA max_page_count = {pages}")
        for number in range(200):
            if (await begin(found, id=f"t{number}", task="x" * 4000))[0] != 200:
                break
        status, reply = await found.ask("GET", "/health")
        assert status == 503 and "ledger" in reply["error"]["message"]
        database.execute("PRAGMA max_page_count = 1000000")
        found.gateway.tick(found.gateway.now_s())
        assert (await found.ask("GET", "/health"))[0] == 200

    tell(folder, story, ledger=str(tmp_path / "ledger.sqlite"))


def test_a_batch_is_encoded_piece_by_piece_and_reads_the_same(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        for member in ("x", "y"):
            await begin(found, TOKENS.trainer, id=member, group="g", group_size=2)
            await found.turn(PROMPT, member, max_tokens=3)
            await found.ask("POST", f"/v1/trajectories/{member}/finish", {"reward": 1})
        whole = found.gateway.books.batch(1, 0)
        _, as_json = await found.ask("GET", "/v1/batches/next?wait_s=5")
        assert as_json == msgspec.json.decode(msgspec.json.encode(whole))
        async with GatewayClient(found.url, TOKENS.trainer) as client:
            assert await client.next_batch(1, 0) == whole

    tell(folder, story)
