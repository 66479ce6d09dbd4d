"""Settings of the HTTP servers: one device (engine, front, lending, rollout front) and the gateway.

`rose serve` and `rose gateway` read them from a YAML file and from dotted overrides; their flags are overrides with
shorter names.

    device: cpu:0
    engine: {kv_memory_mb: 512, max_sequences: 64}
    front: {port: 8000}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rose.config.schema import setting
from rose.core.admission import Mode
from rose.core.slo import Budgets
from rose.errors import ConfigError

UNDECLARED_TTFT_MS, UNDECLARED_TPOT_MS = 500.0, 150.0  # usual for interactive use; an idle device needs none
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


def chosen_mode(mode: Mode | Literal["auto"], ttft_ms: float | None, tpot_ms: float | None) -> Mode:
    """Return the mode that `auto` stands for. Raises ConfigError if `decode` has no budgets to keep."""
    is_declared = ttft_ms is not None and tpot_ms is not None
    if mode == "auto":
        return "decode" if is_declared else "idle"
    if mode == "decode" and not is_declared:
        raise ConfigError(
            "mode decode lends time out of serving's budgets, and they are not declared",
            hint="give --ttft-ms and --tpot-ms, or choose idle",
        )
    return mode


@dataclass(frozen=True, slots=True)
class LendSettings:
    """The terms on which the owner lends a device. KV memory is part of `engine.kv_memory_mb`."""

    mode: Literal["auto", "decode", "idle", "paper", "alternate", "fcfs"] = setting(
        "auto",
        "when rollouts may run: idle only without serving work; decode also between decode steps, within declared "
        "budgets; auto is decode if both budgets are declared, else idle",
    )
    ttft_ms: float | None = setting(None, "serving's budget for the first token", minimum=1, maximum=3_600_000)
    tpot_ms: float | None = setting(None, "serving's budget for each later token", minimum=0.1, maximum=3_600_000)
    tpot: Literal["mean", "every_gap"] = setting(
        "mean", "what tpot_ms is promised for: a request's mean time per token, or every gap between two tokens"
    )
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
    spare_sequences: int = setting(
        64,
        "users' requests that may run beyond engine.max_sequences while some have been delayed by lending",
        minimum=0,
        maximum=4096,
    )
    max_waiting: int = setting(1024, "most rollouts that wait; beyond it the answer is 429", minimum=0)
    journal: str | None = setting(None, "file that every lending decision and breach is written to; null for none")

    @property
    def chosen_mode(self) -> Mode:
        """Return the lending mode. Raises ConfigError for `decode` without budgets."""
        return chosen_mode(self.mode, self.ttft_ms, self.tpot_ms)

    @property
    def budgets(self) -> Budgets:
        """Return the declared budgets. In `idle` the TTFT budget only bounds how long a step may be."""
        ttft_ms, tpot_ms = self.ttft_ms or UNDECLARED_TTFT_MS, self.tpot_ms or UNDECLARED_TPOT_MS
        return Budgets(ttft_ms / 1000, tpot_ms / 1000, self.slack_share, self.answer_s, self.tpot)

    def engine(self, kv_memory_mb: int) -> EngineSettings:
        """Return the rollout engine's settings beside a serving engine with this much memory."""
        return EngineSettings(
            kv_memory_mb, self.max_context_tokens, self.max_step_tokens, self.max_sequences, self.max_waiting
        )


@dataclass(frozen=True, slots=True)
class RolloutFrontSettings(FrontSettings):
    port: int = setting(8001, "TCP port for rollouts; 0 takes a free one", minimum=0, maximum=65535)
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
    """Return the cores of a device in the order written: `cpu:0-1,3` -> (0, 1, 3). Some may not exist."""
    kind, _, ranges = device.partition(":")
    cores: list[int] = []
    try:
        for part in ranges.split(","):
            first, dash, last = part.partition("-")
            cores += range(int(first), int(last if dash else first) + 1)
    except ValueError:
        cores = []
    if kind != "cpu" or not cores:
        raise ConfigError(f"`{device}` is not a device", hint="write it like cpu:0, cpu:0-1 or cpu:0,2")
    if len(set(cores)) < len(cores):
        raise ConfigError(f"device `{device}` names a core twice", hint="name every core once")
    return tuple(cores)


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Routes by which a trainer made for another server controls the gateway."""

    api: Literal["vllm"] | None = setting(
        None, "whose control routes the gateway answers to the trainer (`--door`); null answers none"
    )
    folder: str | None = setting(
        None, "weights are read from folders below this one (`--door-folder`); null reads none"
    )
    relay: str | None = setting(
        None, "where the gateway publishes weights that it read from a folder (`--door-relay`): an address or a folder"
    )
    run: str | None = setting(None, "name of the run in that relay; the model's name if null")
    wait_s: float = setting(
        240.0, "longest a weight update waits for its publication and for the workers", minimum=0.1, maximum=3600
    )


@dataclass(frozen=True, slots=True)
class GatewaySettings(FrontSettings):
    port: int = setting(8002, "TCP port; 0 takes a free one", minimum=0, maximum=65535)
    max_body_bytes: int = setting(8 << 20, "largest request body", minimum=1024, maximum=1 << 30)
    obey_priority: bool = setting(True, "whether clients may choose the `priority` of their requests")
    model_name: str | None = setting(None, "name that clients use for the rollout model; the folder's if null")
    wait_s: float = setting(30.0, "longest a turn waits for a worker before the answer is 503", minimum=0.1)
    version_wait_s: float = setting(
        30.0, "longest a turn waits for a worker with the weights that it demands before the answer is 409", minimum=0
    )
    max_waiting: int = setting(4096, "most turns that wait; beyond it the answer is 429", minimum=0)
    lease_s: float = setting(5.0, "a worker silent for longer has lost its turns", minimum=0.2, maximum=3600)
    beat_s: float = setting(1.0, "how often workers send a heartbeat", minimum=0.05, maximum=600)
    max_trajectories: int = setting(100_000, "most trajectories held at once; beyond it the answer is 429", minimum=1)
    max_kept_mb: int = setting(4096, "most memory for turns of all trajectories; beyond it: 429", minimum=1)
    max_session_mb: int = setting(512, "most memory for turns of one trajectory; beyond it: 429", minimum=1)
    idle_s: float = setting(3600.0, "a trajectory that is not used for this long is forgotten", minimum=1)
    ledger: str | None = setting(None, "file that keeps trajectories when the gateway dies; null keeps them in memory")
    router: Literal["cost", "paper"] = setting("cost", "how a worker is chosen for a turn")
    max_staleness: int = setting(0, "versions of the weights that a worker may be behind", minimum=0, maximum=1000)
    borrowed_max: int | None = setting(None, "most serving devices borrowed at once; null borrows all", minimum=0)
    dedicated_max: int | None = setting(None, "most dedicated workers used at once; null uses all", minimum=0)
    return_after_s: float = setting(30.0, "a borrowed device that is idle for longer is returned", minimum=0)
    shards: tuple[str, ...] = setting(
        (), "addresses of all gateways of this job, in one order everywhere; empty for a single gateway"
    )
    shard: int | None = setting(None, "this gateway's place in `shards`, from 0; null for a single gateway", minimum=0)
    shard_moves_per_minute: int = setting(60, "most idle workers that move to other gateways in a minute", minimum=0)
    shard_journal: str | None = setting(None, "file that every such move is written to; null for none")
    gated_s: float = setting(1.0, "a turn whose worker blocks admission for longer moves to another worker", minimum=0)
    control: ControlSettings = field(default_factory=ControlSettings)
