"""Every flag of a training run, declared once: its name, type, default, group, limits and help; and reading values.

Names are those of transformers' `run_clm.py` and `TrainingArguments` wherever the thing exists there. Standard
library only, so that `--help` prints without loading torch.
"""

import json
import math
from collections import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from modeling.execution import BY_MASK, PER_DOCUMENT, VARLEN
from modeling.spec import BALANCE_SCOPES, STOCK_TYPES

SCHEDULES = ("linear", "cosine", "cosine_with_min_lr", "constant", "constant_with_warmup")


@dataclass(frozen=True, kw_only=True)
class FlagSpec:
    """What a flag accepts. `kind` is the plain type; None is allowed where the default is None."""

    name: str
    kind: type
    group: str
    help: str
    default: Any
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None

    def read(self, raw: object) -> Any:
        """Read a text or a JSON value as the flag's type; ValueError where it is none or breaks a limit."""
        if raw is None and self.default is None:
            return None
        value = convert(raw, kind=self.kind)
        for item in value if isinstance(value, tuple) else (value,):
            if self.choices and item not in self.choices:
                raise ValueError(f"{item!r} is not one of {', '.join(self.choices)}")
        if self.at_least is not None and value < self.at_least:
            raise ValueError(f"{value} is too small; the least is {self.at_least}")
        if self.at_most is not None and value > self.at_most:
            raise ValueError(f"{value} is too large; the most is {self.at_most}")
        return value


def _flag(help: str, *, group: str, default: Any = None, **limits: Any) -> Any:
    metadata = {"help": help, "group": group, **limits}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


