"""The flags that `plan`, `dry-run` and `sweep` share, and how they become a model and the job that a run would be.

A job is never put together here: flags turn into those of a run and a DeepSpeed JSON, which the trainer's own rules
settle.
"""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from modeling.execution import VARLEN
from modeling.layout import STRATEGIES, ParallelLayout, divisors
from modeling.spec import spec_of
from recipe.plan.hardware import Hardware, with_network
from recipe.plan.job import ELEMENT_BYTES, Job, job_of
from recipe.plan.search import PlanRequest, kernel_faults, layout_rules
from recipe.settings.arguments import parse_arguments
from recipe.settings.flags import Arguments
from recipe.settings.model import CONFIG_FLAG, read_model, run_options, sizes_of
from recipe.settings.parallel import ACCUMULATION_KEY, MICRO_KEY
from recipe.settings.presets import PRESETS
from recipe.settings.resolve import ResolvedConfig, WorldInfo, resolve_config
from recipe.settings.sources import load_deepspeed_json
from recipe.shared.command import at_least_even, at_least_one, at_least_two, positive_number

OUTPUT_DIR = "runs/plan"
MODEL_FLAG = "--model"
USUAL_SKEW = 1.3  # natural routing under a balance loss; what Megatron-LM's Mixtral runs fit best with
USUAL_PER_NODE = 8
DEFAULT_PRECISION = {"cuda": "bf16", "cpu": "fp32"}
PLANNED = tuple(name for name in STRATEGIES if name != "auto")  # "auto" takes one of them when it sees the tokens


class JobSettings(NamedTuple):
    """A job, and the settings of the run that it is."""

    job: Job
    settings: ResolvedConfig


