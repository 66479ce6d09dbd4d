"""The values of a deployment on Kubernetes: what `rose deploy k8s --values FILE` reads, and the Helm chart's values.

They are settings as everywhere in ROSE: typed, with limits, with a default for each, and unknown keys are refused. The
chart in deploy/helm/rose takes the same file; its values.yaml and values.schema.json are made from these classes.
Values hold names and sizes only. Tokens are in Secrets, which the objects refer to by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rose.config.loading import load_settings
from rose.config.schema import setting
from rose.config.server_settings import GatewaySettings
from rose.config.yaml_text import as_override
from rose.errors import ConfigError

NAME = r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?"  # a DNS label, with room for the longest suffix of an object's name
QUANTITY = r"[0-9]{1,6}(\.[0-9]{1,3})?(m|k|M|G|T|Ki|Mi|Gi|Ti)?"
EXAMPLE_TRAINER = ("python", "/opt/rose/examples/own_trainer.py", "$(ROSE_MODEL)", "$(ROSE_GATEWAY)", "$(ROSE_RELAY)")

GPU_FLAGS = ("--gpu-memory-utilization=0.6",)


def _text(default: str, what: str, pattern: str, example: str) -> Any:
    return setting(default, what, pattern=pattern, example=example)


def _name(default: str, what: str) -> Any:
    """Return a setting that names an object; it may be empty if its default is."""
    return _text(default, what, NAME if default else f"({NAME})?", "rose-1: small letters, digits and -, 40 at most")


def _size(default: str, what: str) -> Any:
    return _text(default, what, QUANTITY, "500m, 2 or 4Gi")


def _count(default: int, what: str, minimum: int = 1, maximum: int = 10_000) -> Any:
    return setting(default, what, minimum=minimum, maximum=maximum)


def _port(default: int, what: str) -> Any:
    return _count(default, what, 1024, 65535)  # the processes are not root


@dataclass(frozen=True, slots=True)
class ImageValues:
    repository: str = _text(
        "rose", "image of every container, built by deploy/docker", r"[\w./:-]+", "example.org/rose"
    )
    tag: str = _text("0.2.0-cuda", "its tag", r"\w[\w.-]{0,127}", "0.2.0-cuda")
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = setting("IfNotPresent", "when nodes pull it")
    pull_secret: str = _name("", "Secret with the registry's password; empty for none")


@dataclass(frozen=True, slots=True)
class ModelValues:
    claim: str = _name("rose-models", "PersistentVolumeClaim with model folders, mounted at /models")
    folder: str = _text("rollout", "folder of the rollout model in it", r"\w[\w.-]*(/\w[\w.-]*)*", "qwen3/8b")


@dataclass(frozen=True, slots=True)
class GatewayValues:
    port: int = _port(8002, "port of the gateway")
    cpu: str = _size("1", "CPU that it requests")
    memory: str = _size("6Gi", "memory, requested and limit; more than its setting max_kept_mb")
    storage: str = _size("10Gi", "volume of the ledger")
    settings: Mapping[str, str | bool | int | float] = setting({}, "settings of `rose gateway`, as with --set")


@dataclass(frozen=True, slots=True)
class RelayValues:
    address: str = _text("", "a relay elsewhere; empty runs one", r"((https?|s3|gs|az)://\S+)?", "s3://bucket/folder")
    port: int = _port(7070, "port of the relay")
    cpu: str = _size("500m", "CPU that it requests")
    memory: str = _size("1Gi", "memory, requested and limit")
    storage: str = _size("50Gi", "volume of the weight versions")


@dataclass(frozen=True, slots=True)
class WorkerValues:
    replicas: int = _count(1, "workers, without a scaler", 0)
    engine: Literal["vllm", "embedded"] = setting("vllm", "vllm, or the embedded engine on one core")
    cpu: str = _size("4", "CPU that each requests")
    memory: str = _size("32Gi", "memory of each, requested and limit; shared memory counts")
    gpus: int = _count(1, "GPUs of each", 0, 1)
    shared_memory: str = _size("16Gi", "/dev/shm; two copies of the weights and what vLLM needs")
    kv_memory_mb: int = _count(4096, "memory for keys and values of each", 1, 1 << 20)
    max_sequences: int = _count(64, "rollouts at once in each", 1, 4096)
    scaler: Literal["none", "hpa", "keda"] = setting("none", "what sets the number of workers instead of `replicas`")
    min_replicas: int = _count(1, "fewest workers, with a scaler")
    max_replicas: int = _count(8, "most workers, with a scaler")
    waiting_turns: int = _count(16, "turns that wait per worker before another one is started", 1, 100_000)
    prometheus: str = _text("http://prometheus:9090", "Prometheus, for keda", r"https?://\S+", "http://prometheus:9090")


@dataclass(frozen=True, slots=True)
class TrainerValues:
    kind: Literal["none", "job", "jobset", "rayjob"] = setting("job", "what runs the trainer; none if not here")
    image: str = _text("", "its image, with Ray for a rayjob; empty takes `image`", r"\S*", "example.org/trainer:1")
    command: tuple[str, ...] = setting(EXAMPLE_TRAINER, "its command; $(ROSE_MODEL) and the like are filled in")
    ranks: int = _count(1, "pods; more than one only with jobset and rayjob")
    cpu: str = _size("4", "CPU that each requests")
    memory: str = _size("32Gi", "memory of each, requested and limit; shared memory counts")
    gpus: int = _count(1, "GPUs of each", 0, 64)
    shared_memory: str = _size("8Gi", "/dev/shm of each")
    storage: str = _size("50Gi", "volume for checkpoints, mounted at /runs")
    retries: int = _count(0, "restarts after a failure; for a trainer that resumes by itself", 0, 1000)
    ray_version: str = _text("2.60.0", "version of Ray in the image, for rayjob", r"\d+\.\d+\.\d+", "2.60.0")


@dataclass(frozen=True, slots=True)
class SidecarValues:
    deployment: str = _name("", "the Deployment to lend; empty for none")
    container: str = _name("vllm", "its container that runs vLLM")
    container_index: int = _count(0, "place of that container in the list, from 0", 0, 15)
    namespace: str = _name("default", "its namespace, which needs the worker Secret and the model claim too")
    port: int = _count(8000, "port of vLLM", 1, 65535)
    flags_in: Literal["args", "command"] = setting("args", "list of the container that ends with vLLM's flags")
    serving_flags: tuple[str, ...] = setting(GPU_FLAGS, "flags added to vLLM's; both engines must fit into the GPU")
    user: int = _count(0, "user id for both containers; 0 as in vLLM's image", 0, (1 << 31) - 1)
    gpu: Literal["time-slices", "dra", "none"] = setting("time-slices", "how both get one GPU; none: a CPU")
    device_class: str = _text("gpu.nvidia.com", "DeviceClass, for dra", r"[a-z0-9.-]+", "gpu.nvidia.com")
    mode: Literal["auto", "idle", "decode"] = setting("idle", "when to lend")
    ttft_ms: float = setting(500.0, "serving's budget for the first token", minimum=1, maximum=3_600_000)
    tpot_ms: float = setting(150.0, "serving's budget for each later token", minimum=0.1, maximum=3_600_000)
    kv_memory_mb: int = _count(4096, "memory for keys and values of the rollouts", 1, 1 << 20)
    max_sequences: int = _count(16, "rollouts at once", 1, 4096)
    cpu: str = _size("2", "CPU that the agent requests")
    memory: str = _size("16Gi", "memory, requested and limit; shared memory counts")
    shared_memory: str = _size("8Gi", "shared by both containers; two copies of the weights")


@dataclass(frozen=True, slots=True)
class MonitoringValues:
    namespace: str = _name("monitoring", "namespace of Prometheus")
    pod_monitors: bool = setting(False, "render PodMonitors of the Prometheus operator")
    rules: bool = setting(False, "render a PrometheusRule with alerts")
    labels: Mapping[str, str] = setting({}, "labels by which your Prometheus selects both")


@dataclass(frozen=True, slots=True)
class DeployValues:
    name: str = _name("rose", "prefix of every object, and the value of the label rose/instance")
    namespace: str = _name("rose", "namespace of every object but the sidecar's")
    storage_class: str = _name("", "StorageClass of the volumes; empty takes the cluster's")
    control_secret: str = _name(
        "rose-control", "Secret: ROSE_AGENT_TOKEN, _TRAINER_TOKEN, _OPERATOR_TOKEN, _RELAY_SECRET"
    )
    worker_secret: str = _name(
        "rose-worker", "Secret: ROSE_WORKER_TOKEN, _ROLLOUT_TOKEN, _OWNER_TOKEN, _RELAY_READ_KEY"
    )
    network_policies: bool = setting(True, "let only pods with the label rose/instance and Prometheus connect")
    gpu_resource: str = _text("nvidia.com/gpu", "name of a GPU on a node", r"[a-z0-9.-]+/[\w.-]+", "nvidia.com/gpu")
    image: ImageValues = field(default_factory=ImageValues)
    model: ModelValues = field(default_factory=ModelValues)
    gateway: GatewayValues = field(default_factory=GatewayValues)
    relay: RelayValues = field(default_factory=RelayValues)
    workers: WorkerValues = field(default_factory=WorkerValues)
    trainer: TrainerValues = field(default_factory=TrainerValues)
    sidecar: SidecarValues = field(default_factory=SidecarValues)
    monitoring: MonitoringValues = field(default_factory=MonitoringValues)

    @property
    def gateway_url(self) -> str:
        return f"http://{self.name}-gateway.{self.namespace}.svc:{self.gateway.port}"

    @property
    def relay_url(self) -> str:
        return self.relay.address or f"http://{self.name}-relay.{self.namespace}.svc:{self.relay.port}"

    @property
    def model_path(self) -> str:
        return f"/models/{self.model.folder}"

    @property
    def gateway_overrides(self) -> list[str]:
        """Return the gateway's settings as `rose gateway --set` takes them, by name."""
        return [as_override(key, value) for key, value in sorted(self.gateway.settings.items())]


