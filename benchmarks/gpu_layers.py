"""What gpu_check.py asks of the work around products: rows, norms, attention over documents, and waits of the host."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_cases import Bench, Case, Row, difference, draw_batch, group_of, make_model, no_waits, synchronize, time_steps
from torch import Tensor

from modeling.attention import find_documents, varlen_attention
from modeling.layers import rms_norm
from modeling.operators import logit_gradients_, logit_sums_, turn, wide_linear, wide_linear_back
from modeling.rows import combine, permute, sort_rows, swiglu, swiglu_back
from recipe.dry_run.kernels import KernelCount

NUM_ACTIVE, SHARE = 8, 8  # experts of a token; of all experts a rank holds one in so many
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def layer_cases(bench: Bench) -> Iterator[Case]:
    for dtype in BOUNDS:
        yield Case("rows", str(dtype).removeprefix("torch."), partial(check_rows, bench, dtype))
        yield Case("operators", str(dtype).removeprefix("torch."), partial(check_operators, bench, dtype))
        yield Case("norms", str(dtype).removeprefix("torch."), partial(check_norms, bench, dtype))
    yield Case("attention", "varlen", partial(check_attention, bench))
    yield Case("waits", f"1 of {bench.num_ranks}", partial(check_waits, bench))


def check_rows(bench: Bench, dtype: torch.dtype) -> list[Row]:
    """Each operator against the same on the CPU, and its bytes a second; an eighth of the pairs are this rank's."""
    num_rows, width, hidden, num_slots = bench.product_sizes
    num_tokens = max(num_rows // 4, 1)
    generator = torch.Generator().manual_seed(1)
    slots = torch.rand(num_tokens, SHARE * num_slots, generator=generator).topk(NUM_ACTIVE).indices
    x = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    weights = torch.rand(num_tokens, NUM_ACTIVE, generator=generator)
    gate_up = torch.randn(num_tokens * NUM_ACTIVE, 2 * width, generator=generator).to(dtype)
    grad = torch.randn(num_tokens * NUM_ACTIVE, width, generator=generator).to(dtype)
    given = (slots, x, weights, gate_up, grad)
    return against_cpu("rows", bench, dtype, given, partial(row_operators, num_slots=num_slots), share=1 / SHARE)


def against_cpu(
    section: str,
    bench: Bench,
    dtype: torch.dtype,
    given: Sequence[Tensor],
    operators: Callable[..., dict[str, Callable[[], Tensor]]],
    *,
    share: float = 1.0,
) -> list[Row]:
    """Run operators on the CPU and on the device, and time them there by the bytes that they are declared to move."""
    results: dict[str, list[Tensor]] = {}
    place, found = (section, str(dtype).removeprefix("torch.")), []
    for device in (torch.device("cpu"), bench.device):
        for what, run in operators(*(tensor.to(device) for tensor in given)).items():
            results.setdefault(what, []).append(run().cpu())
            if device == bench.device and len(results[what]) == 2:
                want, got = results[what]
                # What is returned in float32 of narrower numbers is as exact as of float32.
                found.append(
                    Row(*place, f"{what}: error", difference(got, want), bound=BOUNDS.get(want.dtype, BOUNDS[dtype]))
                )
                with KernelCount(torch.nn.Module(), share_of_rows=share) as declared:
                    run()
                found.append(Row(*place, f"{what}: speed", declared.own_bytes / time_steps(run, bench) / 1e9, "GB/s"))
    return found


def check_operators(bench: Bench, dtype: torch.dtype) -> list[Row]:
    """What works on every element, and the router's product, against the same on the CPU."""
    num_rows, width, hidden, num_experts = bench.product_sizes
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    heads, angles = draw(1, num_rows, hidden // 8, 8), torch.rand(1, num_rows, 4, generator=generator)
    cos, sin = (torch.cat([part, part], -1).to(dtype) for part in (angles.cos(), angles.sin()))
    column = torch.randint(-1, width, (num_rows,), generator=generator)
    given = (heads, cos, sin, draw(num_rows, width), column, draw(num_rows, hidden), draw(num_experts, hidden))
    return against_cpu("operators", bench, dtype, (*given, draw(num_rows, num_experts).float()), element_operators)


def element_operators(
    heads: Tensor, cos: Tensor, sin: Tensor, logits: Tensor, column: Tensor, x: Tensor, weight: Tensor, grad: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """Functions of the same inputs, but for those whose name ends in _: they go on with what they left."""
    num_real = logits.shape[1] - 1
    column, work, fresh = column.clamp(max=num_real - 1), logits.clone(), logits.clone()
    highest, total, _ = logit_sums_(work, column, num_real=num_real)
    factor = 1 / total

    return {
        "turn": lambda: turn(heads.transpose(1, 2), cos, sin, sign=1),
        "logit_gradients_": lambda: logit_gradients_(work, column, highest, highest, factor, num_real=num_real),
        "logit_sums_": lambda: torch.stack(logit_sums_(fresh, column, num_real=num_real)),
        "wide_linear": lambda: wide_linear(x, weight),
        "wide_linear_back": lambda: torch.cat([part.flatten() for part in wide_linear_back(grad, x, weight)]),
    }


def row_operators(
    slots: Tensor, x: Tensor, weights: Tensor, gate_up: Tensor, grad: Tensor, *, num_slots: int
) -> dict[str, Callable[[], Tensor]]:
    """Functions that return the rows that are there, or a number for every token."""
    rows = sort_rows(slots, num_slots=num_slots)
    num_rows = int(rows.offsets_e[-1])
    outs = {"grad_gate_up_R2f": torch.zeros_like(gate_up), "act_Rf": torch.zeros_like(grad)}

    def back() -> Tensor:
        grad_weights = swiglu_back(grad, gate_up, weights, rows, **outs)
        return torch.cat(
            [grad_weights.flatten(), *(out[:num_rows].flatten().to(weights.dtype) for out in outs.values())]
        )

    by_row = permute(x, rows)
    return {
        "sort_rows": lambda: sort_rows(slots, num_slots=num_slots).row_TA,
        "permute": lambda: permute(x, rows)[:num_rows],
        "combine": lambda: combine(by_row, rows, dtype=x.dtype),
        "swiglu": lambda: swiglu(gate_up, weights, rows)[:num_rows],
        "swiglu_back": back,
    }


def check_norms(bench: Bench, dtype: torch.dtype) -> list[Row]:
    """torch's fused norm, forward and backward, against float64."""
    num_rows, _, hidden, _ = bench.product_sizes
    x, grad = (torch.randn(num_rows, hidden, dtype=dtype, device=bench.device, requires_grad=True) for _ in range(2))
    weight = torch.rand(hidden, dtype=dtype, device=bench.device).add_(0.5).requires_grad_()
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    want = F.rms_norm(exact[0], (hidden,), exact[1], eps=1e-6)
    got = rms_norm(x, weight, eps=1e-6)
    pairs = {"forward": (got.detach(), want.detach())}
    grads = (
        torch.autograd.grad(out, inputs, g)
        for out, inputs, g in ((got, [x, weight], grad), (want, exact, grad.double()))
    )
    pairs |= dict(zip(("input's gradient", "weight's gradient"), zip(*grads, strict=True), strict=True))
    place = ("norms", str(dtype).removeprefix("torch."))
    return [Row(*place, f"{what}: error", difference(*pair), bound=BOUNDS[dtype]) for what, pair in pairs.items()]


def check_attention(bench: Bench) -> list[Row]:
    """torch's varlen attention over documents against one call of sdpa for each, in bfloat16; on a GPU alone."""
    num_sequences, length = bench.batch
    starts = tuple((0, length // 3, length // 2 + b) for b in range(num_sequences))
    if bench.device.type != "cuda":
        return [Row("attention", "varlen", "documents", float(sum(map(len, starts))), "its kernels are a GPU's")]
    documents = find_documents(starts, block_size=length, implementation="varlen", device=bench.device)
    assert documents is not None
    shape = (1, 8, num_sequences * length, 128)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=bench.device, requires_grad=True) for _ in range(3))
    bounds = {"cu_seq_lens_q": documents.cu_seqlens, "max_length_q": documents.max_length}
    module: Any = torch.nn.Identity()

    def varlen() -> Tensor:
        return varlen_attention(module, q, k, v, None, scaling=128**-0.5, **bounds)[0]

    parts = []
    for b, row in enumerate(starts):
        for start, end in zip(row, (*row[1:], length), strict=True):
            here = slice(b * length + start, b * length + end)
            parts.append(F.scaled_dot_product_attention(*(x[:, :, here] for x in (q, k, v)), is_causal=True))
    want, got = torch.cat(parts, dim=2).transpose(1, 2), varlen()
    grads = [torch.autograd.grad(out.float().square().sum(), (q, k, v)) for out in (got, want)]
    errors = {"forward": difference(got.detach(), want.detach())}
    errors |= {f"gradient of {name}": difference(a, b) for name, a, b in zip("qkv", *grads, strict=True)}
    rows = [Row("attention", "varlen", f"{what}: error", error, bound=2e-2) for what, error in errors.items()]
    return [*rows, Row("attention", "varlen", "forward", time_steps(varlen, bench) * 1e3, "ms")]


def check_waits(bench: Bench) -> list[Row]:
    """A micro-batch of packed documents, as the first rank of a group without transfers: no operator makes a host wait.

    On a GPU torch raises where one does.
    """
    size = list(bench.models)[-1]
    with group_of(bench.num_ranks, size=bench.models[size]) as mesh:
        model = make_model(
            bench, size, torch.bfloat16, mesh=mesh, attention="varlen" if bench.device.type == "cuda" else "sdpa"
        )
        ids = draw_batch(bench, model, seed=0)
        length = ids.shape[1]
        counts = {"num_items_in_batch": ids.numel(), "num_tokens_in_batch": ids.numel()}

        def micro_batch() -> None:
            model(input_ids=ids, labels=ids, document_starts=((0, length // 3),) * len(ids), **counts).loss.backward()

        micro_batch()  # makes communicators and compiles kernels
        synchronize(bench.device)
        with no_waits(bench.device):
            micro_batch()
    return [Row("waits", f"1 of {bench.num_ranks}", "waits of the host in a micro-batch", 0.0, bound=0.0)]
