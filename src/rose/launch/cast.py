"""The cast of a run on this machine: which processes there are, and how each is started.

    gateway      the door that environments play through
    borrowed     serves users under traffic, and lends what it does not need to the rollout model
    lender       the owner's controls and the rollout engine of a borrowed device that is vLLM
    dedicated    runs rollouts and nothing else
    traffic      the users

Ports are free ones, tokens are made for this run and travel in the environment (role_secrets.py). The serving device
and the gateway have the same port for the whole run, so that those who use them find them again after a restart; the
gateway has a ledger in the run's folder, and goes on from there.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import msgspec

from rose.config.device import cores_of
from rose.config.text import as_override
from rose.launch import vllm_cast
from rose.launch.placement import CONTROL_NICENESS, SERVING_NICENESS, TRAINER_NICENESS, Placement
from rose.launch.processes import URL, Command, free_port, roses
from rose.launch.role_secrets import FOR_GATEWAY, FOR_LENDER, FOR_WORKER
from rose.launch.settings import RunSettings
from rose.launch.traffic import TrafficPlan

GATEWAY, BORROWED, LENDER, DEDICATED, TRAFFIC = "gateway", "borrowed", "lender", "dedicated", "traffic"
WAIT_S = 600.0  # a turn waits for a worker as long as a job does; what never comes is found by the job's own patience


def gateway(model: Path, settings: RunSettings, placement: Placement, ledger: Path) -> Command:
    """Workers that are behind go on, within the bound, if rollouts never stop."""
    arguments = roses("gateway", str(model), "--port", str(free_port()), "--wait-s", f"{WAIT_S:g}")
    arguments += ("--ledger", str(ledger))
    if settings.asynchrony.is_used:
        arguments += ("--set", f"max_staleness={settings.asynchrony.max_staleness}")
    patterns = {"url": rf"ready at {URL}"}
    cores = placement.others
    return Command(GATEWAY, arguments, CONTROL_NICENESS, cores, patterns, is_kept=True, secrets=FOR_GATEWAY)


def borrowed(serving: Path, rollout: Path, settings: RunSettings, placement: Placement, gateway_url: str) -> Command:
    """Its fronts keep off the engine's cores by themselves. It serves even when it is not borrowed."""
    if settings.serving.engine == "vllm":
        return vllm_cast.serving(BORROWED, serving, settings, placement)
    arguments = ["serve", str(serving), "--port", str(free_port()), "--device", placement.serving]
    arguments += ["--kv-memory-mb", str(settings.serving.kv_memory_mb)]
    arguments += ["--set", f"engine.max_context_tokens={settings.serving.max_context_tokens}"]
    patterns, secrets = {"url": rf"ready at {URL}"}, frozenset[str]()
    if settings.serving.is_borrowed:
        secrets = FOR_LENDER
        lend = [as_override(f"lend.{key}", value) for key, value in asdict(settings.serving.lend).items()]
        arguments += ["--lend", str(rollout), "--rollout-port", "0", "--gateway", gateway_url]
        arguments += ["--worker-name", BORROWED]
        arguments += [word for override in lend for word in ("--set", override)]
    return Command(BORROWED, roses(*arguments), SERVING_NICENESS, (), patterns, is_kept=True, secrets=secrets)


def lender(rollout: Path, settings: RunSettings, placement: Placement, gateway_url: str, url: str) -> Command | None:
    """Of the device at this address; None where the device lends itself, or is not borrowed."""
    if settings.serving.engine != "vllm" or not settings.serving.is_borrowed:
        return None
    return vllm_cast.lender(LENDER, BORROWED, url, rollout, settings, placement, gateway_url)


def owner_role(settings: RunSettings) -> str:
    """Of the process that has the owner's controls."""
    return LENDER if settings.serving.engine == "vllm" else BORROWED


def dedicated(rollout: Path, settings: RunSettings, placement: Placement, gateway_url: str) -> Command:
    """Confined to its cores, front and all: the other ones are serving's."""
    if settings.worker.engine == "vllm":
        return vllm_cast.dedicated(DEDICATED, rollout, settings, placement, gateway_url)
    assert placement.worker is not None
    arguments = ["serve", "--lend", str(rollout), "--rollout-port", "0", "--device", placement.worker]
    arguments += ["--kv-memory-mb", str(settings.worker.kv_memory_mb), "--gateway", gateway_url]
    arguments += ["--worker-name", DEDICATED, "--set", f"engine.max_sequences={settings.worker.max_sequences}"]
    patterns, cores = {"url": rf"ready at {URL}"}, cores_of(placement.worker)
    return Command(DEDICATED, roses(*arguments), TRAINER_NICENESS, cores, patterns, is_kept=True, secrets=FOR_WORKER)


def traffic(settings: RunSettings, placement: Placement, url: str) -> Command:
    lend = settings.serving.lend
    plan = TrafficPlan(
        url,
        settings.traffic.source,
        settings.seed,
        settings.traffic.duration_s,
        lend.ttft_ms / 1000,
        lend.tpot_ms / 1000,
    )
    return Command(
        TRAFFIC,
        ("-m", "rose.launch.traffic"),
        SERVING_NICENESS,
        placement.others,
        {"on": r"(traffic is on)"},
        is_kept=True,
        input=msgspec.json.encode(plan),
    )
