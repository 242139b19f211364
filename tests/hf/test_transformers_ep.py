"""Stock models under transformers' expert parallelism: "allgather" equals its own ways, and one process."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import AllReduceEP, EPImplementationInterface

from recipe.hf.transformers_ep import AllGatherEP, keep_local, register_allgather
from tests.ranks import run_ranks
from tests.recording import Collective, Operator, Operators
from tests.referee import FP32_ATOL, STOCK_CONFIGS, Tensors, assert_all_match, full_state, referee_model
from tests.static_shapes import NoHostReads, StaticOperators

pytestmark = pytest.mark.slow

NUM_STEPS = 2


class Training(NamedTuple):
    """Logits and gradients of the first step, the losses of all, the weights after the last; whole tensors."""

    logits: Tensor
    gradients: Tensors
    losses: list[float]
    weights: Tensors


def batch(step: int, *, num_sequences: int = 4, length: int = 9) -> Tensor:
    return torch.randint(0, 50, (num_sequences, length), generator=torch.Generator().manual_seed(step))


def train(model: Any, batches: list[Tensor]) -> Training:
    """A few steps of AdamW on the mean loss of each batch."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, foreach=False)
    logits, gradients, losses = None, {}, []
    for ids in batches:
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        if logits is None:
            logits = out.logits.detach().clone()
            gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
    assert logits is not None
    return Training(logits, gradients, losses, {name: whole(p) for name, p in model.named_parameters()})


def whole(x: Any) -> Tensor:
    full = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full.detach().clone()


def load_split(
    folder: Path, sizes: dict[str, int], implementation: str, *, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    register_allgather()
    config = DistributedConfig(**sizes, ep_implementation=implementation)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=dtype, **options)


def train_split(
    rank: int, _: int, folder: Path, sizes: Any, implementation: str, *, checkpointing: bool = False, **options: Any
) -> Training:
    """The same on one rank of a split model; without tensor parallelism each rank has its share of the sequences."""
    model = load_split(folder, sizes, implementation, **options)
    if checkpointing:
        model.gradient_checkpointing_enable()
    num_batches = sizes.get("fsdp_size", 1)
    batches = [batch(step).chunk(num_batches)[rank // sizes.get("tp_size", 1)] for step in range(NUM_STEPS)]
    return train(model, batches)


class Stock(NamedTuple):
    """A checkpoint of transformers' class, and what one process makes of it."""

    folder: Path
    training: Training


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stock]:
    found = {}
    for kind, make in STOCK_CONFIGS.items():
        folder = tmp_path_factory.mktemp(kind)
        referee_model(make(), full_state(make())).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found[kind] = Stock(folder, train(model, [batch(step) for step in range(NUM_STEPS)]))
    return found


def check_equal(by_rank: list[Training], want: Training, *, num_batches: int = 1) -> None:
    """Ranks stand in order of their batches, neighbours share one; losses and gradients are means over the batches."""
    sharers = len(by_rank) // num_batches
    logits = torch.cat([result.logits for result in by_rank[::sharers]])
    torch.testing.assert_close(logits, want.logits, atol=FP32_ATOL, rtol=0)
    losses = [sum(step) / len(by_rank) for step in zip(*(result.losses for result in by_rank), strict=True)]
    torch.testing.assert_close(losses, want.losses, atol=FP32_ATOL, rtol=0)
    for result in by_rank:
        assert result.gradients.keys() == result.weights.keys() == want.weights.keys()
        assert_all_match(result.gradients, want.gradients)
        assert_all_match(result.weights, want.weights)


SHARED = {"tp_size": 2, "ep_size": 2}
OWN = {"fsdp_size": 2, "ep_size": 2}  # each rank has a batch of its own, which transformers' all-reduce refuses
SHARED_BY_TWO = {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}


@pytest.mark.parametrize(
    ("kind", "sizes", "options", "others"),
    [
        ("mixtral", SHARED, {"experts_implementation": "batched_mm"}, ("all_to_all", "all_reduce")),
        ("qwen3_moe", SHARED, {"experts_implementation": "eager"}, ("all_to_all", "all_reduce")),
        (
            *("olmoe", SHARED),
            {"experts_implementation": "grouped_mm", "checkpointing": True},
            ("all_to_all", "all_reduce"),
        ),
        ("qwen3_moe", OWN, {}, ("all_to_all",)),
        *((kind, SHARED_BY_TWO, {}, ()) for kind in STOCK_CONFIGS),
    ],
)
def test_a_split_stock_model_is_the_model_of_one_process_and_of_transformers_other_ways(
    kind: str, sizes: dict[str, int], options: dict[str, Any], others: tuple[str, ...], stock: dict[str, Stock]
) -> None:
    num_ranks, num_batches = sizes["ep_size"], sizes.get("fsdp_size", 1)
    by_rank = run_ranks(train_split, num_ranks, stock[kind].folder, sizes, "allgather", **options)
    check_equal(by_rank, stock[kind].training, num_batches=num_batches)
    for name in others:
        for ours, theirs in zip(by_rank, run_ranks(train_split, 2, stock[kind].folder, sizes, name), strict=True):
            check_equal([ours], theirs)


ROUTINGS = ("random", "all to the first rank's")


class Layer(NamedTuple):
    """What a rank's experts made of its batch, and the gradients; its own experts' alone."""

    out: Tensor
    grads: list[Tensor]


def stock_experts(*, implementation: str = "eager", dtype: torch.dtype = torch.float64) -> Any:
    """Eight small experts of Qwen3-MoE."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"hidden_size": 8, "moe_intermediate_size": 8, "num_experts": 8}
    torch.manual_seed(0)
    experts = Qwen3MoeExperts(Qwen3MoeConfig(**sizes, experts_implementation=implementation)).to(dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    return experts


def tokens_of(batch: int, routing: str, *, num_tokens: int = 7, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x [7, 8], ids and weights [7, 3] of one batch, and the gradient of the layer's output."""
    generator = torch.Generator().manual_seed(10 + batch)
    x = torch.randn(num_tokens, 8, dtype=dtype, generator=generator)
    ids = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(num_tokens)])
    if routing == ROUTINGS[1]:
        ids = torch.tensor([[1, 0, 2]]).repeat(num_tokens, 1)
    weights = torch.rand(num_tokens, 3, dtype=dtype, generator=generator)
    return [x, ids, weights, torch.randn(num_tokens, 8, dtype=dtype, generator=generator)]


