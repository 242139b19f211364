"""What DeepSpeed's engine holds: saved to its own files, loaded, read, replaced, and compared among the ranks."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import (
    lazy_init_hp_params_optimizer_state,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from modeling.init import full_shapes, shard_table, stored_tensors
from recipe.checkpoint.files import Files
from recipe.checkpoint.rank_files import (
    DS_COUNTERS,
    FOLDER,
    Partition,
    Position,
    RankFile,
    random_states,
    rank_path,
    read_rank_file,
    restore_random_states,
    to_content,
)
from recipe.checkpoint.tensor_file import bytes_of
from recipe.checkpoint.training_state import KINDS, MOMENTS, NATIVE_FOLDER, WEIGHT
from recipe.engine.engine import Engine
from recipe.shared.ranks import Ranks

OPTIMIZER_SETTINGS = ("betas", "eps", "weight_decay")


class _CheckpointEngine:
    """DeepSpeed's checkpoint engine with its files given to `files`, which raise nothing before the save is over.

    DeepSpeed's save has barriers after its writes: a rank that raised at once, on a full disk for example, would leave
    the others waiting there.
    """

    def __init__(self, inner: Any, files: Files) -> None:
        self._inner, self._files = inner, files

    def save(self, state_dict: Any, path: str) -> None:
        self._files.write_state(Path(path), state_dict, lambda state, path: self._inner.save(state, str(path)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def save_native(engine: Engine, folder: Path, *, rank_state: dict[str, Any], files: Files | None = None) -> None:
    """Write weights, optimizer state, this rank's random states and `rank_state` below `folder`. Collective.

    Everything is given to `files`; without them it is written when this returns.
    """
    sink = Files() if files is None else files
    ds = engine.ds
    inner, copy_scripts = ds.checkpoint_engine, ds._copy_recovery_script
    ds.checkpoint_engine = _CheckpointEngine(inner, sink)
    ds._copy_recovery_script = lambda folder: sink.write(Path(folder), lambda path: copy_scripts(str(path)))
    try:
        ds.save_checkpoint(str(folder), tag=NATIVE_FOLDER, save_latest=False)
    finally:
        ds.checkpoint_engine = inner
        del ds._copy_recovery_script
    (folder / FOLDER).mkdir(exist_ok=True)
    file = RankFile(
        partition=describe_partition(engine),
        counters={name: getattr(ds, name) for name in DS_COUNTERS} | {"tokens_read": engine.tokens_read},
        random=random_states(ds.device),
        state=rank_state,
    )
    sink.write_state(rank_path(folder, engine.mesh.rank), to_content(file), torch.save)
    if files is None:
        sink.finish()


def load_native(engine: Engine, folder: Path) -> dict[str, Any]:
    """Put back what `save_native` wrote for the same partition of the model; return its `rank_state`. Collective.

    Raises RuntimeError where DeepSpeed finds nothing to load, which it reports by a warning only.
    """
    wanted = [{name: group[name] for name in OPTIMIZER_SETTINGS} for group in engine.ds.optimizer.param_groups]
    path, _ = engine.ds.load_checkpoint(str(folder), tag=NATIVE_FOLDER, load_module_strict=True)
    if path is None:
        raise RuntimeError(f"DeepSpeed found no checkpoint in {folder / NATIVE_FOLDER}")
    # DeepSpeed also restores the settings of the run that saved; this run's own hold.
    for group, settings in zip(engine.ds.optimizer.param_groups, wanted, strict=True):
        group.update(settings)
    if hasattr(engine.ds.optimizer, "clip_grad"):
        engine.ds.optimizer.clip_grad = engine.ds.gradient_clipping()
    saved = read_rank_file(folder, engine.mesh.rank)
    engine.tokens_read = saved.counters["tokens_read"]
    restore_random_states(saved.random, device=engine.ds.device)
    return saved.state


def restore_counters(engine: Engine, counters: Mapping[str, int]) -> None:
    """Set the counters that a load by DeepSpeed would set."""
    for name in DS_COUNTERS:
        setattr(engine.ds, name, counters[name])
    engine.tokens_read = counters["tokens_read"]


def full_precision_shard(parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a parameter under the engine, from the optimizer's float32 copy. Collective over dp.

    Where ZeRO 0 trains in float32, and of frozen parameters, there is no such copy, and the parameter is returned.
    """
    master = safe_get_full_fp32_param(parameter)
    if master is not None:
        return master.detach().view(getattr(parameter, "ds_shape", parameter.shape))
    if not hasattr(parameter, "ds_shape"):
        return parameter.detach()
    with GatheredParameters([parameter]):
        return parameter.detach().clone()


