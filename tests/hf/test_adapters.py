"""PEFT on exported folders: adapters of attention, experts and router train, merge, come back and are saved whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipe.hf.fine_tuning import PARTS, check_saved, lora_targets, save_finetuned
from tests.exports import CONFIGS
from tests.ranks import run_ranks
from tests.referee import LOGITS_ATOL, assert_all_match, full_state, referee_model
from tests.tuning import (
    FILE,
    Exported,
    adapters,
    ids,
    open_model,
    open_with_adapters,
    plain_engine,
    plain_settings,
)

TYPES = tuple(CONFIGS)


def model_of(name: str) -> Any:
    config = CONFIGS[name]()
    return referee_model(config, full_state(config))


def parts_of(name: str) -> list[str]:
    return [part for part in PARTS if part != "dense" or name in ("qwen3_moe", "gather_moe")]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.requirement("R-FT-01")
def test_every_type_has_the_same_names(name: str) -> None:
    model = model_of(name)
    assert lora_targets(model) == {
        "target_modules": [f"self_attn.{kind}_proj" for kind in "qkvo"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    assert lora_targets(model, adapt=parts_of(name))["target_modules"][4:] == ["embed_tokens", "lm_head"]
    assert lora_targets(model, adapt=["layers.1.self_attn.q_proj"])["target_modules"] == ["layers.1.self_attn.q_proj"]


@pytest.mark.requirement("R-FT-01")
def test_a_name_that_finds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'mlp.gate_proj.weight' is found neither .* of this MixtralForCausalLM"):
        lora_targets(model_of("mixtral"), adapt=["attention", "dense"])
    for usual in ("w1", "experts.0.w1", "mlp.experts"):
        with pytest.raises(ValueError, match=f"'{usual}' is found neither .* nothing would be adapted"):
            lora_targets(model_of("mixtral"), adapt=[usual])


@pytest.mark.requirement("R-FT-01")
def test_a_dense_layer_is_not_taken_for_the_experts() -> None:
    """PEFT would turn the module's name into that of all experts of a Qwen3-MoE."""
    targets = lora_targets(model_of("qwen3_moe"), adapt=["layers.0.mlp.down_proj"])
    assert targets == {"target_modules": [], "target_parameters": ["layers.0.mlp.down_proj.weight"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.requirement("R-FT-01")
def test_adapters_of_every_part_train_merge_and_come_back(name: str, exported: Exported, tmp_path: Path) -> None:
    from peft import PeftModel

    model = open_with_adapters(exported(name), adapt=parts_of(name))
    config = CONFIGS[name]()
    for wanted in ("gate_up_proj", "down_proj", "gate.weight"):
        assert sum(key.endswith(wanted) for key in model.base_model.targeted_parameter_names) >= 2
    shape = model.get_parameter("base_model.model.model.layers.1.mlp.experts.lora_A.default.weight").shape
    assert shape == (4 * config.num_experts, config.moe_intermediate_size)
    start = {key: p.detach().clone() for key, p in adapters(model).items()}
    base = {key: p.detach().clone() for key, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(adapters(model).values(), lr=0.02)
    for _ in range(2):  # the first step moves B alone, which starts as zeros
        model(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [key for key, p in adapters(model).items() if torch.equal(p, start[key])] == []
    assert all(torch.equal(p, base[key]) for key, p in model.named_parameters() if not p.requires_grad)
    want = model.eval()(ids()).logits.detach()
    assert (want - open_model(exported(name))(ids()).logits).abs().max() > 0.1
    save_finetuned(model, tmp_path / "adapter")
    again = PeftModel.from_pretrained(open_model(exported(name)), tmp_path / "adapter").eval()
    assert torch.equal(again(ids()).logits, want)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(ids()).logits, want, atol=LOGITS_ATOL, rtol=0)
    save_finetuned(merged, tmp_path / "merged")
    assert type(merged) is type(open_model(tmp_path / "merged"))
    torch.testing.assert_close(open_model(tmp_path / "merged").eval()(ids()).logits, want, atol=LOGITS_ATOL, rtol=0)


def adapter_gradients(folder: Path, *, reentrant: bool | None) -> dict[str, Tensor]:
    model = open_with_adapters(folder, adapt=["attention", "experts", "router"]).train()
    for key, parameter in adapters(model).items():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    model(input_ids=ids(), labels=ids()).loss.backward()
    return {key: p.grad for key, p in adapters(model).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.requirement("R-FT-05")
def test_checkpointing_changes_no_gradient_of_an_adapter(name: str, exported: Exported) -> None:
    want = adapter_gradients(exported(name), reentrant=None)
    assert all(gradient.any() for gradient in want.values())
    for reentrant in (False, True):
        got = adapter_gradients(exported(name), reentrant=reentrant)
        assert got.keys() == want.keys()
        assert_all_match(got, want, atol=1e-6)


@pytest.mark.requirement("R-FT-02")
def test_an_empty_or_missing_tensor_makes_the_save_fail(tmp_path: Path) -> None:
    for tensors in ({}, {"a.lora_A.weight": torch.ones(4, 2), "a.lora_B.weight": torch.empty(0)}):
        save_file(tensors, tmp_path / FILE)
        with pytest.raises(ValueError, match=rf"{len(tensors)} tensors, {len(tensors) // 2} of them empty, .* gather"):
            check_saved(tmp_path)
    save_file({"a.lora_A.weight": torch.ones(4, 2)}, tmp_path / FILE)
    check_saved(tmp_path)
    with pytest.raises(ValueError, match=r"not hold the adapter's tensors; .* \['a.lora_A.weight', 'b'\]"):
        check_saved(tmp_path, shapes={"a.lora_A.weight": (4, 3), "b": (2,)})


def tune_under_deepspeed(rank: int, world_size: int, name: str, folder: Path, stage: int, out: Path) -> str | None:
    """Two steps of adapters under DeepSpeed, saved by us; and what is said of how PEFT alone saves them."""
    engine = plain_engine(open_with_adapters(folder), plain_settings(stage, num_sequences=8 // world_size))
    mine = ids().chunk(world_size)[rank]
    for _ in range(2):
        engine.backward(engine(input_ids=mine, labels=mine).loss)
        engine.step()
    save_finetuned(engine.module, out)
    if rank or stage < 3:
        return None
    engine.module.save_pretrained(str(out / "unguarded"))
    try:
        check_saved(out / "unguarded")
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gather_moe"])
@pytest.mark.requirement("R-FT-02")
def test_an_adapter_is_saved_whole_under_zero_3(name: str, exported: Exported, tmp_path: Path) -> None:
    for stage in (0, 3):
        out = tmp_path / str(stage)
        said, _ = run_ranks(tune_under_deepspeed, 2, name, exported(name), stage, out)
    assert said is not None
    assert "of them empty" in said
    want, got = load_file(tmp_path / "0" / FILE), load_file(tmp_path / "3" / FILE)
    assert got.keys() == want.keys()
    assert sum("experts" in key for key in want) == 8
    assert_all_match(got, want)
