"""What released trainers and agents send, against a real gateway with a real engine behind it.

Each row is one client's request as its source of that version writes it, but for `ignore_eos`, which fixes lengths,
and a check of the fields that this client reads. The clients are not installed; verifiers is, in `test_verifiers.py`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from tests.integration import gateways
from tests.integration.codex import CODEX_INPUT, codex_request
from tests.integration.devices import Answer
from tests.integration.gateways import AGENT, GENERATE, RunningGateway

from rose.models.presets import write_preset

NAME = "qwen3-3m"
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PROMPT, TOKENS = list(b"Once upon a time"), 6
TALK: list[Any] = [{"role": "user", "content": "Hello!"}]
BEARER = {"Authorization": f"Bearer {AGENT}"}
BASIC = {"Authorization": f"Basic {base64.b64encode(f':{AGENT}'.encode()).decode()}"}
"""What aiohttp, requests and httpx make of `http://:TOKEN@HOST`, for clients that send no key of their own."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    model = write_preset(NAME, tmp_path_factory.mktemp("models") / NAME, seed=0)
    settings = ("beat_s=0.2", "version_wait_s=0.5")
    with gateways.gateway(model, *settings) as running, gateways.worker(model, running.url, "a"):
        running.has_open(1)
        yield running


Reply = dict[str, Any]
Check = Callable[[Reply], None]


def choice_of(reply: Reply) -> Any:
    [choice] = reply["choices"]
    return choice


def ids_and_logprobs(reply: Reply) -> None:
    """Of the token route: as many log-probabilities as ids, each with the name that holds the id."""
    choice = choice_of(reply)
    content = choice["logprobs"]["content"]
    assert len(choice["token_ids"]) == len(content) == TOKENS and choice["finish_reason"] == "length"
    assert [entry["token"] for entry in content] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert all(-100 < entry["logprob"] <= 0 for entry in content)


def verl(reply: Reply) -> None:
    ids_and_logprobs(reply)
    assert choice_of(reply)["weight_versions"] == [{"version": "0", "start": 0, "end": TOKENS}]


def areal(reply: Reply) -> None:
    """Ids are read out of the names of tokens."""
    choice = choice_of(reply)
    ids = [int(name.split(":")[1]) for name in choice["logprobs"]["tokens"]]
    assert len(ids) == len(choice["logprobs"]["token_logprobs"]) == TOKENS
    assert choice["finish_reason"] == "length" and all(0 <= token_id < 264 for token_id in ids)


def tinker(reply: Reply) -> None:
    choice = choice_of(reply)
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == TOKENS
    assert choice["finish_reason"] == "length"


def scored(reply: Reply) -> None:
    tinker(reply)
    first, *others = choice_of(reply)["prompt_logprobs"]
    assert first is None and len(others) == len(PROMPT) - 1
    for token_id, place in zip(PROMPT[1:], others, strict=True):
        [(name, entry)] = place.items()
        assert int(name) == token_id and entry["logprob"] <= 0 and entry["rank"] >= 1
        assert entry["decoded_token"] == chr(token_id)


def trl(reply: Reply) -> None:
    tinker(reply)
    assert choice_of(reply)["prompt_token_ids"] == PROMPT


def chat_logprobs(reply: Reply) -> None:
    choice = choice_of(reply)
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] is not None
    assert len(choice["logprobs"]["content"]) == TOKENS and reply["usage"]["completion_tokens"] == TOKENS


def chat_ids(reply: Reply) -> None:
    chat_logprobs(reply)
    assert reply["prompt_token_ids"] and len(choice_of(reply)["token_ids"]) == TOKENS


def chat_names(reply: Reply) -> None:
    chat_logprobs(reply)
    names = [entry["token"] for entry in choice_of(reply)["logprobs"]["content"]]
    ids = [int(name.removeprefix("token_id:")) for name in names]
    assert choice_of(reply).get("token_ids", ids) == ids


def art(reply: Reply) -> None:
    chat_ids(reply)
    chat_names(reply)


def vllm_33(reply: Reply) -> None:
    chat_ids(reply)
    assert choice_of(reply)["weight_versions"] == [{"version": "0", "start": 0, "end": TOKENS}]


def roll(reply: Reply) -> None:
    chat_logprobs(reply)
    assert all(len(entry["top_logprobs"]) == 1 for entry in choice_of(reply)["logprobs"]["content"])


