"""Training speeds that others published, each with a description of the system that reached it.

A system's habits are stated once; a point adds only the sizes that were published with it. Points are of two kinds: by
`FITTED` ones the numbers of recipe/plan/hardware.py and of the systems were chosen, the others judge them. Dense rows
of llm-foundry take turns, in the order in which they were published.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from recipe.plan.hardware import AttentionShare
from recipe.settings.presets import PRESETS

FITTED, HELD_OUT = "fitted", "held out"
# Single layers; dense steps; steps of mixtures, by systems that work as this project does, partly so, or otherwise.
LAYERS, DENSE, LIKE_OURS, OTHERS = "layers", "dense", "mixtures like ours", "other mixtures"


@dataclass(frozen=True, kw_only=True)
class System:
    """How a system does what the sizes leave open; `source` says where that is from.

    moves           bytes that memory-bound work moves, over those of one kernel that reads and writes each number once
    logit_bytes     of the loss, per logit
    attention       a kernel by its name in the hardware's table, or the shares of the peak that its kernel reaches
    exchange        of tokens: "rows" sends one to every expert, "once" to every rank with one of its experts, "nodes"
                    to a node once and on from there
    exchange_hides  share of an exchange that costs nothing, being beside work
    tensor_parallel "sequence": tokens gathered and sums scattered; "all_reduce": sums to all, and each routed row
                    gathered again behind its expert
    zero            0: nothing is sharded; 1: the optimizer's state; 2: gradients, too; 3: everything
    gradient_bytes  of a number, as gradients are summed over the ranks
    sums            "reduce_scatter", or "all_reduce" where every rank gets all sums
    bucket_bytes    of gradients that are summed in one call
    overlap         "none"; "step": sums beside the last micro-batch's backward, weights beside the next forward;
                    "block": weights of the next block and sums of the last one beside a block
    host_s          of the host for a layer and micro-batch, forward and backward
    """

    name: str
    source: str
    moves: float = 1.0
    logit_bytes: float = 8.0
    attention: str | AttentionShare = "flash_attention_3"
    exchange: str = "rows"
    exchange_hides: float = 0.0
    tensor_parallel: str = "sequence"
    zero: int = 1
    gradient_bytes: int = 4
    sums: str = "reduce_scatter"
    bucket_bytes: float = 2.0**27
    overlap: str = "step"
    host_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Description:
    """A training step of another system.

    tp, ep, pp    separate; ep ranks share the experts, the ranks of a tensor-parallel group among them
    vp            parts of a model that a pipeline's stage has
    accumulation  micro-batches per step and data-parallel rank, of `num_sequences` each
    shared_width  of an expert that every token visits
    choices       experts that a token chooses from, of whole groups; 0: all
    rho           the busiest rank's rows over the mean
    """

    system: System
    model: Mapping[str, Any]
    gpu: str = "h100"
    num_gpus: int
    num_sequences: int = 1
    block_size: int = 4096
    accumulation: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    vp: int = 1
    recompute: bool = False
    shared_width: int = 0
    choices: int = 0
    rho: float = 1.0


class Published(NamedTuple):
    """A point: `unit` is "tokens/s/GPU", or "ms forward" or "ms backward" of a layer's experts.

    use      FITTED or HELD_OUT
    missing  what the model does not know of the system
    """

    name: str
    kind: str
    unit: str
    value: float
    description: Description
    use: str
    missing: str = ""


def _dense(layers: int, hidden: int, heads: int, kv_heads: int, width: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        **PRESETS["mixtral-8x7b"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": width,
        "moe_intermediate_size": width,
        "vocab_size": vocab,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "max_position_embeddings": 65536,
        **more,
    }


# Three matrices instead of two 4 d wide: as many products and numbers in between.
_MPT = {
    name: _dense(layers, hidden, hidden // 128, hidden // 128, round(8 * hidden / 3), 50368, tie_word_embeddings=True)
    for name, layers, hidden in (
        *(("1.3B", 24, 2048), ("2.7B", 32, 2560), ("6.7B", 32, 4096)),
        *(("12.9B", 40, 5120), ("30B", 48, 7168), ("65B", 80, 8192)),
    )
}
_FOUNDRY = System(
    name="llm-foundry",
    source="mosaicml/llm-foundry, scripts/train/benchmarking/README.md: torch 2.1, FSDP, float32 sums, FlashAttention",
    moves=2.3,
    logit_bytes=28,
    attention=AttentionShare(0.204, 0.165),
    zero=3,
    overlap="block",
)
_FOUNDRY_A100 = replace(_FOUNDRY, attention=AttentionShare(0.368, 0.298))


def _foundry() -> Iterator[Published]:
    text = (Path(__file__).parent / "published_dense.csv").read_text()
    for number, row in enumerate(csv.DictReader(text.splitlines())):
        length, gpus, at_once, times = (int(row[key]) for key in ("seq_len", "gpus", "micro_batch", "accumulation"))
        system = _FOUNDRY if row["gpu"] == "h100" else _FOUNDRY_A100
        yield Published(
            f"llm-foundry {row['model']}, {gpus} {row['gpu'].upper()[:4]}, s {length}, {at_once} x {times}"
            + ", recomputed" * (row["recompute"] == "yes"),
            DENSE,
            "tokens/s/GPU",
            float(row["tokens_per_s_per_gpu"]),
            Description(
                system=replace(system, zero=int(row["zero"])),
                model=_MPT[row["model"]],
                gpu=row["gpu"],
                num_gpus=gpus,
                num_sequences=at_once,
                block_size=length,
                accumulation=times,
                recompute=row["recompute"] == "yes",
            ),
            HELD_OUT if number % 2 else FITTED,
        )


_NANOTRON = System(
    name="nanotron",
    source="The Ultra-Scale Playbook (nanotron): H100, float32 sums in buckets of 25 MB, its own network's collectives",
    moves=3.5,
    logit_bytes=28,
    attention="usual",
    zero=0,
    sums="all_reduce",
    bucket_bytes=25e6,
    host_s=4.5e-3,
)
_PLAYBOOK = {
    "1B": _dense(16, 2048, 16, 16, 8192, 131072),
    "3B": _dense(28, 3072, 24, 24, 8192, 131072),
    "8B": _dense(32, 4096, 32, 32, 14336, 131072),
}


def _playbook() -> Iterator[Published]:
    """Steps of 256 sequences of 4,096."""
    for model, gpus, tp, at_once, times, stage, value, use in (
        ("1B", 8, 1, 2, 16, 0, 40_150, FITTED),
        ("1B", 8, 8, 16, 16, 0, 28_101, FITTED),
        ("1B", 8, 8, 1, 256, 0, 6_907, FITTED),
        ("3B", 8, 2, 2, 32, 1, 14_532, FITTED),
        ("3B", 8, 4, 8, 16, 0, 13_367, FITTED),
        ("8B", 8, 2, 1, 64, 1, 7_141, FITTED),
        ("8B", 8, 8, 8, 32, 0, 5_909, FITTED),
        ("3B", 32, 1, 2, 4, 1, 15_387, HELD_OUT),
        ("1B", 128, 2, 4, 1, 0, 30_186, HELD_OUT),
        ("8B", 128, 8, 8, 2, 0, 6_028, HELD_OUT),
    ):
        system = replace(_NANOTRON, zero=stage, sums="reduce_scatter" if stage else "all_reduce")
        yield Published(
            f"nanotron {model}, {gpus} H100, tp {tp}, ZeRO-{stage}, {at_once} x {times}",
            DENSE,
            "tokens/s/GPU",
            value,
            Description(
                system=system,
                model=_PLAYBOOK[model],
                num_gpus=gpus,
                num_sequences=at_once,
                accumulation=times,
                tp=tp,
            ),
            use,
        )


_BRIDGE = System(
    name="Megatron Bridge",
    source="NVIDIA-NeMo/Megatron-Bridge, recipes: fused kernels, cuDNN attention, distributed optimizer, both overlaps",
)
_MEGATRON = System(
    name="Megatron-LM",
    source="NVIDIA/Megatron-LM, tests/functional_tests, release configurations; MoE Parallel Folding (2504.14960)",
)
_TITAN = System(
    name="torchtitan",
    source="pytorch/torchtitan, benchmarks/: compiled, FSDP, SDPA (FlashAttention-2)",
    moves=1.2,
    attention="usual",
    zero=3,
    overlap="block",
)


def _other_dense() -> Iterator[Published]:
    qwen = _dense(36, 4096, 32, 8, 12288, 151936)
    llama_8b, llama_70b = _dense(32, 4096, 32, 8, 14336, 128256), _dense(80, 8192, 64, 8, 28672, 128256)
    gpt = _dense(32, 6144, 48, 8, 16384, 256000)  # two matrices 24,576 wide
    shared = {"num_sequences": 4, "tp": 8, "num_gpus": 256, "accumulation": 3}
    long = {"block_size": 8192, "recompute": True}
    for name, value, use, what in (
        (
            "Megatron Bridge, Qwen3-8B, 16 H100",
            10_456,
            FITTED,
            Description(system=_BRIDGE, model=qwen, num_gpus=16, accumulation=64),
        ),
        ("Megatron-LM, 15.6B, 256 H100, tp 8", 4_282, HELD_OUT, Description(system=_MEGATRON, model=gpt, **shared)),
        (
            "the same, A100",
            1_812,
            HELD_OUT,
            Description(system=_MEGATRON, model=gpt, gpu="a100-80g", **shared),
        ),
        (
            "torchtitan, Llama3-70B, 256 H100 of 500 W, FSDP 32, tp 8",
            597,
            HELD_OUT,
            Description(system=_TITAN, model=llama_70b, num_gpus=256, num_sequences=16, tp=8, **long),
        ),
        (
            "torchtitan, Llama3-8B, 64 H100 of 500 W, FSDP 8, tp 8",
            4_378,
            HELD_OUT,
            Description(system=_TITAN, model=llama_8b, num_gpus=64, num_sequences=12, tp=8, **long),
        ),
        (
            "torchtitan, Llama3-8B, 8 H100 of 500 W, FSDP",
            6_667,
            HELD_OUT,
            Description(system=_TITAN, model=llama_8b, num_gpus=8, num_sequences=2, **long),
        ),
        (
            "Megatron Bridge, Qwen3-8B, 4 H100, tp 4, s 2048",
            2_207,
            HELD_OUT,
            Description(system=_BRIDGE, model=qwen, num_gpus=4, tp=4, block_size=2048, accumulation=32),
        ),
    ):
        missing = "devices of 500 W" if "500 W" in name else "its host: 6.4 ms a layer" if "4 H100" in name else ""
        yield Published(name, DENSE, "tokens/s/GPU", value, what, use, missing)


def _single_layers() -> Iterator[Published]:
    """One layer's experts, 4,096 tokens a rank, 8 H100, routing forced to be even."""
    mixtral = {**PRESETS["mixtral-8x7b"], "num_hidden_layers": 1}
    deepseek = {
        **mixtral,
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "intermediate_size": 2048,
        "num_experts": 32,
        "num_experts_per_tok": 8,
    }
    for model, kwargs, shared in (("Mixtral", mixtral, 0), ("DeepSeek", deepseek, 2048)):
        for way, exchange, values, use in (
            ("NCCL all-to-all", "rows", {"Mixtral": (4.33, 7.68), "DeepSeek": (7.12, 10.48)}, FITTED),
            ("DeepEP", "once", {"Mixtral": (4.64, 7.85)}, HELD_OUT),
            ("HybridEP", "once", {"Mixtral": (4.34, 7.74), "DeepSeek": (5.39, 8.80)}, FITTED),
        ):
            system = replace(_MEGATRON, source="Megatron-LM, moe_perf/baseline.json", exchange=exchange)
            choices = 16 if shared else 0  # four of eight groups, as DeepSeek-V3 has them
            what = Description(system=system, model=kwargs, num_gpus=8, ep=8, shared_width=shared, choices=choices)
            for unit, value in zip(("ms forward", "ms backward"), values.get(model, ()), strict=False):
                yield Published(f"a layer of {model}, EP 8 by {way}", LAYERS, unit, value, what, use)


