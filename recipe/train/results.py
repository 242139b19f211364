"""What a run has come to: the last lines that it prints, and train_results.json."""

from pathlib import Path
from typing import Any, NamedTuple

from recipe.train.metrics import EvalRecord, StepRecord
from recipe.train.run import Run


class TrainResults(NamedTuple):
    """What the last lines of a run report.

    checkpoint  of its last step; None where --save_strategy no leaves none
    hf_folder   None where no Hugging Face weights were written
    stopped     a signal ended training before its last step or its last evaluation
    """

    steps: int
    tokens: int
    last: StepRecord | None
    evaluation: EvalRecord | None
    checkpoint: Path | None
    hf_folder: Path | None
    stopped: bool


def results_dict(results: TrainResults, run: Run) -> dict[str, Any]:
    """The content of train_results.json."""
    return {
        "steps": results.steps,
        "stopped": results.stopped,
        "tokens": results.tokens,
        "train": None if results.last is None else results.last.as_dict(),
        "evaluation": None if results.evaluation is None else results.evaluation.as_dict(),
        "unigram_entropy": run.data.report["unigram_entropy_nats"],
        "checkpoint": None if results.checkpoint is None else str(results.checkpoint),
        "hf_folder": None if results.hf_folder is None else str(results.hf_folder),
    }
