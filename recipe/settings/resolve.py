"""Resolves flags and a DeepSpeed JSON into one complete configuration, or lists everything that is wrong with them.

Nothing is left to be guessed later: no "auto" reaches DeepSpeed, and no key that nobody reads goes unnoticed.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from modeling.execution import Execution
from modeling.layout import ParallelLayout
from modeling.spec import ModelSizes
from recipe.settings.deepspeed_keys import (
    MERGED_KEYS,
    OUR_BLOCKS,
    REFUSED_BLOCKS,
    auto_paths,
    look_up,
    refused_keys,
    shape_faults,
    size_faults,
    unknown_keys,
)
from recipe.settings.flags import Arguments
from recipe.settings.parallel import Batch, GraphFacts, WorldInfo, settle_attention, settle_graphs, settle_layout
from recipe.settings.sources import Sources
from recipe.settings.training import (
    OptimizerOptions,
    ScheduleOptions,
    settle_optimizer,
    settle_precision,
    settle_schedule_options,
    settle_zero_stage,
)
from recipe.shared.flops import count_parameters

__all__ = ["OptimizerOptions", "ResolvedConfig", "WorldInfo", "resolve_config"]

# A step that no run reaches, for DeepSpeed's own progress line: ours replaces it.
NEVER_PRINT_STEPS = 1_000_000_000
# Numbers of a reduce bucket by DeepSpeed's default; ZeRO reserves room for all of them.
BUCKET_KEY = "reduce_bucket_size"
USUAL_BUCKET = 500_000_000


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """Everything a run needs to know before a model is built.

    engine         what `deepspeed.initialize` gets as `config`
    execution      how a step is executed: the rest of the "parallel" block
    num_sequences  B, sequences a group works on at once
    accumulation   micro-batches per optimizer step
    precision      "fp32" or "bf16"
    attention      the kernel's name, as the model takes it
    notes          what each "auto" became and what was chosen for the user, to be printed at the start
    """

    engine: dict[str, Any]
    layout: ParallelLayout
    execution: Execution
    optimizer: OptimizerOptions
    schedule: ScheduleOptions
    num_sequences: int
    accumulation: int
    block_size: int
    precision: str
    zero_stage: int
    attention: str
    notes: tuple[str, ...]

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimizer step over all groups: the global batch."""
        return self.num_sequences * self.accumulation * self.layout.dp


def resolve_config(
    arguments: Arguments,
    *,
    deepspeed_json: Mapping[str, Any],
    ranks: WorldInfo,
    sizes: ModelSizes,
    attention_dropout: float = 0.0,
    extra_faults: Sequence[str] = (),
    extra_notes: Sequence[str] = (),
) -> ResolvedConfig:
    """Find the one configuration that the flags and the JSON agree on for these ranks and this model.

    ValueError lists every unknown key, refused setting, conflict and broken rule at once, together with the
    `extra_faults` that the caller found elsewhere. `extra_notes` come first in the notes.
    """
    broken = list(shape_faults(deepspeed_json))
    if broken:  # nothing inside such a block can be read
        raise _error([*broken, *extra_faults], file=arguments.ds_config)
    sources = Sources(arguments, deepspeed_json=deepspeed_json)
    sources.notes += extra_notes
    _check_keys(sources)
    precision = settle_precision(sources)
    layout, batch, execution = settle_layout(sources, ranks=ranks, sizes=sizes, precision=precision)
    stage = settle_zero_stage(
        sources,
        precision=precision,
        accumulation=batch.accumulation,
        dp_crosses_nodes=layout.dp > 1 and ranks.world_size > ranks.local_world_size,
    )
    facts = GraphFacts(
        ranks=ranks,
        sizes=sizes,
        layout=layout,
        execution=execution,
        precision=precision,
        zero_stage=stage,
        recomputes=arguments.gradient_checkpointing,
        attention=arguments.attn_implementation,
        attention_dropout=attention_dropout,
    )
    facts = replace(facts, attention=settle_attention(sources, facts=facts))
    execution = replace(execution, cuda_graph=settle_graphs(sources, facts=facts))
    optimizer = settle_optimizer(sources)
    schedule = settle_schedule_options(sources, learning_rate=optimizer.learning_rate)
    engine = _engine_config(sources, batch=batch, precision=precision, stage=stage, sizes=sizes, tp=layout.tp)
    engine["gradient_clipping"] = optimizer.max_grad_norm
    sources.faults += dropout_faults(attention_dropout, tp=layout.tp)
    sources.faults += _whole_expert_faults(arguments, layout=layout, execution=execution, stage=stage)
    sources.faults += [
        f'"{path}" is "auto", which only Hugging Face\'s Trainer could fill in; give a value or leave it out'
        for path in auto_paths(engine)
    ]
    sources.faults += extra_faults
    if sources.faults:
        raise _error(sources.faults, file=arguments.ds_config)
    return ResolvedConfig(
        engine=engine,
        layout=layout,
        execution=execution,
        optimizer=optimizer,
        schedule=schedule,
        num_sequences=batch.micro,
        accumulation=batch.accumulation,
        block_size=arguments.block_size,
        precision=precision,
        zero_stage=stage,
        attention=facts.attention,
        notes=tuple(sources.notes),
    )


