"""The processes of a run on this machine: how each is started, and which secrets it gets.

    gateway      what environments play through
    borrowed     serves users under traffic, and lends what it does not need to the rollout model
    lender       the admin controls and the rollout engine of a borrowed device that is vLLM
    dedicated    runs rollouts and nothing else
    rank-1, ...  the trainer's ranks beside rank 0, which is the run itself
    traffic      the users
    relay        gives new weights to workers on other nodes (docs/ray.md)

Ports are free ones. The serving device and the gateway have the same port for the whole run, so that clients find them
again after a restart. Tokens are made for every run and travel in the environment of a process, never on its command
line. Each process gets only what its role needs: a serving device that was broken into cannot take batches or publish
weights. A token that only the process itself uses is made by that process.

vLLM lives in an environment of its own (docs/vllm.md), whose interpreter is named by the settings or by
ROSE_VLLM_PYTHON. A borrowed device that is vLLM is a `vllm serve` with our scheduler, and beside it `rose lend vllm`;
each has half of the KV memory.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import msgspec

from rose.config.server_settings import cores_of
from rose.config.yaml_text import as_override
from rose.errors import ConfigError
from rose.gateway.auth import VARIABLES, GatewayEntry, RoleTokens
from rose.openai.access import OWNER_VARIABLE
from rose.openai.http_server import free_port
from rose.run.cpu_affinity import CONTROL_NICENESS, SERVING_NICENESS, TRAINER_NICENESS, Placement
from rose.run.processes import URL, Command, roses
from rose.run.run_settings import RunSettings
from rose.run.serving_traffic import TrafficPlan
from rose.run.trainer_rank import RankPlan, rank_of_torchrun
from rose.vllm.engine_process import MODULE, ON_CPU
from rose.weights.keys import SECRET, SECRET_FILE

FOR_GATEWAY = frozenset(VARIABLES.values())
FOR_WORKER = frozenset({VARIABLES["worker"], SECRET, SECRET_FILE})  # joins the gateway, reads weights from the relay
FOR_LENDER = FOR_WORKER | {OWNER_VARIABLE}  # a worker that the run lends and holds back


@dataclass(frozen=True, slots=True)
class RunTokens:
    agent: str
    trainer: str
    owner: str
    operator: str
    variables: dict[str, str]


def make_tokens() -> RunTokens:
    """Make a token for every role. The operator's is that of the environment if it is set: it is for people."""
    made = {variable: secrets.token_urlsafe(24) for variable in (*VARIABLES.values(), OWNER_VARIABLE)}
    made |= {name: os.environ[name] for name in (VARIABLES["operator"],) if name in os.environ}
    agent, trainer, operator = (made[VARIABLES[role]] for role in ("agent", "trainer", "operator"))
    return RunTokens(agent, trainer, made[OWNER_VARIABLE], operator, made)


def operators_entry(url: str, tokens: RunTokens) -> GatewayEntry:
    """Return the entry by which `rose pool` finds the run's gateway, also when that is started again."""
    return GatewayEntry(os.getpid(), url, RoleTokens(agent="", worker="", trainer="", operator=tokens.operator))


def secrets_of_run(tokens: RunTokens, of_relay: Mapping[str, str]) -> dict[str, str]:
    """Return all secrets by variable. The relay's are those of this run, or else what the operator has set."""
    given = {variable: os.environ[variable] for variable in (SECRET, SECRET_FILE) if variable in os.environ}
    of_relay = {variable: value for variable, value in of_relay.items() if value}
    return {**tokens.variables, **(of_relay or given)}


GATEWAY, BORROWED, LENDER, DEDICATED, TRAFFIC = "gateway", "borrowed", "lender", "dedicated", "traffic"
RELAY = "relay"
RANK = "rank-"  # and its number
WAIT_S = 600.0  # a turn waits for a worker as long as a job does; the time-outs of the job find what never comes
READY = {"url": rf"ready at {URL}"}


def gateway(model: Path, settings: RunSettings, placement: Placement, ledger: Path) -> Command:
    """Return the gateway's spec. In an asynchronous run workers that are behind go on, within the bound."""
    arguments = roses("gateway", str(model), "--port", str(free_port()), "--wait-s", f"{WAIT_S:g}")
    arguments += ("--ledger", str(ledger))
    if settings.asynchrony.is_used:
        arguments += ("--set", f"max_staleness={settings.asynchrony.max_staleness}")
    cores = placement.others
    return Command(GATEWAY, arguments, CONTROL_NICENESS, cores, READY, is_kept=True, secrets=FOR_GATEWAY)


