"""--freeze_parameters: what is frozen stays as it was, is exported, checked and saved, and the rest trains."""

from pathlib import Path

import pytest
import torch

from recipe.engine.engine import freeze_parameters
from recipe.settings.arguments import parse_arguments
from tests.engine_runs import (
    Case,
    accumulate,
    ds_config,
    join_shards,
    make_mesh,
    model_with,
    optimizer_for,
    slow,
    start_engine,
    weight_shards,
)
from tests.exports import export_engine, read_export
from tests.ranks import run_ranks
from tests.referee import (
    CLIPPED,
    FP32_ATOL,
    Tensors,
    assert_all_match,
    full_state,
    mixed_config,
    our_model,
    random_batch,
    referee_run,
    tiny_config,
)
from tests.training import train_on_ranks, write_inputs

ROUTER = r"mlp\.gate\."
LOWEST = (ROUTER, "embed_tokens", r"layers\.0\.")  # nothing below the second block asks for a gradient
AUXILIARY = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}


@pytest.mark.requirement("R-FT-06")
def test_a_pattern_without_a_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'mlp.router' is found in none of the 21 parameters' names, .* like model\."):
        freeze_parameters(our_model(tiny_config()), ["lm_head", "mlp.router"])
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression: missing \)"):
        freeze_parameters(our_model(tiny_config()), ["("])
    tied = r"'lm_head' is found in lm_head\.weight alone, which is tied to the embedding"
    with pytest.raises(ValueError, match=tied):
        freeze_parameters(our_model(tiny_config(tie_word_embeddings=True)), ["lm_head"])


@pytest.mark.requirement("R-FT-06")
def test_the_flag_is_checked_before_anything_starts(tmp_path: Path) -> None:
    import run_pretrain

    flags = write_inputs(tmp_path) | {"freeze_parameters": "mlp.router"}
    with pytest.raises(ValueError, match=r"freeze_parameters: 'mlp.router' is found in none of the \d+ parameters"):
        run_pretrain.read_request([f"--{name}={value}" for name, value in flags.items()])
    words = ["--freeze_parameters", ROUTER, "embed_tokens", "--config_name", "demo", "--output_dir", "x"]
    assert parse_arguments(words).freeze_parameters == (ROUTER, "embed_tokens")


@pytest.mark.requirement("R-FT-06")
def test_the_balance_loss_reaches_what_is_below_a_frozen_router() -> None:
    gradients = []
    for coefficient in (0.0, 0.5):
        model = our_model(mixed_config(router_aux_loss_coef=coefficient))
        freeze_parameters(model, [ROUTER])
        ids = random_batch().ids
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        assert out.aux_loss > 0
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all((gradients[1][name] is None) == ("mlp.gate." in name) for name in gradients[1])
    below, above = "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"
    assert (gradients[0][below] - gradients[1][below]).abs().max() > 1e-4
    assert torch.equal(gradients[0][above], gradients[1][above])


