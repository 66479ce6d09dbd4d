"""The HTTP listeners that are fuzzed: serving, rollouts, admin controls, gateway."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from tests.fuzz import servers
from tests.fuzz.requests import Route, Target, draw
from tests.fuzz.run import Listener
from tests.fuzz.servers import ROLLOUT_MODEL, SERVING_MODEL, Server
from tests.fuzz.steps import Step, play, request
from tests.integration.gateways import AGENT, OPERATOR, TOKENS, TRAINER, WORKER
from tests.integration.lent import OWNER_TOKEN, ROLLOUT_TOKEN

from rose.api.fleet_orders import OrderBody
from rose.device.admin_routes import ACTIONS, ControlBody
from rose.gateway import trainer_routes, vllm_control_routes
from rose.gateway.gateway_service import VLLM_CONTROL_ROUTES
from rose.openai.anthropic_messages import COUNT_PATH, MESSAGES_PATH
from rose.openai.anthropic_schemas import CountTokensBody, MessagesBody
from rose.openai.application import ROUTES
from rose.openai.responses_api import RESPONSES_PATH

TRIES = 60  # of an honest client; a stated refusal (429, 503) is asked again
SESSIONS = tuple(f"t{number}" for number in range(40))
CALL = {"function": {"name": "f", "arguments": '{"x": 18446744073709551616}'}}
KNOWN: dict[str, Sequence[Any]] = {
    "prompt": ("hello", "x" * 400, [1, 2, 3], ["a", "b"], [[1, 2], [3]], ["a"] * 128),
    "messages": (
        [{"role": "user", "content": "hello"}],
        [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "y"}]}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [CALL]}],
    ),
    "token_ids": ([1, 2, 3], [1] * 200, list(range(64))),
    "tokens": ([1, 2, 3], [5] * 900),
    "max_tokens": (1, 2, 8),
    "max_completion_tokens": (1, 8),
    "min_tokens": (0, 1),
    "n": (1, 2),
    "stop_token_ids": ([], [5]),
    "sampling_params": (
        {"max_tokens": 4}, {"max_tokens": 1, "logprobs": 1}, {"max_tokens": 8, "temperature": 0.0, "seed": 3},
        {"max_tokens": 2, "stop_token_ids": [7], "top_k": 5}, {"max_tokens": 2**31}, {"max_tokens": 4, "seed": 2**64},
        {"max_tokens": 1, "prompt_logprobs": 3, "routed_experts_prompt_start": 7}, {"max_tokens": 2, "logprobs": True},
    ),
    "tools": (
        [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"maximum": 2**60}}}}}],
        [],
    ),
    "chat_template_kwargs": ({}, {"enable_thinking": False}, {"messages": []}, {"tools": 7, "loop": 1}),
    "tool_choice": ("auto", "none"),
    "logprobs": (0, 1, True),
    "model": (SERVING_MODEL,),
    "trajectory": SESSIONS,
    "program_id": SESSIONS,
    "prompt_logprobs": (0, 1, 20),
    "weight_version": ("0", "1"),
    "min_weight_version": ("0", "1"),
    "nvext": ({}, {"extra_fields": ["engine_data"]}),
}  # fmt: skip
MODEL_NAMES = (SERVING_MODEL, ROLLOUT_MODEL, "x", "a/b", "%ff", "x" * 300)


def _routes(token: str | None) -> tuple[Route, ...]:
    """Return the routes of every device, with their bodies."""
    return tuple(
        Route(
            route.method,
            route.path,
            route.reader.kind if route.reader is not None else None,
            token,
            weight=8 if route.reader is not None else 1,
        )
        for route in ROUTES
    )


SERVING = Target(_routes(None), KNOWN, {"model": MODEL_NAMES})
ROLLOUTS = Target(
    _routes(ROLLOUT_TOKEN), KNOWN | {"model": (ROLLOUT_MODEL,)}, {"model": MODEL_NAMES}, (ROLLOUT_TOKEN, OWNER_TOKEN)
)
# `remove` takes the rollout model out of the device for good: it comes only with a wrong token.
ADMIN = Target(
    (
        Route("GET", "/rose/lending", None, OWNER_TOKEN),
        Route("GET", "/rose/steps", None, OWNER_TOKEN),
        Route("POST", "/rose/lending/{action}", ControlBody, OWNER_TOKEN, weight=12),
        Route("POST", "/rose/lending/remove", ControlBody, "not-the-owners-token"),
        Route("GET", "/metrics", None),
    ),
    {"memory_share": (0.0, 0.5, 1.0), "compute_share": (0.0, 0.5, 1.0)},
    {"action": [action for action in ACTIONS if action != "remove"] + ["", "x" * 200, "%00"]},
    (ROLLOUT_TOKEN,),
)


class PublishedVersion(msgspec.Struct):
    """A body of /update_weights that announces a version."""

    update_info: vllm_control_routes.RelayVersion


CONTROL_BODIES = {
    "/update_weights": vllm_control_routes.UpdateBody,
    "/areal_update_weights": vllm_control_routes.FolderBody,
    "/init_weight_transfer_engine": vllm_control_routes.InitBody,
    "/finish_weight_update": vllm_control_routes.FinishUpdateBody,
}
CONTROL_QUERIES = {"/pause": ("mode", "clear_cache"), "/finish_session": ("session_id",)}
TURNS = ("/inference/v1/generate", "/v1/chat/completions", "/v1/completions", RESPONSES_PATH, MESSAGES_PATH)
MESSAGE_ROUTES = (
    Route("POST", MESSAGES_PATH, MessagesBody, AGENT, ("beta",), weight=8),
    Route("POST", f"/sessions/{{session}}{MESSAGES_PATH}", MessagesBody, AGENT, weight=4),
    Route("POST", COUNT_PATH, CountTokensBody, AGENT, weight=4),
)
GATEWAY = Target(
    (
        *(route for route in _routes(AGENT) if route.path != "/openapi.json"),
        *(replace(route, path=f"/sessions/{{session}}{route.path}") for route in _routes(AGENT) if route.kind),
        *(replace(route, token=f"{AGENT}/{SESSIONS[0]}") for route in _routes(AGENT) if route.kind),
        *MESSAGE_ROUTES,
        Route("POST", "/v1/trajectories", trainer_routes.BeginBody, AGENT, weight=8),
        Route("POST", "/v1/trajectories/{trajectory}/finish", trainer_routes.FinishBody, AGENT, weight=8),
        Route("GET", "/v1/batches/next", None, TRAINER, ("groups", "after", "wait_s"), weight=6),
        Route("POST", "/v1/versions", trainer_routes.PublishBody, TRAINER),
        Route("GET", "/v1/pool", None, OPERATOR),
        Route("POST", "/v1/pool/{worker}/drain", None, OPERATOR),
        Route("POST", "/v1/pool/orders", OrderBody, OPERATOR, weight=4),
        Route("GET", "/v1/pool/orders", None, OPERATOR),
        Route("GET", "/ui", None, None),
        Route("GET", "/ui/events", None, AGENT),  # refused: with the operator's token it never ends
        Route("GET", "/ui/trajectories", None, OPERATOR),
        Route("GET", "/ui/trajectories/{trajectory}", None, OPERATOR, weight=2),
        Route("GET", "/v1/workers/connect", None, WORKER),
        *(
            Route(
                route.method, route.path, CONTROL_BODIES.get(route.path), TRAINER, CONTROL_QUERIES.get(route.path, ())
            )
            for route in VLLM_CONTROL_ROUTES
        ),
    ),
    KNOWN
    | {
        "id": SESSIONS,
        "group": [f"g{number}" for number in range(12)],
        "group_size": (1, 2, 4),
        "seed": (0, 1, 2**63 - 1),
        "reward": (0.0, 1.0, -1e308, 1e308),
        "all": (False,),  # an order to all workers would leave the turns without any
        "wait_s": (0, 0.05),
        "folder": ("missing",),
        "weight_dir": ("/missing", "/", "missing", "/\0"),
        "model_path": ("/missing", "/etc"),
        "init_info": ({"backend": "rose"}, {"backend": "nccl"}, {}),
        "relay": ("",),
        "run": ("",),
    },
    {
        "model": MODEL_NAMES,
        "trajectory": (*SESSIONS, "x" * 300, "%ff", "a%2fb"),
        "session": (*SESSIONS, "x" * 400, "%ff", "a%2fb", "%00", "..", "%2e%2e"),
        "member": ("nobody", "%ff", "x" * 300),
    },
    tuple(TOKENS.values()),
)
AS_TRAINER = [("Authorization", f"Bearer {TRAINER}")]
PUBLISHING: dict[bytes, Any] = {b"/v1/versions": trainer_routes.PublishBody, b"/update_weights": PublishedVersion}
BY_PATH = {route.path: route for route in GATEWAY.routes if route.token != f"{AGENT}/{SESSIONS[0]}"}


def trajectory(chance: random.Random) -> list[Step]:
    """Return the requests of one trajectory in a mixed order, with repeats, and a trainer's poll now and then."""
    if chance.random() < 0.3:
        step = _harmless(draw(chance, GATEWAY))
        return [step, request("POST", "/resume", AS_TRAINER)] if b"pause" in step.head else [step]
    name = chance.choice(SESSIONS)
    begin, finish = BY_PATH["/v1/trajectories"], BY_PATH["/v1/trajectories/{trajectory}/finish"]
    steps: list[Step] = []
    for _ in range(chance.randrange(2, 9)):
        match chance.randrange(8):
            case 0:
                steps.append(draw(chance, GATEWAY, begin))
            case 1:
                steps.append(draw(chance, GATEWAY, finish))
            case 2:
                steps.append(draw(chance, GATEWAY, BY_PATH["/v1/batches/next"]))
            case 3 if steps:
                steps.append(chance.choice(steps))
            case _:
                steps.append(draw(chance, GATEWAY, BY_PATH[chance.choice(TURNS)], session=name))
    return steps


