"""The two hooks of slime: its rollouts run behind a ROSE gateway, and its weights go to a relay.

    --custom-generate-function-path rose.adapters.slime.generate
    --custom-update-weight-post-write-path rose.adapters.slime.publish
    --update-weight-mode full --update-weight-transport disk --update-weight-disk-dir FOLDER
    --custom-config-path FILE            with rose_gateway, rose_relay and rose_run

slime copies the entries of that file into its arguments. An entry that is missing there is read from the variable of
its name (ROSE_GATEWAY, ROSE_RELAY, ROSE_RUN). Tokens are only read from variables. slime and miles are not imported:
`generate` fills whatever object has the fields of their samples, and `publish` reads a folder. slime calls the two in
different processes, so they share nothing but the gateway. Versions have slime's own numbers.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rose.adapters.group_players import sampling_seed
from rose.adapters.slime_pool import SlimePool
from rose.api.requests import TurnSampling
from rose.client import PATIENCE_S
from rose.errors import ConfigError

WHOLE_DISTRIBUTION = {"top_p": (1.0, None), "top_k": (-1, 0, None), "min_p": (0.0, None)}
_LABEL = re.compile(r"(\d{1,10})-[0-9a-f]{8}")  # of a version that `publish` announced


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:
    """Let the pool answer the sample's prompt, and return the sample with tokens, log-probabilities and versions.

    A sample that has part of a response already goes on from it.
    """
    status, before = type(sample.status), sample.response_length
    tokens_left = sampling_params["max_new_tokens"] - before
    if tokens_left <= 0:
        sample.status = status("truncated")
        return sample
    if any(value is not None for value in (sample.multimodal_inputs or {}).values()):
        raise ConfigError("the sample has images or sound, and rollouts of ROSE are text", hint="use a text dataset")
    sampling = _sampling(args, sample, sampling_params, tokens_left, is_trained_on=not evaluation)
    pool = _pool(args)
    token_ids = list(sample.tokens) or pool.prompt_ids(sample.prompt)
    answer = await pool.turn(token_ids, sampling)
    count = len(answer.token_ids)
    sample.tokens = [*token_ids, *answer.token_ids]
    sample.response += pool.text(
        answer.token_ids, is_special_shown=not sampling_params.get("skip_special_tokens", True)
    )
    sample.response_length = before + count
    sample.loss_mask = [*([1] * before if sample.loss_mask is None else sample.loss_mask), *[1] * count]
    sample.rollout_log_probs = [*(sample.rollout_log_probs or [0.0] * before), *answer.logprobs]
    sample.weight_versions = [*sample.weight_versions, *(version_number(span.version) for span in answer.spans)]
    sample.status = status("completed" if answer.finish_reason == "stop" else "truncated")
    return sample


def publish(args: Any, version_dir: str, rollout_engines: Sequence[Any]) -> None:
    """Publish the weights in the folder that slime has just written. Every rank calls it; rank 0 publishes."""
    distributed: Any = sys.modules.get("torch.distributed")
    is_parallel = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if (distributed.get_rank() if is_parallel else int(os.environ.get("RANK", "0"))) == 0:
        _pool(args, publishes=True).publish(Path(version_dir))


def version_number(label: str) -> str:
    """Return slime's number of a version, or 0 for weights that slime has not published."""
    match = _LABEL.fullmatch(label)
    return match[1] if match else "0"


def _sampling(
    args: Any, sample: Any, params: Mapping[str, Any], tokens_left: int, *, is_trained_on: bool
) -> TurnSampling:
    """Return the sampling that slime asks for. Raises ConfigError if it cannot be had."""
    if params.get("stop"):
        raise ConfigError("turns do not end at texts", hint="set --rollout-stop-token-ids in place of --rollout-stop")
    for name, allowed in WHOLE_DISTRIBUTION.items():
        value = params.get(name)
        if is_trained_on and value not in allowed:
            hint = f"leave out --rollout-{name.replace('_', '-')}; evaluations may have top_p and top_k of their own"
            raise ConfigError(
                f"training tokens are drawn from the whole distribution, and {name} is {value}", hint=hint
            )
    seed = params.get("sampling_seed")
    if seed is None:
        seed = sampling_seed(getattr(args, "rollout_seed", 0), sample.group_index or 0, sample.index or 0)
    return TurnSampling(
        params["temperature"],
        tokens_left,
        tuple(params.get("stop_token_ids") or ()),
        seed,
        top_p=params.get("top_p") or 1.0,
        top_k=max(0, params.get("top_k") or 0),
    )


def _pool(args: Any, *, publishes: bool = False) -> SlimePool:
    """Return the pool that slime's arguments or the environment name, the same one at every call."""
    relay = _setting(args, "relay") if publishes else ""
    return _open(args.hf_checkpoint, _setting(args, "gateway"), relay, _setting(args, "run"), _patience_s(args))


@functools.cache
def _open(model: str, gateway: str, relay: str, run: str, patience_s: float) -> SlimePool:
    return SlimePool(model, gateway=gateway, relay=relay, run=run, patience_s=patience_s)


def _patience_s(args: Any) -> float:
    value = getattr(args, "rose_patience_s", None) or os.environ.get("ROSE_PATIENCE_S") or PATIENCE_S
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"rose_patience_s is `{value}`", hint="give seconds, as a number") from None


def _setting(args: Any, name: str) -> str:
    value = getattr(args, f"rose_{name}", None) or os.environ.get(f"ROSE_{name.upper()}")
    if not value:
        hint = f"write rose_{name} into the file of --custom-config-path, or set ROSE_{name.upper()}"
        raise ConfigError(f"the {name} of this job is not known", hint=hint)
    return str(value)
