"""What README shows works as it stands: its lines for AutoModel and generate, in a process without this project."""

import re
from pathlib import Path

import pytest

from recipe.settings.arguments import parse_arguments
from tests.clean_process import run_clean
from tests.ranks import run_ranks
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
    script = block.replace(DEMO_FOLDER, str(tmp_path / "run" / "checkpoints" / "latest" / "hf"))
    assert "def main():" in run_clean(script, [], tmp_path, cold=True)
