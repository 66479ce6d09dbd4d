"""A rollout engine on SGLang as a process: how it is started; keeping and ending it is shared with vLLM's.

The engine must not plan a step while another runs (`--disable-overlap-schedule`), or the end of a step would not be
known. SGLang listens on the Unix socket that `rose.sglang.rollout_server` gives it, so the port in its command is never
opened. Its sockets between processes lie in `TMPDIR`, so that is the engine's own folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from rose.bounds import UNREADABLE, Count
from rose.errors import ConfigError
from rose.openai.http_server import free_port
from rose.private_files import without_secrets
from rose.sglang.plugin import ROLE_VARIABLE
from rose.sglang.sglang_engine import SglangEngine
from rose.vllm.control_segment import ENGINE_FOLDER_VARIABLE, EngineControl, Segment
from rose.vllm.engine_process import EngineProcess, RolloutEngineSettings, socket_path

PROGRAM = "rose.sglang.rollout_server"
ON_CPU = {"--device": "cpu", "--attention-backend": "torch_native", "--dtype": "float32"}
SWITCHES = (
    "--skip-tokenizer-init",  # ids in, ids out
    "--skip-server-warmup",  # its request would wait behind the gate
    "--incremental-streaming-output",
    "--disable-overlap-schedule",
    "--enable-priority-scheduling",
    "--schedule-low-priority-values-first",
    "--disable-priority-preemption",
)
FLOAT32_BYTES, FLOAT16_BYTES = 4, 2


class ModelSizes(msgspec.Struct):
    """The sizes in a `config.json` that KV memory and requests depend on."""

    vocab_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    hidden_size: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None


def model_sizes(model: Path) -> ModelSizes:
    """Return the sizes of a model. Raises ConfigError if its folder does not say them."""
    path = model / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=ModelSizes)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{path} does not say the model's sizes: {error}") from error


def kv_tokens(engine: RolloutEngineSettings) -> int:
    """Return how many tokens the engine's KV memory holds."""
    sizes = model_sizes(engine.model)
    heads = sizes.num_key_value_heads or sizes.num_attention_heads
    width = sizes.head_dim or sizes.hidden_size // max(1, sizes.num_attention_heads)
    token_bytes = 2 * sizes.num_hidden_layers * heads * width * (FLOAT32_BYTES if engine.is_cpu else FLOAT16_BYTES)
    return (engine.kv_memory_mb << 20) // max(1, token_bytes)


def sglang_command(engine: RolloutEngineSettings, folder: Path) -> list[str]:
    """Return the command that starts SGLang's server."""
    step_tokens = str(engine.step_tokens)
    flags = {
        "--model-path": str(engine.model),
        "--served-model-name": "rollout",
        "--host": "127.0.0.1",
        "--port": str(free_port()),
        "--max-running-requests": str(engine.max_sequences),
        "--max-total-tokens": str(kv_tokens(engine)),
        "--chunked-prefill-size": step_tokens,
        "--max-prefill-tokens": step_tokens,
    }
    if engine.max_context_tokens:
        flags["--context-length"] = str(engine.max_context_tokens)
    flags |= ON_CPU if engine.is_cpu else {}
    words = [word for pair in flags.items() for word in pair]
    return [engine.python, "-m", PROGRAM, str(socket_path(folder)), *words, *SWITCHES, *engine.extra]


def sglang_environment(engine: RolloutEngineSettings, folder: Path) -> dict[str, str]:
    """Return the environment of the engine, without ROSE's secrets."""
    own = {
        ENGINE_FOLDER_VARIABLE: str(folder),
        ROLE_VARIABLE: "rollout",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",  # a generated token would wait behind the gate
        "TMPDIR": str(folder),
    }
    if engine.is_cpu:
        own |= {"OMP_NUM_THREADS": str(len(engine.cores)), "SGLANG_USE_CPU_ENGINE": "1"}
    else:
        own |= {"CUDA_VISIBLE_DEVICES": engine.device.removeprefix("cuda:")}
    return {**without_secrets(os.environ), **own, **engine.environment}


class SglangProcess(EngineProcess):
    """One run of one rollout engine on SGLang."""

    def __init__(self, settings: RolloutEngineSettings) -> None:
        if settings.ranks > 1:
            raise ConfigError(
                f"a rollout engine on SGLang has one rank, and {settings.device} is for {settings.ranks}",
                hint="give one GPU, or lend a vLLM server",
            )
        super().__init__(settings)

    def _command(self) -> list[str]:
        return sglang_command(self.settings, self.folder)

    def _environment(self) -> dict[str, str]:
        return sglang_environment(self.settings, self.folder)

    def _connect(self, control: Segment[EngineControl]) -> SglangEngine:
        model = self.settings.model
        vocabulary = model_sizes(model).vocab_size
        return SglangEngine(self.socket, self.folder, control, lambda: self.is_running, model, vocabulary)
