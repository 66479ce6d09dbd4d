"""Checks at start-up of vLLM's version, names and scheduling: most of what the schedulers use is not public.

`PRIVATE_NAMES` lists every name of vLLM that this package uses and vLLM does not document, by module. Names are looked
up in vLLM's source without running it, so one check serves the installed version and any unpacked release: a name that
has moved is named at start-up, and by a test over all supported versions, instead of failing in the middle of a step.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from rose.errors import ConfigError

SUPPORTED = ("0.32", "0.33")
WRITTEN_FOR = ", ".join(f"{version}.x" for version in SUPPORTED)

# `Class.name` is a method, field or attribute of a class of the module; other names are the module's own.
PRIVATE_NAMES = {
    "config/parallel.py": (
        "ParallelConfig.data_parallel_index",
        "ParallelConfig.data_parallel_size",
        "ParallelConfig.pipeline_parallel_size",
    ),
    "v1/core/block_pool.py": (
        "BlockPool.num_gpu_blocks",
        "BlockPool.blocks",
        "BlockPool.free_block_queue",
        "BlockPool.get_num_free_blocks",
        "BlockPool.free_blocks",
        "BlockPool.get_usage",
        "BlockPool.move_block_hashes",
        "BlockPool._maybe_evict_cached_block",
    ),
    "v1/core/kv_cache_manager.py": (
        "KVCacheManager.block_pool",
        "KVCacheManager.allocate_slots",
        "KVCacheManager.get_block_ids",
    ),
    "v1/core/kv_cache_utils.py": (
        "KVCacheBlock.block_id",
        "KVCacheBlock.ref_cnt",
        "KVCacheBlock.block_hash",
        "KVCacheBlock.is_null",
        "KVCacheBlock.next_free_block",
        "FreeKVCacheBlockQueue.fake_free_list_head",
        "FreeKVCacheBlockQueue.remove",
        "FreeKVCacheBlockQueue.append",
    ),
    "v1/core/sched/async_scheduler.py": ("AsyncScheduler",),
    "v1/core/sched/scheduler.py": (
        "Scheduler.add_request",
        "Scheduler.finish_requests",
        "Scheduler.schedule",
        "Scheduler.update_from_output",
        "Scheduler.has_requests",
        "Scheduler.reset_prefix_cache",
        "Scheduler.shutdown",
        "Scheduler._preempt_request",
        "Scheduler.block_size",
        "Scheduler.finished_req_ids",
        "Scheduler.kv_cache_config",
        "Scheduler.kv_cache_manager",
        "Scheduler.kv_holding_waiting",
        "Scheduler.max_model_len",
        "Scheduler.max_num_active_reqs",
        "Scheduler.max_num_running_reqs",
        "Scheduler.max_num_scheduled_tokens",
        "Scheduler.prev_step_scheduled_req_ids",
        "Scheduler.requests",
        "Scheduler.running",
        "Scheduler.scheduler_config",
        "Scheduler.vllm_config",
        "Scheduler.waiting",
    ),
    "v1/core/sched/output.py": (
        "SchedulerOutput.num_scheduled_tokens",
        "SchedulerOutput.scheduled_new_reqs",
        "SchedulerOutput.preempted_req_ids",
        "NewRequestData.req_id",
        "NewRequestData.num_computed_tokens",
    ),
    "v1/engine/__init__.py": (
        "EngineCoreOutput.request_id",
        "EngineCoreOutput.new_token_ids",
        "EngineCoreOutput.finish_reason",
        "EngineCoreOutputs.outputs",
        "EngineCoreRequestType.WAKEUP",
        "FinishReason.ABORT",
    ),
    "v1/engine/core.py": (
        "get_kv_cache_configs",
        "EngineCore.get_weight_version",
        "EngineCore.model_executor",
        "EngineCore.scheduler",
        "EngineCoreProc._process_input_queue",
        "EngineCoreProc.input_queue",
    ),
    "v1/executor/abstract.py": ("Executor.collective_rpc",),
    "v1/kv_cache_interface.py": (
        "KVCacheConfig.num_blocks",
        "KVCacheConfig.kv_cache_tensors",
        "KVCacheTensor.size",
        "KVCacheTensor.layers",
        "KVCacheTensor.layer_stride",
        "KVCacheTensor.block_stride",
        "KVCacheTensor.offset",
        "KVCacheTensor.host_resident",
    ),
    "v1/request.py": (
        "Request.request_id",
        "Request._all_token_ids",
        "Request._output_token_ids",
        "Request.arrival_time",
        "Request.block_hashes",
        "Request.cache_salt",
        "Request.client_index",
        "Request.max_tokens",
        "Request.num_computed_tokens",
        "Request.num_preemptions",
        "Request.num_prompt_tokens",
        "Request.status",
        "Request.update_block_hashes",
        "RequestStatus.FINISHED_ABORTED",
        "RequestStatus.RUNNING",
    ),
    "v1/worker/utils.py": ("allocate_kv_cache", "torch"),
    "v1/worker/gpu_model_runner.py": ("allocate_kv_cache", "GPUModelRunner.kv_caches"),
    "v1/worker/gpu/attn_utils.py": ("allocate_kv_cache",),
    "distributed/device_communicators/cpu_communicator.py": ("CpuCommunicator._all_group_ranks_share_shm_group_name",),
    "distributed/device_communicators/shm_broadcast.py": ("SpinCondition.record_read",),
    "model_executor/layers/utils.py": ("dispatch_cpu_unquantized_gemm", "torch"),
    "distributed/weight_transfer/factory.py": (
        "WeightTransferEngineFactory._registry",
        "WeightTransferEngineFactory.register_engine",
    ),
    "distributed/weight_transfer/base.py": (
        "WeightTransferEngine.parse_update_info",
        "WeightTransferInitInfo",
        "WeightTransferUpdateInfo",
    ),
}


def check_version(version: str) -> None:
    """Raise ConfigError for a vLLM that these schedulers were not written for."""
    if not any(version == known or version.startswith(f"{known}.") for known in SUPPORTED):
        raise ConfigError(
            f"vLLM {version} is installed, and ROSE's schedulers are written for {WRITTEN_FOR}",
            hint=f'install a supported one: pip install "vllm=={SUPPORTED[0]}.*"; or serve without --scheduler-cls',
        )


def check_names(package: Path) -> None:
    """Raise ConfigError if vLLM's package in this folder lacks a name that this one uses."""
    missing = missing_names(package)
    if missing:
        raise ConfigError(
            f"this vLLM has no {', '.join(missing[:3])}{' ...' if missing[3:] else ''}, which ROSE's schedulers use",
            hint="install an unchanged vLLM of a supported version, or serve without --scheduler-cls",
        )