def borrowed(serving: Path, rollout: Path, settings: RunSettings, placement: Placement, gateway_url: str) -> Command:
    """Return the serving device's spec. Its fronts avoid the engine's cores; it serves even when not borrowed."""
    if settings.serving.engine == "vllm":
        return _vllm_serving(serving, settings, placement)
    arguments = ["serve", str(serving), "--port", str(free_port()), "--device", placement.serving]
    arguments += ["--kv-memory-mb", str(settings.serving.kv_memory_mb)]
    arguments += ["--set", f"engine.max_context_tokens={settings.serving.max_context_tokens}"]
    secrets = frozenset[str]()
    if settings.serving.is_borrowed:
        secrets = FOR_LENDER
        lend = [as_override(f"lend.{key}", value) for key, value in asdict(settings.serving.lend).items()]
        arguments += ["--lend", str(rollout), "--rollout-port", "0", "--gateway", gateway_url]
        arguments += ["--worker-name", BORROWED]
        arguments += [word for override in lend for word in ("--set", override)]
    return Command(BORROWED, roses(*arguments), SERVING_NICENESS, (), READY, is_kept=True, secrets=secrets)


def lender(rollout: Path, settings: RunSettings, placement: Placement, gateway_url: str, url: str) -> Command | None:
    """Return the lender's spec for the device at this address; None if that lends itself, or is not borrowed.

    The lender starts the rollout engine on serving's cores, and itself avoids them.
    """
    if settings.serving.engine != "vllm" or not settings.serving.is_borrowed:
        return None
    lend, memory_mb = settings.serving.lend, settings.serving.kv_memory_mb
    arguments = _lend_vllm(rollout, placement.serving, BORROWED, settings, gateway_url)
    arguments += ["--serving-url", url, "--owner-port", str(free_port()), "--mode", lend.mode]
    for flag, budget_ms in (("--ttft-ms", lend.ttft_ms), ("--tpot-ms", lend.tpot_ms)):
        arguments += [flag, f"{budget_ms:g}"] if budget_ms is not None else []
    arguments += ["--tpot", lend.tpot]
    arguments += ["--answer-s", f"{lend.answer_s:g}"]
    arguments += ["--slack-share", f"{lend.slack_share:g}", "--compute", f"{lend.compute_share:g}"]
    arguments += ["--max-sequences", str(lend.max_sequences), "--step-tokens", str(lend.max_step_tokens)]
    arguments += ["--max-context", str(lend.max_context_tokens)]
    arguments += ["--kv-memory-mb", str(max(1, int(memory_mb * lend.memory_share) // 2))]
    return Command(LENDER, roses(*arguments), CONTROL_NICENESS, (), VLLM_READY, is_kept=True, secrets=FOR_LENDER)


def owner_role(settings: RunSettings) -> str:
    """Return the role of the process that has the admin controls."""
    return LENDER if settings.serving.engine == "vllm" else BORROWED


def dedicated(rollout: Path, settings: RunSettings, placement: Placement, gateway_url: str) -> Command:
    """Return the dedicated worker's spec, with its front on its own cores: the others belong to serving."""
    assert placement.worker is not None
    own, cores = settings.worker, cores_of(placement.worker)
    if own.engine == "vllm":
        check_vllm(settings)
        arguments = _lend_vllm(rollout, placement.worker, DEDICATED, settings, gateway_url)
        arguments += ["--max-sequences", str(own.max_sequences), "--kv-memory-mb", str(own.kv_memory_mb)]
        arguments += ["--step-tokens", str(STEP_TOKENS), "--max-context", "0"]
        patterns = VLLM_READY
    else:
        arguments = ["serve", "--lend", str(rollout), "--rollout-port", "0", "--device", placement.worker]
        arguments += ["--kv-memory-mb", str(own.kv_memory_mb), "--gateway", gateway_url]
        arguments += ["--worker-name", DEDICATED, "--set", f"engine.max_sequences={own.max_sequences}"]
        patterns = READY
    return Command(DEDICATED, roses(*arguments), TRAINER_NICENESS, cores, patterns, is_kept=True, secrets=FOR_WORKER)


def is_rank(command: Command) -> bool:
    """Return whether a command is that of one of the trainer's other ranks."""
    return command.role.startswith(RANK)


def trainer_ranks(settings: RunSettings, placement: Placement, meeting: Path, secret: bytes) -> list[Command]:
    """Return the specs of the trainer's other ranks; none if torchrun has started them."""
    if rank_of_torchrun(settings.train.ranks) is not None:
        return []
    plans = [RankPlan(rank, settings.train, str(meeting.resolve()), secret) for rank in range(1, settings.train.ranks)]
    return [
        Command(
            f"{RANK}{plan.rank}",
            ("-m", "rose.run.trainer_rank"),
            TRAINER_NICENESS,
            placement.others,
            {"up": r"(is in place)"},
            input=msgspec.json.encode(plan),
        )
        for plan in plans
    ]


def traffic(settings: RunSettings, placement: Placement, url: str) -> Command:
    budgets = settings.serving.lend.budgets
    source, duration_s = settings.traffic.source, settings.traffic.duration_s
    plan = TrafficPlan(url, source, settings.seed, duration_s, budgets.ttft_s, budgets.tpot_s)
    return Command(
        TRAFFIC,
        ("-m", "rose.run.serving_traffic"),
        SERVING_NICENESS,
        placement.others,
        {"on": r"(traffic is on)"},
        is_kept=True,
        input=msgspec.json.encode(plan),
    )


def relay(folder: str, host: str) -> Command:
    """Return the spec of a relay server on the run's folder of weights. Its secret is the one that signs them."""
    arguments = roses("relay", "up", "--folder", folder, "--listen", f"{host}:{free_port(host)}")
    patterns = {"url": r"at (http://[^\s/;]+);"}
    return Command(RELAY, arguments, CONTROL_NICENESS, (), patterns, is_kept=True, secrets=frozenset({SECRET}))


PYTHON_VARIABLE = "ROSE_VLLM_PYTHON"
BECOME = "import os, sys; os.execvp('env', ['env', *sys.argv[1:]])"  # processes of a run begin as this interpreter
STEP_TOKENS, SEQUENCES = 512, 64
VLLM_READY = {"url": rf"controls are at {URL}"}  # long before there is an engine
VLLM_JOIN_S_MAX = 600.0
ASKED_S_MAX = 60.0
ASK = "from importlib.util import find_spec; print(*(name for name in ('vllm', 'rose') if find_spec(name) is None))"
INSTALL = f"run `make venv-vllm`, then set vllm_python=.venv-vllm/bin/python, or {PYTHON_VARIABLE} to the same"


def vllm_python(settings: RunSettings) -> str:
    """Return the interpreter that has vLLM."""
    return settings.vllm_python or os.environ.get(PYTHON_VARIABLE) or sys.executable


def check_vllm(settings: RunSettings) -> None:
    """Raise ConfigError if a device needs vLLM and its interpreter is missing or does not have it."""
    wanted = [name for name in ("serving", "worker") if getattr(settings, name).engine == "vllm"]
    if not wanted:
        return
    what, where = f"{wanted[0]}.engine is vllm", vllm_python(settings)
    try:
        missing = _missing(where)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{what}, and {where} is no interpreter that works: {error}", hint=INSTALL) from error
    if "vllm" in missing:
        raise ConfigError(
            f"{what}, and there is no vLLM for {where}: it lives in an environment of its own", hint=INSTALL
        )
    if "rose" in missing:
        raise ConfigError(
            f"{what}, and the environment of {where} has vLLM but not ROSE, which vLLM must be able to import",
            hint=f"install it there, from its sources: {where} -m pip install --no-deps -e .",
        )


@cache
def _missing(where: str) -> tuple[str, ...]:
    """Return the packages that this interpreter does not find."""
    asked = subprocess.run([where, "-c", ASK], capture_output=True, text=True, timeout=ASKED_S_MAX, check=True)
    return tuple(asked.stdout.split())


def join_s_max(settings: RunSettings, usual_s: float) -> float:
    """Return the longest wait for workers once their processes run; vLLM starts slowly."""
    return VLLM_JOIN_S_MAX if "vllm" in (settings.serving.engine, settings.worker.engine) else usual_s


def _vllm_serving(model: Path, settings: RunSettings, placement: Placement) -> Command:
    """Return the spec of `vllm serve`, pinned as a whole: its HTTP server is part of the device.

    Prompts are computed whole, since users' requests have seeds, and vLLM 0.32 dies on a CPU of one that has a seed and
    a prompt that takes more than one step.
    """
    check_vllm(settings)
    own, cores = settings.serving, cores_of(placement.serving)
    flags = {
        "--model": str(model),
        "--served-model-name": model.name,
        "--host": "127.0.0.1",
        "--port": str(free_port()),
        "--max-model-len": str(own.max_context_tokens),
        "--max-num-seqs": str(SEQUENCES),
        "--max-num-batched-tokens": str(max(STEP_TOKENS, own.max_context_tokens)),
        "--kv-cache-memory-bytes": str((own.kv_memory_mb << 20) // 2),
        "--scheduler-cls": "rose.vllm.ServingScheduler",
        **ON_CPU,
    }
    command = [f"OMP_NUM_THREADS={len(cores)}", "VLLM_CPU_OMP_THREADS_BIND=nobind", vllm_python(settings), "-m", MODULE]
    command += [word for pair in flags.items() for word in pair]
    command += ["--enforce-eager", "--disable-uvicorn-access-log", "--no-enable-chunked-prefill"]
    patterns = {"url": rf"Starting vLLM server on {URL}", "up": r"(Application startup complete)"}
    return Command(BORROWED, ("-c", BECOME, *command), SERVING_NICENESS, cores, patterns, is_kept=True)


def _lend_vllm(model: Path, device: str, name: str, settings: RunSettings, gateway_url: str) -> list[str]:
    python = vllm_python(settings)
    command = ["lend", "vllm", "--rollout-model", str(model), "--device", device, "--vllm-python", python]
    return [*command, "--gateway", gateway_url, "--worker-name", name]
