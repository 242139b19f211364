"""Presets have the sizes of the published models, and names and overrides become one checked configuration."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from modeling.layout import LayoutRequest, ParallelLayout, check_layout, fitting_layouts
from modeling.spec import NEEDED, ROPE_THETA, ROPE_TYPES, RULES
from recipe.settings.flags import Arguments
from recipe.settings.model import read_model, sizes_of
from recipe.settings.presets import PRESETS
from recipe.shared.flops import count_parameters


def read(name: str = "demo", **overrides: Any) -> dict[str, Any]:
    return read_model(Arguments(config_name=name, config_overrides=overrides)).kwargs


def faults_of(**arguments: Any) -> list[str]:
    """The lines of the one error that reading a model ends with."""
    with pytest.raises(ValueError, match=r"^the model \(--\w+ .*\) cannot be used:\n  - ") as caught:
        read_model(Arguments(**arguments))
    return str(caught.value).splitlines()[1:]


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
def test_every_preset_fits_one_two_and_eight_ranks(name: str) -> None:
    sizes = sizes_of(PRESETS[name])
    check_layout(LayoutRequest(sizes=sizes, layout=ParallelLayout(), world_size=1))
    for world_size in (2, 8):
        assert next(fitting_layouts(sizes, world_size=world_size, max_tp=world_size)).tp == world_size


VARIATIONS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": None},
    {"head_dim": None},
    {"intermediate_size": None, "mlp_only_layers": [0]},
    {"intermediate_size": 512, "mlp_only_layers": [0, 1]},
    {"decoder_sparse_step": 2},
    {"decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 5},
    {"decoder_sparse_step": 9},
    {"mlp_only_layers": []},
    {"num_experts": 0, "num_experts_per_tok": 0},
    {"num_experts": 0, "mlp_only_layers": [1]},
    {"qk_norm": None, "tie_word_embeddings": None},
    {"qk_norm": "full", "tie_word_embeddings": True},
]


@pytest.mark.parametrize("changes", VARIATIONS, ids=str)
def test_sizes_are_those_of_the_models_own_config(changes: dict[str, Any]) -> None:
    from modeling.config import GatherMoeConfig

    kwargs = read(**changes)
    assert sizes_of(kwargs) == GatherMoeConfig(**kwargs).sizes


def test_every_setting_of_the_config_class_is_read_or_left_out_by_name() -> None:
    from dataclasses import fields

    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from modeling.config import GatherMoeConfig
    from modeling.spec import LOSS_SETTINGS
    from recipe.settings.model_files import ONLY_VALUE, WITHOUT_EFFECT

    rope = GatherMoeConfig().rope_parameters
    assert rope is not None
    assert rope["rope_theta"] == ROPE_THETA
    assert {"default", *ROPE_INIT_FUNCTIONS} - {"proportional"} == set(ROPE_TYPES)  # which rotates a part of each head
    elsewhere = {*LOSS_SETTINGS, *WITHOUT_EFFECT, *ONLY_VALUE}
    assert {field.name for field in fields(GatherMoeConfig)} - elsewhere == set(RULES) - {"rope_theta"}


def test_overrides_come_last_and_the_preset_stays_as_it_was() -> None:
    assert read(num_hidden_layers=2)["num_hidden_layers"] == 2
    assert PRESETS["demo"]["num_hidden_layers"] == 4
    assert read(initializer_range=1)["initializer_range"] == 1.0
    assert isinstance(read(clip_qkv=8)["clip_qkv"], float)


def test_dense_layers_follow_the_sparse_step_and_the_named_layers() -> None:
    sizes = sizes_of(read(decoder_sparse_step=2, mlp_only_layers=[1]))
    assert (sizes.dense_layers, sizes.intermediate_size) == ((0, 1, 2), 768)
    assert sizes_of(PRESETS["demo"]).intermediate_size == 0


def test_a_rope_keeps_what_is_not_named_anew() -> None:
    assert read()["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}
    assert read(rope_theta=5e5)["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5}
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert read(rope_parameters=yarn)["rope_parameters"] == {**yarn, "rope_theta": 1e4}
    assert read(rope_parameters=yarn, rope_theta=5)["rope_parameters"] == {**yarn, "rope_theta": 5}
    assert "rope_theta" not in read(rope_theta=5e5)


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        ({"num_expert": 4}, "--config_overrides num_expert is unknown; did you mean num_experts?"),
        ({"zzz": 4}, "--config_overrides zzz is unknown"),
        ({"router_aux_loss_coef": 1}, "router_aux_loss_coef is a setting of the run; use --router_aux_loss_coef"),
        ({"qk_norm": "heads"}, "qk_norm='heads' must be one of none, head, full"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' must be one of silu"),
        ({"hidden_size": 256.0}, "hidden_size=256.0 must be a whole number of at least 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True must be a whole number of at least 1"),
        ({"vocab_size": None}, "vocab_size is missing; it must be a whole number of at least 1"),
        ({"num_experts": -1}, "num_experts=-1 must be a whole number of at least 0"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers=[-1] must be a list of layer indices, like [0, 1]"),
        ({"mlp_only_layers": [0, 4]}, "mlp_only_layers names [4], but num_hidden_layers=4: the last layer is 3"),
        ({"norm_topk_prob": "True"}, "norm_topk_prob='True' must be true or false"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0 must be a number above 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan must be a number above 0"),
        ({"initializer_range": -1}, "initializer_range=-1 must be a number of at least 0"),
        ({"attention_dropout": 1}, "attention_dropout=1 must be a number of at least 0 and below 1"),
        ({"clip_qkv": "8"}, "clip_qkv='8' must be a number above 0"),
        ({"head_dim": 7}, "head_dim=7 must be an even whole number"),
        ({"head_dim": None, "hidden_size": 264}, "hidden_size=264 over num_attention_heads=8 gives head_dim=33, which"),
        ({"rope_theta": 0}, "rope_theta=0 must be a number above 0"),
        ({"rope_theta": None}, "--config_overrides rope_theta=None must be a number above 0"),
        ({"rope_parameters": "yarn"}, "rope_parameters='yarn' must be an object with rope_type and rope_theta"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type='spiral' must be one of default, linear, dynamic"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 is not available, only 1: all of a head is rotated",
        ),
        (
            {"rope_theta": 1, "rope_parameters": {"rope_theta": 2}},
            "rope_theta and rope_parameters with a rope_theta name the same setting; keep one",
        ),
    ],
)
def test_values_that_cannot_be_are_named_alone(overrides: dict[str, Any], fault: str) -> None:
    (line,) = faults_of(config_name="demo", config_overrides=overrides)
    assert line.startswith("  - ")
    assert fault in line


def test_every_fault_of_a_model_is_in_one_message(tmp_path: Path) -> None:
    content = {**PRESETS["demo"], "attention_bias": True, "hiden_size": 8, "norm_topk_prob": "yes"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    lines = faults_of(config_name=str(tmp_path), config_overrides={"qk_norm": "x", "num_expert": 1})
    assert len(lines) == 5
    lines = faults_of(config_name="nowhere", config_overrides={"num_expert": 1})
    assert len(lines) == 2


def test_a_file_of_needed_settings_alone_is_enough_and_every_missing_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps({key: PRESETS["demo"][key] for key in NEEDED}))
    assert sizes_of(read(str(file))).head_dim == 32
    file.write_text("{}")
    lines = faults_of(config_name=str(file))
    assert [line.split()[1] for line in lines] == list(NEEDED)


def test_a_preset_has_no_weights_and_the_hub_is_not_asked_for_what_is_here(tmp_path: Path) -> None:
    (line,) = faults_of(model_name_or_path="demo")
    assert "demo is a preset, which has no weights to start from; name it by --config_name demo" in line
    (line,) = faults_of(model_name_or_path=str(tmp_path))
    assert f"--model_name_or_path must be a folder that holds config.json and weights, and {tmp_path} is none" in line
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dict(PRESETS["demo"])))
    (line,) = faults_of(model_name_or_path=str(file))  # a file alone has no weights
    assert f"and {file} is none" in line
    (line,) = faults_of(model_name_or_path=str(tmp_path))
    assert f"{file} names no model_type, which says how its weights are named" in line
    file.write_text(json.dumps({**PRESETS["demo"], "model_type": "gather_moe"}))
    assert read_model(Arguments(model_name_or_path=str(tmp_path))).kwargs == read("demo")


def test_a_name_that_leads_nowhere_is_named_with_the_presets() -> None:
    (line,) = faults_of(config_name="demi")
    assert "--config_name demi is neither a preset (demo, qwen3-30b-a3b, " in line
    assert "HF_HUB_OFFLINE is set and the cache" in line