def train_frozen(
    rank: int, world_size: int, case: Case, patterns: tuple[str, ...], folder: Path
) -> tuple[list[float], Tensors]:
    """Return norms and weight shards after steps with a resume in between, replicas checked; export the weights."""
    from recipe.checkpoint.native import check_replicas, load_native, save_native
    from recipe.shared.ranks import TorchRanks

    config = mixed_config(**AUXILIARY)
    state, norms = full_state(config), []
    engine = start_engine(config, state, case, frozen=patterns)
    for step in range(CLIPPED.num_steps):
        if step == 2:
            save_native(engine, folder / "native", rank_state={})
            torch.distributed.barrier()
            engine = start_engine(config, state, case, frozen=patterns)
            load_native(engine, folder / "native")
        accumulate(engine, random_batch(seed=step), case)
        norms.append(engine.update(learning_rate=CLIPPED.learning_rate))
        check_replicas(engine, TorchRanks())
    owned = sum(p.numel() for group in engine.ds.optimizer.param_groups for p in group["params"])
    trained = sum(getattr(p, "ds_numel", p.numel()) for p in engine.model.parameters() if p.requires_grad)
    assert owned <= -(-trained // case.dp) + 8 * case.dp, "the optimizer holds something frozen"
    export_engine(engine, folder / "hf", hf_format="qwen3_moe")
    return norms, weight_shards(engine)


@pytest.mark.parametrize(
    ("case", "patterns"),
    [
        (Case(dp=2, stage=3), LOWEST),
        slow(Case(tp=2, ep=2, stage=0), (ROUTER,)),
        slow(Case(dp=2, stage=1, accumulation=2), (ROUTER,)),
        slow(Case(dp=2, tp=2, ep=1, stage=2), LOWEST),
        slow(Case(tp=2, ep=1, stage=3, checkpointing=True), (ROUTER, "norm")),
    ],
)
@pytest.mark.requirement("R-FT-06")
def test_what_is_frozen_stays_and_the_rest_trains(case: Case, patterns: tuple[str, ...], tmp_path: Path) -> None:
    config = mixed_config(**AUXILIARY)
    before = full_state(config)
    batches = [random_batch(seed=step) for step in range(CLIPPED.num_steps)]
    want = referee_run(config, before, batches=batches, training=CLIPPED, own=True, frozen=patterns)
    by_rank = run_ranks(train_frozen, case.num_ranks, case, patterns, tmp_path)
    got = join_shards([weights for _, weights in by_rank], config, case)
    assert want.curves.norms[0] > CLIPPED.max_grad_norm
    torch.testing.assert_close(by_rank[0][0], want.curves.norms, atol=FP32_ATOL, rtol=0)
    assert_all_match(got, want.weights)
    model = our_model(config)
    freeze_parameters(model, patterns)
    for name, parameter in model.named_parameters():
        assert torch.equal(got[name], before[name]) != parameter.requires_grad, name
    exported = read_export(tmp_path / "hf")
    assert all(tensor.numel() for tensor in exported.values())
    for name, tensor in got.items():
        if ".experts." not in name:
            assert torch.equal(exported[name], tensor), name


@pytest.mark.slow
@pytest.mark.requirement("R-FT-06")
def test_a_whole_run_with_frozen_routers(tmp_path: Path) -> None:
    """By the flag, in bf16."""
    flags = write_inputs(tmp_path) | {"freeze_parameters": ROUTER, "bf16": True, "max_steps": 3, "save_steps": 1}
    _, said = run_ranks(train_on_ranks, 2, flags)[0]
    assert any("router 0/" in line for line in said), said
    first, second = (read_export(tmp_path / "run" / "checkpoints" / f"step-{step}" / "hf") for step in (1, 2))
    matrices = {name for name, tensor in first.items() if tensor.dim() > 1}
    frozen = {name for name in matrices if ".mlp.gate." in name}
    assert len(frozen) == 2
    assert {name for name in matrices if torch.equal(first[name], second[name])} == frozen


def refuse_adapters(rank: int, world_size: int) -> list[str]:
    """What a model that two ranks share says of adapters of each part, by itself and under the engine."""
    from peft import LoraConfig, get_peft_model

    from recipe.engine.engine import Engine

    config, case, said = tiny_config(), Case(tp=2, ep=2, stage=0), []
    for name in ("mlp.gate.weight", "mlp.experts.down_proj", "self_attn.q_proj.weight"):
        model = model_with(config, full_state(config), make_mesh(config, case))
        get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=[name]))  # changes the model itself
        with pytest.raises(ValueError, match="which a model shared by several ranks would") as caught:
            model(input_ids=random_batch().ids, use_cache=False)
        said.append(str(caught.value).split(",")[0])
        with pytest.raises(ValueError, match=r"none of the model's own, among them \['model\.layers\.0\.") as caught:
            Engine(model, ds_config=ds_config(case), optimizer=optimizer_for(model, CLIPPED))
        said.append(str(caught.value))
    return said


@pytest.mark.requirement("R-FT-01")
def test_a_model_that_ranks_share_refuses_adapters_of_every_part() -> None:
    for said in run_ranks(refuse_adapters, 2):
        assert said[::2] == [
            "a GatherMoeRouter was replaced by ParamWrapper",
            "a GatherMoeExperts was replaced by ParamWrapper",
            "a Linear was replaced by ParamWrapper",
        ]
        assert all(
            "train adapters with transformers' Trainer, from a checkpoint's hf/ folder" in text for text in said[1::2]
        )
