"""The keys a DeepSpeed JSON may hold: known, ours, refused with a reason, and the nearest valid one to a typo.

DeepSpeed ignores an unknown top-level key without a word, so every key is checked here first. A test holds these
tables against the installed DeepSpeed.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

OUR_BLOCKS = ("parallel", "arguments")

PARALLEL_KEYS = (
    *("tp", "ep", "strategy", "cuda_graph", "experts_backend"),
    *("overlap", "overlap_chunks", "regather", "token_dtype", "combine_dtype", "resident_experts"),
)

# Passed on to DeepSpeed, some of them checked or filled in on the way.
PASSED_KEYS = (
    *("aio", "bf16", "checkpoint", "comet", "comms_logger", "communication_data_type", "csv_monitor", "data_types"),
    *("disable_allgather", "disable_python_gc", "dump_state", "flops_profiler", "fp16"),
    *("gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping", "gradient_predivide_factor"),
    *("log_level", "managed_gradient_accumulation", "memory_breakdown", "prescale_gradients"),
    *("seq_parallel_communication_data_type", "steps_per_print", "tensorboard", "timers", "torch_autocast"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "vocabulary_size", "wall_clock_breakdown", "wandb"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization"),
)

# Read here and removed: the optimizer and the schedule are built by us.
MERGED_KEYS = ("optimizer", "scheduler")

# DeepSpeed knows these, but they clash with what this project does itself. Allowed where they are switched off.
REFUSED_BLOCKS = {
    "activation_checkpointing": "it configures DeepSpeed's own checkpointing, which no model here calls; use "
    "--gradient_checkpointing",
    "autotuning": "it starts other processes with other layouts",
    "bfloat16": 'the old name of "bf16"; use that',
    "compile": "its passes rewrite the collectives inside a block",
    "data_efficiency": "batches come from our own loader",
    "dataloader_drop_last": "batches come from our own loader",
    "datastates_ckpt": "checkpoints are committed by our own protocol",
    "expert_parallel": 'experts are split by "parallel": {"ep": ...}',
    "hybrid_engine": "it replaces the model's layers",
    "pipeline": "there is no pipeline parallelism; layers are not split over ranks",
    "sequence_parallel_size": 'tokens are always shared by the ranks of a group; use "parallel": {"tp": ...}',
    "data_parallel_size": 'the rest of the ranks after "parallel": {"tp": ...}',
    "tensor_parallel": 'the model is split by "parallel": {"tp": ...}',
    "use_data_before_expert_parallelism": "it orders DeepSpeed's MoE groups, and there are none",
    "weight_quantization": "quantised weights cannot be trained here",
}

# Blocks that DeepSpeed 0.19 itself no longer has.
REMOVED_BLOCKS = (
    *("amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting", "nebula"),
    *("progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients"),
)

NESTED_KEYS: Mapping[str, tuple[str, ...]] = {
    "parallel": PARALLEL_KEYS,
    "bf16": (
        *("enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads"),
        "bf16_optimizer_states",
    ),
    "fp16": (
        *("enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"),
        *("consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads"),
    ),
    "zero_optimization": (
        *("stage", "allgather_bucket_size", "allgather_partitions", "compute_grad_norm", "contiguous_gradients"),
        *("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "elastic_checkpoint"),
        *("enable_sanity_checks", "ignore_unused_parameters", "leaf_module", "legacy_stage1"),
        *("load_from_fp32_weights", "log_trace_cache_warnings", "memory_efficient_linear", "offload_optimizer"),
        *("offload_param", "overlap_comm", "override_module_apply", "parameter_alignment"),
        *("pipeline_loading_checkpoint", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients"),
        *("save_muon_momentum_buffer_in_memory", "stage3_allgather_sequential"),
        *("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
        *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_model_persistence_threshold"),
        *("stage3_module_granularity_threshold", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size"),
        *("stage3_use_all_reduce_for_fetch_params", "sub_group_size", "use_multi_rank_bucket_allreduce", "zenflow"),
        *("zero_hpz_partition_size", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"),
        "zero_quantized_weights",
    ),
    "data_types": ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"),
    "checkpoint": (
        *("tag_validation", "load_universal", "use_node_local_storage", "parallel_write", "writer"),
        "checkpoint_serialization",
    ),
    "optimizer": ("type", "params"),
    "optimizer.params": ("lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode"),
    "scheduler": ("type", "params"),
    "scheduler.params": (
        *("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps", "warmup_min_ratio"),
        "cos_min_ratio",
    ),
}

# Numbers of parameters, or of bytes.
ZERO_SIZES = (
    *("allgather_bucket_size", "reduce_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_param_persistence_threshold"),
    "stage3_model_persistence_threshold",
)

_OFFLOAD = "the optimizer is torch's on the device of the weights; offloading is not available in this version"
_QUANTIZED = "quantised or two-level collectives are not tested with sharded experts"

# Values that would break what the trainer relies on: path, the values that hold, the reason.
FIXED_VALUES: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("zero_allow_untested_optimizer", (True,), "the optimizer is built here and handed to DeepSpeed"),
    ("zero_force_ds_cpu_optimizer", (False,), "the optimizer is built here and handed to DeepSpeed"),
    ("gradient_allreduce_op", ("mean",), "losses are scaled for an average over dp"),
    ("gradient_predivide_factor", (1, 1.0), "losses are scaled for an average over dp"),
    ("prescale_gradients", (False,), "losses are scaled for an average over dp"),
    ("managed_gradient_accumulation", (True,), "DeepSpeed counts the micro-batches of a step"),
    ("communication_data_type", ("fp32",), "sums of gradients in fewer bits lose 0.8 % at 64 accumulations"),
    ("data_types.grad_accum_dtype", ("fp32",), "sums of gradients in fewer bits lose 0.8 % at 64 accumulations"),
    ("data_types.param_dtype", (), "the precision follows bf16.enabled"),
    ("data_types.buffer_dtype", (), "the precision follows bf16.enabled"),
    ("bf16.bf16_master_weights_and_grads", (False,), "small updates vanish in bfloat16 master weights"),
    ("bf16.bf16_optimizer_states", (False,), "small updates vanish in bfloat16 optimizer states"),
    ("checkpoint.load_universal", (False,), "checkpoints are loaded by our own code"),
    ("checkpoint.use_node_local_storage", (False,), "the commit protocol needs one folder that all ranks see"),
    ("checkpoint.writer", (), "checkpoints are committed by our own protocol, when all of their files are written"),
    ("optimizer.type", ("AdamW", "Adam"), "the optimizer is AdamW, also where the block is left out"),
    ("optimizer.params.adam_w_mode", (True,), "the weight decay is decoupled"),
    ("scheduler.params.warmup_min_lr", (0, "auto"), "the warm-up is linear from 0"),
    ("scheduler.params.warmup_min_ratio", (0, "auto"), "the warm-up is linear from 0"),
    ("scheduler.params.warmup_type", ("linear",), "the warm-up is linear from 0"),
    ("torch_autocast.enabled", (False,), 'it would cast the float32 router; use "bf16"'),
    ("zero_optimization.cpu_offload", (False,), _OFFLOAD),
    ("zero_optimization.cpu_offload_param", (False,), _OFFLOAD),
    ("zero_optimization.offload_optimizer.device", ("none",), _OFFLOAD),
    ("zero_optimization.offload_param.device", ("none",), _OFFLOAD),
    ("zero_optimization.zenflow", (), _OFFLOAD),
    ("zero_optimization.legacy_stage1", (False,), "DeepSpeed has it no more"),
    ("zero_optimization.compute_grad_norm", (True,), "every step's gradient norm is logged"),
    ("zero_optimization.stage3_module_granularity_threshold", (0,), "blocks are fetched as one already"),
    ("zero_optimization.zero_hpz_partition_size", (1,), _QUANTIZED),
    ("zero_optimization.zero_quantized_gradients", (False,), _QUANTIZED),
    ("zero_optimization.zero_quantized_weights", (False,), _QUANTIZED),
    ("zero_optimization.zero_quantized_nontrainable_weights", (False,), _QUANTIZED),
)


def look_up(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None where it or a block on the way is absent."""
    node: Any = config
    for key in path.split("."):
        if not isinstance(node, Mapping) or key not in node:
            return None
        node = node[key]
    return node


