"""Exports tiny models of every type as Hugging Face folders, reads them, and opens them where this project is not."""

import ast
import json
from pathlib import Path
from typing import Any

import torch

from modeling.config import GatherMoeConfig
from modeling.mesh import ParallelMesh, one_rank_mesh
from tests.clean_process import run_clean
from tests.engine_runs import Case, start_engine
from tests.ranks import run_ranks
from tests.referee import Tensors, full_state, mixed_config, tiny_config

MODELING = Path(__file__).parents[1] / "modeling"
CONFIGS = {
    "mixtral": lambda: tiny_config(qk_norm="none", vocab_size=51),
    "qwen3_moe": lambda: mixed_config(qk_norm="head", vocab_size=51),
    "olmoe": lambda: tiny_config(qk_norm="full", norm_topk_prob=False, clip_qkv=0.5, vocab_size=51),
    "gather_moe": lambda: mixed_config(qk_norm="none", vocab_size=51),
}
OPEN_IT = """
import json, sys, torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
folder, ids, is_native = sys.argv[1], torch.tensor(json.loads(sys.argv[2])), sys.argv[3] == "native"

def opened(kind, folder=folder, **options):
    model, info = kind.from_pretrained(folder, trust_remote_code=is_native, output_loading_info=True, **options)
    # A model without a head has no use for the head's weight.
    beside = {"lm_head.weight"} if kind is AutoModel else set()
    assert not (info.pop("unexpected_keys") - beside or any(info.values())), info
    return model.eval()

config = AutoConfig.from_pretrained(folder, trust_remote_code=is_native)
model = opened(AutoModelForCausalLM, dtype=torch.float32)
assert type(model.config) is type(config)
logits = model(ids).logits.detach()
generated = model.generate(ids[:1, :3], max_new_tokens=5, do_sample=False)
torch.testing.assert_close(model.lm_head(opened(AutoModel, dtype=torch.float32)(ids)[0]), logits)
"""
# What somebody with a native folder and nothing of this project does next.
TUNE_IT = """
coarse = opened(AutoModelForCausalLM, dtype="bfloat16", device_map="cpu")
assert {(x.dtype, x.device.type) for x in coarse.parameters()} == {(torch.bfloat16, "cpu")}
torch.testing.assert_close(coarse(ids[:1, :8]).logits.float(), logits[:1, :8], atol=0.05, rtol=0)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model.train()(ids, labels=ids).loss.backward()
optimizer.step()
model.eval().save_pretrained(sys.argv[5])
before, logits = logits, model(ids).logits.detach()
assert not torch.allclose(before, logits, atol=1e-3)
"""
END_IT = """
torch.save((type(model).__name__, logits, generated), sys.argv[4])
assert "modeling" not in sys.modules and "recipe" not in sys.modules
"""


class FakeTokenizer:
    """Replaces a tokenizer where the test is about weights."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer_config.json").write_text("{}")


def export_engine(
    engine: Any,
    folder: Path,
    *,
    hf_format: str = "auto",
    dtype: torch.dtype = torch.float32,
    tokenizer: Any = None,
) -> str:
    """Export what this rank's engine holds; the model type that was written."""
    from recipe.checkpoint.files import Files, complete
    from recipe.hf.export import export_hugging_face
    from recipe.shared.ranks import TorchRanks

    files, ranks = Files(), TorchRanks()
    options = {"tokenizer": tokenizer or FakeTokenizer(), "hf_format": hf_format, "dtype": dtype}
    kind = export_hugging_face(engine, folder, **options, ranks=ranks, files=files)
    complete(files, ranks=ranks)
    return kind


def export(rank: int, world_size: int, config: GatherMoeConfig, state: Tensors, case: Case, folder: Path) -> str:
    """Export a fresh engine's weights in float32; a function for `run_ranks`."""
    return export_engine(start_engine(config, state, case), folder)


def run_export(name: str, case: Case, folder: Path) -> Tensors:
    """Export the model `name` of CONFIGS from the case's layout; the weights that were exported."""
    config = CONFIGS[name]()
    state = full_state(config)
    assert set(run_ranks(export, case.num_ranks, config, state, case, folder)) == {name}
    return state


def load_folder(
    config: GatherMoeConfig, folder: Path, mesh: ParallelMesh | None = None, *, noise_std: float = 0.0
) -> tuple[Any, int]:
    """Build a model and load this rank's part of a folder's weights into it; the model, and the bytes read."""
    from modeling.init import build_model
    from recipe.hf.load import ExpertNoise, load_weights

    mesh = mesh or one_rank_mesh()
    model = build_model(config, mesh=mesh, seed=5)
    return model, load_weights(model, config=config, mesh=mesh, folder=folder, noise=ExpertNoise(noise_std, 3))


def read_export(folder: Path) -> Tensors:
    """Read all tensors of the files in a folder; an AssertionError where one is there twice."""
    from safetensors.torch import load_file

    found: Tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        assert not tensors.keys() & found.keys()
        found |= tensors
    return found


def open_in_clean_process(
    folder: Path, ids: torch.Tensor, tmp_path: Path, *, native: bool, tuned: Path | None = None
) -> Any:
    """Load with the Auto classes where this project cannot be imported; fine-tune and save to `tuned`, if given.

    The process that fine-tunes is a cold one: what code of ours forgets to import is not there by chance.
    """
    out = tmp_path / f"opened-{folder.name}.pt"
    words = [str(folder), json.dumps(ids.tolist()), "native" if native else "stock", str(out), str(tuned)]
    run_clean(OPEN_IT + (TUNE_IT if tuned else "") + END_IT, words, tmp_path, cold=tuned is not None)
    return torch.load(out)


def files_with_imports(*names: str) -> set[str]:
    """These files of modeling/ and those that they import, by whatever detour."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            nodes = ast.walk(ast.parse((MODELING / name).read_text()))
            waiting += [f"{node.module}.py" for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
    return found


def sample_ids() -> torch.Tensor:
    """Draw ids as long as the model allows; being causal it covers every shorter input."""
    return torch.randint(0, 51, (3, 64), generator=torch.Generator().manual_seed(3))
