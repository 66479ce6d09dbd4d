"""The workloads of a deployment: gateway, relay, dedicated workers and trainer, with their Services and volumes.

The gateway and the relay are StatefulSets of one pod: each has a volume that one process writes. Workers hold no state.
Turns, versions and trajectories survive a restart of each (docs/failures.md).
"""

from __future__ import annotations

from typing import Any

from rose.deploy import pod_parts as pod
from rose.deploy.deploy_values import DeployValues
from rose.deploy.pod_parts import Object


def gateway(values: DeployValues) -> list[Object]:
    """Return the gateway, which keeps its ledger in a volume."""
    own = values.gateway
    command = ["rose", "gateway", values.model_path, "--host", "0.0.0.0", "--port", str(own.port)]
    command += ["--ledger", "/state/ledger.sqlite"]
    command += [word for override in values.gateway_overrides for word in ("--set", override)]
    tokens = [pod.secret_variable(values, f"ROSE_{role}_TOKEN") for role in ("AGENT", "WORKER", "TRAINER", "OPERATOR")]
    process = pod.container(values, "gateway", command, tokens, own, [pod.MODEL_MOUNT, pod.STATE_MOUNT])
    process |= pod.probes({"httpGet": {"path": "/version", "port": "http"}}, 10, 300)
    return _one_pod_with_state(values, "gateway", process, own, "http", [pod.model_volume(values)])


def relay(values: DeployValues) -> list[Object]:
    """Return the relay, unless the values name one that is elsewhere."""
    own = values.relay
    if own.address:
        return []
    command = ["rose", "relay", "up", "--folder", "/state/values", "--listen", f"0.0.0.0:{own.port}"]
    secret = [pod.secret_variable(values, "ROSE_RELAY_SECRET")]
    process = pod.container(values, "relay", command, secret, own, [pod.STATE_MOUNT])
    process |= pod.probes({"tcpSocket": {"port": "relay"}}, 10, 120)
    return _one_pod_with_state(values, "relay", process, own, "relay", [])


def _one_pod_with_state(
    values: DeployValues, component: str, process: Object, own: Any, port: str, volumes: list[Object]
) -> list[Object]:
    process |= {**pod.SEALED, "ports": [{"name": port, "containerPort": own.port}]}
    process["readinessProbe"] = process["livenessProbe"] | {"failureThreshold": 3}
    chosen, ports = pod.selector(values, component), [{"name": port, "port": own.port, "targetPort": port}]
    spec = {
        "serviceName": f"{values.name}-{component}",
        "replicas": 1,
        "selector": {"matchLabels": chosen},
        "template": pod.pod_template(values, component, process, volumes),
        "volumeClaimTemplates": [{"metadata": {"name": "state"}, "spec": pod.claim_spec(values, own.storage)}],
    }
    service = pod.new_object(values, "v1", "Service", component, {"selector": chosen, "ports": ports})
    return [service, pod.new_object(values, "apps/v1", "StatefulSet", component, spec)]


def worker_command(values: DeployValues) -> list[str]:
    """Return the command of a dedicated worker."""
    own, joined = values.workers, ["--gateway", values.gateway_url, "--worker-name", "$(POD_NAME)"]
    memory = ["--kv-memory-mb", str(own.kv_memory_mb)]
    if own.engine == "embedded":
        listening = ["--rollout-port", str(pod.PORT_ROLLOUTS), "--set", "rollout.host=0.0.0.0"]
        lent = ["--lend", values.model_path, "--device", "cpu:0", "--set", f"lend.max_sequences={own.max_sequences}"]
        return ["rose", "serve", *lent, *listening, *memory, *joined]
    engine = ["--rollout-model", values.model_path, "--device", "cuda:0" if own.gpus else "cpu:0"]
    engine += ["--owner-port", str(pod.PORT_OWNER), "--max-sequences", str(own.max_sequences)]
    return ["rose", "lend", "vllm", *engine, *memory, *joined]


