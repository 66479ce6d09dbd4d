"""Settings of `rose run`: what is learnt, by how many trajectories, on whose cores, beside which traffic.

    steps: 20
    environment: frozenlake
    groups: {groups: 8, size: 8}
    train: {learning_rate: 0.0003}
    traffic: {source: "gamma:rate=2,cv=2"}

A *profile* is a set of other defaults. `default` is a job of minutes that learns to cross a frozen lake. In
`rollout-heavy` rollouts take most of a step, as they do in jobs with large models: turns are a short plan of forty
tokens and more, groups are large, and only the members of a group whose rewards differ most are trained on.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rose.config import yaml_text as text
from rose.config.loading import load_settings
from rose.config.schema import setting
from rose.config.server_settings import DEVICE_PATTERN, LendSettings
from rose.core.groups import GroupRules
from rose.cost.bill import CostSettings
from rose.envs.environment_registry import environment_settings
from rose.envs.openai_agent import check_agent
from rose.envs.trouble import TroubleSettings
from rose.errors import ConfigError
from rose.load.generators import generated
from rose.models.presets import find_preset
from rose.run.tracking import TrackingSettings, check_tracking
from rose.train.train_settings import TrainSettings, check_train
from rose.weights.relay.opening import relay_kind

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
COMPARED_STEPS = 4  # one round of with, without, without, with


@dataclass(frozen=True, slots=True)
class GroupSettings:
    groups: int = setting(8, "groups a step trains on", minimum=1, maximum=4096)
    size: int = setting(8, "trajectories of one group", minimum=2, maximum=4096)
    train_size: int = setting(0, "members of a group that are trained on; 0 takes all", minimum=0, maximum=4096)
    dynamic_sampling: bool = setting(True, "drop groups in which all went alike, and draw others")
    draws_max: int = setting(32, "most groups drawn in one step", minimum=1, maximum=1 << 20)
    draw_ahead: float = setting(1.0, "groups under way per group still missing", minimum=1, maximum=16)

    def rules(self) -> GroupRules:
        return GroupRules(
            self.groups, self.size, self.train_size, self.dynamic_sampling, self.draws_max, self.draw_ahead
        )


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """The device that serves users and lends what it does not need."""

    is_borrowed: bool = setting(True, "whether the serving device lends itself to this job")
    engine: Literal["embedded", "vllm"] = setting("embedded", "what serves: embedded, or vllm (docs/vllm.md)")
    preset: str = setting("qwen3-3m", "preset of the serving model")
    device: str | None = setting(None, "its cores; null takes the first", pattern=DEVICE_PATTERN, example="cpu:0")
    kv_memory_mb: int = setting(256, "memory for keys and values of both models, in MiB", minimum=8, maximum=1 << 20)
    max_context_tokens: int = setting(
        2048, "longest request of a user; lengths of the traffic are scaled to it", minimum=64, maximum=1 << 20
    )
    owner_lends_s: float = setting(0.0, "a restless owner takes it back after so long; 0 has none", minimum=0)
    owner_keeps_s: float = setting(2.0, "and offers it again after so long", minimum=0.01)
    lend: LendSettings = field(default_factory=lambda: LendSettings(ttft_ms=500.0, tpot_ms=150.0))


@dataclass(frozen=True, slots=True)
class TrafficSettings:
    """Requests of users to the serving device, with lengths as in the Azure conversation trace."""

    source: str = setting("gamma:rate=2,cv=2", "arrivals: a generator of `rose load`")
    duration_s: float = setting(7200.0, "traffic is drawn for this long; a run that takes longer begins it again",
                                minimum=10, maximum=1e6)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The dedicated rollout worker, beside the trainer."""

    is_used: bool = setting(True, "whether there is a dedicated worker")
    engine: Literal["embedded", "vllm"] = setting("embedded", "what it runs on: embedded, or vllm (docs/vllm.md)")
    device: str | None = setting(None, "its cores; null takes the second", pattern=DEVICE_PATTERN, example="cpu:1")
    kv_memory_mb: int = setting(256, "memory for keys and values, in MiB", minimum=8, maximum=1 << 20)
    max_sequences: int = setting(64, "most turns that run together", minimum=1, maximum=4096)


