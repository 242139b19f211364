"""Give a model in training a new placement of its experts: weights and moments move between the ranks of a group.

The model stays the same function, and training goes on as it would have, to rounding; see `gather-moe place` for the
same on exported weights. Nothing but the experts' numbers changes, in the experts and in the rows of the router.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from modeling.comm import RowSplits, all_to_all_rows
from modeling.mesh import ParallelMesh
from modeling.moe import GatherMoeSparseBlock
from recipe.checkpoint.native import link_moments, parts_in_place, read_training_state, write_training_state
from recipe.engine.engine import Engine

Numbers = Sequence[int]  # the new number of every expert of a layer


def move_experts(engine: Engine, numbers_by_layer: Sequence[Numbers]) -> None:
    """Renumber every MoE layer's experts. Collective over the whole world; after a load or a step.

    The loads that the next step's copies are chosen by are renumbered, too.
    """
    blocks = [module for module in engine.model.modules() if isinstance(module, GatherMoeSparseBlock)]
    link_moments(engine)
    with parts_in_place(engine):
        for block, numbers in zip(blocks, numbers_by_layer, strict=True):
            _move_block(engine, block, numbers)
    loads = engine.loads()
    if loads is not None:
        moved = [renumber(torch.tensor(layer), numbers) for layer, numbers in zip(loads, numbers_by_layer, strict=True)]
        engine.restore_loads([layer.tolist() for layer in moved])


def _move_block(engine: Engine, block: GatherMoeSparseBlock, numbers: Numbers) -> None:
    for parameter in (block.experts.gate_up_proj, block.experts.down_proj):
        state = read_training_state(engine, parameter)
        state = [exchange_experts(part, numbers, mesh=engine.mesh) for part in state]
        write_training_state(engine, parameter, state)
    router = block.gate
    state = [renumber(part, numbers) for part in read_training_state(engine, router.weight)]
    write_training_state(engine, router.weight, state)
    if router.e_score_correction_bias is not None:
        router.e_score_correction_bias.copy_(renumber(router.e_score_correction_bias, numbers))


def renumber(x: Tensor, numbers: Numbers) -> Tensor:
    """Rows [E, ...] in the order of their new numbers."""
    out = torch.empty_like(x)
    out[torch.tensor(numbers, device=x.device)] = x
    return out


def exchange_experts(x: Tensor, numbers: Numbers, *, mesh: ParallelMesh) -> Tensor:
    """This rank's experts [e, ...] before -> those after, sent between ranks with the same slice. Collective.

    Rows go out by the rank they belong to and their new number, and come in by the rank they were on and that number.
    """
    here, num_local, peers = mesh.ep_rank, x.shape[0], mesh.expert_peers
    old_of = sorted(range(len(numbers)), key=lambda old: numbers[old])  # by new number
    leaving = [old for old in old_of if old // num_local == here]
    arriving = sorted(old_of[here * num_local :][:num_local], key=lambda old: old // num_local)
    send, receive = [0] * mesh.layout.tp, [0] * mesh.layout.tp
    for old in leaving:
        send[peers[numbers[old] // num_local]] += 1
    for old in arriving:
        receive[peers[old // num_local]] += 1
    assert mesh.group is not None
    rows = all_to_all_rows(x[[old % num_local for old in leaving]], RowSplits(send, receive), mesh.group)
    out = torch.empty_like(x)
    out[[numbers[old] % num_local for old in arriving]] = rows
    return out
