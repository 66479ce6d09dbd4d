"""Modules in place of vLLM's, with as much of its schedulers, engine and weight transfer as ROSE's plugins use."""

from __future__ import annotations

import importlib
import itertools
import queue
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rose.vllm.kv_allocation import RankReply

BLOCK_TOKENS = 16
BLOCK_BYTES = 1000
MODULES = ("engine_hook", "serving_scheduler", "rollout_scheduler", "vllm_weights")


@dataclass
class Block:
    """One block of the pool."""

    block_id: int
    ref_cnt: int = 0
    block_hash: str | None = None
    is_null: bool = False
    next_free_block: Block | None = None


class FreeQueue:
    """The free blocks of a pool: those without a hash first, as vLLM orders them, then a tail that is no block."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def remove(self, block: Block) -> None:
        self._pool.free.remove(block.block_id)

    def append(self, block: Block) -> None:
        self._pool.free.add(block.block_id)

    @property
    def fake_free_list_head(self) -> Block:
        free = sorted((self._pool.blocks[number] for number in self._pool.free), key=lambda b: b.block_hash is not None)
        chain = [Block(-1), *free, Block(-1)]
        for block, following in itertools.pairwise(chain):
            block.next_free_block = following
        chain[-1].next_free_block = None
        return chain[0]


class BlockPool:
    """A pool of free blocks; block 0 is the null block."""

    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = blocks
        self.blocks = [Block(number, is_null=number == 0) for number in range(blocks)]
        self.free = {block.block_id for block in self.blocks[1:]}
        self.free_block_queue = FreeQueue(self)

    def move_block_hashes(self, source: Block, target: Block) -> None:
        assert target.block_hash is None
        source.block_hash, target.block_hash = None, source.block_hash

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def free_blocks(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            self.free.add(block.block_id)

    def _maybe_evict_cached_block(self, block: Block) -> None:
        block.block_hash = None

    def use(self, count: int) -> None:
        """Let requests refer to the lowest free blocks."""
        for number in sorted(self.free)[:count]:
            self.free.remove(number)
            self.blocks[number].ref_cnt += 1


class StubKvManager:
    """Gives requests the lowest free blocks; full blocks are cached when their request is preempted or ends."""

    def __init__(self, pool: BlockPool) -> None:
        self.block_pool = pool
        self.held: dict[str, list[int]] = {}

    def get_block_ids(self, name: str) -> tuple[list[int], ...]:
        return (self.held.get(name, []),)

    def allocate_slots(self, request: StubRequest, tokens: int) -> list[int] | None:
        held = self.held.get(request.request_id, [])
        count = -(-(request.num_computed_tokens + tokens) // BLOCK_TOKENS) - len(held)
        if count > self.block_pool.get_num_free_blocks():
            return None
        blocks = self.block_pool.blocks
        chosen = sorted(self.block_pool.free, key=lambda number: (blocks[number].block_hash is not None, number))[
            :count
        ]
        self.block_pool.free -= set(chosen)
        for number in chosen:
            blocks[number].ref_cnt, blocks[number].block_hash = 1, None
        self.held[request.request_id] = held + chosen
        return chosen

    def cache_full(self, request: StubRequest) -> None:
        for place, number in enumerate(self.held.get(request.request_id, [])):
            if (place + 1) * BLOCK_TOKENS <= request.num_computed_tokens:
                self.block_pool.blocks[number].block_hash = f"{request.request_id}:{place}"

    def free(self, request: StubRequest) -> None:
        self.block_pool.free_blocks([self.block_pool.blocks[n] for n in self.held.pop(request.request_id, [])])


class StubWorker:
    """The worker of an engine on a pool, in place of vLLM's executor."""

    def __init__(self, free_groups: int) -> None:
        self.free_groups = free_groups
        self.mapped = {0}
        self.copied: list[tuple[int, int]] = []
        self.failure: Exception | None = None

    def collective_rpc(self, method: Any, args: tuple[Any, ...]) -> list[RankReply]:
        return [self.reply(method, args)]

    def reply(self, method: Any, args: tuple[Any, ...]) -> RankReply:
        if self.failure is not None:
            return RankReply(failure=str(self.failure))
        return RankReply(tuple(getattr(self, method.__name__)(*args) or ()))

    def map_groups(self, groups: list[int]) -> list[int]:
        mapped = groups[: self.free_groups]
        assert not self.mapped & set(mapped)
        self.free_groups -= len(mapped)
        self.mapped |= set(mapped)
        return mapped

    def unmap_groups(self, groups: list[int]) -> None:
        gone = self.mapped & set(groups)
        self.mapped -= gone
        self.free_groups += len(gone)

    def copy_blocks(self, moves: list[tuple[int, int]]) -> None:
        self.copied += moves