def describe_partition(engine: Engine) -> Partition:
    """Return where the optimizer holds the numbers of each parameter."""
    tensors = stored_tensors(engine.model)
    shapes = {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in tensors.items()}
    held = ((name, p) for name, p in engine.model.named_parameters() if p.requires_grad)
    positions = _positions(engine)
    return Partition(
        optimizer=type(engine.ds.optimizer).__name__,
        shapes=shapes,
        positions={name: positions[id(parameter)] for name, parameter in held},
    )


def _positions(engine: Engine) -> dict[int, Position]:
    """Return the position of every parameter that the optimizer trains, by the parameter's id."""
    optimizer = engine.ds.optimizer
    if engine.zero_stage == 0:
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return {id(p): Position(number, 0, p.numel(), 0) for number, p in enumerate(held)}
    if engine.zero_stage == 3:
        trained = [p for p in engine.model.parameters() if p.requires_grad]
        found = {id(p): optimizer.grad_position[optimizer.get_param_id(p)] for p in trained}
        return {key: Position(group, start, width, 0) for key, (group, start, width) in found.items()}
    positions = {}
    for number, group in enumerate(_flat_groups(engine)):
        width = group.whole.numel() // engine.mesh.layout.dp
        for parameter in group.parameters:
            # DeepSpeed makes all parameters views of one tensor, which the ranks share in equal parts.
            start = (parameter.data_ptr() - group.whole.data_ptr()) // group.whole.element_size()
            assert _is_at(start, parameter, width=width, dp_rank=engine.mesh.dp_rank)
            positions[id(parameter)] = Position(number, 0, width, -start)
    return positions


def _is_at(start: int, parameter: Any, *, width: int, dp_rank: int) -> bool:
    """Return whether DeepSpeed has this rank's part of a parameter, if there is one, at that start."""
    piece = Position(0, 0, width, -start).piece(dp_rank, numel=parameter.numel())
    fragment = parameter._hp_mapping
    if fragment is None:
        return piece.numel == 0
    return piece == (fragment.hp_fragment_address.start, fragment.lp_fragment_address.start, piece.numel)


def start_moments(engine: Engine, *, step: float) -> None:
    """Give all that is trained moments of 0 and this step counter, as the optimizer's first step would."""
    optimizer = engine.ds.optimizer
    if engine.zero_stage == 0:
        inner, held = optimizer, [p for group in optimizer.param_groups for p in group["params"]]
    elif engine.zero_stage == 3:
        inner, held = optimizer.optimizer, optimizer.fp32_partitioned_groups_flat
    else:
        inner, held = optimizer.optimizer, [group.part for group in _flat_groups(engine)]
    for tensor in held:
        device = tensor.device if inner.defaults.get("fused") else "cpu"
        counter = torch.tensor(step, dtype=torch.float32, device=device)
        inner.state[tensor] = {"step": counter, **{name: torch.zeros_like(tensor) for name in MOMENTS}}
    link_moments(engine)


def link_moments(engine: Engine) -> None:
    """Let DeepSpeed find the moments of all parameters (stages 1 and 2).

    DeepSpeed links them in an optimizer step, and only those of the first parameter group.
    """
    if engine.zero_stage in (1, 2):
        for group in _flat_groups(engine):
            lazy_init_hp_params_optimizer_state(group.parameters, group.part, engine.ds.optimizer.optimizer.state)


class _FlatGroup(NamedTuple):
    """A parameter group under ZeRO 1 and 2: all of it in one flat tensor, and this rank's part of that."""

    parameters: list[nn.Parameter]
    whole: Tensor
    part: Tensor  # float32


def _flat_groups(engine: Engine) -> list[_FlatGroup]:
    optimizer = engine.ds.optimizer
    names = ("bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups")
    if not hasattr(optimizer, names[0]):
        names = ("bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition")
    return [_FlatGroup(*group) for group in zip(*(getattr(optimizer, name) for name in names), strict=True)]