@dataclass(frozen=True, slots=True)
class AsynchronySettings:
    """Rollouts that go on while the trainer learns (docs/trainer.md). Synchronous training is the bound 0."""

    is_used: bool = setting(False, "whether rollouts never stop; else a step plays, then learns, then publishes")
    max_staleness: int = setting(2, "versions that a token may be older than the weights that learn from it", minimum=0,
                                 maximum=1000)  # fmt: skip

    @property
    def bound(self) -> int:
        return self.max_staleness if self.is_used else 0


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    every_steps: int = setting(5, "steps between two evaluations; 0 evaluates never", minimum=0)
    episodes: int = setting(200, "held-out episodes of one evaluation", minimum=1, maximum=100_000)


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    every_steps: int = setting(5, "steps between two checkpoints; 0 writes none", minimum=0)
    keep: int = setting(2, "checkpoints that stay", minimum=1, maximum=1000)


@dataclass(frozen=True, slots=True)
class WeightsSettings:
    """How new weights get to the workers (docs/weights.md)."""

    relay: str | None = setting(
        None, "address of the relay; null is a folder of the run", example="http://relay.example:7070"
    )
    anchor_every: int = setting(16, "versions between two that are sent whole, for workers that join", minimum=1,
                                maximum=100_000)  # fmt: skip
    keep_versions: int = setting(32, "versions that a worker may miss and still catch up by what changed", minimum=1,
                                 maximum=100_000)  # fmt: skip
    patience_s: float = setting(30.0, "longest that a relay may fail before the run ends", minimum=0.1, maximum=86_400)


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The place of a run's processes (docs/ray.md). A run may be resumed elsewhere."""

    kind: Literal["local", "ray"] = setting("local", "where the processes run: local is this machine; or ray")
    address: str = setting("auto", "Ray cluster that this machine is a node of; auto finds it", example="10.0.0.1:6379")
    label: str = setting("rose/role", "label of nodes that names the role they take")
    cpus: float = setting(1.0, "CPUs that each role reserves on its node", minimum=0.001, maximum=4096)
    wait_s: float = setting(5.0, "longest wait for nodes; more where nodes are added on demand", minimum=0.1,
                            maximum=86_400)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EnvironmentSettings:
    reset_s_max: float = setting(60.0, "longest a reset may take", minimum=0.01)
    step_s_max: float = setting(30.0, "longest a step may take", minimum=0.01)
    tries_max: int = setting(3, "how often a failed episode is played anew", minimum=1, maximum=100)
    agent_s_max: float = setting(600.0, "longest that an agent may take for an episode", minimum=0.01)


