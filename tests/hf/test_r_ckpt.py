"""Checkpoints as Hugging Face folders: every layout and stage writes the same, complete, loadable model."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from modeling.config import GatherMoeConfig
from modeling.hf_keys import file_tensors
from modeling.layout import ParallelLayout
from recipe.hf.export import opening_code
from tests.clean_process import run_clean
from tests.parity import Case, full_state, mixed_config, referee_model, start_engine, tiny_config
from tests.ranks import RankError, run_ranks
from tests.training import train_on_ranks, write_ds_config, write_inputs

CONFIGS = {
    "mixtral": lambda: tiny_config(qk_norm="none", vocab_size=51),
    "qwen3_moe": lambda: mixed_config(qk_norm="head", vocab_size=51),
    "olmoe": lambda: tiny_config(qk_norm="full", norm_topk_prob=False, clip_qkv=0.5, vocab_size=51),
    "gather_moe": lambda: mixed_config(qk_norm="none", vocab_size=51),
}
MODELING = Path(__file__).parents[2] / "modeling"
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
    """Stands in for a tokenizer where the test is about weights."""

    bos_token_id, eos_token_id, pad_token_id = None, 1, None

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer_config.json").write_text("{}")


def export(
    rank: int,
    world_size: int,
    config: GatherMoeConfig,
    state: dict[str, torch.Tensor],
    case: Case,
    folder: Path,
    options: tuple[str, torch.dtype],
) -> str:
    from recipe.hf.export import ExportOptions, export_hugging_face
    from recipe.shared.ranks import TorchRanks

    engine = start_engine(config, state, case)
    return export_hugging_face(
        engine, folder, tokenizer=FakeTokenizer(), options=ExportOptions(*options), ranks=TorchRanks()
    )


def run_export(
    name: str, case: Case, folder: Path, *, hf_format: str = "auto", dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Export from `case`'s layout; the weights that were exported."""
    config = CONFIGS[name]()
    state = full_state(config)
    kinds = run_ranks(export, case.dp * case.tp, config, state, case, folder, (hf_format, dtype))
    assert set(kinds) == {"gather_moe" if hf_format == "native" else name}
    return state


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118
                assert name not in tensors, "each tensor is written once"
                tensors[name] = reader.get_tensor(name)
    return tensors


def expected_tensors(name: str, state: dict[str, torch.Tensor], *, kind: str) -> dict[str, torch.Tensor]:
    config = CONFIGS[name]()
    expected = {}
    for key, tensor in state.items():
        for target in file_tensors(key, num_experts=config.num_experts, model_type=kind):
            part = tensor if target.expert is None else tensor[target.expert]
            expected[target.name] = part if target.half is None else part.chunk(2)[target.half]
    return expected


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


