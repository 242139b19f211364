"""Reads the command line, an argument file and the "arguments" block of a DeepSpeed JSON into one `Arguments`.

The command line wins over the argument file, and that over the block: the block holds defaults, not opinions.
Every fault is collected and raised in one message.
"""

import argparse
import difflib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipe.settings.flags import Arguments, FlagSpec, flag_specs
from recipe.settings.model_source import is_on_hub
from recipe.settings.sources import load_deepspeed_json
from recipe.shared.json_files import read_json_object, read_text

__all__ = ["Arguments", "parse_arguments"]

COMMAND_LINE = "on the command line"
CALLER = "by the program that starts the run"
ARGUMENT_FILE_SUFFIXES = (".json", ".yaml", ".yml")
DEEPSPEED_FLAGS = ("ds_config", "deepspeed", "deepspeed_config")

# Flags people bring along from other trainers that cannot hold here, and what to do instead.
REFUSED_FLAGS = {
    "fp16": "float16 needs loss scaling, which the router and the losses here do not have; use --bf16",
    "do_train": "a run always trains; leave it out",
    "do_eval": "evaluation always follows training; --eval_steps adds more of it",
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy"),
        "use --eval_steps N, or 0 for the end only, and --max_eval_samples 0 for none",
    ),
    **dict.fromkeys(
        ("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        "a run ends with its last weights; --save_steps and --save_total_limit say which checkpoints are kept",
    ),
    **dict.fromkeys(
        ("fsdp", "fsdp_config", "fsdp_min_num_params"),
        'DeepSpeed shards: "zero_optimization" in the JSON says how much',
    ),
    **dict.fromkeys(
        ("use_cpu", "no_cuda"), "a run takes the GPUs that torch sees; for a CPU set CUDA_VISIBLE_DEVICES="
    ),
    **dict.fromkeys(
        ("per_gpu_train_batch_size", "auto_find_batch_size"),
        "use --per_device_train_batch_size; `gather-moe plan` finds it",
    ),
    "per_gpu_eval_batch_size": "use --per_device_eval_batch_size",
    "logging_strategy": "use --logging_steps N",
    "logging_dir": "logs are in --output_dir, those of --report_to tensorboard in its folder tensorboard",
    "save_safetensors": "weights are always saved as safetensors; leave it out",
    "data_seed": "--seed orders the data, too",
    "disable_tqdm": "the bar is for terminals alone",
    "torch_compile": 'blocks are replayed as CUDA graphs where they can be: "cuda_graph" in the JSON\'s "parallel"',
    "use_liger_kernel": "kernels of this model's own do the same",
    "attn_impl": "use --attn_implementation",
    "warmup_ratio": "give --warmup_steps a value below 1, which means a share of the run",
    "optim": "the optimizer is AdamW",
    "run_name": "a run is known by its --output_dir",
    "hub_token": "who reads the command line would read it; log in with `hf auth login`, or set HF_TOKEN",
    "hub_strategy": "weights are uploaded once, at the end of the run",
    "trust_remote_code": "code from a checkpoint is never run here",
    "torch_dtype": "use --bf16, or leave it out for float32",
}
# Other flags of transformers' Trainer, lest a similar name be suggested for one of them.
_TRAINER_ALONE = """
accelerator_config activation_checkpointing activation_checkpointing_kwargs average_tokens_across_devices
batch_eval_metrics bf16_full_eval dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context
dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers
ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug do_predict enable_jit_checkpoint
eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_use_gather_object fp16_backend
fp16_full_eval fp16_opt_level full_determinism gradient_checkpointing_kwargs group_by_length half_precision_backend
hub_always_push hub_revision ignore_data_skip include_for_metrics include_inputs_for_metrics
include_num_input_tokens_seen include_tokens_per_second jit_mode_eval label_names label_smoothing_factor
length_column_name liger_kernel_config log_level log_level_replica log_on_each_node logging_first_step
logging_nan_inf_filter mp_parameters neftune_noise_alpha optim_args optim_target_modules parallelism_config past_index
prediction_loss_only project ray_scope remove_unused_columns restore_callback_states_from_checkpoint save_on_each_node
save_only_model skip_memory_metrics split_batches tf32 torch_compile_backend torch_compile_mode torch_empty_cache_steps
tpu_metrics_debug tpu_num_cores trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy
use_cache use_ipex use_legacy_prediction_loop use_mps_device
"""
TRAINER_ALONE = frozenset(_TRAINER_ALONE.split())


