"""The rows of a rank's experts: pairs of a token and its expert sorted by expert, and all work on them but products.

Rows lie in buffers that hold the most that could come, and only the device knows how many there are: every operator
stops at the last real row, reads each number once and writes each once. Sorting is by counting, in three launches; the
routing weight is part of the activation, as in Megatron-Core, so that a token's rows are summed as they are.

Each is one operator of torch's (operators.py): a kernel of ours on a GPU and in Triton's interpreter, a few lines of
torch on a CPU.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .operators import NAMESPACE, Operator, by_kernel, define_operators, next_power_of_2

# A block of pairs to be placed is a tile of pairs x slots in registers; more of it would spill.
PAIRS_BY_SLOTS = 8192
# Programs that share the rows which are there, sixteen for each multiprocessor of an H100.
MAX_PROGRAMS = 2112
NUMBERS = 4096  # that a program works on at a time


class Rows(NamedTuple):
    """The token-expert pairs of a rank as rows of fixed number R, sorted by slot and then by token.

    A pair's slot is the number of its expert among those of this rank; every other number is another rank's pair, or
    padding.

    pair_R     [R] int32     which of the T * A pairs each row is; undefined after the last
    row_TA     [T, A] int32  which row each pair is, -1 where it is not here
    offsets_e  [e] int32     end of each slot's rows
    """

    pair_R: Tensor
    row_TA: Tensor
    offsets_e: Tensor


def sort_rows(slots_TA: Tensor, *, num_slots: int) -> Rows:
    """Sort the pairs [T, A] by slot, stable; there is room for T * min(A, num_slots). A token has a slot once."""
    return Rows(*_operators().sort_rows(slots_TA, num_slots))


def permute(x_TD: Tensor, rows: Rows, *, through_TA: Tensor | None = None) -> Tensor:
    """Fetch each row's token: [T, D] -> [R, D]; with `through_TA` [T, A] int32, the row of x that it names for a pair.

    Rows that no pair fills stay undefined.
    """
    return _operators().permute(x_TD, rows.pair_R, rows.offsets_e, rows.row_TA.shape[1], through_TA)


def combine(y_RD: Tensor, rows: Rows, *, dtype: torch.dtype) -> Tensor:
    """Sum every token's rows in the order of its choices: [R, D] -> [T, D] of `dtype`, in float32 at least."""
    return _operators().combine(y_RD, rows.row_TA, dtype)


def swiglu(gate_up_R2f: Tensor, weights_TA: Tensor, rows: Rows) -> Tensor:
    """Compute silu(gate) * up times the routing weight, rounded once: [R, 2f] (gate first), [T, A] -> [R, f]."""
    return _operators().swiglu(gate_up_R2f, weights_TA, rows.pair_R, rows.offsets_e)


def swiglu_back(
    grad_Rf: Tensor,
    gate_up_R2f: Tensor,
    weights_TA: Tensor,
    rows: Rows,
    *,
    grad_gate_up_R2f: Tensor,
    act_Rf: Tensor,
) -> Tensor:
    """Return the gradient of the routing weights [T, A]; write that of gate and up, and `swiglu`'s result again."""
    return _operators().swiglu_back(
        grad_Rf, gate_up_R2f, weights_TA, rows.pair_R, rows.offsets_e, grad_gate_up_R2f, act_Rf
    )


def clear_empty(grad_eOI: Tensor, rows: Rows) -> Tensor:
    """Write zeros to the gradients of experts without rows, in place; those of others are not touched.

    torch's grouped product may leave anything there on compute capability 10 (pytorch issue 172439).
    """
    _operators().clear_empty(grad_eOI, rows.offsets_e)
    return grad_eOI


def _operators() -> Any:
    _define_operators()
    return getattr(torch.ops, NAMESPACE)


# torch.compile calls it while it traces and keeps the answer: it cannot look into what defines an operator.
@torch.compiler.assume_constant_result
def _define_operators() -> bool:
    return _define_once()


