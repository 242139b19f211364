"""From settled settings to a run and an engine: data, tokenizer, configuration, weights, optimizer, and run.json."""

import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils.tqdm import disable_progress_bars
from torch import nn
from transformers.utils.logging import set_verbosity

from modeling.config import GatherMoeConfig
from modeling.init import build_model
from modeling.mesh import ParallelMesh
from modeling.model import GatherMoeForCausalLM
from modeling.spec import spec_of
from recipe.checkpoint.run_folder import RunFolder
from recipe.data.options import option_faults
from recipe.data.prepare import PreparedData, prepare_data
from recipe.engine.engine import Engine, build_optimizer, freeze_parameters
from recipe.engine.graphs import CudaCapture, install_graphs
from recipe.hf.config import TOKEN_IDS, choose_type
from recipe.hf.hub import claim_repository, fetch_model
from recipe.hf.load import ExpertNoise, load_weights
from recipe.launch.start import World, compute_capability
from recipe.settings.flags import Arguments
from recipe.settings.model import ModelSettings, read_model, run_options, sizes_of
from recipe.settings.model_source import HubModel, is_on_hub
from recipe.settings.parallel import installed_attention
from recipe.settings.resolve import ResolvedConfig, WorldInfo, resolve_config
from recipe.settings.sources import load_deepspeed_json
from recipe.settings.training import settle_schedule
from recipe.shared.flops import count_parameters
from recipe.shared.ranks import Ranks
from recipe.shared.together import on_every, on_first
from recipe.train.log import tensorboard_faults

# Any of them is enough for AutoTokenizer; old folders have no tokenizer_config.json.
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")


