"""Programs on several ranks of this machine, started as users start them."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests.integration import devices


def torchrun(ranks: int, *arguments: str) -> str:
    """Run a program on so many ranks of this machine, as users do, and return its output."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = str(found.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", port, *arguments]
    environment = devices.environment() | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "USE_LIBUV": "0"}
    ended = subprocess.run(
        command,
        cwd=devices.ROOT,
        env=environment | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[:9000]
    return ended.stdout
