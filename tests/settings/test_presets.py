"""Presets and config.json files: names, files and overrides become one checked configuration, or one list of faults."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from modeling.config import GatherMoeConfig
from modeling.layout import LayoutRequest, ParallelLayout, check_layout, fitting_layouts
from modeling.spec import LOSS_SETTINGS, NEEDED, ROPE_THETA, ROPE_TYPES, RULES
from recipe.hf.config import config_dict
from recipe.settings.flags import Arguments
from recipe.settings.model import read_model, sizes_of
from recipe.settings.model_files import FILE_TYPES, GENERATION, ONLY_VALUE, WITHOUT_EFFECT
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
        ("demo", 0.01, 0.01),
    ],
)
def test_presets_have_the_published_parameter_counts(name: str, total_billions: float, active_billions: float) -> None:
    counts = count_parameters(sizes_of(PRESETS[name]))
    assert round(counts.total / 1e9, 2) == total_billions
    assert round(counts.active / 1e9, 2) == active_billions


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
    kwargs = read(**changes)
    assert sizes_of(kwargs) == GatherMoeConfig(**kwargs).sizes


def test_every_setting_of_the_config_class_is_read_or_left_out_by_name() -> None:
    from dataclasses import fields

    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = GatherMoeConfig().rope_parameters
    assert rope is not None
    assert rope["rope_theta"] == ROPE_THETA
    assert {"default", *ROPE_INIT_FUNCTIONS} - {"proportional"} == set(ROPE_TYPES)  # which rotates a part of each head
    elsewhere = {*LOSS_SETTINGS, *WITHOUT_EFFECT, *ONLY_VALUE}
    assert {field.name for field in fields(GatherMoeConfig)} - elsewhere == set(RULES) - {"rope_theta"}


def test_overrides_come_last_and_the_preset_stays_as_it_was() -> None:
    assert read(num_hidden_layers=2)["num_hidden_layers"] == 2
    assert PRESETS["demo"]["num_hidden_layers"] == 4
    assert isinstance(read(clip_qkv=8)["clip_qkv"], float)
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


SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
OWN: dict[str, dict[str, Any]] = {
    "gather_moe": {
        "num_key_value_heads": 2,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "qk_norm": "full",
        "clip_qkv": 3.0,
        "mlp_only_layers": [1],
    },
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
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
    },
}
EVERY_TYPE = pytest.mark.parametrize("name", FILE_TYPES)


def written_config(name: str) -> Any:
    from transformers import AutoConfig

    import modeling.model  # noqa: F401 - registers our own type

    return AutoConfig.for_model(name, **{**SMALL, **OWN[name]})


def read_content(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(content, default=str))
    return read_model(Arguments(config_name=str(folder))).kwargs


def fault_of(content: dict[str, Any], folder: Path) -> str:
    with pytest.raises(ValueError, match="cannot be used") as caught:
        read_content(content, folder)
    return str(caught.value)


@EVERY_TYPE
def test_every_way_to_write_a_config_gives_the_same_model(name: str, tmp_path: Path) -> None:
    config = written_config(name)
    want = read_content(config.to_dict(), tmp_path)
    assert read_content(config.to_diff_dict(), tmp_path) == want
    config.save_pretrained(tmp_path)
    assert read_model(Arguments(config_name=str(tmp_path))).kwargs == want
    ours = GatherMoeConfig(**want)
    written = config_dict(ours, model_type=name, dtype="float32")
    again = GatherMoeConfig(**read_content(written, tmp_path))
    for key in set(RULES) - {"rope_theta"}:
        assert getattr(again, key) == getattr(ours, key), key
    assert again.sizes == ours.sizes == sizes_of(want)
    renamed = {ours: theirs for theirs, ours in FILE_TYPES[name].renamed.items()}
    for key, value in want.items():
        if key not in FILE_TYPES[name].implied:
            assert value == getattr(config, renamed.get(key, key)), key
    assert want["rope_parameters"].items() >= {**SMALL, **OWN[name]}["rope_parameters"].items()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe"])
def test_a_stock_config_file_gives_the_sizes_of_the_stock_model(name: str, tmp_path: Path) -> None:
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    config = written_config(name)
    kwargs = read_content(config.to_dict(), tmp_path)
    with torch.device("meta"):
        stock = auto.from_config(config)
    assert count_parameters(sizes_of(kwargs)).total == sum(p.numel() for p in stock.parameters())
    assert kwargs["qk_norm"] == {"mixtral": "none", "qwen3_moe": "head", "olmoe": "full"}[name]
    assert kwargs.get("clip_qkv") == (5.0 if name == "olmoe" else None)
    assert kwargs["norm_topk_prob"] is (name == "mixtral")
    assert sizes_of(kwargs).dense_layers == ((0,) if name == "qwen3_moe" else ())


@EVERY_TYPE
def test_what_a_file_leaves_out_is_what_its_type_takes(name: str, tmp_path: Path) -> None:
    """Old files and those written by hand: only the sizes, everything else is the default of the type."""
    sizes = {key: OWN[name][key] for key in OWN[name] if "intermediate" in key or key.startswith("num_")}
    sizes.pop("num_key_value_heads")
    short = {key: SMALL[key] for key in SMALL if "token_id" not in key and key != "rope_parameters"} | sizes
    kwargs = GatherMoeConfig(**read_content({"model_type": name, **short}, tmp_path))
    from transformers import AutoConfig

    whole = GatherMoeConfig(**read_content(AutoConfig.for_model(name, **short).to_dict(), tmp_path))
    for key in set(RULES) - {"rope_theta"}:
        assert getattr(kwargs, key) == getattr(whole, key), key


def test_what_older_versions_wrote_is_read(tmp_path: Path) -> None:
    old = {"rope_theta": 1e6, "rope_scaling": None, "sliding_window": 4096, "use_sliding_window": False}
    old |= {"torch_dtype": "bfloat16", "torchscript": False, "pruned_heads": {}, "is_decoder": False, "top_k": 50}
    old |= {"max_window_layers": 28, "_attn_implementation_autoset": False}
    content = {**written_config("qwen3_moe").to_dict(), **old}
    del content["rope_parameters"]
    assert read_content(content, tmp_path)["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}


def test_a_window_counts_where_its_type_says_so(tmp_path: Path) -> None:
    """Qwen3 leaves one aside unless use_sliding_window asks for it; the others know no such switch."""
    content = {**written_config("qwen3_moe").to_diff_dict(), "sliding_window": 8}
    want = read_content(content, tmp_path)
    assert read_content({**content, "use_sliding_window": False}, tmp_path) == want
    assert "sliding_window=8 is not" in fault_of({**content, "use_sliding_window": True}, tmp_path)
    window = {"sliding_window": 8, "use_sliding_window": False}
    assert "sliding_window=8 is not" in fault_of({**written_config("mixtral").to_diff_dict(), **window}, tmp_path)


@pytest.mark.parametrize(("kind", "fits"), [("sliding_attention", True), ("chunked_attention", False)])
def test_only_a_sliding_window_is_taken_for_the_whole_where_every_sequence_fits(
    kind: str, fits: bool, tmp_path: Path
) -> None:
    content = {**written_config("mixtral").to_dict(), "sliding_window": 64, "layer_types": ["full_attention", kind]}
    if fits:
        assert "layer_types" not in read_content(content, tmp_path)
        content["sliding_window"] = None
    assert f"layer_types=['full_attention', '{kind}'] is not available" in fault_of(content, tmp_path)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "truncate": False}
STRETCHED: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "llama3": {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 16,
    },
}


def read_with_weights(rope: dict[str, Any], folder: Path, **overrides: Any) -> GatherMoeConfig:
    content = {**written_config("mixtral").to_diff_dict(), "rope_parameters": rope}
    (folder / "config.json").write_text(json.dumps(content))
    return GatherMoeConfig(**read_model(Arguments(model_name_or_path=str(folder), config_overrides=overrides)).kwargs)


@pytest.mark.parametrize("kind", STRETCHED)
def test_a_longer_context_leaves_the_rotary_embedding_of_weights_as_it_was(kind: str, tmp_path: Path) -> None:
    import torch

    from modeling.attention import rotary_tables

    positions = torch.arange(64)[None]
    short, long = (
        rotary_tables(read_with_weights(STRETCHED[kind], tmp_path, **changes), positions, dtype=torch.float32)
        for changes in ({}, {"max_position_embeddings": 128})
    )
    assert torch.equal(short.cos, long.cos)
    assert torch.equal(short.sin, long.sin)


def test_a_context_is_stretched_from_the_length_that_weights_have_learnt(tmp_path: Path) -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    yarn = {key: value for key, value in YARN.items() if key != "rope_theta"}
    longer = {"rope_parameters": yarn, "max_position_embeddings": 128}
    rope = read_with_weights(plain, tmp_path, **longer).rope_parameters
    assert rope == {**YARN, "original_max_position_embeddings": 64}
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert read_with_weights(dynamic, tmp_path, max_position_embeddings=64).rope_parameters == dynamic
    with pytest.raises(ValueError, match=r"max_position_embeddings=128 would turn positions otherwise than .* has 64"):
        read_with_weights(dynamic, tmp_path, max_position_embeddings=128)


@pytest.mark.parametrize("kind", STRETCHED)
def test_readers_of_either_name_find_the_scaling_of_the_rotary_embedding(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = read_with_weights(STRETCHED[kind], tmp_path)
    want = {key: value for key, value in (config.rope_parameters or {}).items() if key != "rope_theta"}
    for model_type in ("gather_moe", "mixtral"):
        written = config_dict(config, model_type=model_type, dtype="float32")
        assert written["rope_scaling"] == want
        for left_out in ("rope_scaling", "rope_parameters", None):
            content = {key: value for key, value in written.items() if key != left_out}
            assert read_content(content, tmp_path)["rope_parameters"] == config.rope_parameters
            assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters
    other = {**written, "rope_scaling": {**want, "original_max_position_embeddings": 32}}
    assert "rope_scaling and rope_parameters name the same setting and differ; keep one" in fault_of(other, tmp_path)


def test_overrides_that_say_what_the_weights_are_anyway_change_nothing(tmp_path: Path) -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    same = {"tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "qk_norm": "none"}
    want = read_with_weights(plain, tmp_path).to_dict()
    assert read_with_weights(plain, tmp_path, head_dim=8, num_key_value_heads=2, **same).to_dict() == want
    assert read_with_weights(plain, tmp_path, head_dim=None, tie_word_embeddings=None).to_dict() == want
    with pytest.raises(ValueError, match=r"tie_word_embeddings=True cannot change weights that exist; .* has False"):
        read_with_weights(plain, tmp_path, tie_word_embeddings=True)


def test_settings_of_generation_are_all_known_by_name() -> None:
    from transformers import GenerationConfig

    assert set(GenerationConfig._get_default_generation_params()) <= {*GENERATION, *WITHOUT_EFFECT}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"model_type": "llama"}, "holds a 'llama'; configurations can be read of gather_moe, mixtral"),
        ({"model_type": None}, "holds a None; configurations"),
        ({"model_type": "qwen3_moe", "attention_bias": True}, "attention_bias=True is not available, only False"),
        ({"model_type": "mixtral", "sliding_window": 8}, "sliding_window=8 is not available, only None"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling={'factor': 2} names no rope_type"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25 is not available, only 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not available, only 1"),
        ({"rope_theta": 1, "rope_parameters": {"rope_theta": 2}}, "rope_theta=1 and rope_parameters with rope_theta=2"),
        ({"rope_theta": "big"}, "rope_theta='big' must be a number above 0"),
        ({"rope_parameters": [1]}, "rope_parameters=[1] must be an object"),
        ({"hiden_size": 8}, "hiden_size is unknown"),
        ({"num_local_experts": 8, "num_experts": 4}, "num_local_experts=8 and num_experts=4 name the same setting"),
        (
            {"model_type": "mixtral", "norm_topk_prob": False},
            "norm_topk_prob=False is not available in this type",
        ),
        ({"model_type": "olmoe", "qk_norm": "head"}, "qk_norm='head' is not available in this type, only 'full'"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True is not available, only False"),
        ({"chunk_size_feed_forward": 2}, "chunk_size_feed_forward=2 is not available, only 0"),
        ({"output_hidden_states": True}, "output_hidden_states=True is not available, only False"),
        ({"problem_type": "regression"}, "problem_type='regression' is not available, only None"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not available, only None"),
        ({"score_function": "relu"}, "score_function='relu' must be one of softmax, sigmoid"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor=0 must be a number above 0"),
        (
            {"model_type": "mixtral", "score_function": "sigmoid"},
            "score_function='sigmoid' is not available in this type, only 'softmax'",
        ),
    ],
)
def test_files_with_what_our_model_cannot_express_are_refused(
    content: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    assert fault in fault_of({**PRESETS["demo"], **content}, tmp_path)


def test_losses_that_differ_from_the_files_are_said(tmp_path: Path) -> None:
    content = {**PRESETS["demo"], "model_type": "gather_moe"}
    losses = {"router_aux_loss_coef": 0.001, "router_z_loss_coef": 0.0, "balance_scope": "micro_batch"}
    losses |= {"balance_bias_update_rate": 0.001, "router_jitter_noise": 0.1, "capacity_factor": 1.25}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**content, **losses}))
    given = {"router_aux_loss_coef": "on the command line"}
    for flag in ("config_name", "model_name_or_path"):
        arguments = Arguments(**{flag: str(tmp_path)}, router_aux_loss_coef=0.02, given=given)
        assert read_model(arguments).notes == (
            f"router_aux_loss_coef is 0.02 (on the command line), not the 0.001 that {file} names; "
            "--router_aux_loss_coef sets it",
            f"balance_scope is sequence (by default), not the micro_batch that {file} names; --balance_scope sets it",
            f"balance_bias_update_rate is 0.0 (by default), not the 0.001 that {file} names; "
            "--balance_bias_update_rate sets it",
            f"router_jitter_noise is 0.0 (by default), not the 0.1 that {file} names; --router_jitter_noise sets it",
            f"capacity_factor is None (by default), not the 1.25 that {file} names; --capacity_factor sets it",
        )
    file.write_text(json.dumps(content))
    assert read_model(Arguments(config_name=str(tmp_path))).notes == ()
    assert read_model(Arguments(config_name="demo")).notes == ()
