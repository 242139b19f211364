"""DeepSpeed's own files inside a checkpoint, and what its optimizer holds of each parameter, read and replaced."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import (
    lazy_init_hp_params_optimizer_state,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from modeling.init import stored_tensors
from recipe.checkpoint.files import Files, WriteNow
from recipe.engine import Engine
from recipe.state.random_states import random_states, restore_random_states
from recipe.state.rank_files import (
    FOLDER,
    Counters,
    Partition,
    Piece,
    RankFile,
    rank_path,
    read_rank_file,
    to_content,
)
from recipe.state.training_state import KINDS, MOMENTS, NATIVE_FOLDER, WEIGHT

OPTIMIZER_SETTINGS = ("betas", "eps", "weight_decay")


class _Diverted:
    """DeepSpeed's checkpoint engine, its files given to `files`, which raise nothing before the save is over.

    DeepSpeed's save has barriers behind its writes: a rank that raised at once, on a full disk say, would leave the
    others waiting there.
    """

    def __init__(self, inner: Any, files: Files) -> None:
        self._inner, self._files = inner, files

    def save(self, state_dict: Any, path: str) -> None:
        self._files.write_state(Path(path), state_dict, lambda state, path: self._inner.save(state, str(path)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def save_native(engine: Engine, folder: Path, *, rank_state: dict[str, Any], files: Files | None = None) -> None:
    """Write weights, optimizer state, this rank's random states and `rank_state` below `folder`. Collective.

    By way of `files` where they are given, else before this returns.
    """
    sink = WriteNow() if files is None else files
    ds = engine.ds
    inner, copy_scripts = ds.checkpoint_engine, ds._copy_recovery_script
    ds.checkpoint_engine = _Diverted(inner, sink)
    ds._copy_recovery_script = lambda folder: sink.write(Path(folder), lambda path: copy_scripts(str(path)))
    try:
        ds.save_checkpoint(str(folder), tag=NATIVE_FOLDER, save_latest=False)
    finally:
        ds.checkpoint_engine = inner
        del ds._copy_recovery_script
    (folder / FOLDER).mkdir(exist_ok=True)
    file = RankFile(
        partition=describe_partition(engine),
        counters=Counters(
            global_steps=ds.global_steps,
            global_samples=ds.global_samples,
            skipped_steps=ds.skipped_steps,
            tokens_read=engine.tokens_read,
        ),
        random=random_states(ds.device),
        state=rank_state,
    )
    sink.write_state(rank_path(folder, engine.mesh.rank), to_content(file), torch.save)
    if files is None:
        sink.finish()


def load_native(engine: Engine, folder: Path) -> dict[str, Any]:
    """Put back what `save_native` wrote, for the same partition of the model; returns its `rank_state`. Collective.

    Raises RuntimeError where DeepSpeed finds nothing to load, which it reports by a warning only.
    """
    wanted = [{name: group[name] for name in OPTIMIZER_SETTINGS} for group in engine.ds.optimizer.param_groups]
    path, _ = engine.ds.load_checkpoint(str(folder), tag=NATIVE_FOLDER, load_module_strict=True)
    if path is None:
        raise RuntimeError(f"DeepSpeed found no checkpoint in {folder / NATIVE_FOLDER}")
    # DeepSpeed brings back the settings of the run that saved, too; those of this run hold.
    for group, settings in zip(engine.ds.optimizer.param_groups, wanted, strict=True):
        group.update(settings)
    if hasattr(engine.ds.optimizer, "clip_grad"):
        engine.ds.optimizer.clip_grad = engine.ds.gradient_clipping()
    saved = read_rank_file(folder, engine.mesh.rank)
    engine.tokens_read = saved.counters.tokens_read
    restore_random_states(saved.random, device=engine.ds.device)
    return saved.state


def restore_counters(engine: Engine, counters: Counters) -> None:
    """What else a load by DeepSpeed brings back, for a load that is not its own."""
    engine.ds.global_steps = counters.global_steps
    engine.ds.global_samples = counters.global_samples
    engine.ds.skipped_steps = counters.skipped_steps
    engine.tokens_read = counters.tokens_read


def full_precision_shard(parameter: nn.Parameter) -> Tensor:
    """This rank's shard of a parameter under the engine, from the optimizer's float32 copy. Collective over dp.

    There is none where ZeRO 0 trains in float32, nor of what is frozen: the parameter itself is all there is.
    """
    master = safe_get_full_fp32_param(parameter)
    if master is not None:
        return master.detach().view(getattr(parameter, "ds_shape", parameter.shape))
    if not hasattr(parameter, "ds_shape"):
        return parameter.detach()
    with GatheredParameters([parameter]):
        return parameter.detach().clone()


def describe_partition(engine: Engine) -> Partition:
    """Where this rank's optimizer has the numbers of each parameter."""
    tensors = stored_tensors(engine.model)
    shapes = {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in tensors.items()}
    numbers = {}
    if engine.zero_stage == 0:
        held = (parameter for group in engine.ds.optimizer.param_groups for parameter in group["params"])
        numbers = {id(parameter): number for number, parameter in enumerate(held)}
    pieces = {}
    for name, parameter in engine.model.named_parameters():
        if not parameter.requires_grad:
            continue
        found = _piece(engine, parameter, number=numbers.get(id(parameter)))
        pieces[name] = () if found is None else (found,)
    return Partition(optimizer=type(engine.ds.optimizer).__name__, shapes=shapes, pieces=pieces)


