"""Presets have the sizes of the published models, and names, files and overrides become one configuration."""

import json
from pathlib import Path
from typing import Any

import pytest

from modeling.layout import check_layout, largest_layout
from recipe.flops import count_parameters
from recipe.settings.presets import PRESETS, model_kwargs, sizes_of


@pytest.mark.parametrize(
    ("name", "total_billions", "active_billions"),
    [
        ("qwen3-30b-a3b", 30.53, 3.35),
        ("qwen3-235b-a22b", 235.09, 22.19),
        ("mixtral-8x7b", 46.70, 12.88),
        ("mixtral-8x22b", 140.62, 39.15),
        ("olmoe-1b-7b", 6.92, 1.28),
    ],
)
def test_presets_have_the_published_parameter_counts(name: str, total_billions: float, active_billions: float) -> None:
    counts = count_parameters(sizes_of(PRESETS[name]))
    assert round(counts.total / 1e9, 2) == total_billions
    assert round(counts.active / 1e9, 2) == active_billions


def test_the_demo_is_small_but_not_a_toy() -> None:
    demo = sizes_of(PRESETS["demo"])
    assert 10_000_000 <= count_parameters(demo).total <= 16_000_000
    assert (demo.num_experts, demo.num_experts_per_tok) == (8, 2)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_fits_two_and_eight_ranks(name: str) -> None:
    for world_size in (2, 8):
        layout = largest_layout(sizes_of(PRESETS[name]), world_size=world_size, max_tp=world_size)
        assert layout.tp == world_size


@pytest.mark.parametrize("name", PRESETS)
def test_the_models_own_config_takes_every_preset_and_reads_back_what_it_saved(name: str, tmp_path: Path) -> None:
    from modeling.config import GatherMoeConfig

    config = GatherMoeConfig(**PRESETS[name])
    config.save_pretrained(tmp_path)
    again = model_kwargs(str(tmp_path))
    assert config.sizes == sizes_of(PRESETS[name]) == sizes_of(again)
    assert config.rope_parameters is not None
    assert config.rope_parameters["rope_theta"] == again["rope_parameters"]["rope_theta"] == PRESETS[name]["rope_theta"]
    assert GatherMoeConfig(**again).to_dict() == config.to_dict()


def _stock_config(name: str) -> Any:
    from transformers import AutoConfig

    small: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    small |= {"num_experts_per_tok": 2, "max_position_embeddings": 64}
    moe: dict[str, Any] = {
        "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "intermediate_size": 24, "head_dim": 8},
        "olmoe": {"num_key_value_heads": 4, "num_experts": 4, "intermediate_size": 24, "clip_qkv": 5.0},
        "qwen3_moe": {
            "num_key_value_heads": 2,
            "num_experts": 4,
            "moe_intermediate_size": 24,
            "intermediate_size": 40,
            "mlp_only_layers": [0],
            "head_dim": 8,
            "tie_word_embeddings": True,
        },
    }
    return AutoConfig.for_model(name, **small, **moe[name])


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe"])
def test_a_stock_config_file_gives_the_sizes_of_the_stock_model(name: str, tmp_path: Path) -> None:
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM

    config = _stock_config(name)
    config.save_pretrained(tmp_path)
    kwargs = model_kwargs(str(tmp_path))
    with torch.device("meta"):
        stock = auto.from_config(config)
    assert count_parameters(sizes_of(kwargs)).total == sum(p.numel() for p in stock.parameters())
    assert kwargs["qk_norm"] == {"mixtral": "none", "qwen3_moe": "head", "olmoe": "full"}[name]
    assert kwargs.get("clip_qkv") == (5.0 if name == "olmoe" else None)
    assert kwargs["norm_topk_prob"] is (name == "mixtral")
    assert sizes_of(kwargs).dense_layers == ((0,) if name == "qwen3_moe" else ())


def test_overrides_come_last_and_the_preset_stays_as_it_was() -> None:
    assert model_kwargs("demo", overrides={"num_hidden_layers": 2})["num_hidden_layers"] == 2
    assert PRESETS["demo"]["num_hidden_layers"] == 4


def test_dense_layers_follow_the_sparse_step_and_the_named_layers() -> None:
    kwargs = model_kwargs("demo", overrides={"decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert sizes_of(kwargs).dense_layers == (0, 1, 2)
    assert sizes_of(kwargs).intermediate_size == 768
    assert sizes_of(PRESETS["demo"]).intermediate_size == 0


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"model_type": "llama"}, 'holds a "llama"; configurations can be read of gather_moe, mixtral'),
        ({"model_type": "qwen3_moe", "attention_bias": True}, "attention_bias=True is not available, only False"),
        ({"model_type": "mixtral", "sliding_window": 8}, "sliding_window=8 is not available, only null"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling=.* is not available, only None"),
        ({"hiden_size": 8}, "hiden_size is unknown"),
    ],
)
def test_files_with_what_our_model_cannot_express_are_refused(
    content: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=fault):
        model_kwargs(str(file))


def test_a_file_of_our_own_type_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**PRESETS["demo"], "model_type": "gather_moe", "use_cache": True})
    )
    assert model_kwargs(str(tmp_path)) == PRESETS["demo"]


def test_names_and_overrides_that_do_not_exist_are_named() -> None:
    with pytest.raises(ValueError, match=r"config_name 'demi' is neither a file nor a preset \(demo, qwen3-30b-a3b"):
        model_kwargs("demi")
    with pytest.raises(ValueError, match="num_expert is unknown, did you mean num_experts"):
        model_kwargs("demo", overrides={"num_expert": 4})


def test_sizes_that_are_missing_or_no_counts_are_all_named() -> None:
    with pytest.raises(ValueError, match="whole numbers of at least 1, got vocab_size=None, num_experts=0"):
        sizes_of({**PRESETS["demo"], "vocab_size": None, "num_experts": 0})


def test_presets_obey_the_rules_on_one_rank() -> None:
    from modeling.layout import LayoutRequest, ParallelLayout

    for kwargs in PRESETS.values():
        check_layout(LayoutRequest(sizes=sizes_of(kwargs), layout=ParallelLayout(), world_size=1))
