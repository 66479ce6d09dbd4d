"""`rose lend vllm`: rollouts beside a `vllm serve` that runs already, within what it can spare.

Starts a rollout engine on the same device and keeps it running, joins a gateway if one is named, and obeys `rose lend
pause`, `resume` and the others. Ends with Ctrl-C; serving does not notice.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rose.errors import ConfigError

MODES = ("idle", "decode")
FLAG_HELP = "a further flag of the rollout engine, as in --vllm-flag=--dtype=bfloat16; may be given more than once"
EXAMPLE = "for example: rose lend vllm --serving-url http://127.0.0.1:8000 --rollout-model FOLDER --device cpu:0"


def configure(parser: argparse.ArgumentParser) -> None:
    """Added to `rose lend`'s own options."""
    group = parser.add_argument_group("with vllm")
    group.add_argument("--serving-url", metavar="URL", help="the running `vllm serve`; without: a dedicated worker")
    group.add_argument("--rollout-model", type=Path, metavar="FOLDER", help="what is trained")
    group.add_argument("--device", default="cpu:0", help="the one that serves: cpu:0, cpu:0-3, cuda:0 (default cpu:0)")
    group.add_argument("--gateway", metavar="URL", help="the gateway to work for; its token is in ROSE_WORKER_TOKEN")
    group.add_argument("--worker-name", default="", metavar="NAME", help="how the gateway calls this device")
    group.add_argument("--owner-port", type=int, default=0, metavar="N", help="of the owner's controls; 0 takes any")
    group.add_argument("--mode", choices=MODES, default="idle", help="when to lend (default idle)")
    group.add_argument("--ttft-ms", type=float, default=500.0, help="budget for a first token (default 500)")
    group.add_argument("--tpot-ms", type=float, default=150.0, help="budget for every later token (default 150)")
    group.add_argument("--slack-share", type=float, default=0.7, help="of the budgets that lending may use up (0.7)")
    group.add_argument("--answer-s", type=float, default=60.0, help="users wait this long for an answer (default 60)")
    group.add_argument("--max-sequences", type=int, default=16, help="rollouts at once (default 16)")
    group.add_argument("--max-context", type=int, default=4096, help="longest rollout; 0 is the model's (default 4096)")
    group.add_argument("--step-tokens", type=int, default=256, help="of the largest rollout step (default 256)")
    group.add_argument("--kv-memory-mb", type=int, default=256, help="KV memory of the rollouts (default 256)")
    group.add_argument("--vllm-flag", action="append", default=[], metavar="FLAG", help=FLAG_HELP)
    group.add_argument("--vllm-python", default=sys.executable, metavar="PATH", help="the interpreter that has vLLM")


def run(arguments: argparse.Namespace) -> int:
    if arguments.rollout_model is None:
        raise ConfigError("which model should the rollouts run?", hint=EXAMPLE)
    compute_share = 1.0 if arguments.compute is None else arguments.compute
    if not 0 <= compute_share <= 1:
        raise ConfigError(f"--compute {compute_share:g} is not a share", hint="give 0 to 1")
    import asyncio
    import logging

    from rose.core.slo import Budgets
    from rose.engines.vllm.starting import RolloutEngine
    from rose.launch.vllm import Doors, lend
    from rose.rollout.vllm_agent import VllmLending

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    budgets = Budgets(arguments.ttft_ms / 1000, arguments.tpot_ms / 1000, arguments.slack_share, arguments.answer_s)
    engine = RolloutEngine(
        arguments.rollout_model,
        arguments.device,
        max_context_tokens=arguments.max_context,
        max_sequences=arguments.max_sequences,
        step_tokens=arguments.step_tokens,
        kv_memory_mb=arguments.kv_memory_mb,
        python=arguments.vllm_python,
        extra=tuple(arguments.vllm_flag),
    )
    lending = VllmLending(
        engine,
        arguments.serving_url or "",
        arguments.mode,
        budgets.ttft_s,
        budgets.tpot_s,
        budgets.slack_share,
        compute_share,
        budgets.answer_s,
    )
    doors = Doors(arguments.gateway, arguments.worker_name, arguments.owner_port)
    return asyncio.run(lend(lending, doors))
