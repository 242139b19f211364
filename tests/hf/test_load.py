"""Folders as transformers, others and we write them, into any layout; a new run starts from one of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modeling.config import GatherMoeConfig
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh
from recipe.hf.load import HfFolder
from recipe.settings.flags import Arguments
from recipe.settings.model import read_model
from tests.engine_runs import Case, slow
from tests.exports import CONFIGS, load_folder, read_export, run_export
from tests.hub_samples import make_model
from tests.ranks import RankError, run_ranks
from tests.referee import LOGITS_ATOL, tiny_config
from tests.training import read_metrics, train_on_ranks, write_ds_config, write_inputs
from tests.tuning import Exported

STOCK: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [1], "tie_word_embeddings": True},
    "olmoe": {"num_experts": 4, "num_key_value_heads": 4},
}
STYLES: dict[str, dict[str, Any]] = {
    "a tensor per expert": {},
    "experts stacked": {"save_original_format": False},
    "several files": {"max_shard_size": "20KB"},
}
DTYPES = {"a tensor per expert": torch.float32, "experts stacked": torch.bfloat16, "several files": torch.float16}

Folders = dict[str, tuple[Path, GatherMoeConfig, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """By type and style: a folder, our configuration, and the whole tensors under our names."""
    found = {}
    for kind, own in STOCK.items():
        model = make_model(kind=kind, num_experts_per_tok=2, **own)
        for style, save in STYLES.items():
            folder = tmp_path_factory.mktemp("stock") / f"{kind}, {style}"
            model.to(DTYPES[style]).save_pretrained(folder, **save)
            state = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
            config = GatherMoeConfig(**read_model(Arguments(model_name_or_path=str(folder))).kwargs)
            found[folder.name] = (folder, config, state)
    return found


def load_all(rank: int, world_size: int, folders: Folders, layout: ParallelLayout) -> dict[str, tuple[int, int]]:
    """Load this rank's shards of every folder and compare them with the whole ones; bytes read, and of the shards."""
    from modeling.init import cut, shard_table

    found = {}
    for name, (folder, config, state) in folders.items():
        mesh = build_mesh(layout, num_key_value_heads=config.sizes.num_key_value_heads)
        model, num_bytes = load_folder(config, folder, mesh)
        table, size = shard_table(config, mesh), 0
        for key, parameter in model.named_parameters():
            shard = table.shard(key, tuple(state[key].shape), group_rank=mesh.group_rank)
            assert torch.equal(parameter.data, cut(state[key], shard).float()), (name, key)
            size += parameter.numel() * state[key].element_size()
        found[name] = (num_bytes, size)
    return found


@pytest.mark.parametrize(
    "layout",
    [ParallelLayout(tp=2, ep=1), slow(ParallelLayout(tp=2, ep=2)), slow(ParallelLayout())],
    ids=str,
)
def test_every_way_to_store_a_model_is_read_by_the_ranks_that_need_it(folders: Folders, layout: ParallelLayout) -> None:
    assert len(folders) == 9
    assert all(len(list(folders[name][0].glob("*.safetensors"))) > 2 for name in folders if "several" in name)
    for by_folder in run_ranks(load_all, layout.tp, folders, layout):
        for name, (num_bytes, size) in by_folder.items():
            assert num_bytes == size, name


def test_our_folders_load_back_into_any_layout_and_each_rank_reads_its_part(tmp_path: Path) -> None:
    state = run_export("qwen3_moe", Case(tp=2, ep=1, stage=1), tmp_path)
    total = sum(tensor.numel() * tensor.element_size() for tensor in read_export(tmp_path).values())
    folders = {"ours": (tmp_path, CONFIGS["qwen3_moe"](), state)}
    for tp, ep in ((1, 1), (4, 4), (4, 2), (4, 1)):
        for found in run_ranks(load_all, tp, folders, ParallelLayout(tp=tp, ep=ep)):
            num_bytes = found["ours"][0]
            assert num_bytes == total if tp == 1 else num_bytes < 0.4 * total