def openhands(reply: Reply) -> None:
    message = choice_of(reply)["message"]
    assert message["role"] == "assistant" and reply["usage"]["completion_tokens"] == TOKENS


def codex(reply: Reply) -> None:
    [message] = reply["output"]
    assert (message["type"], message["role"], message["content"][0]["type"]) == ("message", "assistant", "output_text")
    assert reply["usage"]["output_tokens"] == TOKENS and reply["usage"]["input_tokens_details"]["cached_tokens"] >= 0


@dataclass(frozen=True)
class ReleasedClient:
    name: str
    path: str
    body: dict[str, Any]
    check: Check
    headers: dict[str, str] = field(default_factory=lambda: BEARER)
    trajectory: str | None = None  # that the answer must belong to


def session(name: str, headers: dict[str, str] = BEARER) -> dict[str, str]:
    return headers | {"X-Session-ID": name}


SAMPLED = {"max_tokens": TOKENS, "temperature": 1.0, "top_p": 1.0}
ENDLESS = {"stop_token_ids": [], "ignore_eos": True}
VERIFIERS = {
    "top_k": -1, "min_p": 0.0, "max_tokens": TOKENS, "temperature": 1.0, "logprobs": 1, "skip_special_tokens": False,
    **ENDLESS,
}  # fmt: skip
CHATTED = {"model": NAME, "messages": TALK, "max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
BASH_PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH_TOOL = {"type": "function", "function": {"name": "bash", "description": "x", "parameters": BASH_PARAMETERS}}
OPENHANDS = {
    "model": NAME, "temperature": 0.0, "max_tokens": TOKENS, "tools": [BASH_TOOL], "ignore_eos": True,
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "You help."}]},
        {"role": "user", "content": [{"type": "text", "text": "Say hello"}]},
    ],
}  # fmt: skip
RELEASED = [
    ReleasedClient(
        "verifiers 0.4 and prime-rl, first turn", GENERATE,
        {"model": NAME, "token_ids": PROMPT, "sampling_params": VERIFIERS | {"routed_experts_prompt_start": 0}},
        ids_and_logprobs, session("verifiers"), "verifiers",
    ),
    ReleasedClient(
        "verifiers 0.4 and prime-rl, a turn that its renderer has bridged", GENERATE,
        {
            "model": NAME, "token_ids": PROMPT, "cache_salt": "3", "priority": 0,
            "sampling_params": VERIFIERS | {"routed_experts_prompt_start": 57},
        },
        ids_and_logprobs, session("verifiers-2"), "verifiers-2",
    ),
    ReleasedClient(
        "SkyRL 0.4, without a key", GENERATE,
        {
            "model": NAME, "token_ids": PROMPT,
            "sampling_params": SAMPLED | {
                "min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "top_k": -1,
                "min_p": 0.0, "logprobs": 1, "stop": None, "ignore_eos": True,
            },
        },
        ids_and_logprobs, session("skyrl", BASIC), "skyrl",
    ),
    ReleasedClient(
        "verl 0.9 by an adapter, its sampling parameters as they are", GENERATE,
        {
            "token_ids": PROMPT,
            "sampling_params": SAMPLED | {"top_k": -1, "repetition_penalty": 1.0, "logprobs": True, **ENDLESS},
        },
        verl, session("verl"), "verl",
    ),
    ReleasedClient(
        "AReaL 1.0.4, without a key", COMPLETIONS,
        SAMPLED | {
            "prompt": PROMPT, "top_k": 100_000_000, "stop_token_ids": [], "ignore_eos": True,
            "skip_special_tokens": True, "return_tokens_as_token_ids": True, "logprobs": 0, "use_beam_search": False,
            "stream": False,
        },
        areal, BASIC,
    ),
    ReleasedClient(
        "the Tinker server of SkyRL", COMPLETIONS,
        SAMPLED | {
            "model": NAME, "prompt": PROMPT, "n": 1, "seed": 1, "top_k": -1, "logprobs": True, "stream": False,
            "return_token_ids": True, "ignore_eos": True,
        },
        tinker,
    ),
    ReleasedClient(
        "Tinker with the log-probabilities of the prompt", COMPLETIONS,
        SAMPLED | {
            "model": NAME, "prompt": PROMPT, "n": 1, "seed": 1, "top_k": -1, "logprobs": 1, "stream": False,
            "return_token_ids": True, "prompt_logprobs": 0, "ignore_eos": True,
        },
        scored,
    ),
    ReleasedClient(
        "TRL 1.16 AsyncGRPO, without a key", COMPLETIONS,
        SAMPLED | {
            "model": NAME, "prompt": PROMPT, "top_k": 0, "repetition_penalty": 1.0, "n": 1, "return_token_ids": True,
            "logprobs": 0, "seed": 2**62, "ignore_eos": True,
        },
        trl, BASIC,
    ),
    ReleasedClient(
        "ART 0.5.23", CHAT,
        CHATTED | {
            "logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": True,
            "nvext": {"extra_fields": ["engine_data"]}, "chat_template_kwargs": {"preserve_thinking": True},
        },
        art,
    ),
    ReleasedClient(
        "vLLM 0.33", CHAT,
        CHATTED | {"logprobs": True, "return_token_ids": True, "return_weight_versions": True},
        vllm_33,
    ),
    ReleasedClient(
        "OpenEnv 0.10, whose key upstream is the session", CHAT,
        CHATTED | {
            "logprobs": True, "top_logprobs": 0, "return_token_ids": True, "top_p": 1.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        },
        chat_ids, {"Authorization": f"Bearer {AGENT}/openenv"}, "openenv",
    ),
    ReleasedClient(
        "Agent Lightning 1.0.2", CHAT,
        CHATTED | {"logprobs": True, "return_token_ids": True},
        chat_ids,
    ),
    ReleasedClient(
        "Harbor 0.25 terminus-2", CHAT,
        CHATTED | {"logprobs": True, "return_token_ids": True, "session_id": "harbor", "temperature": 0.7},
        chat_ids, session("harbor"), "harbor",
    ),
    ReleasedClient(
        "ROLL's OpenAI proxy", CHAT,
        CHATTED | {
            "tools": [], "tool_choice": "none", "top_p": 0.8, "top_k": 20, "logprobs": True, "top_logprobs": 1,
            "chat_template_kwargs": {"enable_thinking": False},
        },
        roll,
    ),
    ReleasedClient(
        "rllm, whose gateway names the session in the path", f"/sessions/rllm{CHAT}",
        CHATTED | {"logprobs": True, "return_token_ids": True},
        chat_ids, BEARER, "rllm",
    ),
    ReleasedClient(
        "NeMo-Gym 0.7", CHAT,
        CHATTED | {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True, "top_p": 1.0},
        chat_names,
    ),
    ReleasedClient(
        "OpenHands, by LiteLLM 1.106.2", CHAT, OPENHANDS,
        openhands, {"Authorization": f"Bearer {AGENT}/openhands"}, "openhands",
    ),
    ReleasedClient(
        "Codex 0.169.0, its request without the stream", RESPONSES,
        codex_request(NAME, CODEX_INPUT, stream=False, max_output_tokens=TOKENS, ignore_eos=True),
        codex, {"Authorization": f"Bearer {AGENT}/codex"}, "codex",
    ),
]  # fmt: skip