def missing_names(package: Path) -> list[str]:
    """Return the private names, with their modules, that the vLLM in this folder does not have."""
    missing = []
    for module, names in PRIVATE_NAMES.items():
        try:
            found = _names_of(ast.parse((package / module).read_text()))
        except (OSError, SyntaxError, UnicodeDecodeError):
            found = set()
        missing += [f"{module}: {name}" for name in names if name not in found]
    return missing


def _names_of(tree: ast.Module) -> set[str]:
    """Return the names of a module, and those of its classes with the class before them."""
    names = set(_bound_names(tree.body))
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            members = {*_bound_names(node.body), *_own_attributes(node)}
            names |= {f"{node.name}.{member}" for member in members}
    return names


def _bound_names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _own_attributes(node: ast.ClassDef) -> Iterator[str]:
    """Yield the attributes that methods of a class assign to `self`."""
    for child in ast.walk(node):
        match child:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def check_scheduling(name: str, *, is_async: bool, wants_async: bool) -> None:
    """Raise ConfigError if a scheduler is used under the other kind of scheduling; names the right one."""
    if is_async == wants_async:
        return
    right = f"Async{name}" if wants_async else name.removeprefix("Async")
    kind = "asynchronous" if wants_async else "synchronous"
    raise ConfigError(
        f"vLLM's scheduling is {kind} here, and {name} is for the other kind",
        hint=f"use --scheduler-cls rose.vllm.{right}",
    )


def check_chunked(is_chunked: bool) -> None:
    """Raise ConfigError without chunked prefill: a prompt longer than a grant would never start."""
    if not is_chunked:
        raise ConfigError(
            "the rollout engine runs without chunked prefill, so a prompt longer than a grant would never start",
            hint="remove --no-enable-chunked-prefill",
        )
