"""A mixture of experts made of a dense model: the same function at first, in every layout, reading only its bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from modeling.config import GatherMoeConfig
from modeling.spec import stock_type
from recipe.settings.arguments import parse_arguments
from recipe.settings.flags import Arguments
from recipe.settings.model import read_model
from tests.engine_runs import Case, accumulate, ds_config, join_shards, make_mesh, optimizer_for, slow
from tests.exports import load_folder
from tests.hub_samples import make_model
from tests.ranks import run_ranks
from tests.referee import FP32_ATOL, PLAIN, Batch, random_batch, referee_loss

UPCYCLE: dict[str, Any] = {"upcycle_num_experts": 4, "upcycle_top_k": 2}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DENSE: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {**LLAMA_3, "original_max_position_embeddings": 16}},
    "mistral": {"sliding_window": 64, "num_key_value_heads": 4},
    "qwen3": {"tie_word_embeddings": True},
}
NORMS = {"llama": "none", "mistral": "none", "qwen3": "head"}
LAYOUTS = [Case(), Case(tp=2, ep=2), Case(tp=2, ep=1)]
NAMES = {LAYOUTS[0]: "(1,1)", LAYOUTS[1]: "(1,2) ep 2", LAYOUTS[2]: "(1,2) ep 1"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each type, written by transformers, with weights large enough to tell models apart."""
    root = tmp_path_factory.mktemp("dense")
    for kind, own in DENSE.items():
        make_model(kind=kind, vocab_size=51, **own).save_pretrained(root / kind)
    return root


def settings(folder: Path, **flags: Any) -> dict[str, Any]:
    return read_model(Arguments(model_name_or_path=str(folder), **{**UPCYCLE, **flags})).kwargs


def faults_of(folder: Path, **flags: Any) -> list[str]:
    with pytest.raises(ValueError, match="cannot be used") as caught:
        read_model(Arguments(model_name_or_path=str(folder), **flags))
    return str(caught.value).splitlines()[1:]


def start_upcycled(kwargs: dict[str, Any], folder: Path, case: Case, noise_std: float) -> Any:
    config = GatherMoeConfig(**kwargs, router_aux_loss_coef=0.0)
    return load_folder(config, folder, make_mesh(config, case), noise_std=noise_std)


def first_losses(rank: int, world_size: int, folders: dict[str, Any], case: Case, batch: Batch) -> dict[str, Any]:
    """By type, the loss of the first step and the bytes this rank read."""
    from recipe.engine.engine import Engine

    found = {}
    for kind, (folder, kwargs) in folders.items():
        model, num_bytes = start_upcycled(kwargs, folder, case, 0.0)
        engine = Engine(model, ds_config=ds_config(case), optimizer=optimizer_for(model, PLAIN))
        sums = accumulate(engine, batch, case)
        found[kind] = (sums.nll.item() / int((batch.labels[:, 1:] != -100).sum()), num_bytes)
    return found


@pytest.mark.parametrize("case", [slow(LAYOUTS[0]), *LAYOUTS[1:]], ids=NAMES.get)
def test_the_first_loss_is_the_dense_models_and_each_rank_reads_its_part(dense: Path, case: Case) -> None:
    batch = random_batch(vocab_size=51)
    folders = {kind: (dense / kind, settings(dense / kind)) for kind in DENSE}
    models = {kind: AutoModelForCausalLM.from_pretrained(dense / kind).eval() for kind in DENSE}
    want = {kind: referee_loss(model, batch).item() for kind, model in models.items()}
    for rank, found in enumerate(run_ranks(first_losses, case.tp, folders, case, batch)):
        for kind, (loss, num_bytes) in found.items():
            assert abs(loss - want[kind]) < FP32_ATOL, kind
            assert num_bytes == expected_bytes(dense / kind, case, rank), kind


