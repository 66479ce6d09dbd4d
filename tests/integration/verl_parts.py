"""Parts of verl as released on a gateway, in verl's own environment; test_verl.py starts it and reads its lines.

python verl_parts.py STORY REQUEST, where REQUEST is JSON and STORY a name in STORIES, or `check`. Every line is an
object. Of verl nothing is changed: its `CheckpointEngineManager`, `LLMServerManager`, agent loops and TransferQueue run
as they are, in Ray. Two actors that hold a model, which FSDP2 shards over them, stand in for verl's trainer: its own
step needs a GPU.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as distributed
import transfer_queue as tq
from omegaconf import OmegaConf
from safetensors.torch import save_file
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput, get_rollout_replica_class

import rose.adapters.verl
from rose.adapters.verl_rollouts import RoseAgentLoopManager, RoseAgentLoopWorker, RoseClient
from rose.client import GatewayClient
from rose.errors import RoseError
from rose.weights.manifest import folder_hash

RANKS = 2
OWN_TOKEN = 7  # what verl's own replica answers in a mixed pool
ABORTED = [9]  # the prompt whose turn it gives back
LOOPS = ("single_turn_agent", "tool_agent")
SWAPS_MAX = 20  # turns under way when weights come: one of them must have been long enough


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


class Actor(Worker):
    """Two of these hold a sharded model. The two methods are those of verl's own worker, with its engine."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        register_own()
        distributed.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
        path, engine = config.actor_rollout_ref.model.path, config.actor_rollout_ref.rollout.checkpoint_engine
        self.path = path
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (self.world_size,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        settings = engine.engine_kwargs.get(engine.backend, {})
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            engine.backend, is_master=self.rank == 0, bucket_size=1 << 20, **settings
        )
        self.fault = ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, Any]:
        return await self.checkpoint_engine.send_weights(self.tensors(), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what verl's FSDP engine yields: each tensor gathered by all ranks, the tied head too."""
        for name, value in self.model.state_dict().items():
            whole = value.full_tensor()
            if self.fault == "shape" and name.endswith("norm.weight"):
                whole = whole[:-1]
            yield name, whole

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self, seed: int, fault: str = "") -> None:
        """Train: change the weights alike on all ranks, by some noise of this seed."""
        self.fault = fault
        generator = torch.Generator().manual_seed(seed * self.world_size + self.rank)
        with torch.no_grad():
            for value in self.model.parameters():
                own = value.to_local()
                own.mul_(1 + 0.01 * torch.randn(own.shape, generator=generator))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, folder: str) -> str:
        """Write the weights in bf16, by torch's own rounding, and return their hash."""
        weights = {name: value.bfloat16() for name, value in self.tensors() if name != "lm_head.weight"}
        if self.rank == 0:
            shutil.copytree(self.path, folder)
            save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        return folder_hash(folder) if self.rank == 0 else ""


class OwnEngine(CheckpointEngine):
    """An engine of verl for CPUs, which the release does not have: through Ray's object store."""

    def __init__(self, bucket_size: int, is_master: bool = False, *, store: str) -> None:
        self._is_master, self._store = is_master, ray.get_actor(store)

    def prepare(self) -> str:
        return "prepared"

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: list[Any]) -> tuple[Any, Any]:
        assert metadata == ["prepared"] * (actors + rollouts)
        return {"rank": list(range(actors))}, {"rank": list(range(actors, actors + rollouts))}

    def init_process_group(self, rank: int) -> None:
        self._rank = rank

    def finalize(self) -> None:
        del self._rank

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, int]:
        assert self._is_master == (self._rank == 0)
        found = {name: value.bfloat16() for name, value in weights}
        if self._is_master:
            await self._store.put.remote(found)
        return {"own/tensors": len(found)}

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        while (found := await self._store.take.remote()) is None:
            await asyncio.sleep(0.05)
        for item in found.items():
            yield item


class Store:
    def __init__(self) -> None:
        self.held: list[dict[str, torch.Tensor]] = []

    def put(self, tensors: dict[str, torch.Tensor]) -> None:
        self.held.append(tensors)

    def take(self) -> dict[str, torch.Tensor] | None:
        return self.held.pop() if self.held else None


