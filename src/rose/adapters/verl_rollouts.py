"""verl's agent loops play on ROSE's pool: the client that they get, and the manager that gives it to them.

    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=rose.adapters.verl_rollouts.RoseAgentLoopManager

Each agent-loop worker talks to the gateway itself. verl's `request_id`, which all turns of a trajectory have, names the
session. With replicas of verl's own in the pool, verl's load balancer picks a server for each trajectory;
`RoseLoadBalancer` has ROSE among them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import ray
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import normalize_token_ids
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from rose.adapters.verl import ROSE, settings_of
from rose.adapters.verl_pool import VerlTurns, turn_sampling
from rose.errors import ConfigError, Unavailable

_used: ContextVar[set[str] | None] = ContextVar("sessions of the agent loop", default=None)


class RoseClient(FullyAsyncLLMServerClient):
    """verl's LLM client for a pool. Without a load balancer all turns are played through the gateway."""

    def __init__(self, config: Any, load_balancer_handle: Any = None, **options: Any) -> None:
        super().__init__(config, load_balancer_handle, **options)
        self._rollout = config.actor_rollout_ref.rollout
        if self._rollout.full_determinism:
            raise ConfigError("verl's full_determinism gives trajectories of each step the same names; set it to False")
        self._settings = settings_of(self._rollout)
        self._turns: VerlTurns | None = None  # made in the process that plays

    @rollout_trace_op
    async def generate(
        self, request_id: Any, *, prompt_ids: Any, sampling_params: Mapping[str, Any], **more: Any
    ) -> TokenOutput:
        """Play one turn. If it raises RoseError, verl logs that and plays another prompt."""
        asked = {"prompt_ids": normalize_token_ids(prompt_ids), "sampling_params": sampling_params} | more
        if self._load_balancer is None:
            return await self._play(request_id, **asked)
        server_id, server = await self._acquire_server(request_id, **asked)
        try:
            if isinstance(server, SimpleNamespace):
                return await self._play(request_id, **asked)
        finally:
            self._release_server(server_id, request_id=request_id)
        return await super().generate(request_id, **asked)  # the balancer gives it the same server

    async def _acquire_server(self, request_id: Any, **asked: Any) -> tuple[str, Any]:
        """Return a server of verl's own, or the pool in the form of one: verl may continue a turn there."""
        server_id, server = await super()._acquire_server(request_id, **asked)
        return server_id, server or SimpleNamespace(generate=SimpleNamespace(remote=self._play))

    async def _play(
        self, request_id: Any, *, prompt_ids: list[int], sampling_params: Mapping[str, Any], **more: Any
    ) -> TokenOutput:
        if any(more.get(name) for name in ("image_data", "video_data", "audio_data")):
            raise ConfigError("ROSE plays texts only", hint="leave images, videos and audio out of the dataset")
        session = f"{self._settings.run}/{request_id}"
        if (used := _used.get()) is not None:
            used.add(session)
        if self._turns is None:
            self._turns = VerlTurns(self._settings)
        sampling = turn_sampling(sampling_params, len(prompt_ids), self._rollout)
        answer, steps = await self._turns.play(session, prompt_ids, sampling)
        return TokenOutput(
            token_ids=list(answer.token_ids),
            log_probs=list(answer.logprobs) if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            extra_fields={"global_steps": steps[-1], "min_global_steps": min(steps), "max_global_steps": max(steps)},
        )

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """End the sessions that are used inside, by tasks that are started inside too."""
        used: set[str] = set()
        mark = _used.set(used)
        try:
            yield
        except Unavailable:
            used.clear()  # the gateway is away or full; it ends them after its idle_s
            raise
        finally:
            _used.reset(mark)
            if self._turns is not None:
                await self._turns.end(used)


class RoseAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """verl's agent-loop worker, which tells the gateway when a trajectory has ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # Ray copies inherited methods, and verl's `super()` fails in a copy

    async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any:
        async with self.llm_client.episode():
            return await super()._run_agent_loop(*args, **kwargs)


class RoseAgentLoopManager(AgentLoopManagerTQ):
    """verl's agent-loop manager, whose workers have a `RoseClient`."""

    def __init__(self, config: Any, llm_client: Any, *args: Any, **kwargs: Any) -> None:
        is_mixed = config.actor_rollout_ref.rollout.name != ROSE
        client = RoseClient(config, llm_client._load_balancer if is_mixed else None)
        super().__init__(config, client, *args, **kwargs)
        self.agent_loop_workers_class = ray.remote(RoseAgentLoopWorker)


class RoseLoadBalancer(GlobalRequestLoadBalancer):
    """verl's load balancer with ROSE among its servers, as if it were `weight` of them.

    verl makes it from the YAML file `rollout.router_config_path` with `router_class` and `weight`.
    """

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        super().__init__({**servers, **{f"{ROSE}-{number}": None for number in range(config.get("weight", 1))}})
