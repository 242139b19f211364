"""Checkpoints as Hugging Face folders: every layout and stage writes the same, complete, loadable model."""

import ctypes
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling.config import GatherMoeConfig, file_tensors
from recipe.hf.config import choose_type
from recipe.hf.export import opening_code
from tests.clean_process import run_clean
from tests.engine_runs import Case, accumulate, make_mesh, slow, start_engine
from tests.exports import (
    CONFIGS,
    MODELING,
    export,
    export_engine,
    files_with_imports,
    open_in_clean_process,
    read_export,
    run_export,
    sample_ids,
)
from tests.hub_samples import save_tokenizer
from tests.ranks import run_ranks, with_libraries
from tests.referee import (
    FP32_ATOL,
    LOGITS_ATOL,
    Batch,
    Tensors,
    full_state,
    random_batch,
    referee_loss,
    referee_model,
    tiny_config,
)
from tests.states import assert_same
from tests.training import train_on_ranks, write_ds_config, write_inputs

NEEDED_CODE = files_with_imports("config.py", "model.py")  # of the two files that the Auto classes open
CHAT = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}"
OPEN_TOKENIZER = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, native = sys.argv[1], sys.argv[2] == "native"
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=native)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=native)
ids = tokenizer("ab", return_tensors="pt", return_token_type_ids=False)
new = model.generate(**ids, max_new_tokens=5, do_sample=False)
chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
print(json.dumps([tokenizer.decode(ids.input_ids[0]), chat, model.generation_config.eos_token_id, new.shape[1]]))
assert "modeling" not in sys.modules and "recipe" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.requirement("R-CKPT-14")
def test_automodel_opens_every_type_in_a_clean_process(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    state = run_export(name, Case(dp=2, tp=2, ep=2, stage=2), folder)
    kind, logits, generated = open_in_clean_process(folder, sample_ids(), tmp_path, native=name == "gather_moe")
    ours = referee_model(CONFIGS[name](), state, own=True).eval()
    torch.testing.assert_close(logits, ours(sample_ids()).logits, atol=LOGITS_ATOL, rtol=0)
    torch.testing.assert_close(generated, ours.generate(sample_ids()[:1, :3], max_new_tokens=5, do_sample=False))
    architectures = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "olmoe": "OlmoeForCausalLM"}
    assert kind == architectures.get(name, "GatherMoeForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [kind]
    assert opening_code(folder).endswith(", trust_remote_code=True)") == (name == "gather_moe")
    assert (config["model_type"], config["vocab_size"], config["dtype"]) == (name, 51, "float32")
    assert {"tokenizer_config.json", "generation_config.json"} <= {path.name for path in folder.iterdir()}
    assert {path.name for path in folder.glob("*.py")} == (NEEDED_CODE if name == "gather_moe" else set())


@pytest.mark.slow
@pytest.mark.requirement("R-CKPT-14")
def test_a_native_folder_is_fine_tuned_and_saved_with_its_code_in_a_clean_process(tmp_path: Path) -> None:
    folder, tuned = tmp_path / "hf", tmp_path / "tuned"
    run_export("gather_moe", Case(), folder)
    _, want, _ = open_in_clean_process(folder, sample_ids(), tmp_path, native=True, tuned=tuned)
    code = {path.name: path.read_bytes() for path in tuned.glob("*.py")}
    assert code == {name: (MODELING / name).read_bytes() for name in NEEDED_CODE}
    kind, logits, _ = open_in_clean_process(tuned, sample_ids(), tmp_path, native=True)
    assert kind == "GatherMoeForCausalLM"
    torch.testing.assert_close(logits, want)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("mixtral", Case(tp=4, ep=2)),
        slow("qwen3_moe", Case(tp=4, ep=2)),
        *(slow(name, Case(dp=2, tp=2, ep=1, stage=2)) for name in ("mixtral", "qwen3_moe")),
        *(slow(name, Case(dp=2, tp=2, ep=2, stage=3)) for name in ("mixtral", "qwen3_moe")),
    ],
    ids=str,
)
@pytest.mark.requirement("R-CKPT-05", "R-CKPT-06", "R-TP-05", "R-TP-06")
@pytest.mark.requirement("R-MOE-04")
def test_every_tensor_is_written_once_and_equal(name: str, case: Case, tmp_path: Path) -> None:
    state = run_export(name, case, tmp_path / "hf")
    want: Tensors = {}
    for key, tensor in state.items():
        for target in file_tensors(key, num_experts=CONFIGS[name]().num_experts, model_type=name):
            part = tensor if target.expert is None else tensor[target.expert]
            want[target.name] = part if target.half is None else part.chunk(2)[target.half]
    got = read_export(tmp_path / "hf")
    assert_same(got, want)