class OwnServer:
    """A replica of verl's own: its receiver of weights, and its server of turns."""

    def __init__(self, settings: dict[str, Any]) -> None:
        register_own()
        self._engine = CheckpointEngineRegistry.new("rose_own", bucket_size=1 << 20, **settings)
        self._step, self._weights, self._aborted = -1, {}, 0

    async def update_weights(self, global_steps: int) -> None:
        self._weights = {name: value async for name, value in self._engine.receive_weights(global_steps)}
        self._step = global_steps

    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._engine, method)(*args, **kwargs)

    def generate(self, prompt_ids: list[int], **_: Any) -> TokenOutput:
        self._aborted += prompt_ids == ABORTED
        reason, steps = "aborted" if prompt_ids == ABORTED else "completed", {"global_steps": self._step}
        return TokenOutput(token_ids=[OWN_TOKEN], log_probs=[0.0], stop_reason=reason, extra_fields=steps)

    def aborted(self) -> int:
        return self._aborted

    def weights(self) -> dict[str, torch.Tensor]:
        return self._weights


class OwnReplica(RolloutReplica):
    async def init_standalone(self) -> None:
        await self.launch_servers()

    async def launch_servers(self) -> None:
        engine = self.config.checkpoint_engine
        self._server_handle = ray.remote(num_cpus=0)(OwnServer).remote(engine.engine_kwargs[engine.backend])
        self._server_address, self.workers = "own", [self._server_handle]


def register_own() -> None:
    CheckpointEngineRegistry.register("own")(OwnEngine)
    RolloutReplicaRegistry.register("own", lambda: OwnReplica)
    rose.adapters.verl.register()


def actors(config: Any) -> RayWorkerGroup:
    pool = RayResourcePool(process_on_nodes=[RANKS], use_gpu=False, max_colocate_count=1)
    remote = RayClassWithInitArgs(cls=ray.remote(Actor), config=config)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=remote, device_name="cpu")


def managers(config: Any) -> tuple[RayWorkerGroup, LLMServerManager, CheckpointEngineManager]:
    """Return the parts as verl's trainer for separate rollouts makes them."""
    group = actors(config)
    servers = LLMServerManager.create(config=config)
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    return group, servers, CheckpointEngineManager(engine, group, servers.get_replicas())


def check(config: Any) -> None:
    """Check the configuration as verl's command does before it starts, and load what it names."""
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    found = {
        "trainer": get_trainer_cls(config.trainer.v1.trainer_mode),
        "manager": load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class),
        "replica": get_rollout_replica_class(rollout.name),
    }
    say(**{name: value.__name__ for name, value in found.items()})


def weights(config: Any, folder: Path) -> None:
    """Send weights; one version is refused. After each, wait until test_verl.py has looked at the workers."""
    group, _, manager = managers(config)
    for step, fault in enumerate(("", "", "shape", "")):
        group.change(step, fault=fault)
        try:
            metrics = manager.update_weights(global_steps=step)
            say(step=step, hash=group.save(str(folder / f"saved-{step}"))[0], metrics=metrics)
        except Exception as error:
            say(step=step, error=str(error))
        sys.stdin.readline()


def loops(config: Any, folder: Path) -> None:
    """Play both agent loops of verl, in its Ray actors and here, and swap weights in the middle of turns."""
    config.transfer_queue.enable = True
    tq.init(config.transfer_queue)
    group, servers, manager = managers(config)
    manager.update_weights(global_steps=0)
    group.save(str(folder / "saved-0"))
    model = AutoModelForCausalLM.from_pretrained(folder / "saved-0", dtype=torch.float32)
    loop_manager = RoseAgentLoopManager.create(
        config=config,
        llm_client=servers.get_client(client_cls=FullyAsyncLLMServerClient),
        teacher_client=None,
        reward_loop_worker_handles=None,
    )
    loop_manager.generate_sequences(batch_of("actors", 4))
    asyncio.run(_loops(config, loop_manager.llm_client, model))
    asyncio.run(_swap(loop_manager.llm_client, group, manager))
    tq.close()


