"""No request blocks the event loop of a server, whatever its body holds.

Each route of the device and of the gateway gets the worst bodies that its limits allow. A heartbeat in the server's
loop counts the beats that the loop missed because of its own work; how busy the machine is does not count. A row passes
if one of `TRIES` causes no missed beat: a pause of the interpreter (garbage collection) is not the request's fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from tests.fuzz.heartbeat import Heartbeat
from tests.fuzz.worst import Worst, worst_bodies
from tests.unit.rollout_world import LENDING, TOKENS, LoopEngine

from rose.api.fleet_orders import OrderBody
from rose.api.worker_messages import CONNECT_PATH
from rose.config.server_settings import ControlSettings, FrontSettings, GatewaySettings
from rose.device import engine_messages
from rose.device.admin_routes import ADMIN_ROUTES, LendingControls, LentContext
from rose.device.engine_channel import DeviceEvents
from rose.engines.base import LendingStatus
from rose.gateway import gateway_service as gateway_routes
from rose.gateway import trainer_routes, vllm_control_routes
from rose.gateway.gateway_server import build_gateway
from rose.models.model_folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset
from rose.observe.metrics import Metrics
from rose.openai.anthropic_messages import COUNT_PATH, MESSAGES_PATH
from rose.openai.anthropic_schemas import CountTokensBody, MessagesBody
from rose.openai.application import ROUTES
from rose.openai.application import application as device_application
from rose.openai.http_server import HttpServer, InFlight

BLOCK_MS = 100.0  # 50 on a machine of one's own; the tests share theirs
TRIES, PLAIN = 3, 5  # so many missed beats are no accident: one try is enough
PATIENCE_S = 60.0
OWNER_TOKEN = "an-owner-token"
DEVICE_ROUTES = {
    route.path.replace("{action}", "limits"): route.reader.kind
    for route in (*ROUTES, *ADMIN_ROUTES)
    if route.reader is not None
}
GATEWAY_ROUTES: dict[str, Any] = {path: kind for path, kind in DEVICE_ROUTES.items() if "lending" not in path} | {
    MESSAGES_PATH: MessagesBody,
    COUNT_PATH: CountTokensBody,
    "/v1/trajectories": trainer_routes.BeginBody,
    "/v1/trajectories/t/finish": trainer_routes.FinishBody,
    "/v1/versions": trainer_routes.PublishBody,
    "/v1/pool/orders": OrderBody,
    "/update_weights": vllm_control_routes.UpdateBody,
    "/areal_update_weights": vllm_control_routes.FolderBody,
    "/init_weight_transfer_engine": vllm_control_routes.InitBody,
    "/finish_weight_update": vllm_control_routes.FinishUpdateBody,
}
WITHOUT_BODY = {
    "/v1/pool/{worker}/drain", "/pause", "/resume", "/reset_prefix_cache", "/finish_session", "/start_weight_update",
    "/shutdown_weight_transfer_engine", "/areal_pause_generation", "/areal_continue_generation",
}  # fmt: skip

JOIN = {
    "type": "Join", "name": "w", "kind": "dedicated", "model": "m", "version": "0", "seats": 4, "kv_tokens": 4096,
    "context_tokens": 1024,
}  # fmt: skip
BEAT = {
    "type": "Beat", "running": 0, "waiting": 0, "kv_used_tokens": 0, "kv_tokens": 4096, "version": "0",
    "gate_open": True,
}  # fmt: skip
READY = {"type": "VersionReady", "version": "0", "size_bytes": 1}
FRAMES: dict[str, Callable[[], Any]] = {
    "one frame of many beats": lambda: [BEAT] * 200_000,
    "one frame of many refusals": lambda: [
        {"type": "Refused", "ticket": 1, "fault": {"kind": "Unavailable", "what": "x"}}
    ] * 200_000,
    "one message of many pieces": lambda: [{"type": "Tokens", "pieces": [[1, [1], [-0.5], "0"]] * 500_000}],
    "one piece of many tokens": lambda: [{"type": "Tokens", "pieces": [[1, [1] * 2**21, [-0.5] * 2**21, "0"]]}],
    "one piece with the log-probabilities of a prompt": lambda: [
        {"type": "Tokens", "pieces": [[1, [1], [-0.5], "0", None, None, [], [[-0.5, 1, []]] * 2**16]]}
    ],
    "many phases of one version": lambda: [READY | {"seconds": {f"phase {n}": 0.1 for n in range(100_000)}}],
    "many kinds of failures": lambda: [
        READY | {"fault": {"kind": f"kind {n}", "what": "x"}} for n in range(50_000)
    ],
    "a long text": lambda: [BEAT | {"why": "x" * (32 << 20)}],
}  # fmt: skip
TOKENS_OF_NO_TURN = {"type": "Tokens", "pieces": [[1, [1], [-0.5], "0"]]}
BURSTS: dict[str, Callable[[], bytes]] = {
    "frames without content": lambda: masked(0x82, b"") * 170_000,
    "pongs": lambda: masked(0x8A, b"") * 170_000,
    "frames without messages": lambda: masked(0x82, msgspec.msgpack.encode([])) * 150_000,
    "frames of one beat": lambda: masked(0x82, msgspec.msgpack.encode([BEAT])) * 9_000,
    "frames of one token": lambda: masked(0x82, msgspec.msgpack.encode([TOKENS_OF_NO_TURN])) * 20_000,
}


def masked(first: int, content: bytes) -> bytes:
    """Return a short frame of a client. The mask is zero, so the content stays as it is."""
    return bytes((first, 0x80 | len(content))) + bytes(4) + content


class LentEngine(LoopEngine):
    """Answers the owner's commands as the supervisor of a lent device does."""

    def __init__(self) -> None:
        super().__init__()
        self.events: Any = DeviceEvents()
        self.desired = self.client = self
        self.removed, self.lend_terms = "", None

    def on_command(self, word: engine_messages.AdminCommand) -> None:
        """Orders are not kept here."""

    async def control(self, command: engine_messages.AdminCommand) -> LendingStatus:
        return LENDING


