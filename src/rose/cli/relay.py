"""`rose relay up`: start a relay for clusters that share no storage. `rose relay key`: print the key for workers."""

from __future__ import annotations

import argparse
import gc
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rose.errors import ConfigError

SUMMARY = "start a relay between a trainer and its rollout workers"
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}
HEAP_S = 5.0  # between two collections of garbage, a few milliseconds each


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    up = actions.add_parser("up", help="start a relay here, until Ctrl-C")
    up.add_argument("--backend", choices=["http", "tcp", "mooncake"], default="http", help="http (tcp is its old name)")
    up.add_argument("--folder", type=Path, metavar="DIR", help="http: folder of the values")
    up.add_argument("--listen", metavar="HOST:PORT", help="http: where to listen (127.0.0.1:7070)")
    up.add_argument("--secret-file", type=Path, metavar="FILE", help="http: the run's secret")
    up.add_argument("--certificate", metavar="FILE", help="http: speak TLS with this certificate")
    up.add_argument("--key", metavar="FILE", help="http: the certificate's private key")
    up.add_argument("--host", default="127.0.0.1", help="mooncake: address of the master")
    up.add_argument("--holders", type=int, default=2, metavar="N", help="mooncake: processes that give memory (2)")
    up.add_argument("--holder-mb", type=int, default=4096, metavar="MB", help="mooncake: memory of each (4096)")
    up.add_argument("--logs", type=Path, metavar="DIR", help="mooncake: folder for the logs of its processes")
    up.add_argument("--trusted-network", action="store_true", help="mooncake: allow more than loopback; no passwords!")
    key = actions.add_parser(
        "key", help="print the read key of a secret: all that a worker needs, for ROSE_RELAY_SECRET"
    )
    key.add_argument("--secret-file", type=Path, metavar="FILE", help="the run's secret (ROSE_RELAY_SECRET_FILE)")


def run(arguments: argparse.Namespace) -> int:
    from rose.weights.keys import read_key, run_secret

    if arguments.action == "key":
        print(read_key(run_secret(file=arguments.secret_file)).text())
    elif arguments.backend == "mooncake":
        _serve_mooncake(arguments)
    else:
        _serve_http(arguments)
    return 0


def _serve_http(arguments: argparse.Namespace) -> None:
    from rose.openai.loops import settle_process, trim_heap
    from rose.weights.keys import run_secret
    from rose.weights.relay.filesystem import FilesystemRelay
    from rose.weights.relay.relay_api import server_tls, split_address
    from rose.weights.relay.relay_server import RelayServer

    if arguments.folder is None:
        raise ConfigError("the relay needs a folder", hint="rose relay up --folder relay --secret-file secret")
    if bool(arguments.certificate) != bool(arguments.key):
        raise ConfigError("TLS needs both --certificate and --key")
    host, port = split_address(arguments.listen or "127.0.0.1:7070")
    tls = server_tls(arguments.certificate, arguments.key) if arguments.certificate else None
    secret = run_secret(file=arguments.secret_file)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    settle_process()
    threading.Thread(target=_collect_garbage, args=(trim_heap,), name="relay-heap", daemon=True).start()
    with RelayServer(FilesystemRelay(arguments.folder), secret, host=host, port=port, tls=tls) as server:
        scheme = "https" if tls is not None else "http"
        print(f"relay of {arguments.folder} at {scheme}://{server.address}; Ctrl-C ends it")
        print(f'next: publisher = Publisher(model, "{scheme}://{server.address}", run="my-run")', flush=True)
        signal.sigwait(STOP_SIGNALS)


def _collect_garbage(trim: Callable[[], None]) -> None:
    """Free the buffers of calls that were cut off. Each is in a cycle with its error, and few objects are made here."""
    while True:
        time.sleep(HEAP_S)
        gc.collect()
        trim()


def _serve_mooncake(arguments: argparse.Namespace) -> None:
    from rose.weights.relay.mooncake import MooncakeCluster

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    with MooncakeCluster(
        holders=arguments.holders,
        holder_bytes=arguments.holder_mb << 20,
        host=arguments.host,
        log_folder=arguments.logs,
        trusted_network=arguments.trusted_network,
    ) as cluster:
        print(f"relay at mooncake://{cluster.address}, {arguments.holders} holders; Ctrl-C ends it")
        print(f'next: publisher = Publisher(model, "mooncake://{cluster.address}", run="my-run")', flush=True)
        signal.sigwait(STOP_SIGNALS)
