"""The relays of the benchmark, each on the trainer's side of the link, as processes of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coserving.children import environment

from syncing.links import TRAINER, Link

SECRET = "a secret of the benchmark, long enough"
OBJECT_PORT = 5123
START_S = 60.0


@contextlib.contextmanager
def store(kind: str, link: Link) -> Iterator[dict[str, Any]]:
    """How to reach a new, empty relay of this kind: {address, object_options}."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rose-sync-")))
        if kind == "filesystem":
            yield {"address": str(folder / "relay")}
        elif kind == "http":
            yield {"address": stack.enter_context(_http(folder, link))}
        elif kind == "object":
            yield stack.enter_context(_object(link))
        else:
            from rose.weights.relay.mooncake import MooncakeCluster

            cluster = stack.enter_context(MooncakeCluster(holders=1, holder_bytes=3 << 30, log_folder=folder))
            yield {"address": f"mooncake://{cluster.address}"}


def missing(kind: str) -> str:
    """Why this relay cannot be measured here, or nothing."""
    needs = {"object": ["obstore", "moto", "flask"], "mooncake": ["mooncake"]}.get(kind, [])
    lacking = [name for name in needs if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


@contextlib.contextmanager
def _http(folder: Path, link: Link) -> Iterator[str]:
    (folder / "secret").write_text(SECRET)
    command = [sys.executable, "-m", "rose", "relay", "up", "--folder", str(folder / "relay")]
    command += ["--secret-file", str(folder / "secret"), "--listen", f"{link.trainer_address}:0"]
    with _process(link.inside(TRAINER, command), stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        yield line.split(" at ")[1].split(";")[0]


@contextlib.contextmanager
def _object(link: Link) -> Iterator[dict[str, Any]]:
    host = link.trainer_address
    command = [sys.executable, "-m", "moto.server", "-H", host, "-p", str(OBJECT_PORT)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with _process(link.inside(TRAINER, command), **quiet):
        endpoint = f"http://{host}:{OBJECT_PORT}"
        make = f"import urllib.request as u; u.urlopen(u.Request('{endpoint}/weights', method='PUT'), timeout=30)"
        until_s = time.monotonic() + START_S
        while subprocess.run(link.inside(TRAINER, [sys.executable, "-c", make]), capture_output=True).returncode:
            if time.monotonic() > until_s:
                raise urllib.request.URLError(f"the mock of S3 at {endpoint} did not start")
            time.sleep(0.5)
        options = {"endpoint": endpoint, "access_key_id": "x", "secret_access_key": "y", "region": "us-east-1",
                   "allow_http": "true", "virtual_hosted_style_request": "false"}  # fmt: skip
        yield {"address": "s3://weights/run", "object_options": options}


@contextlib.contextmanager
def _process(command: list[str], **options: Any) -> Iterator[Any]:
    process = subprocess.Popen(command, env=environment(), **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
