"""Triton kernels of the grouped products: each program finds its expert in offsets that only the device knows.

MegaBlocks (2211.15841, section 5.1) lays the experts' rows out in tiles by a pass over the routing and hands its
kernels the resulting block indices; vLLM's fused kernel reads each tile's expert from a list made beforehand. Here a
tile's expert follows from the offsets by a cumulative sum over as many numbers as there are experts, which every
program makes again: no pass beforehand, nothing of a size that depends on the routing, nothing for the host to read.

A side of a tile is HEIGHT (rows of the output), WIDTH (its columns) or DEPTH (the dimension summed over). Sums run in
float32 and in a fixed order; no two programs write the same number. WIDEN is for Triton's interpreter, which has no
bfloat16 product: the products of two such numbers are exact in float32, so only the speed is another.
"""

# Type checkers know nothing of Triton's types.
# mypy: disable-error-code="no-untyped-def,name-defined"

from importlib import import_module

# By name: transformers refuses to load a checkpoint's code if a package it imports is not there, used or not.
triton = import_module("triton")
tl = import_module("triton.language")


def interpreted() -> bool:
    """Whether these kernels run in Triton's interpreter, on the CPU; fixed when this file is loaded."""
    return not isinstance(multiply_rows, triton.JITFunction)


@triton.jit
def find_segment(offsets_e, tile, num_experts, num_rows, SEGMENTS: tl.constexpr, HEIGHT: tl.constexpr):
    """The expert of a row tile, its first row and the end of that expert's rows.

    The rows after the last expert's count as one expert more, number `num_experts`. A larger number is returned where
    there is no such tile. SEGMENTS is a power of two above `num_experts`.
    """
    segment = tl.arange(0, SEGMENTS)
    ends = tl.load(offsets_e + segment, mask=segment < num_experts, other=num_rows)
    starts = tl.load(offsets_e + segment - 1, mask=(segment > 0) & (segment <= num_experts), other=0)
    num_tiles = (ends - starts + HEIGHT - 1) // HEIGHT
    tile_ends = tl.cumsum(num_tiles, 0)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    here = segment == expert
    first_tile = tl.sum(tl.where(here, tile_ends - num_tiles, 0), 0)
    start = tl.sum(tl.where(here, starts, 0), 0)
    end = tl.sum(tl.where(here, ends, 0), 0)
    return expert, start + (tile - first_tile) * HEIGHT, end


