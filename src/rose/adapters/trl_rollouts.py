"""TRL's synchronous trainer plays on the pool: a rollout function for GRPOTrainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rose.adapters.group_players import Prompt, prompt_ids, sampling_seed
from rose.adapters.rose_pool import TURN_PATIENCE_S, RosePool
from rose.adapters.trl_weights import TrlWeights
from rose.adapters.turn_watch import TurnWatch
from rose.api.requests import TurnAnswer, TurnSampling
from rose.api.trajectories import BeginBody, FinishBody
from rose.client import GatewayClient
from rose.errors import ConfigError

STALE_AFTER_S = 300.0  # without an ended rollout; TRL's own limit for its asynchronous trainer
WHOLE_DISTRIBUTION = {
    "top_p": (1.0, None),
    "top_k": (0, -1, None),
    "min_p": (0.0, None),
    "repetition_penalty": (1.0, None),
}
"""Values of TRL's settings that leave the model's distribution as it is: what is trained on is drawn from all of it."""


def sampling_of(args: Any) -> TurnSampling:
    """Return the sampling that TRL's settings ask for. Raises ConfigError for a part of the distribution."""
    for name, allowed in WHOLE_DISTRIBUTION.items():
        value = getattr(args, name, None)
        if value not in allowed:
            hint = "leave top_p, top_k, min_p and repetition_penalty as they are"
            raise ConfigError(f"rollouts are drawn from the whole distribution, and {name} is {value}", hint=hint)
    return TurnSampling(args.temperature, args.max_completion_length, seed=args.seed)


class TrlRollouts:
    """TRL's rollout function for GRPOTrainer: publishes the weights when they have changed, and plays the prompts.

    GRPOTrainer corrects for older weights only if it runs vLLM itself. So the gateway must have `max_staleness` 0, and
    each token must be of the weights that were just published.
    """

    def __init__(self, pool: RosePool, *, stale_after_s: float = STALE_AFTER_S, **options: Any) -> None:
        self._pool, self._weights, self._stale_after_s = pool, TrlWeights(pool, **options), stale_after_s
        self._step: int | None = None  # whose weights were published
        self._calls = 0

    def __call__(self, prompts: Sequence[Prompt], trainer: Any) -> dict[str, Any]:
        if trainer.state.global_step != self._step:
            self._publish(trainer)
            self._step = trainer.state.global_step
        self._calls += 1
        template = trainer.args.chat_template_kwargs
        inputs = [prompt_ids(self._pool.folder.tokenizer, prompt, template) for prompt in prompts]
        answers = self._pool.ask(lambda client: self._play(client, inputs, sampling_of(trainer.args)))
        return {
            "prompt_ids": inputs,
            "completion_ids": [list(answer.token_ids) for answer in answers],
            "logprobs": [list(answer.logprobs) for answer in answers],
        }

    def _publish(self, trainer: Any) -> None:
        """Publish the trainer's weights. Every rank advances the iterator, which gathers sharded tensors."""
        accelerator = trainer.accelerator
        model = accelerator.unwrap_model(trainer.model)
        if hasattr(model, "peft_config"):
            raise ConfigError("TrlRollouts cannot publish an adapter of PEFT", hint="use AsyncGRPOTrainer, or merge it")
        stream = ((name, _whole(value)) for name, value in model.named_parameters())
        if not accelerator.is_main_process:
            for _ in stream:
                pass
        else:
            if self._step is None:
                self._weights.init_weight_transfer()
            self._weights.send_weights(stream)
            self._weights.resume()
        accelerator.wait_for_everyone()

    async def _play(
        self, client: GatewayClient, prompts: Sequence[Sequence[int]], sampling: TurnSampling
    ) -> list[TurnAnswer]:
        version = (await client.pool())["version"]
        names = [f"{self._pool.prefix}/sync-{self._calls}/{number}" for number in range(len(prompts))]
        watch = TurnWatch(client.pool, self._stale_after_s)

        async def play(number: int) -> TurnAnswer:
            own = replace(sampling, seed=sampling_seed(sampling.seed, self._calls, number))
            await client.begin(BeginBody(id=names[number]))
            answer = await watch(turns.trajectory(names[number])(prompts[number], own))
            await client.finish(names[number], FinishBody())
            if any(span.version != version for span in answer.spans):
                hint = "start the gateway with max_staleness 0, or use AsyncGRPOTrainer"
                raise ConfigError(f"a worker wrote tokens with other weights than {version}", hint=hint)
            return answer

        async with self._pool.client(TURN_PATIENCE_S) as turns:
            playing = asyncio.gather(*(play(number) for number in range(len(prompts))))
            try:
                return await playing
            finally:
                playing.cancel()


def _whole(value: Any) -> Any:
    """Return a parameter without its gradient, gathered from all ranks if it is sharded."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value.detach()