@cache
def _define_once() -> bool:
    operators: list[Operator] = [
        (_sort_rows, lambda slots_TA, num_slots: _room_for_rows(slots_TA, num_slots), ()),
        (_permute, lambda x_TD, pair_R, *_: x_TD.new_empty(len(pair_R), x_TD.shape[1]), ()),
        (_combine, lambda y_RD, row_TA, dtype: y_RD.new_empty(len(row_TA), y_RD.shape[1], dtype=dtype), ()),
        (_swiglu, lambda gate_up_R2f, *_: gate_up_R2f.new_empty(len(gate_up_R2f), gate_up_R2f.shape[1] // 2), ()),
        (_swiglu_back, lambda _, __, weights_TA, *___: torch.empty_like(weights_TA), ("grad_gate_up_R2f", "act_Rf")),
        (_clear_empty, lambda *_: None, ("grad_eOI",)),
    ]
    define_operators(NAMESPACE, operators)
    return True


def _by_kernel(x: Tensor) -> bool:
    """Whether kernels work on x; ValueError on a GPU where they cannot."""
    found = by_kernel(x)
    if x.is_cuda and not found:
        raise ValueError(
            f"experts in {x.dtype} on a GPU need the package triton and a type that it knows, float32 or narrower; "
            "`pip install triton` (Linux), or choose experts_backend='loop'"
        )
    return found


def count_rows_on_cpu(offsets_e: Tensor) -> int:
    """Read how many rows there are, which on a device only kernels do."""
    assert offsets_e.device.type == "cpu"
    return int(offsets_e[-1].item())


def _room_for_rows(slots_TA: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_active = slots_TA.shape
    sizes = ((num_tokens * min(num_active, num_slots),), slots_TA.shape, (num_slots,))
    pair_R, row_TA, offsets_e = (slots_TA.new_empty(size, dtype=torch.int32) for size in sizes)
    return pair_R, row_TA, offsets_e


def _sort_rows(slots_TA: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    pair_R, row_TA, offsets_e = _room_for_rows(slots_TA, num_slots)
    slots_P = slots_TA.flatten()
    if not _by_kernel(slots_TA):
        key_P, order = torch.where((slots_P >= 0) & (slots_P < num_slots), slots_P, num_slots).sort(stable=True)
        offsets_e.copy_(torch.searchsorted(key_P, torch.arange(num_slots), right=True))
        num_rows = count_rows_on_cpu(offsets_e)
        order = order[:num_rows]
        pair_R[:num_rows] = order.int()
        row_TA.fill_(-1).view(-1)[order] = torch.arange(num_rows, dtype=torch.int32)
        return pair_R, row_TA, offsets_e
    from .kernels import count_pairs, place_pairs

    slots_across = next_power_of_2(num_slots)
    block = max(16, min(256, PAIRS_BY_SLOTS // slots_across))
    num_pairs = len(slots_P)
    num_blocks = max(1, -(-num_pairs // block))
    counts_eB = slots_TA.new_empty(num_slots, num_blocks, dtype=torch.int32)
    sizes = {"num_pairs": num_pairs, "num_slots": num_slots, "num_blocks": num_blocks}
    with torch.cuda.device_of(slots_TA):
        count_pairs[(num_blocks,)](slots_P, counts_eB, **sizes, BLOCK=block, SLOTS=slots_across)
        ends_eB = counts_eB.view(-1).cumsum(0, dtype=torch.int32).view_as(counts_eB)
        place_pairs[(num_blocks,)](
            slots_P, counts_eB, ends_eB, pair_R, row_TA, **sizes, BLOCK=block, SLOTS=slots_across
        )
    offsets_e.copy_(ends_eB[:, -1])
    return pair_R, row_TA, offsets_e


def _permute(x_TD: Tensor, pair_R: Tensor, offsets_e: Tensor, num_active: int, through_TA: Tensor | None) -> Tensor:
    num_columns = x_TD.shape[1]
    out_RD = x_TD.new_empty(len(pair_R), num_columns)
    if not _by_kernel(x_TD):
        pairs = pair_R[: count_rows_on_cpu(offsets_e)]
        torch.index_select(
            x_TD, 0, pairs // num_active if through_TA is None else through_TA.view(-1)[pairs], out=out_RD[: len(pairs)]
        )
        return out_RD
    from .kernels import permute_rows

    tile = _tile(num_columns)
    with torch.cuda.device_of(x_TD):
        permute_rows[_grid(out_RD, tile)](
            x_TD.contiguous(),
            pair_R,
            pair_R if through_TA is None else through_TA,
            offsets_e,
            out_RD,
            len(offsets_e),
            num_columns,
            num_active,
            THROUGH=through_TA is not None,
            **tile,
        )
    return out_RD


def _combine(y_RD: Tensor, row_TA: Tensor, dtype: torch.dtype) -> Tensor:
    (num_tokens, num_active), num_columns = row_TA.shape, y_RD.shape[1]
    if not _by_kernel(y_RD):
        total_TD = y_RD.new_zeros(num_tokens, num_columns, dtype=torch.promote_types(y_RD.dtype, torch.float32))
        for row_T in row_TA.unbind(1) if len(y_RD) else ():
            # Rows that no pair fills are uninitialised: select, never multiply with 0.
            total_TD += torch.where(row_T[:, None] >= 0, y_RD[row_T.clamp(min=0)], 0.0)
        return total_TD.to(dtype)
    from .kernels import combine_rows

    out_TD = y_RD.new_empty(num_tokens, num_columns, dtype=dtype)
    columns = min(1024, next_power_of_2(num_columns))
    if not num_tokens:  # a grid must not be empty
        return out_TD
    with torch.cuda.device_of(y_RD):
        combine_rows[(num_tokens, -(-num_columns // columns))](
            y_RD, row_TA, out_TD, num_columns, NUM_ACTIVE=num_active, COLUMNS=columns
        )
    return out_TD


def _swiglu(gate_up_R2f: Tensor, weights_TA: Tensor, pair_R: Tensor, offsets_e: Tensor) -> Tensor:
    width = gate_up_R2f.shape[1] // 2
    out_Rf = gate_up_R2f.new_empty(len(gate_up_R2f), width)
    if not _by_kernel(gate_up_R2f):
        pairs = pair_R[: count_rows_on_cpu(offsets_e)]
        gate, up = _wide(gate_up_R2f[: len(pairs)]).chunk(2, dim=1)
        out_Rf[: len(pairs)] = F.silu(gate) * up * weights_TA.reshape(-1)[pairs, None]
        return out_Rf
    from .kernels import swiglu_rows

    tile = _tile(width)
    with torch.cuda.device_of(gate_up_R2f):
        swiglu_rows[_grid(out_Rf, tile)](
            gate_up_R2f, pair_R, weights_TA.contiguous(), offsets_e, out_Rf, len(offsets_e), width, **tile
        )
    return out_Rf


def _swiglu_back(
    grad_Rf: Tensor,
    gate_up_R2f: Tensor,
    weights_TA: Tensor,
    pair_R: Tensor,
    offsets_e: Tensor,
    grad_gate_up_R2f: Tensor,
    act_Rf: Tensor,
) -> Tensor:
    grad_weights_TA = torch.zeros_like(weights_TA, memory_format=torch.contiguous_format)
    width = act_Rf.shape[1]
    if not _by_kernel(grad_Rf):
        pairs = pair_R[: count_rows_on_cpu(offsets_e)]
        here = slice(len(pairs))
        gate, up = _wide(gate_up_R2f[here]).chunk(2, dim=1)
        grad, weight = _wide(grad_Rf[here]), weights_TA.reshape(-1)[pairs, None]
        silu = F.silu(gate)
        grad_weights_TA.view(-1)[pairs] = (grad * silu * up).sum(1).to(weights_TA.dtype)
        grad = grad * weight
        act_Rf[here] = silu * up * weight
        grad_gate_up_R2f[here, :width] = torch.ops.aten.silu_backward(grad * up, gate)
        grad_gate_up_R2f[here, width:] = grad * silu
        return grad_weights_TA
    from .kernels import swiglu_rows_back

    columns = min(512, next_power_of_2(width))
    tile = {"ROWS": max(1, NUMBERS // 2 // columns), "COLUMNS": columns}
    with torch.cuda.device_of(grad_Rf):
        swiglu_rows_back[(max(1, min(MAX_PROGRAMS, -(-len(act_Rf) // tile["ROWS"]))),)](
            grad_Rf,
            gate_up_R2f,
            pair_R,
            weights_TA.contiguous(),
            offsets_e,
            grad_gate_up_R2f,
            act_Rf,
            grad_weights_TA,
            len(offsets_e),
            width,
            **tile,
        )
    return grad_weights_TA


def _clear_empty(grad_eOI: Tensor, offsets_e: Tensor) -> None:
    if not _by_kernel(grad_eOI):
        is_empty = offsets_e.diff(prepend=offsets_e.new_zeros(1)) == 0
        grad_eOI.masked_fill_(is_empty[:, None, None], 0.0)
        return
    from .kernels import clear_without_rows

    numbers = grad_eOI[0].numel()
    grid = (len(grad_eOI), max(1, min(MAX_PROGRAMS // len(grad_eOI), -(-numbers // NUMBERS))))
    with torch.cuda.device_of(grad_eOI):
        clear_without_rows[grid](grad_eOI, offsets_e, numbers, COLUMNS=NUMBERS)


def _tile(num_columns: int) -> dict[str, int]:
    columns = min(1024, next_power_of_2(num_columns))
    return {"ROWS": NUMBERS // columns, "COLUMNS": columns}


def _grid(out: Tensor, tile: dict[str, int]) -> tuple[int]:
    return (max(1, min(MAX_PROGRAMS, -(-len(out) // tile["ROWS"]) * -(-out.shape[1] // tile["COLUMNS"]))),)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