_AUTOMODEL = System(
    name="NeMo AutoModel",
    source="NVIDIA-NeMo/Automodel, docs/performance-summary.mdx: FSDP, DeepEP, grouped products, transformer engine",
    exchange="once",
    zero=3,
    gradient_bytes=4,
    overlap="block",
)
_FOLDED_FSDP = replace(_MEGATRON, name="FSDP", zero=3, overlap="block")
_DEEPSPEED = System(
    name="DeepSpeed",
    source="DeepSpeed pull request 8064 (AutoEP): transformers' operators one by one, bf16 sums, overlap with ZeRO-3",
    moves=3.5,
    logit_bytes=28,
    attention="usual",
    tensor_parallel="all_reduce",
    gradient_bytes=2,
    sums="all_reduce",
    overlap="none",
    host_s=12e-3,
)
_OLMO = System(
    name="OLMo",
    source="OLMoE (2409.02060) and its configurations: FSDP by block, operators one by one, megablocks",
    moves=3.5,
    logit_bytes=28,
    attention="usual",
    zero=3,
    overlap="block",
)


def _mixtures() -> Iterator[Published]:
    qwen, mixtral, large = (PRESETS[name] for name in ("qwen3-30b-a3b", "mixtral-8x7b", "mixtral-8x22b"))
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
    oss: dict[str, Any] = {
        **qwen,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2880,
        "intermediate_size": 2880,
        "qk_norm": "none",
    }
    bridge = {"model": qwen, "num_gpus": 16, "accumulation": 64, "ep": 16}
    nccl, hybrid = replace(_BRIDGE, moves=1.5), replace(_BRIDGE, exchange="nodes")
    folding = {"model": large, "num_gpus": 128}
    benchmark: dict[str, Any] = {"model": cut, "num_gpus": 16, "block_size": 1024, "accumulation": 4}
    wide = {**mixtral, "vocab_size": 256000}
    yield from (
        Published(name, kind, "tokens/s/GPU", value, what, use, missing)
        for name, kind, value, what, use, missing in (
            (
                "Megatron Bridge, Qwen3-30B, 16 H100, EP16 by HybridEP",
                *(OTHERS, 10_607, Description(system=hybrid, **bridge), FITTED, ""),
            ),
            (
                "the same, overlapped",
                *(OTHERS, 13_011, Description(system=replace(hybrid, exchange_hides=0.5), **bridge), HELD_OUT),
                "how much of the exchange hides is assumed",
            ),
            ("the same, all-to-all", OTHERS, 6_355, Description(system=nccl, **bridge), FITTED, ""),
            (
                "the same, all-to-all, overlapped",
                *(OTHERS, 8_373, Description(system=replace(nccl, exchange_hides=0.5), **bridge), HELD_OUT),
                "how much of the exchange hides is assumed",
            ),
            (
                "AutoModel, Qwen3-30B, 8 H100, FSDP 8 EP 8",
                *(OTHERS, 12_040),
                Description(
                    system=_AUTOMODEL, model=qwen, num_gpus=8, ep=8, num_sequences=4, accumulation=16, recompute=True
                ),
                *(FITTED, ""),
            ),
            (
                "AutoModel, GPT-OSS-20B, 8 H100, EP 8",
                *(OTHERS, 13_058),
                Description(system=_AUTOMODEL, model=oss, num_gpus=8, ep=8, num_sequences=2, accumulation=16),
                *(HELD_OUT, "FlexAttention, windows"),
            ),
            (
                "Megatron-Core, Mixtral 8x22B, 128 H100, tp 2 EP 8 pp 8",
                *(OTHERS, 2_014),
                Description(system=_MEGATRON, **folding, accumulation=32, tp=2, ep=8, pp=8),
                *(FITTED, "interleaved stages, of which nothing is published"),
            ),
            (
                "the same, FSDP",
                *(LIKE_OURS, 176, Description(system=_FOLDED_FSDP, **folding, accumulation=2), HELD_OUT),
                "memory at its limit, recomputation",
            ),
            (
                "Megatron-LM, Mixtral 8x7B, 64 H100, tp 2 EP 8 pp 4 vp 8",
                *(OTHERS, 4_960),
                Description(
                    system=_MEGATRON, model=mixtral, num_gpus=64, tp=2, ep=8, pp=4, vp=8, accumulation=32, rho=1.3
                ),
                *(HELD_OUT, "the number of devices is inferred"),
            ),
            (
                "Megatron-LM, Mixtral 8x7B, 128 H100, tp 2 EP 4 pp 4",
                *(OTHERS, 3_657),
                Description(system=_MEGATRON, model=wide, num_gpus=128, tp=2, ep=4, pp=4, accumulation=64, rho=1.2),
                *(HELD_OUT, "the number of devices is inferred"),
            ),
            (
                "Megatron-LM, Mixtral 8x7B, 468 TFLOP/s",
                *(OTHERS, 5_872),
                Description(system=_MEGATRON, model=mixtral, num_gpus=64, ep=8, pp=4, accumulation=16),
                *(HELD_OUT, "its layout is assumed"),
            ),
            (
                "Megatron Bridge, Qwen3-235B, 256 H100, tp 2 EP 32 pp 8 vp 4",
                *(OTHERS, 2_132),
                Description(
                    system=replace(_BRIDGE, exchange_hides=0.6),
                    model=PRESETS["qwen3-235b-a22b"],
                    num_gpus=256,
                    tp=2,
                    ep=32,
                    pp=8,
                    vp=4,
                    accumulation=64,
                ),
                *(HELD_OUT, "how much of the exchange hides is assumed"),
            ),
            (
                "DeepSpeed ZeRO-1, Qwen3.6-35B cut to 20 layers, 16 H100, EP 8",
                *(LIKE_OURS, 3_588, Description(system=_DEEPSPEED, **benchmark, ep=8), FITTED, ""),
            ),
            (
                "the same, ZeRO-3",
                *(LIKE_OURS, 1_746),
                Description(system=replace(_DEEPSPEED, zero=3, sums="reduce_scatter", overlap="block"), **benchmark),
                *(HELD_OUT, "its hooks, fetches of single tensors"),
            ),
            (
                "OLMoE, FSDP",
                *(LIKE_OURS, 23_600),
                Description(system=_OLMO, model=PRESETS["olmoe"], num_gpus=256, num_sequences=4),
                *(HELD_OUT, "its batch per device"),
            ),
        )
    )


def published_points() -> tuple[Published, ...]:
    """A point's own description holds what was published of it, and nothing that is fitted."""
    return (*_single_layers(), *_foundry(), *_playbook(), *_other_dense(), *_mixtures())
