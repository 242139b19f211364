"""Training speeds that others published, each with a description of the system that reached it.

A system's habits are stated once, each with where that is said; a point adds only the sizes that were published with
it. Routing is forced to be even.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from recipe.plan.zero3 import Thresholds
from recipe.settings.presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class System:
    """How a system does what the sizes leave open; `sources` says where each of these is from.

    fused            memory-bound work in one kernel each, reading its inputs and writing its result once
    exchange         of tokens: "per rank" sends a row to every rank with one of its experts, "per node" once to a node
    tensor_parallel  "sequence": tokens gathered and sums scattered; "all_reduce": sums to all, and each routed row
                     gathered again behind its expert
    zero             1: each rank keeps a part of the optimizer's state; 3: of everything, gathered per micro-batch
    gradient_bytes   of a number, as gradients are summed over the ranks
    sums             "reduce_scatter", or "all_reduce" where every rank gets all sums
    overlap          "none"; "step": sums beside the last micro-batch's backward, weights beside the next forward;
                     "block": weights of the next block, as far as `ahead`, and sums of the last one, beside a block
    ahead            numbers of the next block's weights that are gathered before it is needed
    """

    name: str
    fused: bool
    exchange: str
    tensor_parallel: str
    zero: int
    gradient_bytes: int
    sums: str
    overlap: str
    sources: Mapping[str, str]
    ahead: float = inf


@dataclass(frozen=True, kw_only=True)
class Description:
    """A training step of another system.

    tp, ep, pp    separate; ep ranks share the experts, the ranks of a tensor-parallel group among them
    accumulation  micro-batches per step and data-parallel rank, of `num_sequences` each
    """

    system: System
    model: Mapping[str, Any]
    gpu: str
    num_gpus: int
    num_sequences: int
    block_size: int
    accumulation: int
    tp: int = 1
    ep: int = 1
    pp: int = 1


class Published(NamedTuple):
    """A point: `unit` is "tokens/s/GPU" or "MFU" (0 to 1). `missing`: what the model does not know of the system."""

    name: str
    unit: str
    value: float
    description: Description
    missing: str


_BRIDGE_RECIPE = "Megatron Bridge, recipe qwen3_30b_a3b_pretrain_16gpu_h100_bf16"
BRIDGE = System(
    name="Megatron Bridge",
    fused=True,
    exchange="per node",
    tensor_parallel="sequence",
    zero=1,
    gradient_bytes=2,
    sums="reduce_scatter",
    overlap="step",
    sources={
        "fused": f"{_BRIDGE_RECIPE}: bias_activation_fusion, apply_rope_fusion, moe_router_fusion",
        "exchange": f"{_BRIDGE_RECIPE}: HybridEP",
        "tensor_parallel": "Megatron-LM, docs of sequence parallelism",
        "zero": f"{_BRIDGE_RECIPE}: use_distributed_optimizer",
        "gradient_bytes": f"{_BRIDGE_RECIPE}: grad_reduce_in_fp32 = False",
        "sums": "Megatron-LM, docs of the distributed optimizer",
        "overlap": f"{_BRIDGE_RECIPE}: overlap_grad_reduce, overlap_param_gather",
    },
)
_FOLDING = "MoE Parallel Folding (2504.14960)"
MEGATRON = System(
    name="Megatron-Core",
    fused=True,
    exchange="per rank",
    tensor_parallel="sequence",
    zero=1,
    gradient_bytes=4,
    sums="reduce_scatter",
    overlap="step",
    sources={
        "fused": "assumed: Megatron-Core has such kernels, and NVIDIA's recipes use them",
        "exchange": f"{_FOLDING}: all-to-all dispatcher",
        "tensor_parallel": "Megatron-LM, docs of sequence parallelism",
        "zero": f"{_FOLDING}: distributed optimizer",
        "gradient_bytes": "Megatron-LM's default with bf16: accumulate_allreduce_grads_in_fp32",
        "sums": "Megatron-LM, docs of the distributed optimizer",
        "overlap": "assumed: overlap_grad_reduce and overlap_param_gather, as in NVIDIA's recipes",
    },
)
FSDP = System(
    name="FSDP",
    fused=True,
    exchange="per rank",
    tensor_parallel="sequence",
    zero=3,
    gradient_bytes=4,
    sums="reduce_scatter",
    overlap="block",
    sources={
        "fused": "assumed as in Megatron-Core, whose model it is held against",
        "exchange": f"{_FOLDING}: all-to-all",
        "tensor_parallel": "none",
        "zero": "FSDP (2304.11277), full sharding",
        "gradient_bytes": "assumed as in Megatron-Core",
        "sums": "FSDP (2304.11277), section 3.2",
        "overlap": "FSDP (2304.11277), section 3.3: the next unit's weights are gathered beside the current one's work",
    },
)
_PR = "DeepSpeed pull request 8064"
_EAGER = {
    "fused": "PyTorch's operators one by one, as transformers' models are written",
    "exchange": "DeepSpeed 0.19.8, auto_ep_layer.py: rows to every rank by all_to_all_single",
    "tensor_parallel": "DeepSpeed 0.19.8, layers.py (LinearAllreduce) and ep_tp_dispatch.py (restore_combined)",
    "zero": f"{_PR}, the row's own name",
    "gradient_bytes": "DeepSpeed 0.19.8, engine.py: in bf16 gradients travel in bf16 unless the JSON says otherwise",
}
DEEPSPEED_1 = System(
    name="DeepSpeed ZeRO-1",
    fused=False,
    exchange="per rank",
    tensor_parallel="all_reduce",
    zero=1,
    gradient_bytes=2,
    sums="all_reduce",
    overlap="none",
    sources={
        **_EAGER,
        "sums": "DeepSpeed 0.19.8, stage_1_and_2.py: buckets of gradients are all-reduced",
        "overlap": "DeepSpeed 0.19.8, zero/config.py: overlap_comm is false below stage 3",
    },
)
DEEPSPEED_3 = System(
    name="DeepSpeed ZeRO-3",
    fused=False,
    exchange="per rank",
    tensor_parallel="all_reduce",
    zero=3,
    gradient_bytes=2,
    sums="reduce_scatter",
    overlap="block",
    ahead=Thresholds.of({}).prefetch,
    sources={
        **_EAGER,
        "sums": "DeepSpeed 0.19.8, stage3.py",
        "overlap": "DeepSpeed 0.19.8, zero/config.py: overlap_comm is true in stage 3",
        "ahead": "DeepSpeed 0.19.8: stage3_prefetch_bucket_size",
    },
)


def published_points() -> tuple[Published, ...]:
    """A point's own description holds what was published of it, and nothing that is fitted."""
    qwen, mixtral = PRESETS["qwen3-30b-a3b"], PRESETS["mixtral-8x22b"]
    # Its layers with linear attention are priced as attention, whose scores are few at this length.
    cut: dict[str, Any] = {
        **qwen,
        "vocab_size": 248320,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 256,
        "moe_intermediate_size": 512,
    }
    # 65,536 tokens a step in 64 sequences; two at once where two ranks share them.
    benchmark: dict[str, Any] = {"model": cut, "gpu": "h100", "num_gpus": 16, "block_size": 1024, "accumulation": 4}
    large: dict[str, Any] = {"model": mixtral, "gpu": "h100", "num_gpus": 128, "num_sequences": 1, "block_size": 4096}
    # transformers' own layer with linear attention runs 213 operators forward and 624 backward at this length.
    lacks = "the host: some 840 operators of a layer with linear attention, waits for counts, hooks; the shared expert"
    return (
        Published(
            "Megatron Bridge, Qwen3-30B, 16 H100, EP16",
            "tokens/s/GPU",
            13_010,
            Description(
                system=BRIDGE,
                model=qwen,
                gpu="h100",
                num_gpus=16,
                num_sequences=1,
                block_size=4096,
                accumulation=64,
                ep=16,
            ),
            "kernels that exchange and permute at once",
        ),
        Published(
            "Megatron-Core, Mixtral 8x22B, 128 H100, TP2 EP8 PP8",
            "MFU",
            0.493,
            Description(system=MEGATRON, **large, accumulation=32, tp=2, ep=8, pp=8),
            "interleaved stages, of which nothing is published",
        ),
        Published(
            "the same, FSDP and EP8",
            "MFU",
            0.234,
            Description(system=FSDP, **large, accumulation=2, ep=8),
            "recomputation, memory at its limit",
        ),
        Published(
            "the same, FSDP",
            "MFU",
            0.043,
            Description(system=FSDP, **large, accumulation=2),
            "recomputation, memory at its limit",
        ),
        Published(
            "DeepSpeed ZeRO-1, Qwen3.6-35B cut to 20 layers, EP8",
            "tokens/s/GPU",
            3_588,
            Description(system=DEEPSPEED_1, **benchmark, num_sequences=1, ep=8),
            lacks,
        ),
        Published(
            "the same, TP2 EP8",
            "tokens/s/GPU",
            2_092,
            Description(system=DEEPSPEED_1, **benchmark, num_sequences=2, tp=2, ep=8),
            f"{lacks}; gradients summed over tensor-parallel ranks one by one",
        ),
        Published(
            "the same, ZeRO-3",
            "tokens/s/GPU",
            1_746,
            Description(system=DEEPSPEED_3, **benchmark, num_sequences=1),
            lacks,
        ),
    )