def workers(values: DeployValues) -> list[Object]:
    """Return the dedicated workers. Two on CPUs never share a node, because each takes its first core."""
    own, chosen, mounts = values.workers, pod.selector(values, "worker"), [pod.MODEL_MOUNT, pod.SHARED_MOUNT]
    process = pod.container(values, "worker", worker_command(values), pod.worker_variables(values), own, mounts)
    if own.engine == "embedded":
        process |= {**pod.SEALED, "ports": [{"name": "rollouts", "containerPort": pod.PORT_ROLLOUTS}]}
        process |= pod.probes({"tcpSocket": {"port": "rollouts"}}, 10, 600)  # its routes need a token
    else:
        status = ["rose", "lend", "status", "--url", f"http://127.0.0.1:{pod.PORT_OWNER}"]
        process |= pod.probes({"exec": {"command": status}}, 60, 600)
    volumes = [pod.model_volume(values), pod.shared_volume(own.shared_memory)]
    template = pod.pod_template(values, "worker", process, volumes)
    if not own.gpus:
        apart = {"labelSelector": {"matchLabels": chosen}, "topologyKey": "kubernetes.io/hostname"}
        rule = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
        template["spec"]["affinity"] = rule
    spec = {
        **({"replicas": own.replicas} if own.scaler == "none" else {}),
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"}},
        "selector": {"matchLabels": chosen},
        "template": template,
    }
    return [pod.new_object(values, "apps/v1", "Deployment", "worker", spec)]


def trainer(values: DeployValues) -> list[Object]:
    """Return the trainer and its volume: a Job, a JobSet or a RayJob."""
    own = values.trainer
    if own.kind == "none":
        return []
    claim = pod.claim_spec(values, own.storage, "ReadWriteMany" if own.ranks > 1 else "ReadWriteOnce")
    volume = pod.new_object(values, "v1", "PersistentVolumeClaim", "trainer", claim, suffix="runs")
    api, kind, spec = {"job": _job, "jobset": _jobset, "rayjob": _rayjob}[own.kind](values)
    return [volume, pod.new_object(values, api, kind, "trainer", spec)]


def _addresses(values: DeployValues) -> dict[str, str]:
    return {"ROSE_MODEL": values.model_path, "ROSE_GATEWAY": values.gateway_url, "ROSE_RELAY": values.relay_url}


def _trainer_pod(values: DeployValues, name: str = "") -> Object:
    """Return the pod of a trainer; one with a name is started by Ray."""
    own, secrets = values.trainer, ("ROSE_TRAINER_TOKEN", "ROSE_AGENT_TOKEN", "ROSE_RELAY_SECRET")
    variables = [pod.plain_variable(key, value) for key, value in _addresses(values).items()]
    variables += [pod.secret_variable(values, key) for key in secrets]
    mounts = [pod.MODEL_MOUNT, pod.SHARED_MOUNT, {"name": "runs", "mountPath": "/runs"}]
    process = pod.container(values, name or "trainer", () if name else own.command, variables, own, mounts)
    process |= {"workingDir": "/runs", "image": own.image or process["image"]}
    runs = {"name": "runs", "persistentVolumeClaim": {"claimName": f"{values.name}-runs"}}
    volumes = [pod.model_volume(values), pod.shared_volume(own.shared_memory), runs]
    template = pod.pod_template(values, "trainer", process, volumes)
    template["metadata"]["annotations"] = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    return template if name else {**template, "spec": {**template["spec"], "restartPolicy": "Never"}}


def _job(values: DeployValues) -> tuple[str, str, Object]:
    drained = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    policy = {"backoffLimit": values.trainer.retries, "podFailurePolicy": {"rules": [drained]}}
    return "batch/v1", "Job", {**policy, "template": _trainer_pod(values)}


def _jobset(values: DeployValues) -> tuple[str, str, Object]:
    ranks = values.trainer.ranks
    counts = {"completionMode": "Indexed", "completions": ranks, "parallelism": ranks, "backoffLimit": 0}
    jobs = [{"name": "rank", "replicas": 1, "template": {"spec": {**counts, "template": _trainer_pod(values)}}}]
    spec = {"failurePolicy": {"maxRestarts": values.trainer.retries}, "replicatedJobs": jobs}
    return "jobset.x-k8s.io/v1alpha2", "JobSet", spec


def _rayjob(values: DeployValues) -> tuple[str, str, Object]:
    """Return a RayJob. Its entrypoint is a shell line, where $(NAME) would mean something else."""
    own, line, others = values.trainer, " ".join(values.trainer.command), values.trainer.ranks - 1
    for name, value in _addresses(values).items():
        line = line.replace(f"$({name})", value)
    head = {"rayStartParams": {}, "template": _trainer_pod(values, "ray-head")}
    cluster: Object = {"rayVersion": own.ray_version, "headGroupSpec": head}
    if others:
        counts = {"replicas": others, "minReplicas": others, "maxReplicas": others}
        pods = {"rayStartParams": {}, "template": _trainer_pod(values, "ray-worker")}
        cluster["workerGroupSpecs"] = [{"groupName": "rank", **counts, **pods}]
    policy = {"backoffLimit": own.retries, "shutdownAfterJobFinishes": True}
    return "ray.io/v1", "RayJob", {"entrypoint": line, **policy, "rayClusterSpec": cluster}