async def _loops(config: Any, client: RoseClient, model: torch.nn.Module) -> None:
    say(actors=await trajectories_of("actors", model))
    replies = watch_turns()
    worker = RoseAgentLoopWorker(config, client)
    await worker.generate_sequences(batch_of("here", 4))
    say(here=await trajectories_of("here", model), turns=replies)
    ended = []
    for session in {reply["session"] for reply in replies}:
        try:
            await client._turns._turns.turn(session, {"token_ids": [1], "sampling_params": {"max_tokens": 1}})
        except RoseError as error:
            ended.append(error.what)
    say(ended=ended)
    await client._turns.close()


async def _swap(client: RoseClient, group: RayWorkerGroup, manager: CheckpointEngineManager) -> None:
    """Send weights while a turn is under way, until a turn has tokens of both; say its spans and its steps."""
    client._turns = None  # of the loop before
    replies = watch_turns()
    for step in range(1, SWAPS_MAX):
        group.change(step)
        sampling = {"temperature": 1.0, "max_tokens": 2000, "ignore_eos": True, "logprobs": True}
        playing = asyncio.create_task(client.generate(f"swap-{step}", prompt_ids=[5] * 8, sampling_params=sampling))
        while not playing.done() and not await running(client):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(manager.update_weights, global_steps=step)
        output = await playing
        if len(replies[-1]["spans"]) > 1:
            break
    say(spans=replies[-1]["spans"], steps=output.extra_fields, tokens=len(output.token_ids))
    await client._turns.close()


def mixed(config: Any, folder: Path) -> None:
    """Send weights to a replica of verl's own and to the pool, and play on both behind one load balancer."""
    register_own()
    rollout, engine = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.checkpoint_engine
    rollout.name, engine.backend = "own", "rose_own"
    engine.engine_kwargs.rose_own = {**engine.engine_kwargs.pop("rose"), "own": {"store": "store"}}
    router = folder / "router.yaml"
    router.write_text("router_class: rose.adapters.verl_rollouts.RoseLoadBalancer\nweight: 2\n")
    rollout.router_config_path = str(router)
    store = ray.remote(num_cpus=0)(Store).options(name="store").remote()
    group, servers, manager = managers(config)
    group.change(5)
    metrics = manager.update_weights(global_steps=5)
    saved = group.save(str(folder / "saved-5"))[0]
    received = ray.get(servers.server_handles[0].weights.remote())
    whole = AutoModelForCausalLM.from_pretrained(folder / "saved-5", dtype=torch.bfloat16).state_dict()
    is_same = all(torch.equal(received[name], value) for name, value in whole.items())
    client = RoseAgentLoopManager(config, servers.get_client()).llm_client
    outputs, resumed = asyncio.run(_mixed(client, servers.server_handles[0]))
    status = ray.get(servers.global_load_balancer.get_status.remote())
    found = {"own_is_same": is_same, "outputs": outputs, "resumed": resumed, "servers": status["servers"]}
    say(metrics=metrics, hash=saved, **found)
    del store


async def _mixed(client: RoseClient, own: Any) -> tuple[list[list[Any]], list[int]]:
    """Play two turns of some trajectories; then one whose replica gives it back and leaves, so that the pool ends it.

    Return the number of tokens and the step of each turn of the former, and the tokens of the latter.
    """
    sampling = {"temperature": 1.0, "max_tokens": 4, "ignore_eos": True, "logprobs": True}

    async def trajectory(name: str) -> list[Any]:
        outputs = [await client.generate(name, prompt_ids=[5, 6], sampling_params=sampling) for _ in range(2)]
        return [[len(output.token_ids), output.extra_fields["min_global_steps"]] for output in outputs]

    found = await asyncio.gather(*(trajectory(f"mixed-{number}") for number in range(9)))
    balancer = client._load_balancer
    await balancer.remove_servers.remote(["rose-0", "rose-1"])
    playing = asyncio.create_task(client.generate("resumed", prompt_ids=ABORTED, sampling_params=sampling))
    while not await own.aborted.remote():
        await asyncio.sleep(0.01)
    await balancer.add_servers.remote({"rose-0": None, "rose-1": None})
    await balancer.remove_servers.remote(["own"])
    resumed = (await playing).token_ids
    await client._turns.close()
    return found, resumed