def expected_bytes(folder: Path, case: Case, rank: int) -> int:
    """Norms whole, of 51 rows of the vocabulary 26 or 25, of a feed-forward what etp leaves, and half of all else."""
    total = 0
    for name, tensor in load_file(folder / "model.safetensors").items():
        share = 1 if "norm" in name else case.tp // case.ep if ".mlp." in name else case.tp
        count = tensor.numel() // share
        if case.tp == 2 and tensor.shape[0] == 51:
            count = (26, 25)[rank] * tensor.shape[1]
        total += 4 * count
    return total


@pytest.mark.parametrize("kind", DENSE)
def test_the_settings_become_those_of_a_mixture_that_a_stock_type_expresses(dense: Path, kind: str) -> None:
    config = GatherMoeConfig(**settings(dense / kind, config_overrides={"max_position_embeddings": 32}))
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (4, 2, True)
    assert (config.moe_intermediate_size, config.qk_norm) == (48, NORMS[kind])
    assert config.tie_word_embeddings == (kind == "qwen3")
    assert stock_type(config) == ("qwen3_moe" if kind == "qwen3" else "mixtral")
    assert config.max_position_embeddings == 32
    same = {"norm_topk_prob": True, "routed_scaling_factor": 1, "tie_word_embeddings": kind == "qwen3"}
    assert settings(dense / kind, config_overrides=same) == settings(dense / kind)
    for key, value in DENSE[kind].items():
        assert key == "sliding_window" or getattr(config, key) == value


def weights_of(rank: int, world_size: int, kwargs: dict[str, Any], folder: Path, case: Case) -> dict[str, Tensor]:
    model, _ = start_upcycled(kwargs, folder, case, 0.01)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_noise_makes_experts_differ_and_is_the_same_in_every_layout(dense: Path) -> None:
    kwargs = settings(dense / "llama", config_overrides={"mlp_only_layers": [0]})
    config = GatherMoeConfig(**kwargs)
    file = load_file(dense / "llama" / "model.safetensors")
    (one,) = run_ranks(weights_of, 1, kwargs, dense / "llama", Case())
    for case in LAYOUTS[1:]:
        shards = run_ranks(weights_of, 2, kwargs, dense / "llama", case)
        joined = join_shards(shards, config, case)
        for name, tensor in joined.items():
            assert torch.equal(tensor, one[name]), name
    experts = one["model.layers.1.mlp.experts.gate_up_proj"]
    source = torch.cat([file[f"model.layers.1.mlp.{half}_proj.weight"] for half in ("gate", "up")])
    noise = experts - source
    assert not torch.equal(experts[0], experts[1])
    assert noise.std().item() == pytest.approx(0.01, rel=0.05)
    assert abs(noise.mean().item()) < 1e-3
    assert 0 < one["model.layers.1.mlp.gate.weight"].std().item() < 0.03
    assert torch.equal(one["model.layers.0.mlp.up_proj.weight"], file["model.layers.0.mlp.up_proj.weight"])


def rewritten(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    """The folder's config.json with changes; None takes a setting out."""
    content = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in content.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    return tmp_path


def test_everything_that_cannot_be_expressed_is_listed(dense: Path, tmp_path: Path) -> None:
    odd = {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "sliding_window": 8, "num_experts": 4}
    odd |= {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}, "layer_types": ["sliding_attention"] * 2}
    lines = "\n".join(faults_of(rewritten(dense / "llama", tmp_path, **odd)))
    for fault in (
        "is a dense llama; --upcycle_num_experts 8 --upcycle_top_k 2, say, make a mixture of experts of it",
        "attention_bias=True is not available, only False",
        "mlp_bias=True is not available, only False",
        "hidden_act='gelu' must be one of silu",
        "sliding_window=8 is not available, only None or what no sequence is longer than (max_position_embeddings=64;",
        "num_experts is unknown",
        "rope_type='spiral' must be one of default",
        "layer_types=['sliding_attention', 'sliding_attention'] is not available, only full_attention",
    ):
        assert lines.count(fault) == 1, fault
    assert lines.count("\n") == 7, lines


