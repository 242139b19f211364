"""The files in examples/ work: programs and flags run at a reduced size, the script and the hostfile are parsed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import recipe.cli
import run_pretrain
from recipe.settings.arguments import parse_arguments
from tests.documents import ROOT, read_training
from tests.exports import read_export
from tests.ranks import run_ranks
from tests.training import train_on_ranks, write_inputs

EXAMPLES = ROOT / "examples"
LIMIT_S = 200


def test_every_example_is_tested() -> None:
    tested = {"chat.jinja", "chat.jsonl", "finetune_lora.py", "finetune_sft.py", "finetune_trainer.py", "hostfile"}
    tested |= {"pretrain.yaml", "two_nodes.sbatch"}
    assert {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"} == tested


def test_the_hostfile_is_read_as_two_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe.cli.main(["hosts", str(EXAMPLES / "hostfile")]) == 0
    assert "16 ranks on 2 hosts" in capsys.readouterr().out


def test_the_slurm_script_starts_what_its_files_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    script = EXAMPLES / "two_nodes.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).stderr == b""
    text = script.read_text().replace("\\\n", " ")
    command = next(line.removeprefix("srun ") for line in text.splitlines() if line.startswith("srun "))
    nodes = next(line.partition("--nodes=")[2] for line in text.splitlines() if line.startswith("#SBATCH --nodes="))
    started = read_training(command.replace("$SLURM_NNODES", nodes))
    monkeypatch.chdir(ROOT)
    arguments = parse_arguments(started.argv)
    assert started.num_ranks == arguments.expect_world_size == 16
    assert arguments.config_name == "qwen3-30b-a3b"
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 16, "LOCAL_WORLD_SIZE": 8, "GROUP_WORLD_SIZE": 2}
    for name, value in world.items():
        monkeypatch.setenv(name, str(value))
    layout = run_pretrain.read_request(started.argv).settings.layout
    assert (layout.dp, layout.tp, layout.ep) == (16, 1, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face weights that a run of ours has left."""
    place = tmp_path_factory.mktemp("trained")
    run_ranks(train_on_ranks, 2, write_inputs(place, max_position_embeddings=256))
    return place / "run" / "checkpoints" / "latest" / "hf"


@pytest.mark.slow
def test_the_conversations_train_by_the_template(folder: Path, tmp_path: Path) -> None:
    flags = write_inputs(tmp_path)
    del flags["config_name"]
    chat = {
        "model_name_or_path": folder,
        "train_file": EXAMPLES / "chat.jsonl",
        "chat_template": EXAMPLES / "chat.jinja",
    }
    sizes = {"block_size": 256, "max_steps": 2, "validation_split_percentage": 10}
    results, said = run_ranks(train_on_ranks, 2, flags | chat | sizes)[0]
    assert results["steps"] == 2
    assert any("read as chat" in line and "responses are trained on" in line for line in said)
    rows = [json.loads(line) for line in (EXAMPLES / "chat.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    template = (tmp_path / "run" / "checkpoints" / "latest" / "hf" / "chat_template.jinja").read_text()
    assert template == (EXAMPLES / "chat.jinja").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "saved"), [("finetune_trainer", "."), ("finetune_sft", "."), ("finetune_lora", "merged")]
)
def test_a_program_fine_tunes_what_was_trained(program: str, saved: str, folder: Path, tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLES / f"{program}.py"), str(folder), str(tmp_path / "out")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    start, tuned = read_export(folder), read_export(tmp_path / "out" / saved)
    assert tuned.keys() == start.keys()
    changed = [key for key, tensor in tuned.items() if not torch.equal(tensor, start[key])]
    assert any("experts" in key for key in changed)
    assert any("mlp.gate." in key for key in changed) == (program != "finetune_lora")
    if program == "finetune_lora":
        assert any("experts" in key for key in load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors"))