def _harmless(step: Step) -> Step:
    """Return the step, unless it publishes a version: a trainer may well stop all workers, and would."""
    for path, kind in PUBLISHING.items():
        if path not in step.head:
            continue
        if b"content-encoding" not in step.head.lower():
            try:
                msgspec.json.decode(step.body, type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return step
        return request("GET", "/v1/pool", AS_TRAINER)
    return step


# Honest clients


async def asked(port: int, path: str, body: Any, token: str | None = None, method: str = "POST") -> Any:
    """Return the answer to a request, asked again while it is refused for now; a text says what is wrong."""
    headers = [("Connection", "close")] + ([("Authorization", f"Bearer {token}")] if token else [])
    step = request(method, path, headers, json.dumps(body).encode() if method == "POST" else b"")
    said = ""
    for _ in range(TRIES):
        reply = await play(step, port)
        if reply.status == 200:
            return json.loads(reply.body)
        said = f"status {reply.status}: {reply.body[:200]!r}"
        if reply.status not in (429, 503):
            return said
        if b"queue_full" in reply.body:  # a trainer's pause whose end was lost with its connection
            await play(request("POST", "/resume", AS_TRAINER), port)
        await asyncio.sleep(0.5)
    return f"refused for ever: {said}"


class Right:
    """Holds the first answer to a request; the later ones must be the same."""

    def __init__(self, path: str, body: Any, token: str | None, port: str) -> None:
        self._path, self._body, self._token, self._port = path, body, token, port
        self._expected: dict[int, Any] = {}

    async def __call__(self, server: Server) -> str | None:
        port = server.ports[self._port]
        found = await asked(port, self._path, self._body, self._token)
        if isinstance(found, str):
            return found
        answer = found["choices"][0].get("text", found["choices"][0].get("token_ids"))
        expected = self._expected.setdefault(port, answer)
        return None if answer == expected else f"another answer: {answer!r}, not {expected!r}"


COMPLETION = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
GENERATION = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}}
HTTP_LISTENERS = (
    Listener(
        "serving", servers.device, "serving", lambda chance: [draw(chance, SERVING)],
        Right("/v1/completions", COMPLETION, None, "serving"),
    ),
    Listener(
        "rollouts", servers.device, "rollouts", lambda chance: [draw(chance, ROLLOUTS)],
        Right("/inference/v1/generate", GENERATION, ROLLOUT_TOKEN, "rollouts"),
    ),
    Listener(
        "admin", servers.device, "serving", lambda chance: [draw(chance, ADMIN)],
        Right("/v1/completions", COMPLETION, None, "serving"),
    ),
    Listener(
        "gateway", servers.gateway, "gateway", trajectory,
        Right("/inference/v1/generate", GENERATION, AGENT, "gateway"),
    ),
)  # fmt: skip
