"""What gpu_check.py measures: errors of products and precisions, graphed blocks against eager ones, speed."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from modeling.config import GatherMoeConfig
from modeling.execution import Execution
from modeling.experts_grouped import multiply, multiply_outer
from modeling.init import build_model
from modeling.layout import ParallelLayout
from modeling.mesh import ParallelMesh, build_mesh, one_rank_mesh
from recipe.shared.flops import find_peak, model_flops_per_token

SMALL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
    "qk_norm": "head",
    "use_cache": False,
}
LARGE = SMALL | {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


class Products(NamedTuple):
    """Functions of x [R, I] or its gradient [R, O], weight [e, O, I] and offsets [e], as in experts_grouped.py."""

    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    back: Callable[[Tensor, Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]


TRITON = Products(
    lambda x, weight, offsets: multiply(x, weight, offsets, triton=True),
    lambda grad, weight, offsets: multiply(grad, weight.transpose(1, 2), offsets, triton=True),
    lambda grad, x, offsets: multiply_outer(grad, x, offsets, triton=True),
)
TORCH = Products(
    lambda x, weight, offsets: F.grouped_mm(x, weight.transpose(1, 2), offs=offsets),
    lambda grad, weight, offsets: F.grouped_mm(grad, weight, offs=offsets),
    lambda grad, x, offsets: F.grouped_mm(grad.t(), x, offs=offsets),
)


class Bench(NamedTuple):
    """What is checked, and on what; a test puts a CPU and small sizes here.

    product_sizes  rows R, width out O, width in I, experts e
    batch          sequences, positions
    """

    device: torch.device
    models: Mapping[str, dict[str, Any]]
    product_sizes: tuple[int, int, int, int]
    batch: tuple[int, int]
    products: Mapping[str, Products]
    variants: Mapping[str, Callable[[Any], None]]  # each changes a model in place
    num_ranks: int = 8  # of the group whose first rank's share is timed
    num_steps: int = 20
    num_timed: int = 10


class Row(NamedTuple):
    """A number, and where there is one the bound it must not exceed. `void` says why there is no number."""

    section: str
    case: str
    what: str
    value: float | None
    unit: str = ""
    bound: float | None = None
    void: str | None = None

    @property
    def is_good(self) -> bool:
        return self.void is None and (self.bound is None or (self.value is not None and self.value <= self.bound))


class Case(NamedTuple):
    """A measurement, which makes several rows."""

    section: str
    name: str
    measure: Callable[[], list[Row]]


def cases(bench: Bench) -> Iterator[Case]:
    for name in bench.products:
        for precision in DTYPES:
            yield Case("products", f"{name} {precision}", partial(check_products, bench, name, precision))
    for precision in DTYPES:
        yield Case("precision", precision, partial(check_precision, bench, precision))
    for precision in ("fp32", "bf16"):
        yield Case("graphs", precision, partial(check_graphs, bench, precision))
    for variant in bench.variants:
        for size in bench.models:
            yield Case("speed", f"{size} {variant}", partial(measure_speed, bench, size, variant))
        if variant != "compiled":
            size, case = list(bench.models)[-1], f"{variant}, 1 of {bench.num_ranks}"
            yield Case("speed", case, partial(measure_speed, bench, size, variant, num_ranks=bench.num_ranks))


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Let float32 products be made in TF32, or not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# Of the largest number of a result: float32 sums of some thousand terms, and operands of 11 and 8 bits.
PRODUCT_BOUNDS = {"fp32": 1e-5, "tf32": 4e-3, "bf16": 1e-2}


def check_products(bench: Bench, name: str, precision: str) -> list[Row]:
    """Errors for each routing, and speed for the first one, in which experts have some rows more or less."""
    num_rows, out, width, num_experts = bench.product_sizes
    generator = torch.Generator().manual_seed(1)
    x, grad, weight = (
        torch.randn(*shape, generator=generator).to(bench.device, DTYPES[precision])
        for shape in ((num_rows, width), (num_rows, out), (num_experts, out, width))
    )
    uneven = torch.randint(num_rows // 2, num_rows + 1, (num_experts,), generator=generator).float()
    ends = (uneven.cumsum(0) / uneven.sum() * (num_rows * 15 // 16)).long()
    routings = {
        "uneven": ends,
        "to one expert": torch.where(torch.arange(num_experts) < num_experts // 2, 0, num_rows),
        "no rows": torch.zeros(num_experts),
    }
    place, rows, products = ("products", f"{name} {precision}"), [], bench.products[name]
    with matmul_precision(precision):
        for routing, offsets in routings.items():
            offs = offsets.to(bench.device, torch.int32)
            runs: dict[str, Callable[[], Tensor]] = {
                "forward": partial(products.forward, x, weight, offs),
                "back": partial(products.back, grad, weight, offs),
                "weight_gradient": partial(products.weight_gradient, grad, x, offs),
            }
            for run, want in zip(runs.items(), plain_products(x, grad, weight, offsets), strict=True):
                what, got = run[0], run[1]()
                filled = got[: int(offsets[-1])] if got.dim() == 2 else got
                error = difference(filled, want.to(filled.device)) if filled.numel() else 0.0
                rows.append(Row(*place, f"{what}, {routing}: error", error, bound=PRODUCT_BOUNDS[precision]))
                if name == "triton" and got.dim() == 2:
                    tail = got[int(offsets[-1]) :]
                    rows.append(Row(*place, f"{what}, {routing}: rows of nobody", float(tail.any()), bound=0.0))
                if routing == "uneven":
                    step_s = time_steps(run[1], bench)
                    flops = 2 * int(offsets[-1]) * out * width
                    rows.append(Row(*place, f"{what}: speed", flops / step_s / 1e12, "TFLOP/s"))
    return rows


def plain_products(x: Tensor, grad: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three products in float64, expert by expert, of the rows that are somebody's."""
    forward, back = [], []
    gradients = torch.zeros_like(weight, dtype=torch.float64)
    for expert, (start, end) in enumerate(pairwise([0, *map(int, offsets)])):
        rows, grads, own = x[start:end].double(), grad[start:end].double(), weight[expert].double()
        forward.append(rows @ own.t())
        back.append(grads @ own)
        gradients[expert] = grads.t() @ rows
    return torch.cat(forward), torch.cat(back), gradients


