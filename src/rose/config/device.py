"""Settings of one device: the engine process on its cores and the HTTP front before it.

`rose serve` reads them from a YAML file and from dotted overrides; its flags are overrides with shorter names.

    device: cpu:0
    engine: {kv_memory_mb: 512, max_sequences: 64}
    front: {port: 8000}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rose.config.schema import setting
from rose.errors import ConfigError

DEVICE_PATTERN = r"cpu:\d+(-\d+)?(,\d+(-\d+)?)*"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    kv_memory_mb: int = setting(512, "memory for keys and values, in MiB", minimum=1, maximum=1 << 20)
    max_context_tokens: int = setting(0, "longest prompt and answer together; 0 takes the model's own", minimum=0)
    max_step_tokens: int = setting(512, "most tokens one step computes; longer prompts run in chunks", minimum=1)
    max_sequences: int = setting(64, "most requests that run together", minimum=1, maximum=4096)
    max_waiting: int = setting(1024, "most requests that wait; beyond it the answer is 429", minimum=0)
    # The embedded engine is always batch-invariant: its fixed tile and reduction order is also its fastest one.
    # `false` is accepted, so that settings can be shared with other engines, and changes nothing here.
    batch_invariant: bool = setting(True, "same tokens under any batching, chunking, prefix hit or preemption")


@dataclass(frozen=True, slots=True)
class FrontSettings:
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 lets other machines in")
    port: int = setting(8000, "TCP port; 0 takes a free one", minimum=0, maximum=65535)
    max_body_bytes: int = setting(4 << 20, "largest request body", minimum=1024, maximum=1 << 30)
    max_connections: int = setting(1024, "most connections open at once", minimum=1, maximum=1 << 20)
    read_timeout_s: float = setting(30.0, "longest wait for a request to arrive whole", minimum=0.1, maximum=3600)
    slow_reader_s: float = setting(
        30.0, "a client that takes nothing for this long is cut off", minimum=0.1, maximum=3600
    )
    shutdown_s: float = setting(
        10.0, "longest wait for running requests when the device stops", minimum=0, maximum=3600
    )
    tool_parser: Literal["hermes", "text"] = setting(
        "hermes", "how tool calls are read: <tool_call> blocks as in Hermes and Qwen, or left as text"
    )
    obey_priority: bool = setting(False, "whether clients may choose the `priority` of their requests")
    allowed_hosts: tuple[str, ...] = setting(
        (), "names beside localhost by which clients may call a device that listens on this machine only"
    )
    ssl_certfile: str | None = setting(None, "PEM file with the certificate for HTTPS; null listens without TLS")
    ssl_keyfile: str | None = setting(None, "PEM file with its private key, if it is not in ssl_certfile")


@dataclass(frozen=True, slots=True)
class LendSettings:
    """On what terms a device is lent; its owner's to choose. KV memory is part of `engine.kv_memory_mb`."""

    mode: Literal["decode", "idle", "paper", "alternate", "fcfs"] = setting(
        "decode", "when rollouts may run: idle only without serving work; decode also between decode steps"
    )
    ttft_ms: float = setting(500.0, "serving's budget for the first token", minimum=1, maximum=3_600_000)
    tpot_ms: float = setting(150.0, "serving's budget for each later token", minimum=0.1, maximum=3_600_000)
    slack_share: float = setting(0.7, "share of the budgets that lending may use up", minimum=0.05, maximum=1)
    answer_s: float = setting(
        60.0,
        "how long users and proxies wait for a whole answer; lending leaves one alone that gets near it",
        minimum=1,
        maximum=86400,
    )
    headroom_share: float = setting(0.2, "share of the KV memory kept free for serving", minimum=0.01, maximum=0.9)
    regrowth: Literal["hysteresis", "swap"] = setting("hysteresis", "how rollouts get memory back after a cut")
    memory_share: float = setting(1.0, "most of the KV memory that rollouts may hold", minimum=0, maximum=1)
    compute_share: float = setting(1.0, "most of the device's time that rollouts may have", minimum=0, maximum=1)
    page_kb: int = setting(2048, "size of a page of KV memory, in KiB; a multiple of 4", minimum=4, maximum=1 << 20)
    max_context_tokens: int = setting(0, "longest rollout, prompt and answer; 0 takes the model's own", minimum=0)
    max_step_tokens: int = setting(512, "most tokens one rollout step computes", minimum=1)
    max_sequences: int = setting(64, "most rollouts that run together", minimum=1, maximum=4096)
    max_waiting: int = setting(1024, "most rollouts that wait; beyond it the answer is 429", minimum=0)
    journal: str | None = setting(None, "file that every lending decision and breach is written to; null for none")

    def engine(self, kv_memory_mb: int) -> EngineSettings:
        """The rollout engine's settings beside a serving engine with this much memory."""
        return EngineSettings(
            kv_memory_mb, self.max_context_tokens, self.max_step_tokens, self.max_sequences, self.max_waiting
        )


@dataclass(frozen=True, slots=True)
class RolloutFrontSettings(FrontSettings):
    port: int = setting(8001, "TCP port of the rollouts' own door; 0 takes a free one", minimum=0, maximum=65535)
    obey_priority: bool = setting(True, "whether clients may choose the `priority` of their requests")


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    device: str = setting("cpu:0", "cores the engine is pinned to", pattern=DEVICE_PATTERN, example="cpu:0 or cpu:0-1")
    model_name: str | None = setting(None, "name that clients use for the model; the folder's name if null")
    engine: EngineSettings = field(default_factory=EngineSettings)
    front: FrontSettings = field(default_factory=FrontSettings)
    lend: LendSettings = field(default_factory=LendSettings)
    rollout: RolloutFrontSettings = field(default_factory=RolloutFrontSettings)


def cores_of(device: str) -> tuple[int, ...]:
    """`cpu:0-1,3` -> (0, 1, 3), in the order written; whether they exist is for the process that pins itself."""
    kind, _, ranges = device.partition(":")
    try:
        cores = [core for part in ranges.split(",") for core in _range_of(part)]
    except ValueError:
        cores = []
    if kind != "cpu" or not cores:
        raise ConfigError(f"`{device}` is not a device", hint="write it like cpu:0, cpu:0-1 or cpu:0,2")
    if len(set(cores)) < len(cores):
        raise ConfigError(f"device `{device}` names a core twice", hint="name every core once")
    return tuple(cores)


def _range_of(part: str) -> range:
    first, dash, last = part.partition("-")
    return range(int(first), int(last if dash else first) + 1)