def add_model_flags(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    add, names = parser.add_argument, f"a preset ({', '.join(PRESETS)}), config.json, folder or model on the hub"
    length = "positions in a sequence; as in a run: 1024 if absent"
    add(MODEL_FLAG, "--config_name", required=required, metavar="NAME", help=names)
    add("--config_overrides", metavar="KEY=VALUE,...", help="changes to the model's configuration")
    add("--seq_len", "--block_size", type=at_least_two, metavar="S", help=length)


def add_world_flags(parser: argparse.ArgumentParser) -> None:
    add, per_node = parser.add_argument, "of a node; as usual for the device, or all if fewer"
    add("--gpus", "--ranks", type=at_least_one, required=True, metavar="N", help="devices, one rank each")
    add("--gpus_per_node", type=at_least_one, metavar="N", help=per_node)


def add_job_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of how one run is laid out; whatever is absent is settled as the trainer settles it."""
    add = parser.add_argument
    add("--tp", type=at_least_one, help="ranks of a group (N); as many as the model allows in a node if absent")
    add("--ep", type=at_least_one, help="shares of whole experts in a group")
    add("--strategy", choices=STRATEGIES, help="how tokens meet their experts")
    add("--zero_stage", type=int, choices=(0, 1, 2, 3), help="2, or 1 where sums would cross nodes again, if absent")
    add("--micro_batch", type=at_least_one, metavar="B", help="sequences a group works on at once; 8 if absent")
    add("--accumulation", type=at_least_one, help="micro-batches per optimizer step")
    add("--precision", choices=tuple(ELEMENT_BYTES))
    add("--recompute", action="store_true", help="compute every block again in the backward pass")
    add("--ds_config", metavar="FILE", help="a DeepSpeed JSON as a run has it, under the flags given here")


def node_size(flags: argparse.Namespace, *, usual: int = USUAL_PER_NODE, name: str = "a GPU server") -> int:
    """Return the devices of a node, all where they fill none; ValueError where some would be left for another.

    `usual` is taken where the flag is absent, and `name` says of what it is the usual number.
    """
    gpus, per_node = flags.gpus, min(flags.gpus, flags.gpus_per_node or usual)
    if gpus % per_node:
        whole = gpus // per_node * per_node
        given = f"--gpus_per_node {per_node}" if flags.gpus_per_node else f"{per_node}, the usual number for {name}"
        counts = " or ".join(str(number) for number in (whole, whole + per_node) if number)
        raise ValueError(
            f"--gpus {gpus} do not fill nodes of {given}; pass a --gpus_per_node of {divisors(gpus)}, or take "
            f"{counts} devices"
        )
    return int(per_node)


def read_moe_model(arguments: Arguments, *, flags: argparse.Namespace) -> dict[str, Any]:
    """Return the model's configuration; ValueError where there is none, or no layer of it has experts."""
    model = read_model(arguments, flag=CONFIG_FLAG if flags.model is None else MODEL_FLAG).kwargs
    if not sizes_of(model).num_moe_layers:
        name = arguments.config_name or arguments.model_name_or_path
        raise ValueError(
            f"{name} has no layer with experts (num_experts={model['num_experts']}); this is about mixtures of experts"
        )
    return model


def run_words(flags: argparse.Namespace) -> Iterator[str]:
    """Yield the model's flags as those of a run."""
    named = {"config_name": flags.model, "config_overrides": flags.config_overrides, "block_size": flags.seq_len}
    yield from (f"--{name}={value}" for name, value in named.items() if value is not None)
    yield f"--output_dir={OUTPUT_DIR}"


def read_job(
    flags: argparse.Namespace, *, device: str = "cuda", compute_capability: tuple[int, int] | None = (9, 0)
) -> JobSettings:
    """Return the job of these flags on such devices; ValueError lists every rule of the trainer that it breaks."""
    precision = flags.precision or (None if flags.ds_config else DEFAULT_PRECISION[device])
    words = list(run_words(flags))
    if flags.ds_config is not None:
        words.append(f"--ds_config={flags.ds_config}")
    if precision is not None:
        words.append(f"--bf16={precision == 'bf16'}")
    if flags.recompute:
        words.append("--gradient_checkpointing")
    arguments = parse_arguments(words)
    if arguments.freeze_parameters:
        raise ValueError(
            f"freeze_parameters {' '.join(arguments.freeze_parameters)} has no formula here: less would be sent "
            "and kept; plan without it"
        )
    model = read_moe_model(arguments, flags=flags)
    # Ranks on a CPU are one machine's, where nothing else is said.
    per_node = node_size(flags) if device == "cuda" else node_size(flags, usual=flags.gpus, name="a CPU")
    settings = resolve_config(
        arguments,
        deepspeed_json=_with_flags(load_deepspeed_json(flags.ds_config), flags),
        ranks=WorldInfo(
            world_size=flags.gpus, local_world_size=per_node, device=device, compute_capability=compute_capability
        ),
        sizes=sizes_of(model),
        attention_dropout=spec_of(model).attention_dropout,
    )
    model |= run_options(arguments)
    job = job_of(settings, model=model, recompute=arguments.gradient_checkpointing, device=device)
    return JobSettings(job, settings)


def _with_flags(ds_config: Mapping[str, Any], flags: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON with the flags' values over its own; a block that is no object is left for the rules to name."""
    changed = dict(ds_config)
    for block, values in (
        ("parallel", {"tp": flags.tp, "ep": flags.ep, "strategy": flags.strategy}),
        ("zero_optimization", {"stage": flags.zero_stage}),
    ):
        before, given = ds_config.get(block, {}), {key: value for key, value in values.items() if value is not None}
        if given and isinstance(before, Mapping):
            changed[block] = {**before, **given}
    for key, value in ((MICRO_KEY, flags.micro_batch), (ACCUMULATION_KEY, flags.accumulation)):
        if value is not None:
            changed[key] = value
    return changed


class PlanSettings(NamedTuple):
    """A request, the flags by which a run names its model, and what was taken for want of a flag."""

    request: PlanRequest
    model_flags: dict[str, Any]
    notes: tuple[str, ...]


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a search; what a run would settle itself is found by it."""
    add, tokens = parser.add_argument, "tokens of an optimizer step over all devices; one sequence per device if absent"
    skew = "the busiest rank's expert rows over the mean, where each rank holds whole experts; 1.3 if absent, 1: even"
    add("--tokens_per_batch", type=at_least_one, metavar="T", help=tokens)
    add("--max_micro_batch", type=at_least_one, metavar="B", help="sequences a group may work on at once; any number")
    add("--precision", choices=tuple(ELEMENT_BYTES), help="bf16 on a GPU and fp32 on a CPU if absent")
    network = "Gbit/s of the network between nodes, per GPU; assumed, and said so, if absent"
    add("--network_gbits", type=positive_number, metavar="RATE", help=network)
    kernel = "attention kernel, as in a run; the fastest for the GPU if absent"
    add("--attn_implementation", choices=(*VARLEN, "sdpa"), metavar="NAME", help=kernel)
    add("--skew", type=at_least_even, default=USUAL_SKEW, metavar="RHO", help=skew)


def read_plan_request(flags: argparse.Namespace, *, hardware: Hardware) -> PlanSettings:
    """Return what the flags ask for; ValueError where numbers clash, or the model breaks a rule in every layout."""
    arguments = parse_arguments(list(run_words(flags)))
    model, notes = read_moe_model(arguments, flags=flags), []
    if flags.network_gbits is not None:
        hardware = with_network(hardware, flags.network_gbits)
    if flags.tokens_per_batch is None:
        notes.append("one sequence per device and step; --tokens_per_batch asks for more")
    tokens = flags.tokens_per_batch or flags.gpus * arguments.block_size
    if tokens % arguments.block_size:
        nearest = max(1, round(tokens / arguments.block_size)) * arguments.block_size
        raise ValueError(
            f"--tokens_per_batch {tokens} is no whole number of sequences of --seq_len {arguments.block_size}; the "
            f"nearest that is: {nearest}"
        )
    is_this_machine = hardware.device == "cpu" and not (hardware.measured and hardware.inter)
    request = PlanRequest(
        model=model,
        hardware=hardware,
        gpus=flags.gpus,
        # Ranks on a CPU are this machine's, unless several were probed.
        ranks_per_node=node_size(
            flags, usual=flags.gpus if is_this_machine else hardware.ranks_per_node, name=hardware.name
        ),
        block_size=arguments.block_size,
        sequences_per_step=tokens // arguments.block_size,
        precision=flags.precision or DEFAULT_PRECISION[hardware.device],
        skew=flags.skew,
        max_micro_batch=flags.max_micro_batch,
        attention=flags.attn_implementation or arguments.attn_implementation,
    )
    if request.attention != "auto" and (reasons := "; ".join(kernel_faults(request))):
        raise ValueError(
            f"--attn_implementation {request.attention} cannot be planned: {reasons}; leave it out for what a run takes"
        )
    if faults := layout_rules(request, ParallelLayout()):  # a rank alone breaks no rule of layouts
        raise ValueError("no layout can be planned:\n" + "\n".join(f"  - {fault}" for fault in faults))
    names = {"config_name": flags.model, "config_overrides": dict(arguments.config_overrides)}
    return PlanSettings(request, {key: value for key, value in names.items() if value}, tuple(notes))


def layout_words(text: str) -> dict[str, Any]:
    """Read `tp=4,ep=4,strategy=gather_tokens` as a mapping; the last two may be left out."""
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    keys = [key for key, _ in pairs]
    if "tp" not in keys or set(keys) - {"tp", "ep", "strategy"} or len(set(keys)) < len(keys):
        raise argparse.ArgumentTypeError(f"{text!r} is not like tp=4,ep=4,strategy={PLANNED[0]}, each of them once")
    found: dict[str, Any] = {key: value if key == "strategy" else at_least_one(value) for key, value in pairs}
    if found.get("strategy", PLANNED[0]) not in PLANNED:
        raise argparse.ArgumentTypeError(f"strategy={found['strategy']} is not one of {', '.join(PLANNED)}")
    return found