def trouble(config: Any, folder: Path) -> None:
    """Play while the gateway goes away, and comes back when test_verl.py is told so; then while it stays away."""
    config.transfer_queue.enable = True
    tq.init(config.transfer_queue)
    _, servers, manager = managers(config)
    manager.update_weights(global_steps=0)
    client = RoseAgentLoopManager(config, servers.get_client()).llm_client
    asyncio.run(_trouble(config, client))
    try:
        manager.update_weights(global_steps=1)
    except Exception as error:
        say(publish=str(error)[-400:])
    tq.close()


async def _trouble(config: Any, client: RoseClient) -> None:
    sampling = {"temperature": 1.0, "max_tokens": 2000, "ignore_eos": True, "logprobs": True}
    playing = asyncio.create_task(client.generate("long", prompt_ids=[5] * 8, sampling_params=sampling))
    while not await running(client):
        await asyncio.sleep(0.01)
    say(now="away")
    say(tokens=len((await playing).token_ids))
    say(now="gone")
    await asyncio.to_thread(sys.stdin.readline)
    worker = RoseAgentLoopWorker(config, client)
    await worker.generate_sequences(batch_of("lost", 1))
    await asyncio.gather(*worker.background_tasks)
    say(status=(await tq.async_kv_list("train"))["train"]["lost-0"]["status"])
    await client._turns.close()


async def running(client: RoseClient) -> bool:
    turns = client._turns
    return turns is not None and not turns._not_open and bool((await turns._client.pool())["running_turns"])


def batch_of(name: str, prompts: int) -> TensorDict:
    """Return a batch as verl's trainer makes it, and register its prompts as that does."""
    rows = {
        "raw_prompt": [[{"role": "user", "content": f"Number {number}."}] for number in range(prompts)],
        "uid": [f"{name}-{number}" for number in range(prompts)],
        "agent_name": [LOOPS[number % 2] for number in range(prompts)],
        "index": list(range(prompts)),
    }
    batch = tensordict_utils.get_tensordict(rows)
    tensordict_utils.assign_non_tensor_data(batch, "global_steps", 0)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 0}] * prompts
    tq.kv_batch_put(keys=rows["uid"], partition_id="train", tags=tags)
    return batch


async def trajectories_of(name: str, model: torch.nn.Module) -> list[dict[str, Any]]:
    """Wait until all prompts of a batch have ended, and return what TransferQueue has of their trajectories."""
    while True:
        tags = (await tq.async_kv_list("train"))["train"]
        prompts = {key: tag for key, tag in tags.items() if tag.get("is_prompt") and key.startswith(name)}
        if all(tag["status"] not in ("pending", "running") for tag in prompts.values()):
            break
        await asyncio.sleep(0.1)
    found = []
    for key in sorted(key for key in tags if key.startswith(name) and key not in prompts):
        [row] = await tq.async_kv_batch_get(keys=[key], partition_id="train")
        mask = row["response_mask"].bool()
        mine = logprobs_of(model, row["input_ids"])[-len(mask) :]
        found.append(
            {
                "key": key,
                "steps": [tags[key]["min_global_steps"], tags[key]["max_global_steps"]],
                "sampled": int(mask.sum()),
                "given": int((~mask).sum()),
                "difference": float((mine - row["rollout_log_probs"])[mask].abs().max()),
                "responses": row["responses"].tolist(),
            }
        )
    assert {tag["status"] for tag in prompts.values()} == {"finished"}, prompts
    return found


def logprobs_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token but the first."""
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def watch_turns() -> list[dict[str, Any]]:
    """Return the list to which what the gateway answers to each turn will be added."""
    replies: list[dict[str, Any]] = []
    play = GatewayClient.turn

    async def watched(self: GatewayClient, session: str, body: dict[str, Any]) -> bytes:
        data = await play(self, session, body)
        reply = json.loads(data)
        [choice] = reply["choices"]
        place = {name: reply["rose"][name] for name in ("workers", "turn", "is_fork")}
        replies.append({"session": session, "spans": choice["weight_versions"]} | place)
        return data

    GatewayClient.turn = watched
    return replies


def main(story: str, request: dict[str, Any]) -> None:
    config = OmegaConf.create(request["config"])
    if story == "check":
        return check(config)
    ray.init(num_cpus=6, include_dashboard=False, runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "lo"}})
    try:
        STORIES[story](config, Path(request["folder"]))
    finally:
        ray.shutdown()


STORIES = {"weights": weights, "loops": loops, "mixed": mixed, "trouble": trouble}

if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