@dataclass
class Served:
    """A server in a loop and thread of its own; the test is its client."""

    name: str
    port: int
    heartbeat: Heartbeat
    limit_bytes: int

    def ask(self, path: str, worst: Worst, token: str) -> int:
        head = [f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {token}", "Connection: close"]
        head += [f"Content-Length: {len(worst.body)}", *(f"{name}: {value}" for name, value in worst.headers)]
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as connection:
            try:
                connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + worst.body)
            except (BrokenPipeError, ConnectionResetError):
                return 0
            return _status_of(connection)


def _status_of(connection: socket.socket) -> int:
    """Read the whole answer; a server may reset the connection after it refused the body."""
    data = bytearray()
    try:
        while piece := connection.recv(1 << 16):
            if len(data) < 64:
                data += piece
    except ConnectionResetError:
        pass
    return int(data[9:12]) if data.startswith(b"HTTP/1.") else 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("qwen3-3m", tmp_path_factory.mktemp("models") / "qwen3-3m", seed=0))


@pytest.fixture(scope="module")
def device(folder: ModelFolder) -> Iterator[Served]:
    async def made() -> web.Application:
        engine: Any = LentEngine()
        figures = Metrics()
        controls = LendingControls(engine, OWNER_TOKEN, figures)
        context = LentContext.build(folder, "m", FrontSettings(), engine, metrics=figures, controls=controls)
        return device_application(context, InFlight(), ADMIN_ROUTES)

    yield from _served("device", made, FrontSettings())


@pytest.fixture(scope="module")
def gateway(folder: ModelFolder) -> Iterator[Served]:
    yield from _gateway(folder)


@pytest.fixture
def fresh_gateway(folder: ModelFolder) -> Iterator[Served]:
    yield from _gateway(folder)


def _gateway(folder: ModelFolder) -> Iterator[Served]:
    settings = replace(GatewaySettings(control=ControlSettings("vllm", wait_s=0.1)), model_name="m", wait_s=0.1)
    ticking: list[asyncio.Task[None]] = []

    async def made() -> web.Application:
        found = build_gateway(folder, settings)
        ticking.append(asyncio.create_task(found.tick_for_ever()))
        return gateway_routes.application(found, TOKENS, InFlight())

    yield from _served("gateway", made, settings)


def _served(
    name: str, made: Callable[[], Coroutine[Any, Any, web.Application]], settings: FrontSettings
) -> Iterator[Served]:
    ready, done = threading.Event(), threading.Event()
    found: list[Served] = []

    async def serve() -> None:
        server = HttpServer(await made(), settings, "rose.test", settings.max_connections)
        listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        await server.listen(listener)
        heartbeat = Heartbeat(BLOCK_MS)
        found.append(Served(name, listener.getsockname()[1], heartbeat, settings.max_body_bytes))
        ready.set()
        while not done.is_set():
            await asyncio.sleep(0.05)
        heartbeat.close()
        await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(PATIENCE_S)
    yield found[0]
    done.set()
    thread.join()


def missed_beats(served: Served, path: str, worst: Worst, token: str) -> tuple[int, list[str]]:
    """Return the fewest beats that the server missed in so many tries, with the stack of the last block."""
    fewest, stack = 1 << 30, []
    for _ in range(TRIES):
        _wait_for_a_beat(served.heartbeat, served.heartbeat.beats)  # making the body may have blocked the loop, too
        served.heartbeat.blocks.clear()
        beats = served.heartbeat.beats
        status = served.ask(path, worst, token)
        assert status not in (500, 502, 504), f"{status}"
        _wait_for_a_beat(served.heartbeat, beats)
        if served.heartbeat.missed() < fewest:
            fewest = served.heartbeat.missed()
            stack = [line for block in served.heartbeat.blocks for line in block.stack]
        if not fewest or fewest > PLAIN:
            break
    return fewest, stack


