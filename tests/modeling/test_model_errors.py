"""What the model refuses, alone and when a group of ranks shares it, each by its words."""

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
from tests.referee import mixed_config, tiny_config

IDS = torch.arange(16).view(1, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
    ],
)
def test_configurations_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
    ],
)
def test_executions_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Execution(**options)


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


def _refused_under_a_mesh(rank: int, world_size: int) -> dict[str, str]:
    config = mixed_config()
    mesh = build_mesh(ParallelLayout(tp=world_size, ep=world_size), num_key_value_heads=2)
    model = build_model(config, mesh=mesh, seed=0)
    cache = build_model(config, mesh=one_rank_mesh(), seed=0)(IDS, use_cache=True).cache

    def dropout() -> None:
        GatherMoeForCausalLM(mixed_config(attention_dropout=0.1), mesh=mesh)

    calls = {
        "dropout": dropout,
        "reentrant": lambda: model.gradient_checkpointing_enable({"use_reentrant": True}),
        "generate": lambda: model.generate(IDS, max_new_tokens=1),
        "logits": lambda: model(IDS, output_logits=True),
        "embeds": lambda: model(inputs_embeds=torch.zeros(1, 4, 32)),
        "cache": lambda: model(IDS, cache=cache),
        "odd": lambda: model(IDS[:, :15]),
        "resize": lambda: model.resize_token_embeddings(60),
        "layout": lambda: build_mesh(ParallelLayout(dp=2, tp=2, ep=1), num_key_value_heads=2),
        "isolation": lambda: _with_attention(model, "paged_attention"),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


def _with_attention(model: GatherMoeForCausalLM, name: str) -> None:
    model.config._attn_implementation_internal = name
    model(IDS, document_starts=((0, 3),))


UNDER_A_MESH = {
    "dropout": "attention_dropout=0.1 is not supported when tp=2 ranks share a model; set it to 0",
    "reentrant": "use_reentrant=True is not supported under a mesh: reentrant checkpointing cannot be combined with "
    "collectives in the block; use use_reentrant=False",
    "generate": "generate() serves one process, and this model is shared by tp=2 ranks; load a checkpoint's hf/ folder "
    "with AutoModelForCausalLM.from_pretrained instead",
    "logits": "output_logits=True is not supported under a mesh; load the saved hf/ folder on one process",
    "embeds": "under a mesh a model takes input_ids only, without inputs_embeds and without a cache",
    "cache": "under a mesh a model takes input_ids only, without inputs_embeds and without a cache",
    "odd": "1 sequences of 15 tokens cannot be shared by tp=2 ranks; their product must be a multiple of 2",
    "resize": "resize_token_embeddings() serves one process, and this model is shared by tp=2 ranks; resize the saved "
    "hf/ folder's model and start from that",
    "layout": "the layout dp=2 tp=2 ep=1 etp=2 is for 4 ranks, but 2 are running",
    "isolation": "attn_implementation='paged_attention' is not known to keep packed documents apart; choose one of "
    "['eager', 'flash_attention_2', 'flash_attention_3', 'flash_attention_4', 'flex_attention', 'sdpa']",
}


def test_what_a_shared_model_cannot_do_is_refused_on_every_rank() -> None:
    for found in run_ranks(_refused_under_a_mesh, 2):
        assert found == UNDER_A_MESH


def _checkpointing_by_default(rank: int, world_size: int) -> dict[str, Any]:
    mesh = build_mesh(ParallelLayout(tp=world_size, ep=1), num_key_value_heads=2)
    model = build_model(mixed_config(router_aux_loss_coef=0.5), mesh=mesh, seed=0)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        results.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return {name: torch.equal(results[1][name], gradient) for name, gradient in results[0].items()}


@pytest.mark.requirement("R-GRAPH-03")
def test_checkpointing_under_a_mesh_changes_no_gradient() -> None:
    for same in run_ranks(_checkpointing_by_default, 2):
        assert all(same.values()), same


def _frozen_under_a_mesh(rank: int, world_size: int, part: str) -> None:
    mesh = build_mesh(ParallelLayout(tp=world_size, ep=world_size), num_key_value_heads=2)
    results = []
    for freeze in (False, True):
        model = build_model(mixed_config(router_aux_loss_coef=0.5), mesh=mesh, seed=0)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (freeze and part in name))
        model(IDS, labels=IDS).loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in results[1].items():
        if part in name:
            assert gradient is None, name
        else:
            torch.testing.assert_close(gradient, results[0][name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("part", ["mlp.gate", "norm", "experts", "embed_tokens", "lm_head", "k_proj"])
def test_parts_of_a_shared_model_can_be_frozen(part: str) -> None:
    run_ranks(_frozen_under_a_mesh, 2, part)