def split_experts(experts: Any, *, rank: int, size: int) -> Any:
    """This rank's experts alone, as transformers' plan leaves them."""
    experts.num_experts //= size
    experts._is_expert_parallel = True
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(parameter.detach().chunk(size)[rank].clone()))
    return experts


def meshes(world_size: int, tp: int) -> tuple[Any, Any]:
    """The mesh of the expert group, all ranks, and that of the ranks that share this one's batch."""
    from torch.distributed import init_device_mesh

    dense = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("fsdp", "tp"))
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("ep",)), dense["tp"]


def run_layer(call: Any, experts: Any, tokens: list[Tensor]) -> Layer:
    x, ids, weights, grad = tokens
    x, weights = x.requires_grad_(), weights.requires_grad_()
    out = call(x, ids, weights)
    out.backward(grad)
    return Layer(out.detach(), [x.grad, weights.grad, *(p.grad for p in experts.parameters())])


def split_layer(rank: int, world_size: int, tp: int, name: str, **options: Any) -> tuple[Any, Any]:
    """A registered implementation on one rank, and this rank's experts."""
    register_allgather()
    experts = split_experts(stock_experts(**options), rank=rank, size=world_size)
    return EPImplementationInterface()[name](experts, *meshes(world_size, tp)), experts


def own_layers(rank: int, world_size: int, tp: int) -> list[Layer]:
    return [run_layer(*split_layer(rank, world_size, tp, "allgather"), tokens_of(rank // tp, r)) for r in ROUTINGS]


@pytest.mark.parametrize(("size", "tp"), [(2, 2), (2, 1), (4, 4), (4, 2), (4, 1)])
def test_the_layer_is_exact(size: int, tp: int) -> None:
    """Output, and gradients of tokens, routing weights and experts; seven tokens do not divide by two or four."""
    by_rank = run_ranks(own_layers, size, tp)
    for number, routing in enumerate(ROUTINGS):
        experts = stock_experts()
        layers = [run_layer(experts, experts, tokens_of(batch, routing)) for batch in range(size // tp)]
        for rank, got in enumerate(found[number] for found in by_rank):
            want = layers[rank // tp]
            torch.testing.assert_close(got.out, want.out, atol=1e-12, rtol=0)
            # The experts' gradients have gathered over all batches.
            parts = [g.chunk(size)[rank] for g in layers[-1].grads[2:]]
            for mine, expected in zip(got.grads, [*want.grads[:2], *parts], strict=True):
                torch.testing.assert_close(mine, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("sizes", [SHARED, OWN], ids=str)
def test_bf16_goes_through(sizes: dict[str, int], stock: dict[str, Stock]) -> None:
    """Routing weights travel in bf16 then; sums in another order differ by a few times 2**-9 of losses near 4."""
    ours, theirs = (
        run_ranks(train_split, 2, stock["qwen3_moe"].folder, sizes, name, dtype=torch.bfloat16)
        for name in ("allgather", "all_to_all")
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.losses, other.losses, atol=2e-2, rtol=0)
        assert {g.dtype for g in mine.gradients.values()} == {torch.bfloat16}


def generate(_: int, __: int, folder: Path) -> Tensor:
    model = load_split(folder, SHARED, "allgather").eval()
    return model.generate(batch(0), max_new_tokens=6, do_sample=False, pad_token_id=0)


def test_it_generates_what_one_process_does(stock: dict[str, Stock]) -> None:
    model = AutoModelForCausalLM.from_pretrained(stock["qwen3_moe"].folder, dtype=torch.float32).eval()
    want = model.generate(batch(0), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert want.shape == (4, 15)
    for got in run_ranks(generate, 2, stock["qwen3_moe"].folder):
        assert torch.equal(got, want)


class StaticExperts(StaticOperators):
    """Lets through transformers' histogram of expert ids: with fixed bounds nothing about it depends on data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "histc" and args[2] < args[3]:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


Record = tuple[list[Operator], list[Collective]]


def recorded(rank: int, world_size: int, tp: int, name: str) -> list[Record]:
    """What one rank's layer calls with the grouped product for its experts; whatever depends on data raises."""
    found = []
    for routing in ROUTINGS:
        layer = split_layer(rank, world_size, tp, name, implementation="grouped_mm", dtype=torch.float32)
        tokens = tokens_of(rank // tp, routing, dtype=torch.float32)
        with NoHostReads(), StaticExperts(), Operators() as seen:
            run_layer(*layer, tokens)
        found.append((seen.called, seen.collectives))
    return found


def collectives_of(size: int, tp: int) -> tuple[list[Collective], list[Collective]]:
    """Those of the forward, and those of the backward in any order.

    Of a shared batch only sums travel. Of two batches of 7 tokens tokens and sums travel once; with two ranks for a
    batch each takes 4 of them, the last one of them padding.
    """
    if tp == size:
        outputs = gradients = Collective("all_reduce", 7 * 8 * 4)
        return [outputs], [Collective("all_reduce", 7 * 3 * 4), gradients]
    tokens = size * -(-7 // tp)
    check, gathered = Collective("all_gather", size * 8), Collective("all_gather", tokens * 8 * 4)
    # On gloo a reduce-scatter is an exchange whose parts each rank adds up.
    summed = Collective("all_to_all", tokens * 8 * 4)
    in_batch = [Collective("all_gather", tp * -(-7 // tp) * width * 4) for width in (8, 3)] if tp > 1 else []
    forward = [check, gathered, Collective("all_gather", tokens * 3 * 6), summed, *in_batch[:1]]
    return forward, [gathered, Collective("all_to_all", tokens * 3 * 4), summed, *in_batch]


@pytest.mark.parametrize(("size", "tp"), [(2, 2), (2, 1), (4, 2)])
def test_nothing_depends_on_the_routing_and_no_more_travels_than_has_to(size: int, tp: int) -> None:
    by_rank = run_ranks(recorded, size, tp, "allgather")
    forward, backward = collectives_of(size, tp)
    for spread, piled in by_rank:
        assert spread == piled
        assert len(spread[0]) > 50
        assert spread[1][: len(forward)] == forward
        assert sorted(spread[1][len(forward) :]) == sorted(backward)
    assert size > 2 or by_rank[0] == by_rank[1]  # of two that share a batch of seven one has a padding row


def test_the_exchange_of_transformers_reads_counts_on_the_host() -> None:
    for message in run_ranks(refused, 2, recorded, 1, "all_to_all"):
        assert message == "tolist depends on data"


def refused(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> str:
    """What the function says when it stops, on every rank alike."""
    with pytest.raises(RuntimeError) as error:
        function(rank, world_size, *args)
    return str(error.value)


def unequal(rank: int, world_size: int) -> None:
    run_layer(*split_layer(rank, world_size, 1, "allgather"), tokens_of(rank, "random", num_tokens=7 + rank))


def test_unequal_batches_are_refused() -> None:
    for rank, message in enumerate(run_ranks(refused, 2, unequal)):
        assert re.search(rf"equally many tokens on all ranks .* of which this one brought {7 + rank}; pad", message)


def test_local_experts_move_to_the_front_and_the_rest_is_cut() -> None:
    ids = torch.tensor([[7, 4, 0], [5, 1, 4], [0, 1, 2], [4, 5, 6]])
    weights = torch.arange(12.0).view(4, 3)
    local_ids, local_weights = keep_local(ids, weights, first_expert=4, num_local=2)
    assert local_ids.tolist() == [[0, 2], [1, 0], [2, 2], [0, 1]]
    assert local_weights.tolist() == [[1.0, 0.0], [3.0, 5.0], [0.0, 0.0], [9.0, 10.0]]
    none_ids, none_weights = keep_local(ids[2:3], weights[2:3], first_expert=4, num_local=2)
    assert none_ids.tolist() == [[1, 2]], "one row, so that the rank takes part in the backward"
    assert none_weights.tolist() == [[0.0, 0.0]]


def test_registering_is_done_once_and_takes_no_name_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EPImplementationInterface, "_global_mapping", {})
    register_allgather()
    register_allgather()
    assert dict(EPImplementationInterface()) == {"allgather": AllGatherEP}
    monkeypatch.setattr(EPImplementationInterface, "_global_mapping", {"allgather": AllReduceEP})
    with pytest.raises(ValueError, match=r"'allgather' is registered as transformers\..*AllReduceEP already; register"):
        register_allgather()
