"""A new run starts from the hf/ folder of an earlier one, whatever type it was saved as, in another layout."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankError, run_ranks
from tests.training import read_metrics, train_on_ranks, write_ds_config, write_inputs

MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"qk_norm": "none"},
    "qwen3_moe": {"qk_norm": "head", "mlp_only_layers": [0], "intermediate_size": 48},
    "olmoe": {"qk_norm": "full", "norm_topk_prob": False, "clip_qkv": 2.0},
    "gather_moe": {"qk_norm": "none", "norm_topk_prob": False},
}


def saved_run(folder: Path, **model: Any) -> tuple[dict[str, Any], Path]:
    """Flags of a new run from a saved one's weights, and its hf/ folder."""
    flags = write_inputs(folder, **model)
    run_ranks(train_on_ranks, 1, flags)
    hf_folder = folder / "run" / "checkpoints" / "latest" / "hf"
    del flags["config_name"], flags["train_vocab_size"]
    return flags | {"model_name_or_path": hf_folder, "output_dir": folder / "more"}, hf_folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_run_goes_on_from_the_weights_of_every_type_in_another_layout(kind: str, tmp_path: Path) -> None:
    flags, hf_folder = saved_run(tmp_path, **MODELS[kind])
    assert json.loads((hf_folder / "config.json").read_text())["model_type"] == kind
    last = read_metrics(tmp_path / "run", key="eval_loss")[6]["eval_loss"]
    # One step with a learning rate of nothing shows that the weights and the tokenizer came along.
    flags |= write_ds_config(tmp_path, parallel={"tp": 2, "ep": 1}) | {"max_steps": 1, "learning_rate": 0.0}
    run_ranks(train_on_ranks, 2, flags)
    assert abs(read_metrics(tmp_path / "more", key="eval_loss")[1]["eval_loss"] - last) < 1e-4
    again = tmp_path / "more" / "checkpoints" / "latest" / "hf" / "config.json"
    assert json.loads(again.read_text())["model_type"] == kind


def test_weights_without_a_tokenizer_do_not_get_a_new_one(tmp_path: Path) -> None:
    flags, hf_folder = saved_run(tmp_path)
    bare = tmp_path / "bare"
    shutil.copytree(hf_folder, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(RankError, match=r"bare holds no tokenizer; name its tokenizer by --tokenizer_name"):
        run_ranks(train_on_ranks, 1, flags | {"model_name_or_path": bare})
