"""What the model refuses, alone and when a group of ranks shares it, each by its words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from modeling.config import GatherMoeConfig
from modeling.execution import Execution
from modeling.init import build_model
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh, one_rank_mesh
from modeling.model import GatherMoeForCausalLM
from tests.ranks import run_ranks
from tests.referee import Tensors, assert_all_match, gradients_of, mixed_config, tiny_config

IDS = torch.arange(16).view(1, 16)


MODELS: list[tuple[dict[str, Any], str]] = [
    ({"qk_norm": "heads"}, r"qk_norm='heads' is not known; choose one of \['none', 'head', 'full'\]"),
    (
        {"balance_scope": "world"},
        r"balance_scope='world' is not known; choose one of \['sequence', 'micro_batch', 'global_batch'\]",
    ),
    ({"hidden_act": "gelu"}, r"hidden_act='gelu' is not known; choose one of \['silu'\]"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 must lie between 1 and num_experts=4"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 must lie between 1 and num_experts=4"),
    ({"router_jitter_noise": -0.1}, r"router_jitter_noise=-0\.1 must lie between 0, which is none, and 1"),
    ({"router_jitter_noise": 1.5}, r"router_jitter_noise=1\.5 must lie between 0, which is none, and 1"),
    ({"capacity_factor": 0}, r"capacity_factor=0 must be above 0; None drops nothing"),
    ({"balance_bias_update_rate": -0.1}, r"balance_bias_update_rate=-0\.1 must be at least 0, which leaves"),
    ({"routed_scaling_factor": 0.0}, r"routed_scaling_factor=0\.0 must be above 0; 1 changes nothing"),
    ({"score_function": "relu"}, r"score_function='relu' is not known; choose one of \['softmax', 'sigmoid'\]"),
]
EXECUTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"experts_backend": "fast"},
        r"experts_backend='fast' is not known; choose one of \['auto', 'loop', 'grouped', 'triton'\]",
    ),
    (
        {"token_dtype": "float8_e4m3", "strategy": "all_to_all"},
        'token_dtype="float8_e4m3" is for strategy "gather_tokens", .* not for "all_to_all"; use "auto"',
    ),
    ({"overlap_chunks": 0}, r"overlap_chunks=0 must be at least 1; None chooses"),
    ({"resident_experts": -1}, "resident_experts=-1 must be at least 0, which makes no copies"),
]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [*((tiny_config, *case) for case in MODELS), *((Execution, *case) for case in EXECUTIONS)],
)
def test_what_cannot_be_is_refused(make: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_values_of_the_wrong_type_are_refused() -> None:
    with pytest.raises(Exception, match="hidden_size"):
        GatherMoeConfig(hidden_size="wide")  # type: ignore[arg-type]


def test_exactly_one_kind_of_input_is_needed() -> None:
    model = GatherMoeForCausalLM(tiny_config())
    embeds = torch.zeros(1, 4, 32)
    for options in ({}, {"input_ids": IDS[:, :4], "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="give exactly one of input_ids and inputs_embeds"):
            model(**options)


def test_a_mesh_is_not_needed_and_one_rank_is_one() -> None:
    mesh = one_rank_mesh()
    assert (mesh.group, mesh.group_rank, mesh.dp_rank, mesh.ep_rank, mesh.dp_ranks) == (None, 0, 0, 0, [0])
    alone = build_model(tiny_config(), mesh=mesh, seed=0)
    assert alone.training
    assert alone(IDS).logits.shape == (1, 16, 50)


def _check_refusals(rank: int, world_size: int) -> None:
    mesh = build_mesh(ParallelLayout(tp=world_size, ep=world_size), num_key_value_heads=2)
    model = build_model(mixed_config(), mesh=mesh, seed=0)
    cache = build_model(mixed_config(), mesh=one_rank_mesh(), seed=0)(IDS, use_cache=True).cache

    noisy = build_model(mixed_config(router_jitter_noise=0.25), mesh=mesh, seed=0)
    noisy.eval()(IDS, labels=IDS)
    ids_only = "under a mesh a model takes input_ids only, without inputs_embeds and without a cache"
    calls: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: GatherMoeForCausalLM(mixed_config(attention_dropout=0.1), mesh=mesh),
            "attention_dropout=0.1 is not supported when tp=2 ranks share a model; set it to 0",
        ),
        (
            lambda: model.gradient_checkpointing_enable({"use_reentrant": True}),
            "use_reentrant=True is not supported under a mesh: reentrant checkpointing cannot be combined with "
            "collectives in the block; use use_reentrant=False",
        ),
        (
            lambda: model.generate(IDS, max_new_tokens=1),
            "generate() serves one process, and this model is shared by tp=2 ranks; load a checkpoint's hf/ folder "
            "with AutoModelForCausalLM.from_pretrained instead",
        ),
        (
            lambda: model(IDS, output_logits=True),
            "output_logits=True is not supported under a mesh; load the saved hf/ folder on one process",
        ),
        (lambda: model(inputs_embeds=torch.zeros(1, 4, 32)), ids_only),
        (lambda: model(IDS, cache=cache), ids_only),
        (
            lambda: model(IDS[:, :15]),
            "1 sequences of 15 tokens cannot be shared by tp=2 ranks; their product must be a multiple of 2",
        ),
        (
            lambda: model.resize_token_embeddings(60),
            "resize_token_embeddings() serves one process, and this model is shared by tp=2 ranks; resize the saved "
            "hf/ folder's model and start from that",
        ),
        (
            lambda: noisy.train()(IDS, labels=IDS),
            "router_jitter_noise=0.25 needs to know which noise a group of tp=2 ranks shares; give "
            "noise=NoiseOrigin(seed, first_token) to every forward",
        ),
        (
            lambda: build_mesh(ParallelLayout(dp=2, tp=2, ep=1), num_key_value_heads=2),
            "the layout dp=2 tp=2 ep=1 etp=2 is for 4 ranks, but 2 are running",
        ),
    ]
    for call, message in calls:
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == message


@pytest.mark.requirement("R-TP-07")
def test_what_a_shared_model_cannot_do_is_refused_on_every_rank() -> None:
    run_ranks(_check_refusals, 2)


def _freeze_each_part(rank: int, world_size: int) -> None:
    mesh = build_mesh(ParallelLayout(tp=world_size, ep=world_size), num_key_value_heads=2)
    model = build_model(mixed_config(router_aux_loss_coef=0.5), mesh=mesh, seed=0)

    def gradients_without(part: str) -> Tensors:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part not in name)
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        return gradients_of(model)

    want = gradients_without("nothing")
    for part in ("mlp.gate", "norm", "experts", "embed_tokens", "lm_head", "k_proj", "self_attn"):
        got = gradients_without(part)
        assert got.keys() == {name for name in want if part not in name} < want.keys()
        assert_all_match(got, want, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_any_part_of_a_model_can_be_frozen_without_changing_the_others(world_size: int) -> None:
    run_ranks(_freeze_each_part, world_size)
