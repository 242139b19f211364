"""A decoder block's forward and backward have static shapes and show the host no number: a graph can hold them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling.attention import AttentionInputs, eager_attention
from modeling.build import build_model
from modeling.decoder import TokenPlace
from modeling.expert_rows import sort_rows
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh
from modeling.noise import NoiseOrigin, token_counters
from modeling.rope import rotary_tables
from tests.ranks import run_ranks
from tests.referee import mixed_config

BATCH, BLOCK = 2, 8
# Operators whose output shape depends on values, or that hand a value to the host.
REFUSED = {
    "nonzero",
    "nonzero_numpy",
    "argwhere",
    "masked_select",
    "unique_dim",
    "_unique",
    "_unique2",
    "unique_consecutive",
    "unique_dim_consecutive",
    "bincount",
    "histc",
    "repeat_interleave",
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "allclose",
    "combinations",
}
BOOLEAN_INDEX = ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")


# On CPU these read a tensor's memory without any operator, so they are refused by their names.
HOST_READS = (
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.cpu,
    Tensor.item,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
)


class StaticOperators(TorchDispatchMode):
    """Refuses operators that depend on data, boolean indices among them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in REFUSED and func._overloadname != "self_int":
            raise RuntimeError(f"{func} depends on data")
        if name in BOOLEAN_INDEX:
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    raise RuntimeError(f"{func} with a boolean index depends on data")
        return func(*args, **(kwargs or {}))


class NoHostReads(TorchFunctionMode):
    """Refuses functions that hand a tensor's numbers to Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_tensor = func in (torch.tensor_split, Tensor.tensor_split) and isinstance(args[1], Tensor)
        if func in HOST_READS or by_tensor:
            raise RuntimeError(f"{func.__name__} depends on data")
        return func(*args, **(kwargs or {}))


@contextmanager
def static_shapes() -> Iterator[None]:
    with NoHostReads(), StaticOperators():
        yield


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: int(x.sum()),
        lambda x: x[x > 0],
        lambda x: x.index_put_((x > 0,), torch.zeros(())),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: x.long().bincount(),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.tensor_split(x, torch.tensor([1, 2])),
    ],
)
def test_the_mode_refuses_what_a_graph_cannot_hold(read: Any) -> None:
    with pytest.raises(RuntimeError, match="depends on data"), static_shapes():
        read(torch.arange(4.0))


def test_the_mode_lets_static_operators_through() -> None:
    x = torch.arange(4.0)
    with static_shapes():
        assert x[torch.tensor([1, 2])].shape == (2,)
        assert x.repeat_interleave(2).shape == (8,)
        x[torch.tensor([0])] = 1.0
        x.masked_fill_(x > 2, 0.0)


def plain_inputs(config: Any, *, block_size: int, dtype: torch.dtype) -> AttentionInputs:
    """Of sequences that are one document each."""
    return AttentionInputs(
        rotary=rotary_tables(config, torch.arange(block_size)[None], dtype=dtype),
        mask=None,
        documents=None,
        function=ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", eager_attention),
        implementation="sdpa",
        cache=None,
        options={},
    )


def _block(rank: int, _: int, ep: int, options: dict[str, Any], mode: bool) -> tuple[list[Tensor], str]:
    """Forward and backward of a sparse block on this rank, under the mode or without it."""
    config = mixed_config(num_experts=4, num_experts_per_tok=2, mlp_only_layers=[], **options)
    mesh = build_mesh(ParallelLayout(tp=2, ep=ep), num_key_value_heads=config.sizes.num_key_value_heads)
    model = build_model(config, mesh=mesh, seed=1)
    block = model.model.layers[1]
    num_tokens = BATCH * BLOCK // 2
    tokens = rank * num_tokens + torch.arange(num_tokens)
    inputs = plain_inputs(config, block_size=BLOCK, dtype=torch.float32)
    noise_t = token_counters(tokens, origin=NoiseOrigin(1, 0), layer_idx=1) if config.router_jitter_noise else None
    place = TokenPlace(BATCH, BLOCK, tokens // BLOCK, torch.arange(num_tokens) > 1, noise_t)
    x = torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    try:
        with static_shapes() if mode else nullcontext():
            out, _, probs_BE, z_B, *_ = block(x, inputs=inputs, place=place)
            (out.square().sum() + probs_BE.square().sum() + z_B.sum()).backward()
    except RuntimeError as error:
        return [], str(error)
    assert x.grad is not None
    gradients = [p.grad for p in block.parameters()]
    assert all(g is not None for g in gradients)
    return [out.detach(), x.grad, *gradients], ""


@pytest.mark.parametrize(("strategy", "ep"), [("gather_tokens", 2), ("gather_tokens", 1), ("gather_weights", 1)])
@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
def test_the_block_has_static_shapes(strategy: str, ep: int, qk_norm: str) -> None:
    options = {"experts_backend": "grouped", "qk_norm": qk_norm, "strategy": strategy}
    under_the_mode = run_ranks(_block, 2, ep, options, True)
    without = run_ranks(_block, 2, ep, options, False)
    for (tensors, refused), (want, _) in zip(under_the_mode, without, strict=True):
        assert refused == ""
        assert len(tensors) == len(want) > 8
        for a, b in zip(tensors, want, strict=True):
            assert torch.equal(a, b)


def test_every_option_of_the_router_has_static_shapes() -> None:
    options = {
        "score_function": "sigmoid",
        "router_bias": True,
        "router_jitter_noise": 0.1,
        "experts_backend": "grouped",
    }
    for (tensors, refused), (want, _) in zip(
        run_ranks(_block, 2, 2, options, True), run_ranks(_block, 2, 2, options, False), strict=True
    ):
        assert refused == ""
        assert len(tensors) == len(want) > 8
        assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))


@pytest.mark.parametrize("ep", [2, 1])
def test_the_loop_reads_counts_on_the_host(ep: int) -> None:
    for _, refused in run_ranks(_block, 2, ep, {"experts_backend": "loop"}, True):
        assert refused == "tolist depends on data"


def test_an_exchange_of_rows_reads_their_numbers_on_the_host() -> None:
    for _, refused in run_ranks(_block, 2, 2, {"experts_backend": "grouped", "strategy": "all_to_all"}, True):
        assert refused == "tolist depends on data"


def test_shapes_do_not_depend_on_the_routing() -> None:
    """All tokens to one expert, or spread evenly: the same operators on the same shapes."""
    spread = torch.arange(16).view(8, 2) % 4
    piled = torch.tensor([[0, 1]]).expand(8, 2)
    away = torch.tensor([[2, 3]]).expand(8, 2)
    shapes = {tuple(sort_rows(ids, num_slots=2).token_R.shape) for ids in (spread, piled, away)}
    assert shapes == {(16,)}
