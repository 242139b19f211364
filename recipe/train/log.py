"""Where a run's records go: the progress bar, metrics.jsonl and TensorBoard."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipe.shared.json_files import json_text, replace_text
from recipe.shared.units import GIB
from recipe.train.metrics import EvalRecord, StepRecord


class MetricsWriter:
    """Appends one JSON line per record to `folder/metrics.jsonl`, and to TensorBoard where asked. For rank 0 only.

    `after_step` is the step a run resumes from: what an earlier run logged beyond it is dropped, since those steps
    are run again. None starts a new file.
    """

    def __init__(self, folder: Path, *, after_step: int | None, tensorboard: bool, say: Callable[[str], None]) -> None:
        self._path = folder / "metrics.jsonl"
        if after_step is None:
            self._path.unlink(missing_ok=True)
        elif self._path.exists():
            _drop_lines_after(self._path, step=after_step, say=say)
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # Readers drop what an earlier writer logged from this step on.
            purge_step = None if after_step is None else after_step + 1
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, record: StepRecord | EvalRecord) -> None:
        """Write the record; it is in the file, for other programs to read, when this returns."""
        values = record.as_dict()
        self._file.write(json_text(values) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in _scalars(values):
                self._board.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


class ProgressBar:
    """Shows a bar over optimizer steps with loss, tokens per second, memory and time left; nothing without `show`."""

    def __init__(self, max_steps: int, *, first_step: int, show: bool, say: Callable[[str], None] = print) -> None:
        self._say = say
        self._bar = tqdm(total=max_steps, initial=first_step, disable=not show, unit="step", dynamic_ncols=True)

    def advance(self) -> None:
        self._bar.update(1)

    def show(self, record: StepRecord) -> None:
        """Show the record's numbers after the bar."""
        self._bar.set_postfix_str(describe_step(record))

    def say(self, text: str) -> None:
        """Print a line above the bar; nothing where the bar is not shown."""
        if not self._bar.disable:
            with tqdm.external_write_mode():
                self._say(text)

    def close(self) -> None:
        self._bar.close()


def describe_step(record: StepRecord) -> str:
    """Return the part of a record that fits after a progress bar; of the MoE layers the worst one's values."""
    loss = "none" if record.loss is None else f"{record.loss:.4f}"
    text = f"loss {loss}, {record.tokens_per_s:,.0f} tokens/s, {record.peak_memory_bytes / GIB:.2f} GiB"
    if record.rho is None or record.dead_experts is None or record.router_entropy is None:
        return text
    return (
        f"{text}, rho {max(record.rho):.2f}, {sum(record.dead_experts)} dead experts, "
        f"router entropy {min(record.router_entropy):.2f}"
    )


def describe_evaluation(record: EvalRecord) -> str:
    if record.eval_loss is None or record.perplexity is None:
        return f"step {record.step}: nothing to evaluate"
    return f"step {record.step}: eval loss {record.eval_loss:.4f}, perplexity {record.perplexity:.2f}"


def _drop_lines_after(path: Path, *, step: int, say: Callable[[str], None]) -> None:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    cut_short = bool(lines) and not lines[-1].endswith("\n")  # the writer was killed in the middle of a line
    kept = []
    for number, line in enumerate(lines[:-1] if cut_short else lines, start=1):
        try:
            line_step = json.loads(line)["step"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} line {number} is not a record of a run: {line.strip()!r}; move the file away"
            ) from error
        if line_step <= step:
            kept.append(line)
    if len(kept) < len(lines):
        replace_text(path, "".join(kept))
        say(f"{path}: dropped {len(lines) - len(kept)} lines logged after step {step}, which are run again")


def tensorboard_faults() -> list[str]:
    """Return what keeps `--report_to tensorboard` from working here, to be said before a run touches anything."""
    if importlib.util.find_spec("tensorboard") is not None:
        return []
    return ["--report_to tensorboard needs the tensorboard package: pip install 'gather-moe[tensorboard]'"]


def _scalars(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if name == "step" or value is None:
            continue
        if isinstance(value, tuple):
            yield from ((f"{name}/moe_layer_{index}", item) for index, item in enumerate(value))
        else:
            yield name, value
