"""`rose relay up`: start a relay for clusters that share no storage. `rose relay key`: print the key for workers."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from rose.errors import ConfigError

SUMMARY = "start a relay between a trainer and its rollout workers"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    up = actions.add_parser("up", help="start a relay here, until Ctrl-C")
    up.add_argument("--backend", choices=["tcp", "mooncake"], default="tcp")
    up.add_argument("--folder", type=Path, metavar="DIR", help="tcp: where the values lie")
    up.add_argument("--listen", metavar="HOST:PORT", help="tcp: where to listen (127.0.0.1:7070)")
    up.add_argument("--secret-file", type=Path, metavar="FILE", help="tcp: the run's secret")
    up.add_argument("--certificate", metavar="FILE", help="tcp: speak TLS with this certificate")
    up.add_argument("--key", metavar="FILE", help="tcp: the certificate's private key")
    up.add_argument("--host", default="127.0.0.1", help="mooncake: address of the master")
    up.add_argument("--holders", type=int, default=2, metavar="N", help="mooncake: processes that give memory (2)")
    up.add_argument("--holder-mb", type=int, default=4096, metavar="MB", help="mooncake: memory of each (4096)")
    up.add_argument("--logs", type=Path, metavar="DIR", help="mooncake: where its processes write what they say")
    up.add_argument("--trusted-network", action="store_true", help="mooncake: allow more than loopback; no passwords!")
    key = actions.add_parser(
        "key", help="print the read key of a secret: all that a worker needs, for ROSE_RELAY_SECRET"
    )
    key.add_argument("--secret-file", type=Path, metavar="FILE", help="the run's secret (ROSE_RELAY_SECRET_FILE)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "key":
        return _key(arguments)
    return _mooncake(arguments) if arguments.backend == "mooncake" else _tcp(arguments)


def _key(arguments: argparse.Namespace) -> int:
    from rose.weights.connecting import run_secret
    from rose.weights.keys import read_key

    print(read_key(run_secret(file=arguments.secret_file)).text())
    return 0


def _tcp(arguments: argparse.Namespace) -> int:
    from rose.weights.connecting import run_secret
    from rose.weights.relay import wire
    from rose.weights.relay.filesystem import FilesystemRelay
    from rose.weights.relay.server import RelayServer
    from rose.weights.relay.tcp import split_address

    if arguments.folder is None:
        raise ConfigError("the relay needs a folder", hint="rose relay up --folder relay --secret-file secret")
    if bool(arguments.certificate) != bool(arguments.key):
        raise ConfigError("TLS needs both --certificate and --key")
    host, port = split_address(arguments.listen or "127.0.0.1:7070")
    tls = wire.server_tls(arguments.certificate, arguments.key) if arguments.certificate else None
    secret = run_secret(file=arguments.secret_file)
    _block_signals()
    with RelayServer(FilesystemRelay(arguments.folder), secret, host=host, port=port, tls=tls) as server:
        scheme = "tcps" if tls is not None else "tcp"
        print(f"relay of {arguments.folder} at {scheme}://{server.address}; Ctrl-C ends it")
        print(f'next: publisher = Publisher(model, "{scheme}://{server.address}", run="my-run")', flush=True)
        _wait_for_signal()
    return 0


def _mooncake(arguments: argparse.Namespace) -> int:
    from rose.weights.relay.mooncake_up import MooncakeCluster

    _block_signals()
    with MooncakeCluster(
        holders=arguments.holders,
        holder_bytes=arguments.holder_mb << 20,
        host=arguments.host,
        log_folder=arguments.logs,
        trusted_network=arguments.trusted_network,
    ) as cluster:
        print(f"relay at mooncake://{cluster.address}, {arguments.holders} holders; Ctrl-C ends it")
        print(f'next: publisher = Publisher(model, "mooncake://{cluster.address}", run="my-run")', flush=True)
        _wait_for_signal()
    return 0


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})


def _wait_for_signal() -> None:
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