@contextmanager
def parts_in_place(engine: Engine) -> Iterator[None]:
    """Allow `write_numbers` inside. Collective: ZeRO-3 partitions all parameters before and gathers them after."""
    if engine.zero_stage == 3:
        engine.ds.optimizer.checkpoint_event_prologue()
    yield
    if engine.zero_stage == 3:
        engine.ds.optimizer.checkpoint_event_epilogue()


def kept(engine: Engine, parameter: Any, *, kind: str) -> range:
    """Return which elements of its flattened shard of a parameter this rank keeps of one of the KINDS."""
    if engine.zero_stage == 3:
        width = parameter.ds_tensor.numel()
        piece = Position(0, 0, width, 0).piece(engine.mesh.dp_rank, numel=parameter.ds_numel)
        return range(piece.offset, piece.offset + piece.numel)
    if kind == WEIGHT or engine.zero_stage == 0:
        return range(parameter.numel())
    if parameter._hp_mapping is None:
        return range(0)
    address = parameter._hp_mapping.lp_fragment_address
    return range(address.start, address.start + address.numel)


def write_numbers(engine: Engine, parameter: Any, value: Tensor, *, kind: str) -> None:
    """Replace one of the KINDS of a parameter: its weight, for the forward and the optimizer alike, or a moment.

    `value` is flat and has the elements that `kept` returns; a frozen parameter has a weight only. Not collective; the
    moments of stages 1 and 2 must have been linked.
    """
    trained = parameter.requires_grad
    if engine.zero_stage == 3:
        # All parts are equally long, the last ones filled up with zeros.
        local = torch.cat([value, value.new_zeros(parameter.ds_tensor.numel() - value.numel())])
        if kind != WEIGHT:
            safe_set_local_optimizer_state(parameter, local, kind)
            return
        parameter.ds_tensor.data.copy_(local)
        if trained:
            safe_set_local_fp32_param(parameter, local)
    elif kind == WEIGHT:
        parameter.data.copy_(value.view(parameter.shape))
        if trained and engine.zero_stage:
            safe_set_full_fp32_param(parameter, value)
    elif engine.zero_stage == 0:
        engine.ds.optimizer.state[parameter][kind].copy_(value.view(parameter.shape))
    elif parameter._hp_mapping is not None:
        parameter._hp_mapping.get_optim_state_fragment(kind).copy_(value)


def read_training_state(engine: Engine, parameter: nn.Parameter) -> list[Tensor]:
    """Copy this rank's shard of a parameter's KINDS, in float32 at least; of a frozen one the weight only.

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
    """Replace what `read_training_state` returned; inside `parts_in_place`."""
    for kind, value in zip(KINDS, state, strict=False):
        own = kept(engine, parameter, kind=kind)
        write_numbers(engine, parameter, value.flatten()[own.start : own.stop], kind=kind)


def check_replicas(engine: Engine, ranks: Ranks) -> None:
    """Compare a hash of every parameter and router's bias among all ranks that hold the same part of it, bit for bit.

    `ranks` is the whole world. Up to ZeRO-2 the hash is of the numbers that the forward uses. Under ZeRO-3 it is of the
    optimizer's copy, which is gathered over dp first, one parameter at a time, so only ranks of one group are compared.
    Moves every parameter to the host once.

    Raises RuntimeError on every rank alike, naming the first parameter that differs and which ranks agree.
    """
    model, mesh = engine.model, engine.mesh
    digests = {}
    for name, tensor in stored_tensors(model).items():
        if engine.zero_stage == 3 and isinstance(tensor, nn.Parameter):
            tensor = full_precision_shard(tensor)
        digests[name] = hashlib.blake2b(bytes_of(tensor.cpu()), digest_size=16).hexdigest()
    by_rank = ranks.gather(digests)
    table = shard_table(model.config, mesh)
    for name, shape in full_shapes(model, config=model.config, table=table).items():
        holders: dict[object, dict[str, list[int]]] = {}
        for rank, its_digests in enumerate(by_rank):
            part = table.shard(name, shape, group_rank=rank % mesh.layout.tp).ranges
            holders.setdefault(part, {}).setdefault(its_digests[name], []).append(rank)
        for same_part in holders.values():
            if len(same_part) > 1:
                raise RuntimeError(
                    f"ranks that must hold the same numbers do not: the tensor {name!r} differs between "
                    f"{' and '.join(f'ranks {some}' for some in same_part.values())}; go back to the last checkpoint"
                )
