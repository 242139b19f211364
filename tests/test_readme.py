"""What README shows works as it stands: its lines for AutoModel and generate, in a process without this project."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.settings.arguments import parse_arguments
from tests.ranks import run_ranks
from tests.test_r_ckpt import HIDE_PROJECT
from tests.training import train_on_ranks, write_inputs

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DEMO_FOLDER = "runs/demo/checkpoints/latest/hf"


def test_readme_opens_with_exactly_two_commands() -> None:
    lines = README.splitlines()
    assert lines[0] == "```bash"
    assert lines[1] == (
        "pip install -e . && deepspeed --num_accelerators 2 run_pretrain.py --ds_config ds_configs/cpu_demo.json"
    )
    assert lines[2] == "pip install -e '.[test]' && pytest"
    assert lines[3] == "```"


def test_every_flag_readme_uses_exists() -> None:
    block = next(block for block in re.findall(r"```bash\n(.*?)```", README, re.S) if "qwen3-30b-a3b" in block)
    words = block.replace("\\\n", " ").split()
    arguments = parse_arguments(words[words.index("run_pretrain.py") + 1 :])
    assert arguments.config_name == "qwen3-30b-a3b"
    assert arguments.block_size == 16384


@pytest.mark.slow
def test_the_lines_that_load_and_generate_run_in_a_clean_process(tmp_path: Path) -> None:
    run_ranks(train_on_ranks, 2, write_inputs(tmp_path))
    block, *_ = re.findall(r"```python\n(.*?)```", README, re.S)
    assert DEMO_FOLDER in block
    script = HIDE_PROJECT + block.replace(DEMO_FOLDER, str(tmp_path / "run" / "checkpoints" / "latest" / "hf"))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "def main():" in done.stdout
