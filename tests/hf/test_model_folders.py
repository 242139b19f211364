"""Saving and loading our own class: Auto classes, one tensor per expert on disk, tied weights, low precision."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from modeling.config import GatherMoeConfig
from modeling.model import GatherMoeForCausalLM, GatherMoeModel
from tests.referee import full_state, mixed_config, tiny_config

CONFIGS: dict[str, Any] = {
    "tiny": lambda: tiny_config(),
    "dense first, head norms": lambda: mixed_config(),
    "tied": lambda: tiny_config(tie_word_embeddings=True, vocab_size=51),
    "full norms, clipped, dense": lambda: mixed_config(qk_norm="full", clip_qkv=0.5),
    "no experts": lambda: tiny_config(num_experts=0, num_experts_per_tok=0, intermediate_size=48),
}
EVERY = pytest.mark.parametrize("name", list(CONFIGS))
IDS = torch.arange(24).view(2, 12)


def model_of(name: str) -> GatherMoeForCausalLM:
    config = CONFIGS[name]()
    model = GatherMoeForCausalLM(config)
    model.load_state_dict(full_state(config), strict=not config.tie_word_embeddings)
    model.tie_weights()
    return model.eval()


def test_auto_classes_know_the_model() -> None:
    values = CONFIGS["tiny"]().to_dict()
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    assert type(config) is GatherMoeConfig
    assert type(AutoModelForCausalLM.from_config(config)) is GatherMoeForCausalLM
    assert type(AutoModel.from_config(config)) is GatherMoeModel


@EVERY
def test_a_saved_model_comes_back_bitwise(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is GatherMoeForCausalLM
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    of_the_file = ("_name_or_path", "dtype", "architectures")
    saved = {key: value for key, value in model.config.to_dict().items() if key not in of_the_file}
    assert loaded.config.to_dict().items() >= saved.items()
    for (key, a), b in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b), key
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is GatherMoeModel
    assert torch.equal(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)


def test_files_hold_one_tensor_per_expert_matrix(tmp_path: Path) -> None:
    model = model_of("dense first, head norms")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    width = model.config.moe_intermediate_size
    experts = model.model.layers[1].mlp.experts
    for e in range(model.config.num_experts):
        prefix = f"model.layers.1.mlp.experts.{e}"
        assert torch.equal(tensors[f"{prefix}.gate_proj.weight"], experts.gate_up_proj[e, :width])
        assert torch.equal(tensors[f"{prefix}.up_proj.weight"], experts.gate_up_proj[e, width:])
        assert torch.equal(tensors[f"{prefix}.down_proj.weight"], experts.down_proj[e])
    assert not any(key.endswith(("gate_up_proj", "experts.down_proj")) for key in tensors)
    assert "model.layers.0.mlp.gate_proj.weight" in tensors


@pytest.mark.requirement("R-CKPT-13")
def test_tied_embeddings_are_stored_once_and_shared_again(tmp_path: Path) -> None:
    model = model_of("tied")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_sharded_files_and_low_precision(tmp_path: Path) -> None:
    model = model_of("tiny").bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    wide = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


def test_the_config_file_says_what_the_model_is(tmp_path: Path) -> None:
    model_of("full norms, clipped, dense").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "model_type": "gather_moe",
        "architectures": ["GatherMoeForCausalLM"],
        "qk_norm": "full",
        "clip_qkv": 0.5,
        "mlp_only_layers": [0],
        "vocab_size": 50,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
    }
    given = {"num_experts": values.get("num_local_experts"), **values}
    assert {key: given[key] for key in expected} == expected
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.sizes == CONFIGS["full norms, clipped, dense"]().sizes


def test_how_a_step_is_executed_is_no_part_of_a_configuration(caplog: pytest.LogCaptureFixture) -> None:
    """Files of earlier versions name it: without effect, and with a warning where it had one."""
    config = GatherMoeConfig(strategy="gather_tokens", overlap=True)
    assert not {"strategy", "overlap"} & config.to_dict().keys()
    said = caplog.text
    assert "overlap=True in a GatherMoeConfig has no effect" in said
    assert "execution=Execution(overlap=True)" in said
    assert "strategy" not in said


def test_defaults_of_the_configuration_follow_from_its_sizes() -> None:
    config = GatherMoeConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=6, decoder_sparse_step=2)
    assert (config.num_key_value_heads, config.head_dim, config.mlp_only_layers) == (4, 16, [])
    assert config.dense_layers == (0, 2, 4)
    assert config.num_local_experts == config.num_experts == 128
    assert config.sizes.intermediate_size == config.intermediate_size
    assert GatherMoeConfig(num_hidden_layers=2).sizes.intermediate_size == 0


@pytest.mark.parametrize("name", ["tiny", "dense first, head norms"])
def test_fresh_weights_are_drawn_for_every_parameter(name: str) -> None:
    """Through transformers' own initialiser, which meets modules it does not know."""
    config = CONFIGS[name]()
    torch.manual_seed(0)
    model = GatherMoeForCausalLM(config)
    for key, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), key
        else:
            assert parameter.std().item() == pytest.approx(config.initializer_range, rel=0.2), key
    experts = model.model.layers[1].mlp.experts.gate_up_proj
    assert not torch.equal(experts[0], experts[1])


@pytest.mark.parametrize("name", ["tied", "tiny"])
@pytest.mark.parametrize("size", [60, 40])
def test_the_vocabulary_can_be_resized(name: str, size: int) -> None:
    model = model_of(name)
    before = model.model.embed_tokens.weight.detach().clone()
    model.resize_token_embeddings(size)
    assert model.config.vocab_size == size
    kept = min(size, before.shape[0])
    assert torch.equal(model.model.embed_tokens.weight[:kept], before[:kept])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == "tied")
    ids = torch.tensor([[1, size - 1, 3, size - 1]])
    out = model(ids, labels=ids)
    assert out.logits.shape[-1] == size
    torch.testing.assert_close(model(ids, labels=ids, output_logits=False).loss, out.loss)