_model = partial(_flag, group="Model")
_data = partial(_flag, group="Data")
_batch = partial(_flag, group="Batches and length of the run")
_optim = partial(_flag, group="Optimizer and schedule")
_loss = partial(_flag, group="Losses")
_speed = partial(_flag, group="Precision and memory")
_log = partial(_flag, group="Logging and evaluation")
_save = partial(_flag, group="Checkpoints")
_start = partial(_flag, group="Start")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What the user asked for in flags, argument file and the "arguments" block of the DeepSpeed JSON.

    `given` maps every flag that was set to the place, like "on the command line"; all others hold their default.
    `hub_names` are the model and the data set that were of the hub, not of this machine, when the flags were read.
    """

    ds_config: str | None = _start("DeepSpeed JSON with our blocks (also --deepspeed X, --deepspeed_config X)")
    local_rank: int = _start("set by launchers; LOCAL_RANK in the environment is what counts", default=-1)
    expect_world_size: int | None = _start("stop unless exactly this many ranks have started", at_least=1)
    torch_num_threads: int | None = _start("threads torch uses on a rank's CPU; its own choice if absent", at_least=1)
    allow_unknown_ds_keys: bool = _start("pass unknown DeepSpeed keys on instead of stopping", default=False)
    seed: int = _start("seed of weights and data order", default=42, at_least=0)

    model_name_or_path: str | None = _model(
        "folder with config.json and weights to start from, or the name of a model on the hub"
    )
    model_revision: str | None = _model("branch, tag or commit of a model on the hub; its main branch if absent")
    config_name: str | None = _model("preset, config.json, folder or model on the hub, to start from fresh weights")
    config_overrides: Mapping[str, Any] = _model("changes to the configuration: key=value,key=value", default={})
    upcycle_num_experts: int | None = _model(
        "make so many experts of every feed-forward of the dense Llama, Mistral or Qwen3 --model_name_or_path",
        at_least=2,
    )
    upcycle_top_k: int | None = _model("experts a token visits in a model made so", at_least=1)
    upcycle_noise_std: float = _model(
        "standard deviation of the normal noise on those experts; 0: equal experts", default=0.0, at_least=0
    )
    freeze_parameters: tuple[str, ...] = _model(
        r"regular expressions; parameters with one in their name are not trained, like `mlp\.gate\.`, the routers",
        default=(),
    )
    attn_implementation: str = _model(
        "attention kernel; auto: the fastest installed for the GPU, torch's varlen, or sdpa",
        default="auto",
        choices=("auto", *VARLEN, *PER_DOCUMENT, *BY_MASK),
    )

    dataset_name: str | None = _data("name of a dataset for the datasets library")
    dataset_config_name: str | None = _data("configuration of that dataset")
    train_file: str | None = _data(
        ".txt, .jsonl or .parquet file or glob, several by commas; stdlib: Python's own source"
    )
    validation_file: str | None = _data("files to evaluate on; none: a part of the training data")
    data_format: str = _data(
        "what rows are: text, chat (`messages`), prompt_completion; auto: as the columns of the first row say",
        default="auto",
        choices=("auto", "text", "chat", "prompt_completion"),
    )
    train_on: str = _data(
        "tokens with a label: responses (of the assistant; completions) or all; auto: all of text, else responses",
        default="auto",
        choices=("auto", "responses", "all"),
    )
    packing_strategy: str = _data(
        "wrapped: documents are cut where blocks end; whole: those that fit are not; auto: text wrapped, else whole",
        default="auto",
        choices=("auto", "wrapped", "whole"),
    )
    chat_template: str | None = _data("Jinja file that writes messages out; the tokenizer's own if absent")
    text_column_name: str = _data("column or JSON key that holds the text", default="text")
    validation_split_percentage: int = _data(
        "share of documents kept for evaluation where there is no validation data", default=5, at_least=0, at_most=99
    )
    streaming: bool = _data("read --dataset_name as a stream while filling the token cache", default=False)
    tokenizer_name: str | None = _data("tokenizer folder or hub name; a BPE is trained if absent")
    train_vocab_size: int = _data("vocabulary of the trained BPE", default=8192, at_least=300)
    eos_token: str | None = _data("end-of-document token, where the tokenizer names none")
    max_train_documents: int | None = _data("use only the first documents", at_least=1)
    max_train_samples: int | None = _data("use only the first packed blocks for training", at_least=1)
    max_eval_samples: int | None = _data(
        "use only the first packed blocks for evaluation; 0: no evaluation", at_least=0
    )
    skip_invalid_text: bool = _data("count and leave out lines that are not UTF-8 instead of stopping", default=False)
    preprocessing_num_workers: int | None = _data("texts tokenised at once; one per CPU if absent", at_least=1)
    dataloader_num_workers: int = _data("threads that prepare batches ahead; 0: none", default=0, at_least=0)
    cache_dir: str | None = _data("where tokenised data is kept")
    overwrite_cache: bool = _data("tokenise again", default=False)

    block_size: int = _batch("positions in a sequence (S)", default=1024, at_least=2)
    per_device_train_batch_size: int = _batch("sequences a group works on at once (B)", default=8, at_least=1)
    per_device_eval_batch_size: int | None = _batch("the same for evaluation; B if absent", at_least=1)
    gradient_accumulation_steps: int = _batch("micro-batches per optimizer step", default=1, at_least=1)
    max_steps: int = _batch("optimizer steps; -1: as --num_train_epochs says", default=-1, at_least=-1)
    num_train_epochs: float = _batch("passes over the data, where --max_steps is -1", default=3.0, at_least=0)

    learning_rate: float = _optim("peak learning rate", default=5e-5, at_least=0)
    lr_scheduler_type: str = _optim("shape of the schedule", default="linear", choices=SCHEDULES)
    lr_scheduler_kwargs: Mapping[str, Any] = _optim("min_lr_rate or min_lr for cosine_with_min_lr, as JSON", default={})
    warmup_steps: float = _optim("optimizer steps to the peak; below 1: a share of the run", default=0.0, at_least=0)
    weight_decay: float = _optim("decoupled weight decay of AdamW", default=0.0, at_least=0)
    adam_beta1: float = _optim("decay of the first moment", default=0.9, at_least=0, at_most=1)
    adam_beta2: float = _optim("decay of the second moment", default=0.999, at_least=0, at_most=1)
    adam_epsilon: float = _optim("added to the denominator", default=1e-8, at_least=0)
    max_grad_norm: float = _optim("clip the global gradient norm to this; 0: never", default=1.0, at_least=0)

    router_aux_loss_coef: float = _loss("weight of the load-balancing loss", default=0.01, at_least=0)
    router_z_loss_coef: float = _loss("weight of the router's z-loss", default=0.0, at_least=0)
    logits_z_loss_coef: float = _loss("weight of the z-loss of the output logits", default=0.0, at_least=0)
    balance_scope: str = _loss(
        "over what load is balanced; only `sequence` is the same in every layout",
        default="sequence",
        choices=BALANCE_SCOPES,
    )
    balance_bias_update_rate: float = _loss(
        "step of the routers' biases that even the load out without a loss; 0: biases stay, or there are none",
        default=0.0,
        at_least=0,
    )
    capacity_factor: float | None = _loss(
        "tokens an expert takes of a training micro-batch, in even shares; what has no room is dropped. None: no limit",
        at_least=0.01,
    )
    router_jitter_noise: float = _loss(
        "half width of the uniform noise on a router's input in training", default=0.0, at_least=0, at_most=1
    )

    bf16: bool = _speed("train in bfloat16 with float32 master weights", default=False)
    gradient_checkpointing: bool = _speed("recompute each block in the backward pass", default=False)

    logging_steps: int = _log("optimizer steps between logged lines", default=10, at_least=1)
    eval_steps: int = _log("optimizer steps between evaluations; 0: at the end only", default=0, at_least=0)
    report_to: tuple[str, ...] = _log("also log to: tensorboard", default=(), choices=("none", "tensorboard"))
    check_replicas_steps: int = _log(
        "steps between checks that replicated weights agree; 0: never", default=0, at_least=0
    )
    profile_steps: int = _log(
        "steps to record with the PyTorch profiler on every rank, for `gather-moe profile`; 0: none",
        default=0,
        at_least=0,
    )
    profile_from_step: int | None = _log("the first of them; the third that the run takes if absent", at_least=1)

    output_dir: str | None = _save("folder of the run: logs, checkpoints, results")
    overwrite_output_dir: bool = _save("start anew in a folder that holds a run", default=False)
    save_strategy: str = _save(
        "steps: as --save_steps says; no: never, not at the end either", default="steps", choices=("steps", "no")
    )
    save_steps: int = _save("optimizer steps between checkpoints; 0: at the end only", default=500, at_least=0)
    save_total_limit: int | None = _save("checkpoints kept; all if absent", at_least=1)
    async_save: bool = _save("copy a checkpoint to host memory and write it while training goes on", default=False)
    place_experts: bool = _save(
        "when resuming, spread the experts over the ranks anew by the loads that the checkpoint has", default=False
    )
    resume_from_checkpoint: str | None = _save("`auto` for the newest complete checkpoint, or its path")
    hf_save: str = _save(
        "which checkpoints carry Hugging Face weights", default="every", choices=("every", "last", "never")
    )
    hf_format: str = _save("model type of those weights", default="auto", choices=("auto", "native", *STOCK_TYPES))
    hf_dtype: str = _save(
        "their precision; auto: that of the run", default="auto", choices=("auto", "float32", "bfloat16", "float16")
    )
    license: str | None = _save("license that their model card names; none if absent")
    push_to_hub: bool = _save("upload those of the last checkpoint at the end of the run", default=False)
    hub_model_id: str | None = _save("where to: ORG/NAME, or NAME of your own; the name of --output_dir if absent")
    hub_private_repo: bool | None = _save("make that repository a private one; as its owner's default if absent")

    given: Mapping[str, str] = field(default_factory=dict)
    hub_names: tuple[str, ...] = ()

    def place(self, name: str) -> str:
        """Return where a flag was set, like "on the command line"."""
        return self.given.get(name, "by default")


def flag_specs() -> dict[str, FlagSpec]:
    """Return all flags by name, in the order they are declared."""
    hints = get_type_hints(Arguments)
    defaults = Arguments()
    return {
        f.name: FlagSpec(name=f.name, kind=_plain(hints[f.name]), default=getattr(defaults, f.name), **f.metadata)
        for f in fields(Arguments)
        if f.metadata
    }


def _plain(hint: Any) -> type:
    """Return int for `int | None`, tuple for `tuple[str, ...]`, dict for `Mapping[str, Any]`."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    plain: type = get_origin(hint) or hint
    return dict if plain is abc.Mapping else plain


