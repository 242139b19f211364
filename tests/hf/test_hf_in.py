"""Folders as transformers and others write them, into any layout: both ways to store experts, shards, low precision."""

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
from recipe.hf.folder import HfFolder
from recipe.settings.flags import Arguments
from recipe.settings.model import read_model
from tests.engine_runs import slow
from tests.hub_samples import make_model
from tests.ranks import run_ranks

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
LAYOUTS = [ParallelLayout(tp=2, ep=2), ParallelLayout(tp=2, ep=1)]

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
    from modeling.init import build_model, cut, shard_table
    from modeling.mesh import build_mesh
    from recipe.hf.load import load_weights

    found = {}
    for name, (folder, config, state) in folders.items():
        mesh = build_mesh(layout, num_key_value_heads=config.sizes.num_key_value_heads)
        model = build_model(config, mesh=mesh, seed=5)
        num_bytes = load_weights(model, config=config, mesh=mesh, folder=folder)
        table, size = shard_table(config, mesh), 0
        for key, parameter in model.named_parameters():
            shard = table.shard(key, tuple(state[key].shape), group_rank=mesh.group_rank)
            assert torch.equal(parameter.data, cut(state[key], shard).float()), (name, key)
            size += parameter.numel() * state[key].element_size()
        found[name] = (num_bytes, size)
    return found


@pytest.mark.parametrize("layout", [slow(LAYOUTS[0]), LAYOUTS[1]], ids=["ep 2", "ep 1"])
def test_every_way_to_store_a_model_is_read_by_the_ranks_that_need_it(folders: Folders, layout: ParallelLayout) -> None:
    assert len(folders) == 9
    for by_folder in run_ranks(load_all, 2, folders, layout):
        for name, (num_bytes, size) in by_folder.items():
            assert num_bytes == size, name


@pytest.mark.slow
def test_one_process_reads_everything_once(folders: Folders) -> None:
    (by_folder,) = run_ranks(load_all, 1, folders, ParallelLayout())
    for name, (folder, _, _) in folders.items():
        tensors = [t for file in folder.glob("*.safetensors") for t in load_file(file).values()]
        assert by_folder[name][0] == sum(t.numel() * t.element_size() for t in tensors), name
        assert len(list(folder.glob("*.safetensors"))) > 2 or "several" not in name


def copied(folders: Folders, name: str, tmp_path: Path, **tensors: Tensor | None) -> Path:
    """A folder of one file with tensors added, replaced, or taken out."""
    folder = tmp_path / "copy"
    shutil.copytree(folders[name][0], folder)
    content = load_file(folder / "model.safetensors") | tensors
    save_file({key: t for key, t in content.items() if t is not None}, folder / "model.safetensors")
    return folder


def load(folders: Folders, name: str, folder: Path) -> int:
    from modeling.init import build_model
    from modeling.mesh import one_rank_mesh
    from recipe.hf.load import load_weights

    mesh, config = one_rank_mesh(), folders[name][1]
    return load_weights(build_model(config, mesh=mesh, seed=5), config=config, mesh=mesh, folder=folder)


MIXTRAL, TIED = "mixtral, a tensor per expert", "qwen3_moe, a tensor per expert"


def test_tables_of_the_rotary_embedding_are_known_and_other_tensors_are_not(folders: Folders, tmp_path: Path) -> None:
    table = torch.ones(4)
    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": table, "model.rotary_emb.inv_freq": table.clone()}
    num_bytes = load(folders, MIXTRAL, folders[MIXTRAL][0])
    assert load(folders, MIXTRAL, copied(folders, MIXTRAL, tmp_path, **harmless)) == num_bytes
    shutil.rmtree(tmp_path / "copy")
    odd = {"model.layers.0.self_attn.q_proj.bias": table, "model.norm.weight": None}
    with pytest.raises(ValueError, match=r"1 are missing \['model.norm.weight'\], 1 are unexpected \['model.layers.0."):
        load(folders, MIXTRAL, copied(folders, MIXTRAL, tmp_path, **odd))


def test_tied_weights_may_be_there_twice_where_they_are_equal(folders: Folders, tmp_path: Path) -> None:
    embedding = load_file(folders[TIED][0] / "model.safetensors")["model.embed_tokens.weight"]
    twice = copied(folders, TIED, tmp_path, **{"lm_head.weight": embedding.clone()})
    assert load(folders, TIED, twice) == load(folders, TIED, folders[TIED][0]) + embedding.numel() * 4
    shutil.rmtree(twice)
    other = copied(folders, TIED, tmp_path, **{"lm_head.weight": embedding + 1})
    with pytest.raises(ValueError, match=r"lm_head.weight in .* is not model.embed_tokens.weight, although"):
        load(folders, TIED, other)


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
        load(folders, "olmoe, several files", several)
    gone.write_bytes(content)
    index = several / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weight_map, gone.name)}))
    with pytest.raises(ValueError, match=r"model-00002-of-.* does not hold "):
        load(folders, "olmoe, several files", several)
