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