def unknown_keys(deepspeed_json: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, fault with the nearest valid key) for every key that nobody reads."""
    top = (*PASSED_KEYS, *MERGED_KEYS, *OUR_BLOCKS)
    for key in deepspeed_json:
        if key not in top and key not in REFUSED_BLOCKS and key not in REMOVED_BLOCKS:
            yield key, f'unknown key "{key}"' + _nearest(key, top)
    for path, known in NESTED_KEYS.items():
        block = look_up(deepspeed_json, path)
        for key in block if isinstance(block, Mapping) else ():
            if key not in known:
                yield f"{path}.{key}", f'unknown key "{path}.{key}"' + _nearest(key, known)


def refused_keys(deepspeed_json: Mapping[str, Any]) -> Iterator[str]:
    """Yield blocks and values that cannot hold here, each with its reason."""
    for key, value in deepspeed_json.items():
        if key in REMOVED_BLOCKS:
            yield f'"{key}" was removed from DeepSpeed; leave it out'
        elif key in REFUSED_BLOCKS and not _is_off(value):
            yield f'"{key}" cannot be used: {REFUSED_BLOCKS[key]}'
    for path, allowed, reason in FIXED_VALUES:
        value = look_up(deepspeed_json, path)
        if value is not None and value not in allowed:
            instead = f"must be {allowed[0]!r}" if allowed else "must be left out"
            yield f'"{path}": {value!r} cannot be used: it {instead}, since {reason}'


def size_faults(deepspeed_json: Mapping[str, Any]) -> Iterator[str]:
    """Yield sizes of ZeRO that are no whole numbers, such as those that are written as text."""
    block = look_up(deepspeed_json, "zero_optimization")
    for key in ZERO_SIZES if isinstance(block, Mapping) else ():
        value = block.get(key)
        if value is None or value == "auto":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            yield f'"zero_optimization.{key}": {value!r} must be a whole number, as 500000000 or 5e8 without quotes'


def shape_faults(deepspeed_json: Mapping[str, Any]) -> Iterator[str]:
    """Yield blocks that are not objects."""
    for path in (*NESTED_KEYS, "arguments"):
        block = look_up(deepspeed_json, path)
        if block is not None and not isinstance(block, Mapping):
            yield f'"{path}" must be an object of keys and values, got {block!r}'


def auto_paths(node: Any, *, path: str = "") -> Iterator[str]:
    """Yield the dotted path of every value that is still "auto"."""
    if node == "auto":
        yield path
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from auto_paths(value, path=f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from auto_paths(value, path=f"{path}[{index}]")


def _is_off(value: Any) -> bool:
    return value in (None, False) or (isinstance(value, Mapping) and value.get("enabled") is False)


def _nearest(key: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f'; did you mean "{near[0]}"?' if near else f"; valid here: {', '.join(sorted(known))}"
