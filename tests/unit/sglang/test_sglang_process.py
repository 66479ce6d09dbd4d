"""How a rollout engine on SGLang is started: where it listens, what it gets, and how much KV memory."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.gateway.auth import VARIABLES
from rose.sglang.plugin import ROLE_VARIABLE
from rose.sglang.sglang_process import SglangProcess, kv_tokens, sglang_command, sglang_environment
from rose.vllm.control_segment import ENGINE_FOLDER_VARIABLE
from rose.vllm.engine_process import RolloutEngineSettings

SIZES = {"vocab_size": 100, "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES))
    return folder


def test_the_server_listens_on_a_socket_in_its_folder(model: Path) -> None:
    engine = RolloutEngineSettings(model, "cpu:0", max_sequences=3, step_tokens=64, kv_memory_mb=1, extra=("--more",))
    command = sglang_command(engine, Path("/a"))
    assert command[1:4] == ["-m", "rose.sglang.rollout_server", "/a/http"]
    flags = dict(pairwise(command))
    assert (flags["--chunked-prefill-size"], flags["--max-prefill-tokens"]) == ("64", "64")
    assert (flags["--max-running-requests"], flags["--host"], flags["--device"]) == ("3", "127.0.0.1", "cpu")
    assert {"--disable-overlap-schedule", "--skip-tokenizer-init", "--more"} <= set(command)
    assert "--device" not in sglang_command(RolloutEngineSettings(model, "cuda:0"), Path("/a"))
    assert "--context-length" not in sglang_command(RolloutEngineSettings(model, max_context_tokens=0), Path("/a"))


def test_kv_memory_is_counted_in_tokens_of_the_model(model: Path) -> None:
    token_bytes = 2 * 2 * 64 * 4
    assert kv_tokens(RolloutEngineSettings(model, kv_memory_mb=1)) == (1 << 20) // token_bytes
    assert kv_tokens(RolloutEngineSettings(model, "cuda:0", kv_memory_mb=1)) == (1 << 20) // token_bytes * 2
    (model / "config.json").write_text(json.dumps({**SIZES, "num_key_value_heads": 2, "head_dim": 4}))
    assert kv_tokens(RolloutEngineSettings(model, kv_memory_mb=1)) == (1 << 20) // (2 * 2 * 8 * 4)


@pytest.mark.parametrize("text", ["{}", "no json", json.dumps({**SIZES, "vocab_size": -1})])
def test_a_model_that_does_not_say_its_sizes_is_refused(text: str, model: Path) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="does not say"):
        kv_tokens(RolloutEngineSettings(model))


def test_the_engine_gets_its_role_and_no_secret(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLES["worker"], "secret")
    own = sglang_environment(RolloutEngineSettings(model, "cpu:0-1"), Path("/a"))
    assert (own[ROLE_VARIABLE], own[ENGINE_FOLDER_VARIABLE], own["TMPDIR"]) == ("rollout", "/a", "/a")
    assert (own["OMP_NUM_THREADS"], own["SGLANG_USE_CPU_ENGINE"]) == ("2", "1")
    assert "secret" not in own.values()
    assert sglang_environment(RolloutEngineSettings(model, "cuda:1"), Path("/a"))["CUDA_VISIBLE_DEVICES"] == "1"


def test_a_group_of_gpus_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="one rank, and cuda:0-1 is for 2"):
        SglangProcess(RolloutEngineSettings(model, "cuda:0-1"))