def convert(value: object, *, kind: type) -> Any:
    """Read `value` as a `kind` (str, int, float, bool, tuple of strings, dict); ValueError where it is none."""
    converters = {str: _string, int: _integer, float: _number, bool: _truth, tuple: _strings, dict: _mapping}
    return converters[kind](value)


def same_value(left: object, right: object) -> bool:
    """Compare as settings: 1e-4 equals 0.0001, 1 equals 1.0, (0.9, 0.95) equals [0.9, 0.95]; true is not 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(same_value(a, b) for a, b in zip(left, right, strict=True))
    return left == right


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text; put it in quotes")
    return value


def _integer(value: object) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a whole number") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a number")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def _truth(value: object) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ValueError(f"{value!r} is neither true nor false")


def _strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError(f"{value!r} is not a list of texts")


def _mapping(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is neither key=value,key=value nor a JSON object")
    if value.lstrip().startswith("{"):
        try:
            return dict(json.loads(value))
        except json.JSONDecodeError as error:
            raise ValueError(f"{value!r} is not a JSON object: {error}") from None
    return dict(_pair(part) for part in value.split(",") if part)


def _pair(text: str) -> tuple[str, Any]:
    """Read `num_experts=16` as ("num_experts", 16); a value that is not JSON stays the text it is."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{text!r} is not key=value")
    try:
        return key.strip(), json.loads(value)
    except json.JSONDecodeError:
        return key.strip(), value
