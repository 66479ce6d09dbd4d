"""`rose deploy k8s`: write the Kubernetes objects of a deployment, from a file of values (docs/deploy.md)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rose.cli.options import add_override_option
from rose.errors import ConfigError, RequestRefused, Unavailable

if TYPE_CHECKING:
    from rose.deploy.deploy_values import DeployValues

SUMMARY = "write the Kubernetes objects of a deployment as YAML"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    k8s = actions.add_parser("k8s", help="print or write Kubernetes objects")
    k8s.add_argument("--values", type=Path, metavar="FILE", help="a YAML file of values (rose settings deploy)")
    k8s.add_argument("--out", type=Path, metavar="DIR", help="write one file per part here (default: print all)")
    what = "also make new tokens, and write them as Secrets to this new file, which only you can read"
    k8s.add_argument("--secrets", type=Path, metavar="FILE", help=what)
    add_override_option(k8s, "deploy")


def run(arguments: argparse.Namespace) -> int:
    from rose.config.loading import load_settings
    from rose.deploy.deploy_values import DeployValues, check_values
    from rose.deploy.rendering import render

    values = check_values(load_settings(DeployValues, arguments.values, arguments.overrides))
    if values.sidecar.deployment and arguments.out is None:
        what = f"the sidecar of `{values.sidecar.deployment}` is a patch, which cannot be printed among objects"
        raise ConfigError(what, hint="add --out DIR")
    if arguments.secrets is not None:
        _write_secrets(values, arguments.secrets)
    if arguments.out is None:
        print(to_yaml([each for objects in render(values).values() for each in objects]), end="")
        return 0
    try:
        _write(values, arguments.out)
    except OSError as error:
        raise Unavailable(f"{error.filename} cannot be written: {error.strerror}", hint="check --out") from error
    return 0


def _write(values: DeployValues, folder: Path) -> None:
    from rose.deploy.rendering import render
    from rose.deploy.vllm_sidecar import patch_files

    folder.mkdir(parents=True, exist_ok=True)
    for part, objects in render(values).items():
        (folder / f"{part}.yaml").write_text(to_yaml(objects))
    print(f"next: kubectl apply -f {folder}")
    sidecar = values.sidecar
    if sidecar.deployment:
        patch = folder / "patch"
        patch.mkdir(exist_ok=True)
        for name, content in patch_files(values).items():
            (patch / name).write_text(to_yaml([content]))
        source = f"kubectl get deployment {sidecar.deployment} -n {sidecar.namespace} -o yaml"
        print(f"the sidecar: {source} > {patch}/deployment.yaml; kubectl diff -k {patch}; kubectl apply -k {patch}")


def _write_secrets(values: DeployValues, path: Path) -> None:
    """Write new Secrets. A file that is there is kept: its tokens may be in use."""
    from rose.private_files import write_private

    if path.exists():
        raise RequestRefused(f"{path} is there already, and its tokens may be in use", hint="name a new file")
    try:
        write_private(path, to_yaml(new_secrets(values)).encode())
    except OSError as error:
        raise Unavailable(f"{path} cannot be written: {error.strerror}", hint="check --secrets") from error


def new_secrets(values: DeployValues) -> list[dict[str, object]]:
    """Return Secrets with new tokens; the workers' also for the namespace of the sidecar.

    The read key of workers is derived from the relay's secret, so that no worker holds what signs versions.
    """
    import secrets

    from rose.deploy.pod_parts import CONTROL_SECRETS, WORKER_SECRETS
    from rose.weights.keys import read_key

    tokens = {key: secrets.token_urlsafe(32) for key in (*CONTROL_SECRETS, *WORKER_SECRETS)}
    tokens["ROSE_RELAY_SECRET"] = secrets.token_hex(32)
    tokens["ROSE_RELAY_READ_KEY"] = read_key(tokens["ROSE_RELAY_SECRET"].encode()).text()
    wanted = [(values.control_secret, values.namespace, CONTROL_SECRETS)]
    wanted.append((values.worker_secret, values.namespace, WORKER_SECRETS))
    if values.sidecar.deployment and values.sidecar.namespace != values.namespace:
        wanted.append((values.worker_secret, values.sidecar.namespace, WORKER_SECRETS))
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": namespace},
            "type": "Opaque",
            "stringData": {key: tokens[key] for key in keys},
        }
        for name, namespace, keys in wanted
    ]


def to_yaml(documents: Sequence[object]) -> str:
    """Return documents as one YAML text, which YAML 1.1 and 1.2 read alike: PyYAML quotes what they differ about."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    return yaml.dump_all(documents, Dumper=Plain, sort_keys=False, explicit_start=True, width=1000)