FIXED = {"host", "port", "ledger", "ssl_certfile", "ssl_keyfile"}  # the objects rely on these settings of the gateway


def check_values(values: DeployValues) -> DeployValues:
    """Return values that fit together. Raises ConfigError for those that do not."""
    workers, trainer, sidecar = values.workers, values.trainer, values.sidecar
    most, fixed = workers.max_replicas, ", ".join(sorted(FIXED & values.gateway.settings.keys()))
    is_own = sidecar.namespace == values.namespace and sidecar.deployment == f"{values.name}-worker"
    rules = (
        (fixed, f"`gateway.settings` cannot set {fixed}", "leave it out; `gateway.port` is the port"),
        (most < workers.min_replicas, f"`workers.min_replicas` is above `max_replicas`, {most}", "raise max_replicas"),
        (workers.engine == "embedded" and workers.gpus, "the embedded engine uses no GPU", "set workers.gpus: 0"),
        (trainer.kind == "job" and trainer.ranks > 1, "a Job is one rank", "set trainer.kind: jobset"),
        (trainer.kind != "none" and not trainer.command, "the trainer has no command", "set trainer.command"),
        (trainer.kind == "rayjob" and not trainer.image, "ROSE's image has no Ray", "set trainer.image"),
        (is_own, f"`{sidecar.deployment}` is ROSE's own", "name the Deployment of your vLLM server"),
    )
    for is_wrong, what, hint in rules:
        if is_wrong:
            raise ConfigError(what, hint=hint)
    load_settings(GatewaySettings, None, values.gateway_overrides)
    return values