@dataclass
class _Collected:
    """Raw values by flag, the place each came from, and what was wrong on the way."""

    specs: Mapping[str, FlagSpec]
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    all_files_read: bool = True

    def read(self, path: str, reader: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
        """Read a file that the user named; a fault, and nothing, where it cannot be."""
        try:
            return reader(path)
        except ValueError as error:
            self.faults.append(str(error))
            self.all_files_read = False
            return {}

    def lay_under(self, layer: Mapping[str, Any], *, place: str) -> None:
        """Add the flags of a layer that no higher layer has set; `place` reads like "on the command line"."""
        for name, value in self._with_one_ds_config(layer, place=place).items():
            fault = self._name_fault(name, place=place)
            if fault:
                self.faults.append(fault)
            elif name not in self.values:
                self.values[name], self.places[name] = value, place

    def _with_one_ds_config(self, layer: Mapping[str, Any], *, place: str) -> dict[str, Any]:
        """Put the DeepSpeed file of a layer under `ds_config`, whichever of its names it was given by."""
        paths = {name: layer[name] for name in DEEPSPEED_FLAGS if name in layer}
        rest = {name: value for name, value in layer.items() if name not in paths}
        if len(set(map(str, paths.values()))) > 1:
            given = ", ".join(f"--{name} {path}" for name, path in paths.items())
            self.faults.append(f"two DeepSpeed files are given {place}: {given}; keep one")
        for name, path in paths.items():
            if isinstance(path, str):
                rest["ds_config"] = path
            else:
                self.faults.append(f"--{name} {place} must be the path of a JSON file, got {path!r}")
        return rest

    def _name_fault(self, name: str, *, place: str) -> str | None:
        if name in self.specs:
            return None
        if name in REFUSED_FLAGS:
            return f"--{name} {place} is not available: {REFUSED_FLAGS[name]}"
        if name in TRAINER_ALONE:
            return f"--{name} {place} is not available: it means something to transformers' Trainer alone; leave it out"
        near = difflib.get_close_matches(name, [*self.specs, *DEEPSPEED_FLAGS], n=1, cutoff=0.6)
        return f"--{name} {place} is unknown; " + (f"did you mean --{near[0]}?" if near else "--help lists all flags")


def parse_arguments(argv: Sequence[str] | None = None, *, defaults: Mapping[str, Any] | None = None) -> Arguments:
    """Read typed flags from `argv` (default: the process's own); `defaults` are the caller's, for what is not set.

    Accepts one positional .json or .yaml argument file. ValueError lists every fault; --help prints and exits with 0.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    collected = _Collected(specs=flag_specs())
    if "--help" in argv or "-h" in argv:
        _help_parser(collected.specs).print_help()
        raise SystemExit(0)
    flags, files = _scan(argv, faults=collected.faults)
    collected.lay_under(_values(flags, collected=collected), place=COMMAND_LINE)
    for path in files:
        collected.lay_under(collected.read(path, _read_argument_file), place=f"in {path}")
    if len(files) > 1:
        collected.faults.append(f"only one argument file can be read, got {', '.join(files)}")
    _lay_block_under(collected)
    collected.lay_under(defaults or {}, place=CALLER)
    arguments = _typed(collected)
    # A file that could not be read may hold what seems to be missing, so combinations say nothing then.
    faults = [*collected.faults, *(_combination_faults(arguments) if collected.all_files_read else ())]
    if faults:
        raise ValueError("these flags cannot be used:\n" + "\n".join(f"  - {fault}" for fault in faults))
    return arguments


def _scan(argv: list[str], *, faults: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the words that follow each flag, `--name value ...`, `--name=value` or a bare `--name`, and the files.

    Launchers put `--local_rank=0` first, so an argument file may stand anywhere outside a flag's values.
    """
    flags: dict[str, list[str]] = {}
    files: list[str] = []
    open_flag: str | None = None  # the flag that the next plain word belongs to
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in flags:
                faults.append(f"--{name} is given twice on the command line")
            flags[name] = [value] if equals else []
            open_flag = None if equals else name
        elif open_flag is not None:
            flags[open_flag].append(word)
        elif word.endswith(ARGUMENT_FILE_SUFFIXES):
            files.append(word)
        else:
            faults.append(f"{word!r} belongs to no flag; an argument file must end in .json or .yaml")
    return flags, files


def _values(flags: Mapping[str, list[str]], *, collected: _Collected) -> dict[str, Any]:
    """Take one value per flag: its word, the list of its words, or true for a bare switch."""
    values: dict[str, Any] = {}
    for name, words in flags.items():
        kind = collected.specs[name].kind if name in collected.specs else str
        if not words and name == "deepspeed":
            continue  # a bare --deepspeed says what is always true here
        if not words and kind is not bool and (name in collected.specs or name in DEEPSPEED_FLAGS):
            collected.faults.append(f"--{name} needs a value")
        elif len(words) > 1 and kind is not tuple:
            collected.faults.append(f"--{name} takes one value, got {' '.join(words)}")
        else:
            values[name] = words if kind is tuple else words[0] if words else "true"
    return values


def _read_argument_file(path: str) -> dict[str, Any]:
    """Read flags as `name: value` from a .json, .yaml or .yml file."""
    if path.endswith(".json"):
        return read_json_object(path)
    import yaml

    try:
        content = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must hold `flag: value` lines")
    return content


def _lay_block_under(collected: _Collected) -> None:
    """Lay the "arguments" block of the DeepSpeed JSON under all other layers."""
    path = collected.values.get("ds_config")
    if path is None:
        return
    block = collected.read(path, load_deepspeed_json).get("arguments", {})
    place = f'in the "arguments" block of {path}'
    if not isinstance(block, dict):
        collected.faults.append(f'"arguments" in {path} must be an object of flags and values, got {block!r}')
        return
    for name in DEEPSPEED_FLAGS:
        if name in block:
            collected.faults.append(f"--{name} {place} would name another such file; give it on the command line")
    collected.lay_under({k: v for k, v in block.items() if k not in DEEPSPEED_FLAGS}, place=place)


def _typed(collected: _Collected) -> Arguments:
    """Convert the values that can be and respect their limits; record a fault for each that cannot."""
    values: dict[str, Any] = {}
    for name, raw in collected.values.items():
        try:
            values[name] = collected.specs[name].read(raw)
        except ValueError as error:
            collected.faults.append(f"--{name} {collected.places[name]}: {error}")
    # Decided here once: a run makes files, and by its end one may have a name of the hub.
    names = [values.get(name) for name in ("model_name_or_path", "dataset_name")]
    hub_names = tuple(name for name in names if name is not None and is_on_hub(name))
    return Arguments(**values, given={name: collected.places[name] for name in values}, hub_names=hub_names)


def _combination_faults(arguments: Arguments) -> Iterator[str]:
    """Yield flags that are fine alone but not together; those of the data are checked where they are read."""
    a = arguments
    if a.model_name_or_path is None and a.config_name is None:
        yield "no model is named; give --config_name (a preset such as demo, or a config.json) or --model_name_or_path"
    if a.model_name_or_path is not None and a.config_name is not None:
        yield (
            f"--model_name_or_path {a.model_name_or_path} and --config_name {a.config_name} both name a model; "
            "keep the first to go on from its weights, the second to start from fresh ones"
        )
    if a.upcycle_num_experts is not None and a.config_name is not None:
        yield (
            "--upcycle_num_experts copies weights, which --config_name does not bring; name the dense model by "
            "--model_name_or_path"
        )
    if (a.upcycle_num_experts is None) != (a.upcycle_top_k is None):
        yield "--upcycle_num_experts and --upcycle_top_k go together: so many experts, so many of them for a token"
    if a.upcycle_noise_std > 0 and a.upcycle_num_experts is None:
        yield f"--upcycle_noise_std {a.upcycle_noise_std} is for experts that --upcycle_num_experts makes"
    for name in ("hub_model_id", "hub_private_repo"):
        if getattr(a, name) is not None and not a.push_to_hub:
            yield f"--{name} is for what --push_to_hub uploads; add that, or leave it out"
    if a.push_to_hub and a.hf_save == "never":
        yield "--push_to_hub uploads the Hugging Face weights that --hf_save never does not write; use --hf_save last"
    if a.push_to_hub and a.save_strategy == "no":
        yield "--push_to_hub uploads what --save_strategy no does not write; leave one of them out"
    if a.output_dir is None:
        yield "no --output_dir is given; name the folder for logs and checkpoints"
    if a.max_steps == 0:
        yield "--max_steps 0 trains nothing; give at least 1, or -1 to go by --num_train_epochs"
    if a.max_steps < 0 and a.num_train_epochs <= 0:
        yield f"--num_train_epochs {a.num_train_epochs} trains nothing; give more than 0, or --max_steps"
    if "none" in a.report_to and len(set(a.report_to)) > 1:
        yield f"--report_to {' '.join(a.report_to)} names none together with others; keep one"
    if a.overwrite_output_dir and a.resume_from_checkpoint is not None:
        yield "--overwrite_output_dir deletes what --resume_from_checkpoint would read; keep one"


def _help_parser(specs: Mapping[str, FlagSpec]) -> argparse.ArgumentParser:
    """Make a parser that formats --help; the words themselves are read by `_scan`, which can list every fault."""
    parser = argparse.ArgumentParser(
        prog="run_pretrain.py",
        description="Pretrain a Mixture-of-Experts language model with DeepSpeed.",
        epilog='Flags may also stand in one .json or .yaml file, or in the DeepSpeed JSON under "arguments".',
        usage="%(prog)s [ARGUMENTS.json|.yaml] [--ds_config X.json] [--flag value ...]",
    )
    groups: dict[str, Any] = {}
    for spec in specs.values():
        group = groups.setdefault(spec.group, None) or parser.add_argument_group(spec.group)
        groups[spec.group] = group
        shown = "" if spec.default in (None, (), {}) else f" (default: {spec.default})"
        kind = "{" + ",".join(spec.choices) + "}" if spec.choices else spec.kind.__name__.upper()
        metavar = {"TUPLE": "STR ...", "DICT": "KEY=VALUE,..."}.get(kind, kind)
        group.add_argument(f"--{spec.name}", metavar=metavar, help=f"{spec.help}{shown}".replace("%", "%%"))
    return parser