@pytest.mark.parametrize(
    ("tied", "case"),
    [
        (True, Case()),
        (True, Case(tp=2, ep=2, stage=3)),
        (True, Case(tp=4, ep=4, stage=1)),
        slow(False, Case(tp=4, ep=4, stage=1)),
    ],
)
@pytest.mark.requirement("R-CKPT-13", "R-CKPT-15")
def test_tied_tables_are_written_once_and_without_padding(tied: bool, case: Case, tmp_path: Path) -> None:
    """51 entries over 4 ranks are 52 rows in training."""
    config = tiny_config(qk_norm="head", vocab_size=51, tie_word_embeddings=tied)
    state, folder = full_state(config), tmp_path / "hf"
    run_ranks(export, case.num_ranks, config, state, case, folder)
    tables = {name: x for name, x in read_export(folder).items() if "embed_tokens" in name or "lm_head" in name}
    assert len(tables) == (1 if tied else 2)
    for name, table in tables.items():
        assert torch.equal(table, state[name])
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 51
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) == tied
    logits, ours = model(sample_ids()).logits, referee_model(config, state, own=True).eval()(sample_ids()).logits
    assert logits.shape[-1] == 51
    torch.testing.assert_close(logits, ours[..., :51], atol=FP32_ATOL, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.requirement("R-CKPT-06")
def test_zero_3_saves_a_complete_model_whatever_deepspeeds_flag_says(flag: bool, tmp_path: Path) -> None:
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": flag}
    flags = write_inputs(tmp_path) | write_ds_config(tmp_path, zero_optimization=zero, parallel={"tp": 1})
    run_ranks(train_on_ranks, 2, flags | {"bf16": True, "max_steps": 1})
    folder = tmp_path / "run" / "checkpoints" / "latest" / "hf"
    tensors = read_export(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": tokenizer.eos_token_id}
    assert len(tensors) > 20
    assert all(tensor.numel() > 0 and tensor.dtype == torch.bfloat16 for tensor in tensors.values())


@pytest.mark.slow
@pytest.mark.requirement("R-CKPT-07")
def test_the_exported_model_is_the_trained_one(tmp_path: Path) -> None:
    """Trained at (2, 2), exported, opened by transformers: the same evaluation loss as the run itself reported."""
    flags = write_inputs(tmp_path) | write_ds_config(tmp_path, parallel={"tp": 2, "ep": 2}) | {"max_steps": 4}
    results, _ = run_ranks(train_on_ranks, 4, flags)[0]
    loss = run_ranks(stock_evaluation, 1, tmp_path)[0]
    assert abs(loss - results["evaluation"]["eval_loss"]) < LOGITS_ATOL


def stock_evaluation(rank: int, world_size: int, folder: Path) -> float:
    """The mean loss of the validation blocks under the stock model of the last checkpoint."""
    import run_pretrain
    from recipe.data.prepare import prepare_data
    from recipe.shared.ranks import OneRank
    from recipe.train.prepare import data_options

    given = json.loads((folder / "run" / "run.json").read_text())["arguments"]
    names = ("train_file", "config_name", "cache_dir", "train_vocab_size", "block_size", "output_dir")
    request = run_pretrain.read_request([f"--{name}={given[name]}" for name in names])
    blocks = prepare_data(data_options(request.arguments), ranks=OneRank(), say=lambda line: None).validation
    model = AutoModelForCausalLM.from_pretrained(folder / "run" / "checkpoints" / "latest" / "hf").eval()
    rows = [blocks[i] for i in range(len(blocks))]
    ids, labels = (torch.stack([torch.from_numpy(row[i]) for row in rows]) for i in (0, 1))
    with torch.no_grad():
        return referee_loss(model, Batch(ids, labels, starts=[row.document_starts for row in rows])).item()


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": "none", "norm_topk_prob": False},
        {"qk_norm": "none", "clip_qkv": 1.0},
        {"qk_norm": "none", "mlp_only_layers": [0]},
        {"qk_norm": "head", "clip_qkv": 1.0},
        {"qk_norm": "full", "mlp_only_layers": [0]},
        {"qk_norm": "full", "head_dim": 16},
        {"num_experts": 0, "num_experts_per_tok": 0},
        {"score_function": "sigmoid"},
        {"routed_scaling_factor": 2.5},
        {"balance_bias_update_rate": 0.01},
        {"router_bias": True},
    ],
    ids=str,
)
def test_what_no_stock_type_says_is_exported_as_native(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    assert choose_type(config, hf_format="auto") == "gather_moe"
    told = rf"'mixtral' cannot express this model .*score_function='{config.score_function}', "
    told += rf"routed_scaling_factor={config.routed_scaling_factor}, router_bias={config.router_bias}\); "
    with pytest.raises(ValueError, match=told + "it is a 'gather_moe'"):
        choose_type(config, hf_format="mixtral")


def export_both(rank: int, world_size: int, config: GatherMoeConfig, state: Tensors, root: Path) -> None:
    """Take a step in bf16, so that the masters are no numbers of bf16 any more, then export in two precisions."""
    case = Case(dp=2, stage=2, bf16=True)
    engine = start_engine(config, state, case)
    accumulate(engine, random_batch(), case)
    engine.update(learning_rate=1e-3)
    for dtype in (torch.float32, torch.bfloat16):
        export_engine(engine, root / str(dtype), dtype=dtype)


@pytest.mark.requirement("R-CKPT-16")
def test_an_export_has_the_precision_asked_for_and_float32_is_the_masters(tmp_path: Path) -> None:
    config = tiny_config()
    run_ranks(export_both, 2, config, full_state(config), tmp_path)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        found[dtype] = read_export(folder)
        assert {tensor.dtype for tensor in found[dtype].values()} == {dtype}
        described = json.loads((folder / "config.json").read_text())
        assert described["dtype"] == described["torch_dtype"] == str(dtype).removeprefix("torch.")
    wide, narrow = found[torch.float32], found[torch.bfloat16]
    assert wide.keys() == narrow.keys()
    for name, tensor in wide.items():
        assert torch.equal(tensor.bfloat16(), narrow[name]), name
    moved = [name for name, tensor in wide.items() if not torch.equal(tensor, narrow[name].float())]
    assert len(moved) > len(wide) / 2, "weights that bf16 cannot hold are the optimizer's own"
    sizes = [sum(t.numel() * t.element_size() for t in tensors.values()) for tensors in (wide, narrow)]
    assert sizes[0] == 2 * sizes[1]


def export_with_tokenizer(rank: int, world_size: int, root: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(root / "tokenizer")
    config = tiny_config(vocab_size=257, eos_token_id=0)
    engine = start_engine(config, full_state(config), Case())
    for hf_format in ("native", "auto"):
        export_engine(engine, root / hf_format, hf_format=hf_format, tokenizer=tokenizer)


@pytest.mark.slow
@pytest.mark.requirement("R-CKPT-14")
def test_tokenizer_chat_template_and_generation_travel_to_a_clean_process(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer", chat_template=CHAT)
    run_ranks(export_with_tokenizer, 1, tmp_path)
    for hf_format in ("native", "auto"):
        said = run_clean(OPEN_TOKENIZER, [str(tmp_path / hf_format), hf_format], tmp_path)
        text, chat, eos_id, length = json.loads(said.splitlines()[-1])
        assert (text, chat, eos_id) == ("ab", "[user] hi", 0)
        assert 2 < length <= 7


MB = 10**6
LARGE = {"hidden_size": 512, "moe_intermediate_size": 640, "num_experts": 16, "head_dim": 64, "vocab_size": 8000}
NUM_RANKS = 4
PRECISIONS = {"float32": NUM_RANKS, "bfloat16": NUM_RANKS // 2}  # precision and ep; with the second experts are sliced
MAX_FILE_BYTES = 12 * MB
GATHERED_BYTES = 8000 * 512 * 4  # the largest tensor
SLACK_BYTES = 6 * MB
M_MMAP_THRESHOLD = -3  # of malloc.h


class Growth(NamedTuple):
    """Of one rank: peaks of resident memory above where they began, in bytes, and the bytes of its files."""

    writing_bytes: int
    checking_bytes: int
    file_bytes: list[int]


def measure(rank: int, store: Path, root: Path, answers: Any) -> None:
    """What one of four ranks needs to export the same model in two precisions and layouts."""
    import torch.distributed as dist
    from transformers.initialization import no_init_weights

    from modeling.model import GatherMoeForCausalLM
    from recipe.checkpoint.files import Files, complete
    from recipe.hf.weights import write_weights
    from recipe.shared.ranks import TorchRanks

    # Freed memory goes back at once, so that what is resident is what is in use.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    ranks = TorchRanks()
    # A small model first, so that a process that was forked has the pages of the libraries it needs.
    for config, dtype, ep in (
        (tiny_config(), "warm-up", NUM_RANKS),
        *((tiny_config(**LARGE), *precision) for precision in PRECISIONS.items()),
    ):
        mesh = make_mesh(config, Case(tp=NUM_RANKS, ep=ep))
        with no_init_weights():
            model = GatherMoeForCausalLM(config, mesh=mesh)
        for number, parameter in enumerate(model.parameters()):
            parameter.data.fill_(number)
        folder, sink = root / dtype, Files()
        ranks.barrier()
        before_bytes = reset_peak()
        options = {"dtype": getattr(torch, dtype, torch.float32), "max_file_bytes": MAX_FILE_BYTES}
        write_weights(folder, model=model, mesh=mesh, model_type="mixtral", files=sink, **options)
        writing_bytes = peak() - before_bytes
        files = [path.stat().st_size for path in folder.glob(f"part-{rank:05d}-*")]
        before_bytes = reset_peak()
        complete(sink, ranks=ranks)
        if dtype in PRECISIONS:
            answers.put((rank, dtype, Growth(writing_bytes, peak() - before_bytes, files)))
    dist.destroy_process_group()


def reset_peak() -> int:
    """Let the peak begin anew; the resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak() -> int:
    return status("VmHWM")


def status(key: str) -> int:
    (kib,) = re.findall(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    return int(kib) * 1024


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_holds_one_file_and_one_gathered_tensor(tmp_path: Path) -> None:
    """However large a model is, exporting takes memory for these alone; seen in fresh processes."""
    for dtype in ("warm-up", *PRECISIONS):
        (tmp_path / dtype).mkdir()
    context = with_libraries()
    answers = context.Queue()
    arguments = (tmp_path / "store", tmp_path, answers)
    processes = [context.Process(target=measure, args=(rank, *arguments), daemon=True) for rank in range(NUM_RANKS)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=120) for _ in range(NUM_RANKS * len(PRECISIONS))]
    for process in processes:
        process.join(30)
    for rank, dtype, growth in found:
        largest_bytes = max(growth.file_bytes)
        # A rank checks files that others wrote.
        checked_bytes = max(size for _, name, other in found if name == dtype for size in other.file_bytes)
        assert growth.writing_bytes < largest_bytes + GATHERED_BYTES + SLACK_BYTES, (rank, dtype, growth)
        assert growth.checking_bytes < checked_bytes + SLACK_BYTES, (rank, dtype, growth)
    written_bytes = {rank: sum(growth.file_bytes) for rank, dtype, growth in found if dtype == "float32"}
    assert max(written_bytes.values()) > 2 * GATHERED_BYTES + 2 * SLACK_BYTES, "or nothing would be seen"