def _error(faults: list[str], *, file: str | None) -> ValueError:
    """Make one message of all faults; a fault that was found twice is listed once."""
    lines = "\n".join(f"  - {fault}" for fault in dict.fromkeys(faults))
    return ValueError(f"the settings ({file or 'flags only'}) cannot be used:\n{lines}")


def _check_keys(sources: Sources) -> None:
    """Record unknown keys, refused ones and sizes that are no numbers as faults; with the opt-out, some as notes."""
    for path, fault in unknown_keys(sources.json):
        ours = path.partition(".")[0] in (*OUR_BLOCKS, *MERGED_KEYS)  # DeepSpeed never sees these
        if sources.arguments.allow_unknown_ds_keys and not ours:
            sources.notes.append(f"{fault} (passed on, since --allow_unknown_ds_keys is set)")
        else:
            sources.faults.append(fault if ours else f"{fault}; --allow_unknown_ds_keys passes it on")
    sources.faults += refused_keys(sources.json)
    sources.faults += size_faults(sources.json)


def dropout_faults(attention_dropout: float, *, tp: int) -> Iterator[str]:
    """Yield why attention dropout cannot be used by the ranks of a group."""
    if attention_dropout > 0 and tp > 1:
        yield (
            f"attention_dropout={attention_dropout} cannot be used with tp={tp}: the ranks of a group would drop "
            "different values; set it to 0 in the model's configuration, or use tp=1"
        )


def _whole_expert_faults(
    arguments: Arguments, *, layout: ParallelLayout, execution: Execution, stage: int
) -> Iterator[str]:
    """Yield what asks for experts that are whole on a rank where none are."""
    if arguments.place_experts and layout.ep == 1:
        yield f"--place_experts needs whole experts that can move: ep > 1, not ep={layout.ep}"
    if stage == 3 and execution.resident_experts:
        yield (
            '"parallel.resident_experts" cannot be used with ZeRO-3, which leaves no rank whole experts to lend; use '
            "stage 0, 1 or 2"
        )


def _engine_config(
    sources: Sources, *, batch: Batch, precision: str, stage: int, sizes: ModelSizes, tp: int
) -> dict[str, Any]:
    """Copy the user's JSON without our blocks and those merged into our options, and fill in all sizes."""
    left_out = (*OUR_BLOCKS, *MERGED_KEYS, *REFUSED_BLOCKS)
    engine = {key: copy.deepcopy(value) for key, value in sources.json.items() if key not in left_out}
    engine["train_micro_batch_size_per_gpu"] = batch.micro
    engine["gradient_accumulation_steps"] = batch.accumulation
    engine["train_batch_size"] = batch.total
    engine["bf16"] = {**engine.get("bf16", {}), "enabled": precision == "bf16"}
    engine["fp16"] = {"enabled": False}
    engine["zero_allow_untested_optimizer"] = True
    engine["zero_force_ds_cpu_optimizer"] = False
    engine.setdefault("steps_per_print", NEVER_PRINT_STEPS)
    zero = zero_block(engine.get("zero_optimization", {}), stage=stage, sizes=sizes, tp=tp, precision=precision)
    engine["zero_optimization"] = zero.block
    sources.notes += zero.notes
    if precision == "bf16":
        engine["data_types"] = {**engine.get("data_types", {}), "grad_accum_dtype": "fp32"}
        engine["communication_data_type"] = "fp32"
        sources.notes.append("bf16: gradients are summed in float32, over micro-batches and between ranks")
    return engine


class ZeroBlock(NamedTuple):
    """The "zero_optimization" block for DeepSpeed, and what was chosen in it."""

    block: dict[str, Any]
    notes: list[str]


def zero_block(block: Mapping[str, Any], *, stage: int, sizes: ModelSizes, tp: int, precision: str) -> ZeroBlock:
    """Add the stage and the three "auto" sizes that the Hugging Face convention derives from the hidden size.

    A reduce bucket that is not given is no larger than a rank's share of a group's weights.
    """
    width = sizes.hidden_size
    derived = {
        BUCKET_KEY: width * width,
        "stage3_prefetch_bucket_size": width * width * 9 // 10,
        "stage3_param_persistence_threshold": 10 * width,
    }
    zero, notes = {**block, "stage": stage}, []
    for key, value in derived.items():
        if look_up(block, key) == "auto":
            zero[key] = value
            notes.append(f'"zero_optimization.{key}": "auto" became {value} (from hidden_size {width})')
    held = -(-count_parameters(sizes).total // max(1, tp))
    if BUCKET_KEY not in zero and reserves_bucket(stage, precision=precision) and held < USUAL_BUCKET:
        zero[BUCKET_KEY] = held
        notes.append(
            f'"zero_optimization.{BUCKET_KEY}" became {held}: a rank of a group of {tp} has about as many weights, and '
            f"ZeRO reserves room for a whole bucket, {USUAL_BUCKET} by default"
        )
    if stage == 3:
        zero.setdefault("stage3_gather_16bit_weights_on_model_save", True)
    return ZeroBlock(zero, notes)


def reserves_bucket(stage: int, *, precision: str) -> bool:
    """Return whether DeepSpeed makes a buffer of the bucket's size; the optimizer of stage 1 in bf16 has none."""
    return stage >= 2 or (stage == 1 and precision == "fp32")