def post(found: RunningGateway, path: str, body: Any, headers: dict[str, str]) -> Answer:
    return found.device.ask("POST", path, body, headers=headers)


@pytest.mark.parametrize("client", RELEASED, ids=[client.name for client in RELEASED])
def test_a_released_client_finds_what_it_reads(found: RunningGateway, client: ReleasedClient) -> None:
    answer = post(found, client.path, client.body, client.headers)
    assert answer.status == 200, answer.body
    client.check(answer.json)
    assert answer.json["rose"].get("trajectory") == client.trajectory
    refused = post(found, client.path, client.body, {**client.headers, "Authorization": "Basic Og=="})
    assert refused.status == 401


def test_nemo_gym_asks_for_prompt_ids_and_sends_back_what_it_was_told(found: RunningGateway) -> None:
    """Its later turns carry ids in the messages; in a session the gateway has them anyway."""
    headers = session("nemo-gym")
    body = CHATTED | {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
    first = post(found, CHAT, body, headers).json
    prompt = post(found, "/tokenize", {"model": NAME, "messages": TALK}, headers).json["tokens"]
    content = choice_of(first)["logprobs"]["content"]
    ids = [int(entry["token"].removeprefix("token_id:")) for entry in content]
    told = {
        "role": "assistant",
        "content": choice_of(first)["message"]["content"],
        "prompt_token_ids": prompt,
        "generation_token_ids": ids,
        "generation_log_probs": [entry["logprob"] for entry in content],
    }
    messages = [*TALK, told, {"role": "user", "content": "And?"}]
    second = post(found, CHAT, body | {"messages": messages, "return_token_ids": True}, headers).json
    assert second["prompt_token_ids"][: len(prompt) + len(ids)] == [*prompt, *ids]
    assert second["rose"]["turn"] == 1 and second["rose"]["is_fork"] is False


def test_litellm_sends_back_an_answer_with_a_field_of_its_own(found: RunningGateway) -> None:
    headers = {"Authorization": f"Bearer {AGENT}/litellm"}
    first = post(found, CHAT, OPENHANDS, headers).json
    answer = {"role": "assistant", "content": choice_of(first)["message"]["content"]}
    answer["provider_specific_fields"] = {"refusal": None}
    messages = [*OPENHANDS["messages"], answer, {"role": "user", "content": [{"type": "text", "text": "Go on"}]}]
    second = post(found, CHAT, OPENHANDS | {"messages": messages}, headers).json
    assert (second["rose"]["turn"], second["rose"]["is_fork"]) == (1, False)


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
def test_a_teacher_gives_an_answer_the_log_probabilities_that_it_was_sampled_with(
    found: RunningGateway, path: str
) -> None:
    """Same weights, another batch: the numbers are the same to the last bit."""
    params = {"max_tokens": 32, "logprobs": 1, "ignore_eos": True, "seed": 5}
    answer = choice_of(post(found, GENERATE, {"token_ids": PROMPT, "sampling_params": params}, BEARER).json)
    ids = [*PROMPT, *answer["token_ids"]]
    wanted = {"max_tokens": 1, "prompt_logprobs": 2}
    body = {"token_ids": ids, "sampling_params": wanted} if path == GENERATE else {"prompt": ids} | wanted
    reply = post(found, path, body, BEARER).json
    places = (reply if path == GENERATE else choice_of(reply))["prompt_logprobs"]
    assert places[0] is None and len(places) == len(ids)
    scores = [place[str(token_id)]["logprob"] for place, token_id in zip(places[1:], ids[1:], strict=True)]
    assert scores[-32:] == [entry["logprob"] for entry in answer["logprobs"]["content"]]
    assert all(len(place) in (2, 3) for place in places[1:])


def test_a_demand_for_weights_that_do_not_come_names_the_newest(found: RunningGateway) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    refused = post(found, GENERATE, body | {"min_weight_version": "step-9"}, BEARER)
    assert (refused.status, refused.error["code"], refused.json["weight_version"]) == (409, "version_unavailable", "0")
    assert post(found, GENERATE, body | {"weight_version": "0"}, BEARER).status == 200


def openai_at(base_url: str, api_key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60)


@pytest.mark.parametrize(
    "path, key",
    [
        ("/v1", f"{AGENT}/official"),
        ("/sessions/official/v1", AGENT),
        ("/sessions/official/v1", f"{AGENT}/official"),
    ],
)
def test_the_official_client_names_its_session_by_key_or_by_address(found: RunningGateway, path: str, key: str) -> None:
    wanted: Any = {"model": NAME, "messages": TALK, "max_tokens": 4}
    with openai_at(found.url + path, key) as client:
        assert [model.id for model in client.models.list()] == [NAME]
        reply: Any = client.chat.completions.create(**wanted)
        words = "".join(
            chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**wanted, stream=True)
        )
    assert (reply.rose["trajectory"], reply.rose["turn"]) == ("official", 0)
    assert words == reply.choices[0].message.content


def test_the_official_client_acts_on_a_trajectory_that_was_begun_by_its_secret_only(found: RunningGateway) -> None:
    begun = found.ask("POST", "/v1/trajectories", {"id": "begun"}, token=AGENT).json["session"]
    wanted: Any = {"model": NAME, "messages": TALK, "max_tokens": 4}
    for path, key in (("/v1", f"{AGENT}/{begun}"), (f"/sessions/{begun}/v1", AGENT)):
        with openai_at(found.url + path, key) as client:
            reply: Any = client.chat.completions.create(**wanted)
            assert reply.rose["trajectory"] == "begun"
    for path, key in (("/v1", f"{AGENT}/begun"), ("/sessions/begun/v1", AGENT)):
        with openai_at(found.url + path, key) as client, pytest.raises(openai.PermissionDeniedError):
            client.chat.completions.create(**wanted)
    with openai_at(f"{found.url}/v1", f"{AGENT}x/{begun}") as client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(**wanted)
