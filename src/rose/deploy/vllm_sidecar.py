"""Lending beside an existing vLLM Deployment: a kustomize patch that adds `rose lend vllm` as a second container.

The agent finds vLLM by its process and its status segment, so both containers share process ids, a volume in memory and
the user. A pod counts as ready only while all its containers run. `rose lend vllm` ends when vLLM is not up yet or does
not publish its status, so a loop starts it again inside the container, and the users' traffic never depends on it.
"""

from __future__ import annotations

from rose.deploy import pod_parts as pod
from rose.deploy.deploy_values import DeployValues
from rose.deploy.pod_parts import Object

AGAIN = (  # ends at once on SIGTERM, and with it the agent
    "trap 'kill $child; wait $child; exit 0' TERM; "
    'while :; do "$@" & child=$!; wait $child; sleep 10 & child=$!; wait $child; done'
)
CLAIM = "rose-gpu"


def lend_command(values: DeployValues) -> list[str]:
    """Return the command line of the agent, without the loop around it."""
    own = values.sidecar
    command = ["rose", "lend", "vllm", "--serving-url", f"http://127.0.0.1:{own.port}"]
    command += ["--rollout-model", values.model_path, "--device", "cpu:0" if own.gpu == "none" else "cuda:0"]
    command += ["--gateway", values.gateway_url, "--worker-name", "$(POD_NAME)", "--owner-port", str(pod.PORT_OWNER)]
    command += ["--mode", own.mode, "--ttft-ms", f"{own.ttft_ms:g}", "--tpot-ms", f"{own.tpot_ms:g}"]
    return [*command, "--max-sequences", str(own.max_sequences), "--kv-memory-mb", str(own.kv_memory_mb)]


def claim_template(values: DeployValues) -> list[Object]:
    """Return the template of the claim that both containers share, with dra."""
    own = values.sidecar
    if not own.deployment or own.gpu != "dra":
        return []
    request = {"name": "gpu", "exactly": {"deviceClassName": own.device_class}}
    spec = {"spec": {"devices": {"requests": [request]}}}
    template = pod.new_object(values, "resource.k8s.io/v1", "ResourceClaimTemplate", "lend", spec)
    template["metadata"]["namespace"] = own.namespace
    return [template]


def _agent_container(values: DeployValues) -> Object:
    own = values.sidecar
    variables = [*pod.worker_variables(values), pod.plain_variable("ROSE_BOARDS", "/dev/shm/segments")]
    command = ["sh", "-c", AGAIN, "rose-lend", *lend_command(values)]
    agent = pod.container(values, "rose-lend", command, variables, own, [pod.MODEL_MOUNT, pod.SHARED_MOUNT])
    agent["volumeMounts"] = [{**mount, "name": f"rose-{mount['name']}"} for mount in agent["volumeMounts"]]
    if own.gpu == "dra":
        agent["resources"]["claims"] = [{"name": CLAIM}]
    elif own.gpu == "time-slices":
        for needs in (agent["resources"]["requests"], agent["resources"]["limits"]):
            needs[values.gpu_resource] = "1"
    agent["securityContext"] = {"allowPrivilegeEscalation": False, "runAsUser": own.user}
    if own.user:  # only a process with the same capabilities may see which sockets a process of root has open
        agent["securityContext"]["capabilities"] = {"drop": ["ALL"]}
    return agent


def _serving_container(values: DeployValues, agent: Object) -> Object:
    """Return what changes in vLLM's container: the image with ROSE, the segment, and the GPU if it is claimed."""
    own = values.sidecar
    none = {values.gpu_resource: None}
    claimed = {"resources": {"limits": none, "requests": none, "claims": [{"name": CLAIM}]}}
    return {
        "name": own.container,
        "image": agent["image"],
        "env": [pod.plain_variable("ROSE_BOARDS", "/rose/segments")],
        "volumeMounts": [{"name": "rose-shared", "mountPath": "/rose"}],
        "securityContext": {"runAsUser": own.user},
        **(claimed if own.gpu == "dra" else {}),
    }


def patch_files(values: DeployValues) -> dict[str, Object | list[Object]]:
    """Return the files of the kustomization, by name. The flags are appended first: adding a container may move it."""
    own = values.sidecar
    scheduler = "ServingScheduler" if own.gpu == "none" else "AsyncServingScheduler"
    flags = [f"--scheduler-cls=rose.vllm.{scheduler}", *own.serving_flags]
    path = f"/spec/template/spec/containers/{own.container_index}/{own.flags_in}/-"
    agent = _agent_container(values)
    models = pod.model_volume(values) | {"name": "rose-models"}
    shared = pod.shared_volume(own.shared_memory) | {"name": "rose-shared"}
    spec: Object = {
        "shareProcessNamespace": True,
        "containers": [_serving_container(values, agent), agent],
        "volumes": [models, shared, {"name": "rose-tmp", "emptyDir": {}}],
    }
    if own.gpu == "dra":
        spec["resourceClaims"] = [{"name": CLAIM, "resourceClaimTemplateName": f"{values.name}-lend"}]
    template = {"metadata": {"labels": {pod.INSTANCE: values.name}}, "spec": spec}
    metadata = {"name": own.deployment, "namespace": own.namespace}
    patch = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": {"template": template}}
    target = {"kind": "Deployment", "name": own.deployment}
    whole: Object = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    whole["resources"] = ["deployment.yaml"]
    whole["patches"] = [{"path": name, "target": target} for name in ("flags.yaml", "sidecar.yaml")]
    additions = [{"op": "add", "path": path, "value": flag} for flag in flags]
    return {"flags.yaml": additions, "sidecar.yaml": patch, "kustomization.yaml": whole}