def _piece(engine: Engine, parameter: Any, *, number: int | None) -> Piece | None:
    """`number` is the parameter's in the optimizer's state where there is no ZeRO."""
    if number is not None:
        return Piece(number, 0, 0, parameter.numel())
    if engine.zero_stage == 3:
        zero = engine.ds.optimizer
        group, start, width = zero.grad_position[zero.get_param_id(parameter)]
        offset = engine.mesh.dp_rank * width
        numel = min(width, parameter.ds_numel - offset)  # the last parts are padded
        return Piece(group, start, offset, numel) if numel > 0 else None
    fragment = parameter._hp_mapping
    if fragment is None:
        return None
    address = fragment.hp_fragment_address
    return Piece(fragment.param_group_index, address.start, fragment.lp_fragment_address.start, address.numel)


def start_moments(engine: Engine, *, step: float) -> None:
    """Give all that is trained moments of 0 and this step counter, as the optimizer's first step would."""
    optimizer = engine.ds.optimizer
    if engine.zero_stage == 0:
        inner, held = optimizer, [p for group in optimizer.param_groups for p in group["params"]]
    elif engine.zero_stage == 3:
        inner, held = optimizer.optimizer, optimizer.fp32_partitioned_groups_flat
    else:
        inner, held = optimizer.optimizer, [flat for _, flat in _flat_groups(engine)]
    for tensor in held:
        device = tensor.device if inner.defaults.get("fused") else "cpu"
        counter = torch.tensor(step, dtype=torch.float32, device=device)
        inner.state[tensor] = {"step": counter, **{name: torch.zeros_like(tensor) for name in MOMENTS}}
    link_moments(engine)


def link_moments(engine: Engine) -> None:
    """Let DeepSpeed find the moments of all parameters (stages 1 and 2); by itself it does so in a step.

    And then only those of the first group of parameters, since it does so after that group's step.
    """
    if engine.zero_stage in (1, 2):
        for parameters, flat in _flat_groups(engine):
            lazy_init_hp_params_optimizer_state(parameters, flat, engine.ds.optimizer.optimizer.state)


def _flat_groups(engine: Engine) -> Iterator[tuple[list[nn.Parameter], Tensor]]:
    """The parameters of every group of the optimizer and this rank's flat part of them, under ZeRO 1 and 2."""
    optimizer = engine.ds.optimizer
    names = ("bit16_groups", "single_partition_of_fp32_groups")
    if not hasattr(optimizer, names[0]):
        names = ("bf16_groups", "fp32_groups_flat_partition")
    yield from zip(*(getattr(optimizer, name) for name in names), strict=True)


@contextmanager
def parts_in_place(engine: Engine) -> Iterator[None]:
    """Where `write_numbers` may be used. Collective: ZeRO-3 lays all parameters down in parts before, gathers after."""
    if engine.zero_stage == 3:
        engine.ds.optimizer.checkpoint_event_prologue()
    yield
    if engine.zero_stage == 3:
        engine.ds.optimizer.checkpoint_event_epilogue()


def write_numbers(engine: Engine, parameter: Any, value: Tensor, *, kind: str) -> None:
    """Replace one of the KINDS of a parameter: its weight, for the forward and the optimizer alike, or a moment.

    `value` is this rank's shard, whole over ZeRO; of a frozen parameter there is but the weight. Not collective; the
    moments of stages 1 and 2 must have been linked.
    """
    trained = parameter.requires_grad
    if engine.zero_stage == 3:
        local = _own_part(value, like=parameter.ds_tensor, dp_rank=engine.mesh.dp_rank)
        if kind != WEIGHT:
            safe_set_local_optimizer_state(parameter, local, kind)
            return
        parameter.ds_tensor.data.copy_(local)
        if trained:
            safe_set_local_fp32_param(parameter, local)
    elif kind == WEIGHT:
        parameter.data.copy_(value)
        if trained and engine.zero_stage:
            safe_set_full_fp32_param(parameter, value)
    elif engine.zero_stage:
        safe_set_full_optimizer_state(parameter, value, kind)
    else:
        engine.ds.optimizer.state[parameter][kind].copy_(value)


def _own_part(value: Tensor, *, like: Tensor, dp_rank: int) -> Tensor:
    """What ZeRO-3 keeps of a shard on one rank: equal parts, the last ones filled up with zeros."""
    width = like.numel()
    part = value.flatten()[dp_rank * width :][:width]
    return torch.cat([part, part.new_zeros(width - part.numel())])


def read_training_state(engine: Engine, parameter: nn.Parameter) -> list[Tensor]:
    """Copies of this rank's shard of a parameter's KINDS, in float32 at least; of a frozen one there is but the weight.

    Collective over dp; after `link_moments`.
    """
    weight = full_precision_shard(parameter).clone()
    if not parameter.requires_grad:
        return [weight]
    if engine.zero_stage == 0:
        state = engine.ds.optimizer.state[parameter]
        return [weight, *(state[name].clone() for name in MOMENTS)]
    return [weight, *(safe_get_full_optimizer_state(parameter, name).view(weight.shape) for name in MOMENTS)]


def write_training_state(engine: Engine, parameter: nn.Parameter, state: list[Tensor]) -> None:
    """Put back what `read_training_state` gave, changed; inside `parts_in_place`."""
    for kind, value in zip(KINDS, state, strict=False):
        write_numbers(engine, parameter, value, kind=kind)