class Pass(NamedTuple):
    """Loss and gradients of one batch."""

    loss: float
    gradients: list[Tensor]


# Losses relative to float64. A token whose two best experts nearly tie may be routed otherwise, so gradients of the
# lower precisions are reported without a bound.
LOSS_BOUNDS = {"fp32": 1e-5, "tf32": 1e-3, "bf16": 2e-2}


def check_precision(bench: Bench, precision: str) -> list[Row]:
    want = run_pass(make_model(bench, "small", torch.float64), bench)
    with matmul_precision(precision):
        got = run_pass(make_model(bench, "small", DTYPES[precision]), bench)
    square = sum((g.double() - w).square().sum().item() for g, w in zip(got.gradients, want.gradients, strict=True))
    norm = sum(w.square().sum().item() for w in want.gradients)
    loss_error, gradient_bound = abs(got.loss - want.loss) / abs(want.loss), 1e-3 if precision == "fp32" else None
    return [
        Row("precision", precision, "loss: error", loss_error, bound=LOSS_BOUNDS[precision]),
        Row("precision", precision, "gradients: norm of the error", (square / norm) ** 0.5, bound=gradient_bound),
    ]


# What another order of sums may do where eager itself repeats bit for bit.
GRAPH_FLOORS = {"fp32": 1e-5, "bf16": 1e-2}


def check_graphs(bench: Bench, precision: str) -> list[Row]:
    """Graphed must differ from eager by no more than twice what eager differs from itself, or the floor."""
    variants = {"eager": "eager", "again": "eager", "graphed": "graphed"}
    passes: dict[str, Pass] = {}
    curves: dict[str, Tensor] = {}
    for name, variant in variants.items():
        model = make_model(bench, "small", DTYPES[precision], variant=variant)
        for _ in range(3):  # the first call of a block is eager, the second records it
            passes[name] = run_pass(model, bench)
        step = training_step(model, bench)
        curves[name] = torch.stack([step(i) for i in range(bench.num_steps)]).double().cpu()
    rows = []
    for what, compare in {
        "loss": lambda name: abs(passes[name].loss - passes["eager"].loss) / abs(passes["eager"].loss),
        "gradients": lambda name: max(
            difference(a, b) for a, b in zip(passes[name].gradients, passes["eager"].gradients, strict=True)
        ),
        f"losses of {bench.num_steps} steps": lambda name: difference(curves[name], curves["eager"]),
    }.items():
        noise = compare("again")
        rows.append(Row("graphs", precision, f"{what}: eager again", noise))
        bound = max(2 * noise, GRAPH_FLOORS[precision])
        rows.append(Row("graphs", precision, f"{what}: graphed", compare("graphed"), bound=bound))
    return rows


def measure_speed(bench: Bench, size: str, variant: str, *, num_ranks: int = 1) -> list[Row]:
    """Of one process, or of the first rank of a group whose transfers take no time and carry nothing.

    Such a rank has the shapes it would have in a real group, and numbers that mean nothing.
    """
    with group_of(num_ranks, size=bench.models[size]) as mesh:
        model = make_model(bench, size, torch.bfloat16, variant=variant, mesh=mesh)
        case = f"{size} {variant}" if num_ranks == 1 else f"{variant}, 1 of {num_ranks}"
        return [Row("speed", case, what, *number) for what, number in speed_of(model, bench).items()]