def test_a_window_that_no_sequence_is_longer_than_changes_nothing(dense: Path, tmp_path: Path) -> None:
    settings(rewritten(dense / "mistral", tmp_path, sliding_window=None))  # 4096, as the type has it
    long = rewritten(dense / "mistral", tmp_path, sliding_window=None, max_position_embeddings=8192)
    (line,) = faults_of(long, **UPCYCLE)
    assert "sliding_window=4096 is not available" in line
    settings(long, config_overrides={"max_position_embeddings": 4096})


def test_rope_scaling_of_older_files_is_read(dense: Path, tmp_path: Path) -> None:
    scaling = {key: value for key, value in LLAMA_3.items() if key != "rope_theta"}
    old = {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": scaling}
    rope = settings(rewritten(dense / "llama", tmp_path, **old))["rope_parameters"]
    assert rope == {**LLAMA_3, "rope_theta": 5e5, "original_max_position_embeddings": 64}
    older = {**old, "rope_scaling": {"type": "linear", "factor": 2.0}}
    rope = settings(rewritten(dense / "llama", tmp_path, **older))["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    for scaling, fault in ((2, "rope_scaling=2 must be an object"), ({"factor": 2}, "names no rope_type")):
        (line,) = faults_of(rewritten(dense / "llama", tmp_path, **{**old, "rope_scaling": scaling}), **UPCYCLE)
        assert fault in line
    (line,) = faults_of(rewritten(dense / "llama", tmp_path, rope_scaling=LLAMA_3), **UPCYCLE)
    assert "rope_scaling and rope_parameters name the same setting" in line


def test_what_publishers_add_is_known(dense: Path, tmp_path: Path) -> None:
    added = {"pretraining_tp": 1, "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}}
    added |= {"torch_dtype": "bfloat16", "_name_or_path": "x", "rope_scaling": None, "mlp_bias": False}
    assert settings(rewritten(dense / "llama", tmp_path, **added)) == settings(dense / "llama")
    (line,) = faults_of(rewritten(dense / "llama", tmp_path, rope_interleaved=True), **UPCYCLE)
    assert "rope_interleaved=True is not available, only False" in line


def test_what_clashes_with_weights_is_refused(dense: Path) -> None:
    overrides = {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 1, "qk_norm": "full"}
    overrides |= {"norm_topk_prob": False, "routed_scaling_factor": 2.5}
    lines = faults_of(dense / "llama", **UPCYCLE, config_overrides=overrides, model_revision="v1")
    for fault in (
        "num_hidden_layers=3 cannot change weights that exist; ",
        "num_experts of a dense model that is upcycled is --upcycle_num_",
        "num_experts_per_tok of a dense model that is upcycled is --upcyc",
        "qk_norm='full' cannot change weights that exist; ",
        "norm_topk_prob=False of a dense model that is upcycled is not available, only ",
        "routed_scaling_factor=2.5 of a dense model that is upcycled is not available, only ",
        "--model_revision v1 is for models on the hub, and ",
    ):
        assert sum(fault in line for line in lines) == 1, fault


def test_a_mixture_is_not_upcycled(tmp_path: Path) -> None:
    content = {"model_type": "mixtral", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32}
    content |= {"num_attention_heads": 8, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(content | {"max_position_embeddings": 64}))
    (line,) = faults_of(tmp_path, **UPCYCLE)
    assert "is a mixtral with experts of its own; --upcycle_num_experts is for dense models" in line
    (line,) = faults_of(tmp_path, config_overrides={"mlp_only_layers": [0]})
    assert "mlp_only_layers=[0] cannot change weights that exist" in line


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--config_name=demo", "--upcycle_num_experts=4", "--upcycle_top_k=2"], "which --config_name does not bring"),
        (["--model_name_or_path=x", "--upcycle_top_k=4"], "--upcycle_num_experts and --upcycle_top_k go together"),
        (["--model_name_or_path=x", "--upcycle_noise_std=0.1"], "--upcycle_noise_std 0.1 is for experts that"),
    ],
)
def test_flags_of_upcycling_go_together(words: list[str], fault: str) -> None:
    with pytest.raises(ValueError, match="cannot be used") as caught:
        parse_arguments([*words, "--output_dir=run"])
    assert fault in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2