@triton.jit
def multiply_rows(
    x_RI,
    weight_eOI,
    offsets_e,
    out_RO,
    num_rows,
    num_out,
    num_in,
    num_experts,
    stride_x_row,
    stride_x_in,
    stride_weight_expert,
    stride_weight_out,
    stride_weight_in,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BAND: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of out [R, O]: rows of x [R, I] times their expert's weight [O, I] transposed; zeros for padding rows.

    Programs go down BAND row tiles before they go on to the next columns, so that those which run at the same time
    share rows and weights in the cache. The grid is a whole number of bands.
    """
    program = tl.program_id(0)
    programs_per_band = BAND * tl.cdiv(num_out, WIDTH)
    in_band = program % programs_per_band
    row_tile = program // programs_per_band * BAND + in_band % BAND
    expert, first_row, end = find_segment(offsets_e, row_tile, num_experts, num_rows, SEGMENTS, HEIGHT)
    if expert > num_experts:
        return
    row = first_row + tl.arange(0, HEIGHT)
    out = in_band // BAND * WIDTH + tl.arange(0, WIDTH)
    depth = tl.arange(0, DEPTH)
    # A large micro-batch's rows hold more numbers than an int32 counts.
    row_64 = row.to(tl.int64)
    x_at = x_RI + row_64[:, None] * stride_x_row
    weight_at = weight_eOI + expert.to(tl.int64) * stride_weight_expert + out[None, :] * stride_weight_out
    total = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    # Padding rows hold anything, so they must not be read.
    num_summed = tl.where(expert < num_experts, num_in, 0)
    for start in range(0, num_summed, DEPTH):
        i = start + depth
        x = tl.load(x_at + i[None, :] * stride_x_in, mask=(row < end)[:, None] & (i < num_in)[None, :], other=0.0)
        weight = tl.load(
            weight_at + i[:, None] * stride_weight_in, mask=(i < num_in)[:, None] & (out < num_out)[None, :], other=0.0
        )
        if WIDEN:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
    tl.store(
        out_RO + row_64[:, None] * num_out + out[None, :],
        total.to(out_RO.dtype.element_ty),
        mask=(row < end)[:, None] & (out < num_out)[None, :],
    )


@triton.jit
def sum_outer(
    grad_RO,
    x_RI,
    offsets_e,
    out_eOI,
    num_out,
    num_in,
    stride_grad_row,
    stride_grad_out,
    stride_x_row,
    stride_x_in,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of out [e, O, I]: the sum over an expert's rows of grad [R, O] times x [R, I]; zeros if it has none."""
    program = tl.program_id(0)
    num_columns = tl.cdiv(num_in, WIDTH)
    tiles_per_expert = tl.cdiv(num_out, HEIGHT) * num_columns
    expert = program // tiles_per_expert
    in_expert = program % tiles_per_expert
    first_row = tl.load(offsets_e + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_e + expert)
    out = in_expert // num_columns * HEIGHT + tl.arange(0, HEIGHT)
    i = in_expert % num_columns * WIDTH + tl.arange(0, WIDTH)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    for start in range(first_row, end, DEPTH):
        row = start + depth
        row_64 = row.to(tl.int64)
        grad = tl.load(
            grad_RO + row_64[None, :] * stride_grad_row + out[:, None] * stride_grad_out,
            mask=(row < end)[None, :] & (out < num_out)[:, None],
            other=0.0,
        )
        x = tl.load(
            x_RI + row_64[:, None] * stride_x_row + i[None, :] * stride_x_in,
            mask=(row < end)[:, None] & (i < num_in)[None, :],
            other=0.0,
        )
        if WIDEN:
            grad, x = grad.to(tl.float32), x.to(tl.float32)
        total = tl.dot(grad, x, total, input_precision=PRECISION)
    tl.store(
        out_eOI + expert.to(tl.int64) * num_out * num_in + out[:, None] * num_in + i[None, :],
        total.to(out_eOI.dtype.element_ty),
        mask=(out < num_out)[:, None] & (i < num_in)[None, :],
    )


@triton.jit
def count_pairs(slots_P, counts_eB, num_pairs, num_slots, num_blocks, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    """Count how many of a block's pairs each slot has: a column of counts [e, blocks]. SLOTS is a power of two."""
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    slot_of_pair = tl.load(slots_P + pair, mask=pair < num_pairs, other=-1)
    taken = (slot_of_pair[:, None] == slot[None, :]).to(tl.int32)
    tl.store(counts_eB + slot * num_blocks + block, tl.sum(taken, 0), mask=slot < num_slots)


@triton.jit
def place_pairs(
    slots_P,
    counts_eB,
    ends_eB,
    pair_R,
    row_P,
    num_pairs,
    num_slots,
    num_blocks,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Give the pairs of a block their rows: after those of lower slots, and of the same slot in earlier blocks.

    row_P [P] is -1 for a pair that is not here; pair_R [R] is written only where a row has a pair.
    """
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    slot_of_pair = tl.load(slots_P + pair, mask=pair < num_pairs, other=-1)
    is_taken = (slot_of_pair[:, None] == slot[None, :]) & (slot < num_slots)[None, :]
    taken = is_taken.to(tl.int32)
    at = slot * num_blocks + block
    end = tl.load(ends_eB + at, mask=slot < num_slots, other=0)
    first = end - tl.load(counts_eB + at, mask=slot < num_slots, other=0)
    row = tl.sum(tl.where(is_taken, first[None, :] + tl.cumsum(taken, 0) - 1, 0), 1)
    is_here = tl.sum(taken, 1) > 0
    tl.store(row_P + pair, tl.where(is_here, row, -1), mask=pair < num_pairs)
    tl.store(pair_R + row, pair, mask=is_here)


@triton.jit
def permute_rows(
    x,
    pair_R,
    through,
    offsets_e,
    out_RD,
    num_experts,
    num_columns,
    num_active,
    THROUGH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Fetch every row [D]: from x[pair // num_active], or with THROUGH from x[through[pair]]; nothing for other rows.

    A fixed number of programs share the tiles of the rows that are there.
    """
    num_rows = tl.load(offsets_e + num_experts - 1)
    across = tl.cdiv(num_columns, COLUMNS)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * across, tl.num_programs(0)):
        row = tile // across * ROWS + tl.arange(0, ROWS)
        column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
        pair = tl.load(pair_R + row, mask=row < num_rows, other=0)
        source = tl.load(through + pair, mask=row < num_rows, other=0) if THROUGH else pair // num_active
        mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        found = tl.load(x + source.to(tl.int64)[:, None] * num_columns + column[None, :], mask=mask, other=0.0)
        tl.store(out_RD + row.to(tl.int64)[:, None] * num_columns + column[None, :], found, mask=mask)


@triton.jit
def combine_rows(y_RD, row_P, out_TD, num_columns, NUM_ACTIVE: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum the rows of one token's pairs in float32 and in their order: some columns of out [T, D]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for active in tl.static_range(NUM_ACTIVE):
        row = tl.load(row_P + token * NUM_ACTIVE + active).to(tl.int64) + tl.zeros((COLUMNS,), dtype=tl.int64)
        y = tl.load(y_RD + row * num_columns + column, mask=(column < num_columns) & (row >= 0), other=0.0)
        total += y.to(tl.float32)
    tl.store(out_TD + token * num_columns + column, total.to(out_TD.dtype.element_ty), mask=column < num_columns)


@triton.jit
def swiglu_rows(
    gate_up_R2f,
    pair_R,
    weight_P,
    offsets_e,
    out_Rf,
    num_experts,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute silu(gate) * up times the pair's routing weight, rounded once; nothing for rows that no pair fills."""
    num_rows = tl.load(offsets_e + num_experts - 1)
    across = tl.cdiv(width, COLUMNS)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * across, tl.num_programs(0)):
        row = tile // across * ROWS + tl.arange(0, ROWS)
        column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
        pair = tl.load(pair_R + row, mask=row < num_rows, other=0)
        weight = tl.load(weight_P + pair, mask=row < num_rows, other=0.0)
        mask = (row < num_rows)[:, None] & (column < width)[None, :]
        at = gate_up_R2f + row.to(tl.int64)[:, None] * (2 * width) + column[None, :]
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
        out = gate * (1.0 / (1.0 + tl.exp(-gate))) * up * weight[:, None]
        out_at = out_Rf + row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(out_at, out.to(out_Rf.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_rows_back(
    grad_Rf,
    gate_up_R2f,
    pair_R,
    weight_P,
    offsets_e,
    grad_gate_up_R2f,
    out_Rf,
    grad_weight_P,
    num_experts,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """From the gradient of `swiglu_rows`: those of gate and up, of the routing weights, and what it had returned.

    A program has whole rows, so that a routing weight's gradient is one sum in a fixed order.
    """
    num_rows = tl.load(offsets_e + num_experts - 1)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        pair = tl.load(pair_R + row, mask=row < num_rows, other=0)
        weight = tl.load(weight_P + pair, mask=row < num_rows, other=0.0)[:, None]
        row_64 = row.to(tl.int64)[:, None]
        grad_weight = tl.zeros((ROWS,), dtype=tl.float32)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            mask = (row < num_rows)[:, None] & (column < width)[None, :]
            at, at_twice = row_64 * width + column[None, :], row_64 * (2 * width) + column[None, :]
            gate = tl.load(gate_up_R2f + at_twice, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(gate_up_R2f + at_twice + width, mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(grad_Rf + at, mask=mask, other=0.0).to(tl.float32)
            sigmoid = 1.0 / (1.0 + tl.exp(-gate))
            silu = gate * sigmoid
            grad_weight += tl.sum(grad * silu * up, 1)
            grad *= weight
            grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
            dtype = out_Rf.dtype.element_ty
            tl.store(grad_gate_up_R2f + at_twice, grad_gate.to(dtype), mask=mask)
            tl.store(grad_gate_up_R2f + at_twice + width, (grad * silu).to(dtype), mask=mask)
            tl.store(out_Rf + at, (silu * up * weight).to(dtype), mask=mask)
        tl.store(grad_weight_P + pair, grad_weight, mask=row < num_rows)


@triton.jit
def clear_without_rows(grad_eN, offsets_e, numbers, COLUMNS: tl.constexpr):
    """Write zeros to the gradient [N] of an expert without rows."""
    expert = tl.program_id(0)
    first_row = tl.load(offsets_e + expert - 1, mask=expert > 0, other=0)
    if tl.load(offsets_e + expert) > first_row:
        return
    start = grad_eN + expert.to(tl.int64) * numbers
    for block in range(tl.program_id(1), tl.cdiv(numbers, COLUMNS), tl.num_programs(1)):
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(start + column, tl.zeros((COLUMNS,), dtype=grad_eN.dtype.element_ty), mask=column < numbers)


@triton.jit
def turn_heads(
    x,
    cos,
    sin,
    out,
    num_heads,
    half,
    stride_sequence,
    stride_head,
    stride_token,
    stride_out_sequence,
    stride_out_head,
    stride_out_token,
    stride_table_sequence,
    stride_table_token,
    SIGN: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Turn some heads of one token by its angles, or back with SIGN -1: channel i with channel i + half."""
    token, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head = (tl.program_id(2) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    channel = tl.arange(0, HALF)
    table = sequence * stride_table_sequence + token * stride_table_token + channel
    c = tl.load(cos + table, mask=channel < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + table, mask=channel < half, other=0.0).to(tl.float32)[None, :] * SIGN
    mask = (head < num_heads)[:, None] & (channel < half)[None, :]
    at = x + sequence * stride_sequence + token * stride_token + head[:, None] * stride_head + channel[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    to = out + sequence * stride_out_sequence + token * stride_out_token
    to += head[:, None] * stride_out_head + channel[None, :]
    dtype = out.dtype.element_ty
    tl.store(to, (first * c - second * s).to(dtype), mask=mask)
    tl.store(to + half, (second * c + first * s).to(dtype), mask=mask)


@triton.jit
def sum_logits(logits, column_c, out_3c, num_rows, num_real, stride_row, COLUMNS: tl.constexpr):
    """Of a row's first `num_real` logits the largest, the sum of exponentials over it, and the one at its column."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride_row
    highest = tl.full((COLUMNS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(0, num_real, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        logit = tl.load(start + column, mask=column < num_real, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, logit)
        # A lane that has seen nothing yet has neither a largest nor a sum.
        above = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - above) + tl.exp(logit - above)
        highest = higher
    most = tl.max(highest, 0)
    above = tl.where(most == float("-inf"), 0.0, most)
    wanted = tl.load(column_c + row)
    found = tl.load(start + wanted, mask=(wanted >= 0) & (wanted < num_real), other=0.0).to(tl.float32)
    tl.store(out_3c + row, most)
    tl.store(out_3c + num_rows + row, tl.sum(total * tl.exp(highest - above), 0))
    tl.store(out_3c + 2 * num_rows + row, found)


@triton.jit
def logit_gradients(logits, column_c, highest_c, factor_c, num_real, num_columns, stride_row, COLUMNS: tl.constexpr):
    """Replace a row of logits by exp(logit - highest) * factor, less 1 at its column; zeros after `num_real`."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride_row
    highest, factor, wanted = tl.load(highest_c + row), tl.load(factor_c + row), tl.load(column_c + row)
    for first in range(0, num_columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        logit = tl.load(start + column, mask=column < num_real, other=float("-inf")).to(tl.float32)
        grad = tl.exp(logit - highest) * factor - tl.where(column == wanted, 1.0, 0.0)
        tl.store(start + column, grad.to(logits.dtype.element_ty), mask=column < num_columns)