class StubRanks:
    """The workers of an engine with tensor parallelism, in place of vLLM's executor."""

    def __init__(self, *free_groups: int) -> None:
        self.ranks = [StubWorker(free) for free in free_groups]

    def collective_rpc(self, method: Any, args: tuple[Any, ...]) -> list[RankReply]:
        return [rank.reply(method, args) for rank in self.ranks]


class StubRequest:
    """A request, with the fields of vLLM's that ROSE reads."""

    def __init__(self, name: str, prompt_tokens: int = 8, max_tokens: int = 4) -> None:
        self.request_id, self.num_prompt_tokens, self.max_tokens = name, prompt_tokens, max_tokens
        self.client_index, self.arrival_time, self.num_preemptions = 0, 0.0, 0
        self.status = SimpleNamespace(name="WAITING")
        self.num_computed_tokens = 0
        self._all_token_ids = [0] * prompt_tokens
        self._output_token_ids: list[int] = []
        self.cache_salt: str | None = None
        self.block_hashes = ["unsalted"]

    def update_block_hashes(self) -> None:
        self.block_hashes.append(str(self.cache_salt))


class StubScheduler:
    """Schedules every request within the limits of tokens and sequences, one token or the whole prompt each."""

    def __init__(self, *, is_async: bool = False, is_chunked: bool = True, blocks: int = 101, plan: Any = None) -> None:
        self.scheduler_config = SimpleNamespace(async_scheduling=is_async, enable_chunked_prefill=is_chunked)
        model = SimpleNamespace(served_model_name="served", model="model")
        parallel = SimpleNamespace(data_parallel_index=0, data_parallel_size=1)
        self.vllm_config = SimpleNamespace(model_config=model, parallel_config=parallel)
        tensors = [SimpleNamespace(size=blocks * BLOCK_BYTES, offset=0)] * 2  # two layers share an allocation
        self.kv_cache_config = SimpleNamespace(num_blocks=blocks, kv_cache_tensors=tensors)
        self.is_pooled = plan is not None
        if self.is_pooled:
            self.kv_cache_config.rose_pool = plan
        self.kv_cache_manager = StubKvManager(BlockPool(blocks))
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.max_num_scheduled_tokens, self.max_num_running_reqs, self.max_num_active_reqs = 256, 8, 8
        self.max_model_len, self.block_size = 1024, BLOCK_TOKENS
        self.requests: dict[str, StubRequest] = {}
        self.running: list[StubRequest] = []
        self.waiting: list[StubRequest] = []
        self.kv_holding_waiting: list[StubRequest] = []
        self.finished_req_ids: set[str] = set()
        self.limits: list[tuple[int, int]] = []  # of tokens and sequences, at every step
        self.was_shut_down = False

    def has_requests(self) -> bool:
        return bool(self.requests or self.finished_req_ids)

    def add_request(self, request: StubRequest) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish_requests(self, names: str | list[str], status: str) -> list[StubRequest]:
        finished = [self.requests.pop(name) for name in ([names] if isinstance(names, str) else names)]
        for queue_ in (self.running, self.waiting):
            queue_[:] = [request for request in queue_ if request not in finished]
        self.finished_req_ids |= {request.request_id for request in finished}
        for request in finished:
            self.kv_cache_manager.free(request)
        return finished

    def _preempt_request(self, request: StubRequest, timestamp: float) -> None:
        self.kv_cache_manager.free(request)
        request.num_computed_tokens, request.num_preemptions = 0, request.num_preemptions + 1
        request.status = SimpleNamespace(name="PREEMPTED")
        self.waiting.insert(0, request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self.limits.append((self.max_num_scheduled_tokens, self.max_num_active_reqs))
        self.finished_req_ids = set()
        tokens, scheduled, begun = self.max_num_scheduled_tokens, {}, []
        while self.waiting and len(self.running) < self.max_num_active_reqs and tokens:
            first = self.waiting[0]
            if self.is_pooled and self.kv_cache_manager.allocate_slots(first, len(first._all_token_ids)) is None:
                break
            self.running.append(self.waiting.pop(0))
            first.status = SimpleNamespace(name="RUNNING")
            begun.append(SimpleNamespace(req_id=self.running[-1].request_id, num_computed_tokens=0))
        for request in self.running:
            count = min(tokens, len(request._all_token_ids) - request.num_computed_tokens)
            if count and self.is_pooled and self.kv_cache_manager.allocate_slots(request, count) is None:
                continue
            if count:
                tokens -= count
                request.num_computed_tokens += count
                scheduled[request.request_id] = count
        return SimpleNamespace(num_scheduled_tokens=scheduled, scheduled_new_reqs=begun, preempted_req_ids=())

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        outputs: dict[int, Any] = {}
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests[name]
            if request.num_computed_tokens == len(request._all_token_ids):
                request._all_token_ids.append(7)
                request._output_token_ids.append(7)
                self.kv_cache_manager.cache_full(request)
                made = outputs.setdefault(request.client_index, EngineCoreOutputs())
                made.outputs.append(EngineCoreOutput(name, [7]))
        return outputs

    def reset_prefix_cache(self) -> bool:
        pool = self.kv_cache_manager.block_pool
        return pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    def shutdown(self) -> None:
        self.was_shut_down = True


class StubAsyncScheduler(StubScheduler):
    """The scheduler for asynchronous scheduling."""


@dataclass
class EngineCoreOutput:
    """What one request made in a step."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None


@dataclass
class EngineCoreOutputs:
    """What the requests of one client made in a step."""

    outputs: list[EngineCoreOutput] = field(default_factory=list)


class StubEngineCore:
    """An engine whose loop sleeps on its input queue."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.version = scheduler, "v1"
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.calls: list[tuple[str, Any]] = []
        self.model_executor = SimpleNamespace(collective_rpc=lambda name, args: self.calls.append((name, args)))

    def get_weight_version(self) -> str:
        return self.version

    def _process_input_queue(self) -> str:
        return "slept"


class StubTransferEngine:
    """vLLM's base class of weight transfers."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def parse_update_info(self, info: dict[str, Any]) -> Any:
        return self.update_info_cls(**info)  # type: ignore[attr-defined]


def install(patch: pytest.MonkeyPatch, version: str = "0.32.0") -> dict[str, Any]:
    """Put the stubs in vLLM's place and return ROSE's modules that need vLLM, imported anew."""
    core = type("EngineCoreProc", (StubEngineCore,), {})  # ROSE changes a method of it
    engine = {"EngineCoreOutput": EngineCoreOutput, "EngineCoreOutputs": EngineCoreOutputs}
    engine |= {
        "EngineCoreRequestType": SimpleNamespace(WAKEUP="wake-up"),
        "FinishReason": SimpleNamespace(ABORT="abort"),
    }
    factory = SimpleNamespace(_registry={}, register_engine=lambda *names: None)
    base = {"WeightTransferEngine": StubTransferEngine, "WeightTransferInitInfo": object}
    modules = {
        "vllm": {"__version__": version, "__file__": None},
        "vllm.v1.core.sched.scheduler": {"Scheduler": StubScheduler},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": StubAsyncScheduler},
        "vllm.v1.engine": engine,
        "vllm.v1.engine.core": {"EngineCoreProc": core},
        "vllm.v1.request": {"RequestStatus": SimpleNamespace(FINISHED_ABORTED="aborted")},
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": factory},
        "vllm.distributed.weight_transfer.base": {**base, "WeightTransferUpdateInfo": object},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        patch.setitem(sys.modules, name, module)
    for name in MODULES:
        patch.delitem(sys.modules, f"rose.vllm.{name}", raising=False)
    loaded = {name: importlib.import_module(f"rose.vllm.{name}") for name in MODULES}
    for name in MODULES:  # to be removed with the stubs
        module = sys.modules.pop(f"rose.vllm.{name}")
        patch.setitem(sys.modules, f"rose.vllm.{name}", module)
    return loaded | {"EngineCoreProc": core}