def sample_ids() -> torch.Tensor:
    """As long as the model allows; being causal it covers every shorter input."""
    return torch.randint(0, 51, (3, 64), generator=torch.Generator().manual_seed(3))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_r_ckpt_14_automodel_opens_every_type_in_a_clean_process(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    state = run_export(name, Case(dp=2, tp=2, ep=2, stage=2), folder)
    kind, logits, generated = open_in_clean_process(folder, sample_ids(), tmp_path, native=name == "gather_moe")
    ours = referee_model(CONFIGS[name](), state, own=True).eval()
    torch.testing.assert_close(logits, ours(sample_ids()).logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(generated, ours.generate(sample_ids()[:1, :3], max_new_tokens=5, do_sample=False))
    architectures = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "olmoe": "OlmoeForCausalLM"}
    assert kind == architectures.get(name, "GatherMoeForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [kind]
    assert opening_code(folder).endswith(", trust_remote_code=True)") == (name == "gather_moe")
    assert (config["model_type"], config["vocab_size"], config["dtype"]) == (name, 51, "float32")
    assert {"tokenizer_config.json", "generation_config.json"} <= {path.name for path in folder.iterdir()}
    assert {path.name for path in folder.glob("*.py")} == (needed_code() if name == "gather_moe" else set())


@pytest.mark.slow
def test_r_ckpt_14_a_native_folder_is_fine_tuned_and_saved_with_its_code_in_a_clean_process(tmp_path: Path) -> None:
    folder, tuned = tmp_path / "hf", tmp_path / "tuned"
    run_export("gather_moe", Case(), folder)
    _, want, _ = open_in_clean_process(folder, sample_ids(), tmp_path, native=True, tuned=tuned)
    code = {path.name: path.read_bytes() for path in tuned.glob("*.py")}
    assert code == {name: (MODELING / name).read_bytes() for name in needed_code()}
    kind, logits, _ = open_in_clean_process(tuned, sample_ids(), tmp_path, native=True)
    assert kind == "GatherMoeForCausalLM"
    torch.testing.assert_close(logits, want)


def needed_code() -> set[str]:
    """The files of modeling/ that the Auto classes' two import, by whatever detour, and themselves."""
    found: set[str] = set()
    waiting = ["config.py", "model.py"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            nodes = ast.walk(ast.parse((MODELING / name).read_text()))
            waiting += [f"{node.module}.py" for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(dp=2, tp=2, ep=1, stage=2), Case(dp=2, tp=2, ep=2, stage=3), Case(tp=4, ep=2)])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_r_ckpt_05_and_06_every_tensor_is_written_once_and_equal(name: str, case: Case, tmp_path: Path) -> None:
    state = run_export(name, case, tmp_path / "hf")
    want, got = expected_tensors(name, state, kind=name), read_folder(tmp_path / "hf")
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert torch.equal(got[key], tensor), key


def test_r_ckpt_15_the_padded_vocabulary_stays_inside(tmp_path: Path) -> None:
    state = run_export("mixtral", Case(tp=4, ep=4, stage=1), tmp_path / "hf")
    got = read_folder(tmp_path / "hf")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert got[name].shape == (51, 32)
        assert torch.equal(got[name], state[name])


@pytest.mark.parametrize("case", [Case(stage=0), Case(tp=2, ep=2, stage=3)])
def test_r_ckpt_13_tied_embeddings_are_written_once(case: Case, tmp_path: Path) -> None:
    config = tiny_config(qk_norm="head", vocab_size=51, tie_word_embeddings=True)
    state = full_state(config)
    folder = tmp_path / "hf"
    run_ranks(export, case.tp, config, state, case, folder, ("auto", torch.float32))
    assert "lm_head.weight" not in read_folder(folder)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    ours = referee_model(config, state, own=True).eval()
    torch.testing.assert_close(model(sample_ids()).logits, ours(sample_ids()).logits, atol=1e-5, rtol=0)


def test_weights_load_back_into_any_layout_and_each_rank_reads_its_part(tmp_path: Path) -> None:
    state = run_export("qwen3_moe", Case(tp=2, ep=1, stage=1), tmp_path / "hf")
    total = sum(tensor.numel() * tensor.element_size() for tensor in read_folder(tmp_path / "hf").values())
    for tp, ep in ((1, 1), (4, 4), (4, 2), (4, 1)):
        layout = ParallelLayout(tp=tp, ep=ep)
        for num_bytes in run_ranks(load_and_compare, tp, CONFIGS["qwen3_moe"](), state, layout, tmp_path / "hf"):
            assert num_bytes == total if tp == 1 else num_bytes < 0.4 * total


def load_and_compare(
    rank: int,
    world_size: int,
    config: GatherMoeConfig,
    state: dict[str, torch.Tensor],
    layout: ParallelLayout,
    folder: Path,
) -> int:
    """Load this rank's shards and hold every one against the whole tensor; the bytes that were read."""
    from modeling.init import build_model, cut, shard_table
    from modeling.mesh import build_mesh
    from recipe.hf.load import load_weights

    mesh = build_mesh(layout, num_key_value_heads=config.num_key_value_heads)
    model = build_model(config, mesh=mesh, seed=5)
    num_bytes = load_weights(model, config=config, mesh=mesh, folder=folder)
    table = shard_table(config, mesh)
    for name, parameter in model.named_parameters():
        shard = table.shard(name, tuple(state[name].shape), group_rank=mesh.group_rank)
        assert torch.equal(parameter.data, cut(state[name], shard)), name
    return num_bytes


@pytest.mark.slow
def test_weights_of_another_configuration_are_refused(tmp_path: Path) -> None:
    state, folder = run_export("mixtral", Case(stage=1), tmp_path / "hf"), tmp_path / "hf"
    more_experts, other_size, same = (
        tiny_config(num_experts=6, vocab_size=51),
        tiny_config(),
        tiny_config(vocab_size=51),
    )
    with pytest.raises(RankError, match=r"not those of its config.json: \d+ are missing .*, 0 are unexpected"):
        run_ranks(load_and_compare, 1, more_experts, state, ParallelLayout(), folder)
    with pytest.raises(RankError, match=r"embed_tokens.weight .* has the shape \[51, 32\], expected \[50, 32\]"):
        run_ranks(load_and_compare, 1, other_size, state, ParallelLayout(), folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(RankError, match=r"holds neither model.safetensors.index.json nor model.safetensors"):
        run_ranks(load_and_compare, 1, same, state, ParallelLayout(), folder)


@pytest.mark.slow
def test_a_stock_type_that_cannot_say_everything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"'mixtral' cannot express this model .* it is a 'gather_moe'"):
        run_export("gather_moe", Case(), tmp_path / "hf", hf_format="mixtral")


@pytest.mark.slow
@pytest.mark.parametrize("flag", [None, False, True])
def test_r_ckpt_06_zero_3_saves_a_complete_model_whatever_deepspeeds_flag_says(flag: Any, tmp_path: Path) -> None:
    zero: dict[str, Any] = {"stage": 3}
    if flag is not None:
        zero["stage3_gather_16bit_weights_on_model_save"] = flag
    flags = (
        write_inputs(tmp_path) | write_ds_config(tmp_path, zero_optimization=zero, parallel={"tp": 1}) | {"bf16": True}
    )
    run_ranks(train_on_ranks, 2, flags | {"max_steps": 2})
    tensors = read_folder(tmp_path / "run" / "checkpoints" / "latest" / "hf")
    assert len(tensors) > 20
    assert all(tensor.numel() > 0 and tensor.dtype == torch.bfloat16 for tensor in tensors.values())


@pytest.mark.slow
def test_r_ckpt_07_the_exported_model_is_the_trained_one(tmp_path: Path) -> None:
    """Trained at (2, 2), exported, opened by transformers: the same evaluation loss as the run itself reported."""
    flags = write_inputs(tmp_path) | write_ds_config(tmp_path, parallel={"tp": 2, "ep": 2}) | {"max_steps": 20}
    results, _ = run_ranks(train_on_ranks, 4, flags)[0]
    loss = run_ranks(stock_evaluation, 1, tmp_path)[0]
    assert abs(loss - results["evaluation"]["eval_loss"]) < 1e-4


def stock_evaluation(rank: int, world_size: int, folder: Path) -> float:
    """The mean loss of the validation blocks under the stock model of the last checkpoint."""
    from transformers import AutoModelForCausalLM

    import run_pretrain
    from recipe.data.prepare import prepare_data
    from recipe.shared.ranks import OneRank
    from recipe.train.prepare import data_options
    from tests.parity import referee_loss

    given = json.loads((folder / "run" / "run.json").read_text())["arguments"]
    names = ("train_file", "config_name", "cache_dir", "train_vocab_size", "block_size", "output_dir")
    request = run_pretrain.read_request([f"--{name}={given[name]}" for name in names])
    blocks = prepare_data(data_options(request.arguments), ranks=OneRank(), say=lambda line: None).validation
    model = AutoModelForCausalLM.from_pretrained(folder / "run" / "checkpoints" / "latest" / "hf").eval()
    rows = [blocks[i] for i in range(len(blocks))]
    ids, labels = (torch.stack([torch.from_numpy(row[i]) for row in rows]) for i in (0, 1))
    with torch.no_grad():
        return referee_loss(model, ids, labels, [row.document_starts for row in rows]).item()


def test_r_ckpt_09_random_states_are_restored_per_rank(tmp_path: Path) -> None:
    draws = run_ranks(draw_save_draw_restore_draw, 2, tmp_path)
    for before, after in draws:
        assert before == after
    assert draws[0][0] != draws[1][0]


def draw_save_draw_restore_draw(rank: int, world_size: int, folder: Path) -> tuple[list[float], list[float]]:
    import random

    import numpy as np

    from recipe.checkpoint.native import load_native, save_native

    def draw() -> list[float]:
        return [random.random(), float(np.random.random()), torch.rand(1).item()]

    config = tiny_config()
    engine = start_engine(config, full_state(config), Case(dp=2, stage=2))
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    save_native(engine, folder, rank_state={"mark": rank})
    before = draw()
    draw()
    assert load_native(engine, folder) == {"mark": rank}
    return before, draw()
