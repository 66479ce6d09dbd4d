"""HAProxy with the configuration of deploy/haproxy, in front of two addresses."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "deploy" / "haproxy"
HAPROXY = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
needs_haproxy = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed: apt-get install haproxy")
PATIENCE_S = 30.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def proxy(*ports: int) -> Iterator[str]:
    """Run the proxy in front of these ports, and yield its address."""
    assert HAPROXY is not None
    port = free_port()
    shards = {f"ROSE_SHARD_{number}": f"127.0.0.1:{shard}" for number, shard in enumerate(ports)}
    variables = {"ROSE_PROXY": f"127.0.0.1:{port}", "ROSE_SHARDS": str(len(ports)), **shards}
    process = subprocess.Popen([HAPROXY, "-f", "rose.cfg"], cwd=FOLDER, env=os.environ | variables)
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            assert process.poll() is None and time.monotonic() < deadline_s, "the proxy did not start"
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                break
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