class Request(NamedTuple):
    """A run as the command line and the JSON ask for it, checked against each other and against the ranks there are."""

    arguments: Arguments
    settings: ResolvedConfig
    model: Mapping[str, Any]  # keyword arguments of GatherMoeConfig
    world: World


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that the training loop works with; the same on every rank but for the rank itself."""

    arguments: Arguments
    settings: ResolvedConfig
    config: GatherMoeConfig
    world: World
    mesh: ParallelMesh
    ranks: Ranks  # all of them, for host decisions
    folder: RunFolder
    model_folder: Path | None  # of the weights the run starts from
    repository: str | None  # of the hub, for what the run will have trained
    data: PreparedData
    say: Callable[[str], None]  # prints on rank 0

    @property
    def max_steps(self) -> int:
        """The last optimizer step."""
        max_steps = self.settings.schedule.max_steps
        assert max_steps is not None, "prepare_run settles the schedule once the data is counted"
        return max_steps

    @property
    def num_train_blocks(self) -> int:
        """How many blocks training goes through: all, or as many as --max_train_samples allows."""
        num_blocks, limit = len(self.data.train), self.arguments.max_train_samples
        return num_blocks if limit is None else min(limit, num_blocks)


def settle_request(arguments: Arguments, *, world: World, model: ModelSettings, faults: Sequence[str] = ()) -> Request:
    """Settle flags, DeepSpeed JSON and model for the ranks there are; ValueError lists `faults` with its own."""
    settings = resolve_config(
        arguments,
        deepspeed_json=load_deepspeed_json(arguments.ds_config),
        ranks=WorldInfo(
            world_size=world.world_size,
            local_world_size=world.local_world_size,
            device=world.device,
            compute_capability=compute_capability(world),
            attention_kernels=installed_attention(),
        ),
        sizes=sizes_of(model.kwargs),
        attention_dropout=spec_of(model.kwargs).attention_dropout,
        extra_faults=faults,
        extra_notes=model.notes,
    )
    return Request(arguments, settings, model.kwargs, world)


def quieten_libraries(*, is_first: bool) -> None:
    """Let DeepSpeed and transformers report warnings on the first rank and errors elsewhere, instead of every step."""
    level = logging.WARNING if is_first else logging.ERROR
    logging.getLogger("DeepSpeed").setLevel(level)
    set_verbosity(level)
    if not is_first:
        disable_progress_bars()


def choose_threads(request: Request) -> None:
    """Share a machine's CPUs among its ranks, unless the user decided: more threads than CPUs slow everything down."""
    wanted = request.arguments.torch_num_threads
    if wanted is None and "OMP_NUM_THREADS" not in os.environ and request.world.device == "cpu":
        wanted = max(1, len(os.sched_getaffinity(0)) // request.world.local_world_size)
    if wanted is not None:
        torch.set_num_threads(wanted)


def prepare_run(
    request: Request, *, mesh: ParallelMesh, ranks: Ranks, folder: RunFolder, say: Callable[[str], None]
) -> Run:
    """Find the weights, read or make the data, settle what depends on it. Collective; ValueError on all ranks alike."""
    repository = claim_repository(request.arguments, ranks=ranks)
    model_folder = find_weights(request, ranks=ranks, say=say)
    # Hosts may see the folder's files differently.
    options = on_every(lambda: data_options(request.arguments, model_folder=model_folder), ranks=ranks)
    data = prepare_data(options, ranks=ranks, say=say)
    run = Run(
        arguments=request.arguments,
        settings=request.settings,
        config=_model_config(request, data),
        world=request.world,
        mesh=mesh,
        ranks=ranks,
        folder=folder,
        model_folder=model_folder,
        repository=repository,
        data=data,
        say=say,
    )
    schedule = settle_schedule(
        request.settings.schedule,
        num_train_sequences=run.num_train_blocks,
        sequences_per_step=request.settings.sequences_per_step,
    )
    return replace(run, settings=replace(request.settings, schedule=schedule))


def find_weights(request: Request, *, ranks: Ranks, say: Callable[[str], None]) -> Path | None:
    """Return the folder of the weights to start from, downloaded if need be; None for fresh ones. Collective."""
    arguments, name = request.arguments, request.arguments.model_name_or_path
    if name is None:
        return None
    if not on_first(lambda: is_on_hub(name), ranks=ranks):
        return Path(name)
    folder = fetch_model(HubModel(name, arguments.model_revision), ranks=ranks, say=say)

    def check() -> None:
        found = read_model(replace(arguments, model_name_or_path=str(folder), model_revision=None))
        if found.kwargs != request.model:
            raise ValueError(f"{name} on the hub changed while the run started; start it again")

    on_every(check, ranks=ranks)
    return folder


def prepare_engine(run: Run) -> Engine:
    """Make or load this rank's weights and hand them to DeepSpeed. Collective."""
    arguments = run.arguments
    # Numbers drawn while training, as for dropout, are the same within a group and differ between groups.
    torch.manual_seed(arguments.seed + run.mesh.dp_rank)
    model = fresh_model(run.config, run.mesh, seed=arguments.seed, settings=run.settings, device=run.world.device)
    folder = run.model_folder
    if folder is not None:
        noise = ExpertNoise(arguments.upcycle_noise_std, arguments.seed)
        load = partial(load_weights, model, config=run.config, mesh=run.mesh, folder=folder, noise=noise)
        num_bytes = on_every(load, ranks=run.ranks)
        run.say(f"model: weights from {folder}, {num_bytes:,} bytes read by this rank")
        if arguments.upcycle_num_experts is not None:
            run.say(
                f"model: {arguments.upcycle_num_experts} experts made of each feed-forward, with noise of standard "
                f"deviation {arguments.upcycle_noise_std}; the routers are fresh"
            )
    freeze_parameters(model, arguments.freeze_parameters)
    run.say(describe_parameters(model, run.config))
    return start_engine(model, arguments=arguments, settings=run.settings, device=run.world.device)


def fresh_model(
    config: GatherMoeConfig, mesh: ParallelMesh, *, seed: int, settings: ResolvedConfig, device: str
) -> GatherMoeForCausalLM:
    """Make this rank's weights on its device, in the type that DeepSpeed computes with."""
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    return build_model(config, mesh=mesh, execution=settings.execution, seed=seed, dtype=dtype, device=device)


def start_engine(model: GatherMoeForCausalLM, *, arguments: Arguments, settings: ResolvedConfig, device: str) -> Engine:
    """Hand a model that has its weights to DeepSpeed, as a run with these settings does. Collective."""
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model.to(device=torch.device(device))  # type: ignore[call-arg]
    optimizer = build_optimizer(model, settings.optimizer)
    engine = Engine(model, ds_config=settings.engine, optimizer=optimizer, seed=arguments.seed)
    if settings.execution.cuda_graph:
        install_graphs(engine.model, capture=CudaCapture())
    return engine


def data_options(arguments: Arguments, *, model_folder: Path | None = None) -> Arguments:
    """Settle the tokenizer: where none is named it is in `model_folder`, which is None before a hub download."""
    name = arguments.model_name_or_path
    if model_folder is None and name is not None and not is_on_hub(name):
        model_folder = Path(name)
    tokenizer = arguments.tokenizer_name or (name if model_folder is None else _own_tokenizer(model_folder))
    return replace(arguments, tokenizer_name=tokenizer)


def _own_tokenizer(model_folder: Path) -> str:
    """Return the folder as its own tokenizer's; ValueError where it has none, lest one be trained by accident."""
    if any((model_folder / file).exists() for file in TOKENIZER_FILES):
        return str(model_folder)
    raise ValueError(f"--model_name_or_path {model_folder} holds no tokenizer; name its tokenizer by --tokenizer_name")


def request_faults(arguments: Arguments, model: Mapping[str, Any]) -> list[str]:
    """Return faults of data options, tokenizer, export and tracker, to be listed with all others."""
    faults = []
    if "tensorboard" in arguments.report_to:
        faults += tensorboard_faults()
    try:
        faults += option_faults(data_options(arguments))
    except ValueError as error:
        faults.append(str(error))
    try:
        config = GatherMoeConfig(**model, balance_bias_update_rate=arguments.balance_bias_update_rate)
        choose_type(config, hf_format=arguments.hf_format)
        if arguments.freeze_parameters:
            with torch.device("meta"):  # the names are what counts
                freeze_parameters(GatherMoeForCausalLM(config), arguments.freeze_parameters)
    except (ValueError, StrictDataclassError) as error:
        faults.append(str(error))
    return faults


def _model_config(request: Request, data: PreparedData) -> GatherMoeConfig:
    tokenizer = data.tokenizer
    vocab_size = data.report["vocab_size"]
    if vocab_size > request.model["vocab_size"]:
        raise ValueError(
            f"the tokenizer has {vocab_size} entries, the model only vocab_size={request.model['vocab_size']}; "
            f"use --config_overrides vocab_size={vocab_size} for a fresh model, or the tokenizer the model was "
            "trained with"
        )
    tokens = {name: getattr(tokenizer, name) for name in TOKEN_IDS}
    return model_config(request, tokens)


def model_config(request: Request, tokens: Mapping[str, Any]) -> GatherMoeConfig:
    """Make the configuration of a run's model: its own settings, the tokenizer's special tokens, the run's options."""
    model = {**request.model, **tokens}
    config = GatherMoeConfig(**model, **run_options(request.arguments), use_cache=False)
    config._attn_implementation = request.settings.attention
    return config


def describe_run(run: Run) -> dict[str, Any]:
    """Return the content of run.json."""
    packages = ("torch", "deepspeed", "transformers", "datasets", "tokenizers", "safetensors", "gather-moe")
    total, active = count_parameters(run.config.sizes)
    return {
        "arguments": {name: value for name, value in asdict(run.arguments).items() if name != "given"},
        "given": dict(run.arguments.given),
        "settings": asdict(run.settings),
        "model": run.config.to_dict(),
        "parameters": {"total": total, "active": active},
        "world": asdict(run.world),
        "data": run.data.report,
        "model_folder": None if run.model_folder is None else str(run.model_folder),
        "command": sys.argv,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }


def describe_parameters(model: nn.Module, config: GatherMoeConfig) -> str:
    """Return a line with the sizes of the whole model, and this rank's share by kind."""
    total, active = count_parameters(config.sizes)
    kinds = {"experts": ".experts.", "router": "mlp.gate.weight", "norms": "norm", "attention": ".self_attn."}
    held = dict.fromkeys([*kinds, "embedding and dense"], 0)
    trained = dict(held)
    for name, parameter in model.named_parameters():
        kind = next((kind for kind, part in kinds.items() if part in name), "embedding and dense")
        held[kind] += parameter.numel()
        trained[kind] += parameter.numel() if parameter.requires_grad else 0
    shares = ", ".join(f"{kind} {trained[kind]:,}/{held[kind]:,}" for kind in held if held[kind])
    return (
        f"model: {total:,} parameters, {active:,} active per token; trainable/held by this rank: "
        f"{sum(trained.values()):,}/{sum(held.values()):,} ({shares})"
    )


def pick_dtype(name: str, *, precision: str) -> torch.dtype:
    """Return the type that --hf_dtype names; "auto" is the precision of the run."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return names[{"fp32": "float32", "bf16": "bfloat16"}[precision] if name == "auto" else name]