@dataclass(frozen=True, slots=True)
class RunSettings:
    profile: Literal["default", "rollout-heavy"] = setting("default", "which set of defaults: default, rollout-heavy")
    name: str | None = setting(None, "name of the run; null makes one", pattern=NAME_PATTERN, example="first-try")
    runs: str = setting("runs", "folder that holds the runs")
    steps: int = setting(20, "steps of learning", minimum=1, maximum=1_000_000)
    environment: str = setting("frozenlake", "what is played")
    environment_options: Mapping[str, bool | int | float | str] = setting({}, "what is changed of it (docs/tasks.md)")
    agent: str | None = setting(None, "function that plays it with an OpenAI client; null plays turn by turn",
                                example="my_agent.py:play")  # fmt: skip
    rollout_model: str | None = setting(None, "folder of the model to train; null makes a warm start")
    seed: int = setting(0, "of maps and traffic", minimum=0, maximum=(1 << 19) - 1)
    compare: bool = setting(False, "alternate steps with and without the borrowed device")
    groups: GroupSettings = field(default_factory=GroupSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    asynchrony: AsynchronySettings = field(default_factory=AsynchronySettings)
    serving: ServingSettings = field(default_factory=ServingSettings)
    traffic: TrafficSettings = field(default_factory=TrafficSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    weights: WeightsSettings = field(default_factory=WeightsSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    patience: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    trouble: TroubleSettings = field(default_factory=TroubleSettings)
    cost: CostSettings = field(default_factory=CostSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    vllm_python: str | None = setting(None, "interpreter that has vLLM; null takes ROSE_VLLM_PYTHON, or this one")


@dataclass(frozen=True, slots=True)
class RolloutHeavySettings(RunSettings):
    profile: Literal["default", "rollout-heavy"] = setting("rollout-heavy", "which set of defaults")
    steps: int = setting(8, "steps of learning", minimum=1, maximum=1_000_000)
    environment: str = setting("frozenlake-plan", "what is played")
    groups: GroupSettings = field(default_factory=lambda: GroupSettings(groups=2, size=128, train_size=8, draws_max=6))
    evaluation: EvaluationSettings = field(default_factory=lambda: EvaluationSettings(every_steps=0))


PROFILES: dict[str, type[RunSettings]] = {"default": RunSettings, "rollout-heavy": RolloutHeavySettings}


def load_run_settings(path: str | Path | None = None, overrides: Sequence[str] = ()) -> RunSettings:
    """Return the checked settings: the profile's defaults, then the file, then the overrides. Raises ConfigError."""
    settings = load_settings(PROFILES[_profile(path, overrides)], path, overrides)
    check_run(settings)
    return settings


def check_run(settings: RunSettings) -> None:
    """Raise ConfigError for names that do not exist and for values that do not go together."""
    environment_settings(settings.environment, settings.environment_options)
    if settings.agent is not None:
        check_agent(settings.agent)
    find_preset(settings.serving.preset)
    generated(settings.traffic.source, seed=0, duration_s=1.0)
    check_train(settings.train)
    check_tracking(settings.tracking)
    if settings.weights.relay is not None:
        relay_kind(settings.weights.relay)
    groups = settings.groups
    if groups.train_size > groups.size:
        _refuse(f"groups.train_size is {groups.train_size}, but a group has only {groups.size} members", "groups.size")
    if groups.train_size == 1:
        _refuse("groups.train_size is 1, and one trajectory has nothing to be compared with", "groups.train_size")
    if groups.draws_max < groups.groups:
        what = f"groups.draws_max is {groups.draws_max}, but a step needs {groups.groups} groups"
        _refuse(what, "groups.draws_max")
    if not settings.serving.is_borrowed and not settings.worker.is_used:
        _refuse("no device is borrowed and there is no dedicated worker: no worker would play", "worker.is_used")
    if settings.serving.engine == "vllm" and settings.serving.lend.mode not in ("auto", "idle", "decode"):
        _refuse(f"a vLLM device cannot be lent in the mode {settings.serving.lend.mode}", "serving.lend.mode=decode")
    if settings.cluster.kind == "ray" and "vllm" in (settings.serving.engine, settings.worker.engine):
        what = "the devices of a run on Ray have the embedded engine"
        raise ConfigError(what, hint="start vLLM devices yourself, and let them join a gateway: docs/vllm.md")
    if settings.compare and not (settings.serving.is_borrowed and settings.worker.is_used):
        what = "a comparison is between a dedicated worker alone and the same with a borrowed device; both are needed"
        _refuse(what, "worker.is_used=true and serving.is_borrowed=true")
    if settings.serving.owner_lends_s and (settings.compare or not settings.serving.is_borrowed):
        what = "serving.owner_lends_s needs a device that is lent, and lent in every step"
        _refuse(what, "serving.owner_lends_s=0")
    if settings.compare and settings.steps % COMPARED_STEPS:
        what = f"a comparison takes steps by fours (with, without, without, with), not {settings.steps}"
        _refuse(what, f"steps={-(-settings.steps // COMPARED_STEPS) * COMPARED_STEPS}")


def _refuse(what: str, key: str) -> None:
    raise ConfigError(what, hint=f"change {key}")


def _profile(path: str | Path | None, overrides: Sequence[str]) -> str:
    """Return the profile that the last source names."""
    found: object = "default"
    tree = text.read_file(Path(path)) if path is not None else None
    if isinstance(tree, dict) and "profile" in tree:
        found = tree["profile"]
    for override in overrides:
        keys, value = text.parse_override(override)
        if keys == ["profile"]:
            found = value
    if found not in PROFILES:
        near = difflib.get_close_matches(str(found), PROFILES, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PROFILES)}"
        raise ConfigError(f"there is no profile {found!r}", hint=hint)
    return str(found)