def _wait_for_a_beat(heartbeat: Heartbeat, before: int) -> None:
    """Wait until the loop has judged the time in which it answered."""
    pause = threading.Event()
    while heartbeat.beats < before + 2:
        pause.wait(0.01)


def check(served: Served, path: str, kind: type[msgspec.Struct], token: str) -> None:
    problems = []
    for worst in worst_bodies(kind, served.limit_bytes):
        row = f"{served.name} {path} {worst.what}"
        missed, stack = missed_beats(served, path, worst, token)
        if missed:
            problems.append(f"{row}: {missed} beats missed\n    " + "\n    ".join(stack[-3:]))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", DEVICE_ROUTES)
def test_no_body_blocks_the_loop_of_a_device(device: Served, path: str) -> None:
    check(device, path, DEVICE_ROUTES[path], OWNER_TOKEN)


@pytest.mark.parametrize("path", GATEWAY_ROUTES)
def test_no_body_blocks_the_loop_of_the_gateway(gateway: Served, path: str) -> None:
    check(gateway, path, GATEWAY_ROUTES[path], TOKENS.operator if path == "/v1/pool/orders" else TOKENS.trainer)


@pytest.mark.parametrize("what", FRAMES)
def test_no_frame_of_a_worker_blocks_the_loop_of_the_gateway(fresh_gateway: Served, what: str) -> None:
    """Neither the frame nor the metrics that are read after it."""
    frame, heartbeat = msgspec.msgpack.encode(FRAMES[what]()), fresh_gateway.heartbeat
    for _ in range(TRIES):  # a machine that others use misses beats of its own
        heartbeat.blocks.clear()
        asyncio.run(be_a_worker(fresh_gateway, frame))
        _wait_for_a_beat(heartbeat, heartbeat.beats)
        if heartbeat.missed() == 0:
            return
    stacks = [line for block in heartbeat.blocks for line in block.stack[-3:]]
    pytest.fail("the loop was blocked:\n" + "\n".join(stacks))


async def be_a_worker(served: Served, frame: bytes) -> None:
    """Join, send the frame, and leave when the gateway has heard it; then read the metrics."""
    url = f"http://127.0.0.1:{served.port}"
    patience = aiohttp.ClientWSTimeout(ws_close=PATIENCE_S)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKENS.worker}"}) as http:
        with contextlib.suppress(ConnectionError):
            async with http.ws_connect(url + CONNECT_PATH, timeout=patience) as connection:
                await connection.send_bytes(msgspec.msgpack.encode([JOIN]))
                await connection.receive()
                await connection.send_bytes(frame)
        async with http.get(url + "/metrics") as reply:
            await reply.read()


@pytest.fixture
def small_heap() -> Iterator[None]:
    """Hide the objects of the tests from the garbage collector: a server of its own has few."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("what", BURSTS)
def test_no_burst_of_short_frames_blocks_the_loop_of_the_gateway(fresh_gateway: Served, what: str) -> None:
    burst, heartbeat = BURSTS[what](), fresh_gateway.heartbeat
    for _ in range(TRIES):
        heartbeat.blocks.clear()
        send_frames(fresh_gateway, burst)
        _wait_for_a_beat(heartbeat, heartbeat.beats)
        if heartbeat.missed() == 0:
            return
    stacks = [line for block in heartbeat.blocks for line in block.stack[-3:]]
    pytest.fail("the loop was blocked:\n" + "\n".join(stacks))


def send_frames(served: Served, frames: bytes) -> None:
    """Send all frames at once on one connection, and wait until the gateway has closed it or has answered the last."""
    head = [f"GET {CONNECT_PATH} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {TOKENS.worker}"]
    head += ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
    head += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="]
    join = msgspec.msgpack.encode([JOIN])
    join = bytes((0x82, 0x80 | 126)) + len(join).to_bytes(2, "big") + bytes(4) + join
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + join + frames + masked(0x88, b""))
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1 << 16):
                pass


def test_every_route_that_takes_a_body_is_in_the_table() -> None:
    routes = (*gateway_routes.ROUTES, *gateway_routes.VLLM_CONTROL_ROUTES)
    posted: Sequence[str] = [route.path for route in routes if route.method == "POST"]
    posted = [path for path in posted if not path.startswith("/sessions/")]  # the same handlers once more
    known = {path.replace("/t/", "/{trajectory}/") for path in GATEWAY_ROUTES} | WITHOUT_BODY
    assert set(posted) == known
