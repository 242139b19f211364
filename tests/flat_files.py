"""DeepSpeed's files of a training state as many data-parallel ranks would have written them, made by one process."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from recipe.checkpoint.rank_files import Counters, Partition, Position, RankFile, rank_path, to_content
from recipe.checkpoint.training_state import KINDS, MOMENTS, WEIGHT
from tests.states import MemoryState


def write_by_hand(folder: Path, state: MemoryState, *, dp: int, stage: int) -> None:
    """ZeRO 2 or 3 in float32 without tensor parallelism; everything in one group of the optimizer."""
    names = [name for name in state.shapes() if state.kinds(name) == KINDS]
    buffers = {name: state.tensors[f"weight/{name}"] for name in state.shapes() if name not in names}
    positions: dict[str, Position] = {}
    parts = {kind: _parts(state, kind, names=names, dp=dp, stage=stage, positions=positions) for kind in KINDS}
    partition = Partition(optimizer="by hand", shapes=state.shapes(), positions=positions)
    counters = Counters(global_steps=int(state.step), global_samples=0, skipped_steps=0, tokens_read=0)
    for name in ("deepspeed", "ranks"):
        (folder / name).mkdir(parents=True)
    for rank in range(dp):
        file = RankFile(partition=partition, counters=counters, random={}, state={"rank": rank})
        torch.save(to_content(file), rank_path(folder, rank))
        model: dict[str, Any] = {"module": buffers, "buffer_names": list(buffers)}
        part = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(model, folder / "deepspeed" / f"{part}mp_rank_00_model_states.pt")
        step = torch.tensor(state.step)
        torch.save(
            {"optimizer_state_dict": _optimizer({kind: parts[kind][rank] for kind in KINDS}, step=step, stage=stage)},
            folder / "deepspeed" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )


def _optimizer(parts: dict[str, Tensor], *, step: Tensor, stage: int) -> dict[str, Any]:
    moments = {kind: parts[kind] for kind in MOMENTS}
    inner = {"state": {0: {"step": step, **moments}}}
    if stage == 3:
        return {"fp32_flat_groups": [parts[WEIGHT]], "optimizer_state_dict": inner}
    return {"single_partition_of_fp32_groups": [parts[WEIGHT]], "base_optimizer_state": inner}


def _parts(
    state: MemoryState, kind: str, *, names: list[str], dp: int, stage: int, positions: dict[str, Position]
) -> list[Tensor]:
    """The flat tensor of every rank; `positions` are filled in."""
    tensors = [state.tensors[f"{kind}/{name}"].flatten() for name in names]
    start = 0
    if stage == 3:  # of every parameter an equal part
        by_tensor = [_shares(tensor, dp=dp) for tensor in tensors]
        for name, shares in zip(names, by_tensor, strict=True):
            positions[name] = Position(0, start, shares[0].numel(), 0)
            start += shares[0].numel()
        return [torch.cat(parts) for parts in zip(*by_tensor, strict=True)]
    shares = _shares(torch.cat(tensors), dp=dp)  # an equal part of all parameters together
    for name, tensor in zip(names, tensors, strict=True):
        positions[name] = Position(0, 0, shares[0].numel(), -start)
        start += tensor.numel()
    return shares


def _shares(flat: Tensor, *, dp: int) -> list[Tensor]:
    width = -(-flat.numel() // dp)
    return [share.clone() for share in pad(flat, (0, width * dp - flat.numel())).split(width)]