def test_weights_of_another_configuration_are_refused(tmp_path: Path) -> None:
    run_export("mixtral", Case(stage=1), tmp_path)
    with pytest.raises(ValueError, match=r"not those of its config.json: \d+ are missing .*, 0 are unexpected"):
        load_folder(tiny_config(num_experts=6, vocab_size=51), tmp_path)
    with pytest.raises(ValueError, match=r"embed_tokens.weight .* has the shape \[51, 32\], expected \[50, 32\]"):
        load_folder(tiny_config(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds neither model.safetensors.index.json nor model.safetensors"):
        load_folder(tiny_config(vocab_size=51), tmp_path)


def num_bytes_read(folders: Folders, name: str, folder: Path) -> int:
    return load_folder(folders[name][1], folder)[1]


def copied(folders: Folders, name: str, tmp_path: Path, **tensors: Tensor | None) -> Path:
    """A folder of one file with tensors added, replaced, or taken out."""
    folder = tmp_path / "copy"
    shutil.copytree(folders[name][0], folder)
    content = load_file(folder / "model.safetensors") | tensors
    save_file({key: t for key, t in content.items() if t is not None}, folder / "model.safetensors")
    return folder


MIXTRAL, TIED = "mixtral, a tensor per expert", "qwen3_moe, a tensor per expert"


def test_tables_of_the_rotary_embedding_are_known_and_other_tensors_are_not(folders: Folders, tmp_path: Path) -> None:
    table = torch.ones(4)
    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": table, "model.rotary_emb.inv_freq": table.clone()}
    num_bytes = num_bytes_read(folders, MIXTRAL, folders[MIXTRAL][0])
    assert num_bytes_read(folders, MIXTRAL, copied(folders, MIXTRAL, tmp_path, **harmless)) == num_bytes
    shutil.rmtree(tmp_path / "copy")
    odd = {"model.layers.0.self_attn.q_proj.bias": table, "model.norm.weight": None}
    with pytest.raises(ValueError, match=r"1 are missing \['model.norm.weight'\], 1 are unexpected \['model.layers.0."):
        num_bytes_read(folders, MIXTRAL, copied(folders, MIXTRAL, tmp_path, **odd))


def test_tied_weights_may_be_there_twice_where_they_are_equal(folders: Folders, tmp_path: Path) -> None:
    embedding = load_file(folders[TIED][0] / "model.safetensors")["model.embed_tokens.weight"]
    twice = copied(folders, TIED, tmp_path, **{"lm_head.weight": embedding.clone()})
    assert (
        num_bytes_read(folders, TIED, twice) == num_bytes_read(folders, TIED, folders[TIED][0]) + embedding.numel() * 4
    )
    shutil.rmtree(twice)
    other = copied(folders, TIED, tmp_path, **{"lm_head.weight": embedding + 1})
    with pytest.raises(ValueError, match=r"lm_head.weight in .* is not model.embed_tokens.weight, although"):
        num_bytes_read(folders, TIED, other)


def test_an_index_beside_a_single_file_of_weights_is_refused(folders: Folders, tmp_path: Path) -> None:
    """transformers opens the single file, and which of the two is the model nobody knows."""
    folder = tmp_path / "both"
    shutil.copytree(folders["olmoe, several files"][0], folder)
    shutil.copyfile(folders["olmoe, a tensor per expert"][0] / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"both holds both model.safetensors.index.json and model.safetensors, and "):
        HfFolder(folder)
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert "model.norm.weight" in HfFolder(folder)


def test_files_that_are_not_whole_are_named(folders: Folders, tmp_path: Path) -> None:
    several = tmp_path / "several"
    shutil.copytree(folders["olmoe, several files"][0], several)
    gone = next(several.glob("model-00002-*"))
    content = gone.read_bytes()
    gone.unlink()
    with pytest.raises(ValueError, match=r"index.json names 1 files that are not there: \['model-00002-of-"):
        HfFolder(several)
    gone.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"\(43 bytes\) cannot be read as safetensors: .*; where git fetched the"):
        num_bytes_read(folders, "olmoe, several files", several)
    gone.write_bytes(content)
    index = several / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weight_map, gone.name)}))
    with pytest.raises(ValueError, match=r"model-00002-of-.* does not hold "):
        num_bytes_read(folders, "olmoe, several files", several)


MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"qk_norm": "none"},
    "qwen3_moe": {"qk_norm": "head", "mlp_only_layers": [0], "intermediate_size": 48},
    "olmoe": {"qk_norm": "full", "norm_topk_prob": False, "clip_qkv": 2.0},
    "gather_moe": {"qk_norm": "none", "norm_topk_prob": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_run_goes_on_from_the_weights_of_every_type_in_another_layout(kind: str, tmp_path: Path) -> None:
    flags = write_inputs(tmp_path, **MODELS[kind]) | {"max_steps": 2}
    run_ranks(train_on_ranks, 1, flags)
    hf_folder = tmp_path / "run" / "checkpoints" / "latest" / "hf"
    assert json.loads((hf_folder / "config.json").read_text())["model_type"] == kind
    last = read_metrics(tmp_path / "run", key="eval_loss")[2]["eval_loss"]
    del flags["config_name"], flags["train_vocab_size"]
    flags |= {"model_name_or_path": hf_folder, "output_dir": tmp_path / "more"}
    # One step with a learning rate of nothing shows that the weights and the tokenizer came along.
    flags |= write_ds_config(tmp_path, parallel={"tp": 2, "ep": 1}) | {"max_steps": 1, "learning_rate": 0.0}
    run_ranks(train_on_ranks, 2, flags)
    assert abs(read_metrics(tmp_path / "more", key="eval_loss")[1]["eval_loss"] - last) < LOGITS_ATOL
    again = tmp_path / "more" / "checkpoints" / "latest" / "hf" / "config.json"
    assert json.loads(again.read_text())["model_type"] == kind


def test_weights_without_a_tokenizer_do_not_get_a_new_one(exported: Exported, tmp_path: Path) -> None:
    flags, bare = write_inputs(tmp_path), tmp_path / "bare"
    del flags["config_name"], flags["train_vocab_size"]
    shutil.copytree(exported("mixtral"), bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(RankError, match=r"bare holds no tokenizer; name its tokenizer by --tokenizer_name"):
        run_ranks(train_on_ranks, 1, flags | {"model_name_or_path": bare})