def speed_of(model: Any, bench: Bench) -> dict[str, tuple[float, str]]:
    step = training_step(model, bench)
    start_s = time.perf_counter()
    for i in range(3):
        step(i)
    synchronize(bench.device)
    warm_s = time.perf_counter() - start_s
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step_s = time_steps(lambda: step(0), bench)
    num_tokens = bench.batch[0] * bench.batch[1]
    flops = model_flops_per_token(model.config.sizes, attention_length=bench.batch[1]) * num_tokens
    flops /= model.mesh.layout.world_size
    peak = find_peak(bench.device.type, precision="bf16")
    numbers = {
        "step": (step_s * 1e3, "ms"),
        "tokens": (num_tokens / step_s, "1/s"),
        f"MFU of {peak.flops_per_s / 1e12:.4g} TFLOP/s ({peak.source})": (100 * flops / step_s / peak.flops_per_s, "%"),
        "the first three steps": (warm_s, "s"),
    }
    if bench.device.type == "cuda":
        numbers["peak memory"] = (torch.cuda.max_memory_allocated() / 2**30, "GiB")
    return numbers | {what: (float(n), "a step") for what, n in count_launches(lambda: step(0), bench).items()}


@contextmanager
def group_of(num_ranks: int, *, size: dict[str, Any]) -> Iterator[ParallelMesh]:
    """A mesh of this process alone, or as the first rank of a fake group with whole experts on every rank."""
    if num_ranks == 1:
        yield one_rank_mesh()
        return
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        layout = ParallelLayout(tp=num_ranks, ep=num_ranks)
        yield build_mesh(layout, num_key_value_heads=size["num_key_value_heads"])
    finally:
        dist.destroy_process_group()


def make_model(
    bench: Bench,
    size: str,
    dtype: torch.dtype,
    *,
    variant: str = "eager",
    mesh: ParallelMesh | None = None,
    attention: str = "sdpa",
) -> Any:
    """The same weights in any type, each rounded once."""
    config = GatherMoeConfig(**bench.models[size])
    execution = Execution(experts_backend="loop" if dtype == torch.float64 else "auto")
    config._attn_implementation = attention
    mesh = mesh or one_rank_mesh()
    model: Any = build_model(config, mesh=mesh, execution=execution, seed=0, dtype=dtype, device=bench.device)
    bench.variants[variant](model)
    return model


def draw_batch(bench: Bench, model: Any, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, bench.batch, generator=generator).to(bench.device)


def forward(model: Any, ids: Tensor) -> Tensor:
    """The loss; every sequence is one document."""
    return model(input_ids=ids, labels=ids, document_starts=((0,),) * len(ids)).loss


def run_pass(model: Any, bench: Bench) -> Pass:
    model.zero_grad()
    loss = forward(model, draw_batch(bench, model, seed=0))
    loss.backward()
    return Pass(loss.item(), [parameter.grad for parameter in model.parameters()])


def training_step(model: Any, bench: Bench) -> Callable[[int], Tensor]:
    """A function that trains on one of four batches with AdamW and returns the loss, on the device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-6, fused=True)
    batches = [draw_batch(bench, model, seed=seed) for seed in range(4)]

    def step(number: int) -> Tensor:
        loss = forward(model, batches[number % 4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model.zero_grad()
    return step


def difference(got: Tensor, want: Tensor) -> float:
    """The largest difference over the largest number; infinite where one of them is not finite."""
    got, want = got.double(), want.double()
    error = ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Let torch raise where an operator makes the host wait for a GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def time_steps(step: Callable[[], Any], bench: Any, *, before: Callable[[], Any] = lambda: None) -> float:
    """The median in seconds, after two that warm up; `bench` has a device and num_timed, `before` is not timed."""
    times_s = []
    for _ in range(bench.num_timed + 2):
        before()
        synchronize(bench.device)
        start_s = time.perf_counter()
        step()
        synchronize(bench.device)
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[2:])


def count_launches(step: Callable[[], Any], bench: Bench) -> dict[str, int]:
    """What the host asks of the GPU in a step, a whole graph at once or a kernel, and kernels that run there."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step()
        synchronize(bench.device)
    events = profile.events()
    asked = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
    kernels = [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]
    return {
        "launches": sum(event.name.startswith(asked) for event in events),
        "kernels": sum(not event.name.startswith(("Memcpy", "Memset")) for event in kernels),
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
