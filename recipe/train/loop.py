"""The training loop: opened at step 0 or at a checkpoint, it takes steps, logs, evaluates and saves, up to the results.

The functions stand in the order in which a run comes to them.
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from recipe.checkpoint.commit import Save, open_saver
from recipe.checkpoint.expert_counts import write_expert_counts
from recipe.checkpoint.files import Files
from recipe.checkpoint.find import Checkpoint
from recipe.checkpoint.folders import path_of_step, step_folder
from recipe.checkpoint.native import check_replicas, save_native
from recipe.data.batches import check_batches, evaluation_batches
from recipe.data.loader import LoaderOptions, Step, StepLoader
from recipe.engine.engine import Engine
from recipe.hf.export import FOLDER, export_hugging_face
from recipe.hf.model_card import TrainingFacts
from recipe.launch.processes import find_deepspeed_command
from recipe.launch.stop import StopSignal
from recipe.settings.training import learning_rate_at
from recipe.shared.errors import CheckpointWriteError
from recipe.shared.flops import find_peak
from recipe.shared.together import on_every, on_first
from recipe.train.disk_room import CheckpointSize
from recipe.train.log import MetricsWriter, ProgressBar, describe_evaluation
from recipe.train.metrics import (
    EvalRecord,
    StepRecord,
    TrainingClock,
    combine_ranks,
    make_eval_record,
    make_step_record,
    read_peak_memory_bytes,
)
from recipe.train.prepare import Run, pick_dtype
from recipe.train.recording import StepRecorder
from recipe.train.resume import checkpoint_details, rank_state, resume


class TrainResults(NamedTuple):
    """The outcome of a run.

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
    """Return the content of train_results.json."""
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


def _open_metrics(run: Run, *, after_step: int) -> MetricsWriter | None:
    """Open metrics.jsonl where this is the first rank."""
    if run.ranks.rank > 0:
        return None
    board = "tensorboard" in run.arguments.report_to
    return MetricsWriter(run.folder.path, after_step=after_step or None, tensorboard=board, say=run.say)


class TrainingLoop:
    """Opened at step 0 or at a checkpoint; holds what changes while training."""

    def __init__(
        self, run: Run, engine: Engine, *, checkpoint: Checkpoint | None, checkpoint_size: CheckpointSize
    ) -> None:
        """Resume from the checkpoint, if any, open the logs, and find the speed that MFU is relative to. Collective.

        `checkpoint_size` is what a checkpoint to be saved will take. The seconds of the first log line count from here.

        ValueError where the checkpoint is of another set-up, or the run has no such steps as --profile_steps asks for,
        or metrics.jsonl is not a log.
        """
        self.run, self._engine, self._size = run, engine, checkpoint_size
        self._progress = progress = resume(run, engine, checkpoint)
        self._recorder = StepRecorder(run, engine, after_step=progress.step)
        self._writer = on_every(lambda: _open_metrics(run, after_step=progress.step), ranks=run.ranks)
        # All ranks of a machine measure at once, so that the sum is what they can do together.
        run.ranks.barrier()
        peak = find_peak(run.world.device, precision=run.settings.precision)
        self._peak_flops_per_s = math.fsum(run.ranks.gather(peak.flops_per_s))
        run.say(f"MFU is relative to {self._peak_flops_per_s / 1e12:.3f} TFLOP/s ({peak.source}, all ranks)")
        self._saves = run.arguments.save_strategy != "no"
        self._last: StepRecord | None = None
        self._evaluation: EvalRecord | None = None
        self._bar = ProgressBar(run.max_steps, first_step=progress.step, show=run.ranks.rank == 0, say=run.say)
        self._stop = StopSignal(run.ranks, command=find_deepspeed_command())
        self._clock = TrainingClock(already_s=progress.elapsed_s)

    def train(self) -> TrainResults:
        """Run to the last step, evaluate, and save; or, after SIGTERM to any rank, to the end of a step, and save."""
        steps = self._loader().steps(self._progress.position)
        try:
            saver = open_saver(self.run.ranks, background=self.run.arguments.async_save)
            with self._stop, self._recorder, saver as self._saver:
                self._take_steps(steps)
                self._finish()
        finally:
            steps.close()  # type: ignore[attr-defined]
            self._bar.close()
            if self._writer is not None:
                self._writer.close()
        return self._results()

    def _loader(self) -> StepLoader:
        run = self.run
        options = LoaderOptions(
            num_sequences=run.settings.num_sequences,
            seed=run.arguments.seed,
            dp=run.mesh.layout.dp,
            dp_rank=run.mesh.dp_rank,
            accumulation=run.settings.accumulation,
            num_workers=run.arguments.dataloader_num_workers,
        )
        return StepLoader(run.data.train.first(run.num_train_blocks), options=options, say=self._bar.say)

    def _take_steps(self, steps: Iterator[Step]) -> None:
        """Take steps up to the last one, or until the ranks agree to stop."""
        run, progress, first = self.run, self._progress, True
        while progress.step < run.max_steps and not self._stop.agreed:
            self._recorder.begin(progress.step + 1)
            step = next(steps)
            if first:
                check_batches(step.micro_batches, ranks=run.ranks, tp=run.mesh.layout.tp)
                first = False
            self._stop.watch()
            self._saver.watch()
            grad_norm = self._take(step)
            self._recorder.end(progress.step)
            self._bar.advance()
            is_last = progress.step == run.max_steps
            if progress.step % run.arguments.logging_steps == 0 or is_last:
                self._log(grad_norm)
            self._between_steps(is_last=is_last)

    def _take(self, step: Step) -> float:
        """Take one optimizer step and return the gradient norm."""
        engine, progress = self._engine, self._progress
        progress.step += 1
        learning_rate = self._learning_rate()
        counts = engine.count(step.micro_batches)
        sums = engine.accumulate(step.micro_batches, counts=counts)
        grad_norm = engine.update(learning_rate=learning_rate)
        progress.position = step.position
        progress.expert_counts.add(sums.expert_counts)
        progress.meter.add(
            sums,
            num_targets=sum(batch.num_targets for batch in step.micro_batches),
            num_tokens=sum(batch.num_tokens for batch in step.micro_batches),
            squared_lengths=sum(batch.squared_lengths for batch in step.micro_batches),
        )
        if counts.num_targets == 0:
            self._bar.say(f"step {progress.step}: an empty step, no token of its batch has a target")
        if not math.isfinite(grad_norm):
            self._bar.say(
                f"step {progress.step}: the gradient norm is {grad_norm}; {engine.skipped_steps} steps skipped so far"
            )
        return grad_norm

    def _learning_rate(self) -> float:
        settings = self.run.settings
        return learning_rate_at(self._progress.step, schedule=settings.schedule, peak=settings.optimizer.learning_rate)

    def _log(self, grad_norm: float) -> None:
        """Combine the sums of all ranks since the last log line into the next one. Collective."""
        run, progress = self.run, self._progress
        totals = progress.meter.take(peak_memory_bytes=read_peak_memory_bytes(run.world.device))
        combined = combine_ranks(run.ranks.gather(totals), tp=run.mesh.layout.tp)
        self._last = make_step_record(
            combined,
            step=progress.step,
            lr=self._learning_rate(),
            grad_norm=grad_norm,
            tokens=self._tokens(),
            skipped_steps=self._engine.skipped_steps,
            elapsed_s=self._clock.lap(),
            sizes=run.config.sizes,
            peak_flops_per_s=self._peak_flops_per_s,
        )
        self._bar.show(self._last)
        self._write(self._last)

    def _tokens(self) -> int:
        return self._progress.position * self.run.settings.block_size

    def _write(self, record: StepRecord | EvalRecord) -> None:
        if self._writer is not None:
            self._writer.write(record)

    def _between_steps(self, *, is_last: bool) -> None:
        """Do what is due after a step; after the last one, evaluating and saving are left to `_finish`."""
        arguments, step = self.run.arguments, self._progress.step
        if self._stop.ask():
            return
        if _is_due(step, every=arguments.check_replicas_steps):
            check_replicas(self._engine, self.run.ranks)
        if is_last:
            return
        self._saver.check()
        with self._clock.paused():
            if _is_due(step, every=arguments.eval_steps):
                self._evaluate()
            if self._saves and not self._stop.agreed and _is_due(step, every=arguments.save_steps):
                self._save(is_last=False)
                self._stop.ask()  # saving may have taken long

    def _evaluate(self) -> None:
        run, layout = self.run, self.run.mesh.layout
        blocks, limit = run.data.validation, run.arguments.max_eval_samples
        blocks = blocks if limit is None else blocks.first(limit)
        if not len(blocks):
            return
        num_sequences = run.arguments.per_device_eval_batch_size or run.settings.num_sequences
        batches = evaluation_batches(blocks, num_sequences=num_sequences, dp=layout.dp, dp_rank=run.mesh.dp_rank)
        result = self._engine.evaluate(self._stop.until(batches))
        if self._stop.agreed:
            return
        self._evaluation = make_eval_record(result.nll, num_targets=result.num_targets, step=self._progress.step)
        self._bar.say(describe_evaluation(self._evaluation))
        self._write(self._evaluation)

    def _save(self, *, is_last: bool) -> None:
        run, arguments, progress = self.run, self.run.arguments, self._progress
        with_hf = arguments.hf_save == "every" or (arguments.hf_save == "last" and is_last)
        save = Save(
            root=run.folder.checkpoints,
            step=progress.step,
            keep=arguments.save_total_limit,
            details=checkpoint_details(run, position=progress.position),
            expected_bytes=self._size.total_bytes(with_hf=with_hf),
        )
        self._saver.save(save, write=partial(self._write_files, with_hf=with_hf))
        progress.saved_step = progress.step

    def _write_files(self, folder: Path, files: Files, *, with_hf: bool) -> None:
        """Give this rank's files of a checkpoint to `files`. Collective."""
        run, progress = self.run, self._progress
        state = rank_state(progress, self._engine, elapsed_s=self._clock.elapsed_s())
        counts = progress.expert_counts.save(progress.step, ranks=run.ranks, tp=run.mesh.layout.tp)

        def write() -> None:
            save_native(self._engine, folder, rank_state=state, files=files)
            if counts is not None and run.ranks.rank == 0:
                write_expert_counts(folder, counts)

        # Whoever fails here must not leave the others in the export's collectives.
        on_every(write, ranks=run.ranks)
        if with_hf:
            export_hugging_face(
                self._engine,
                folder / FOLDER,
                tokenizer=run.data.tokenizer,
                hf_format=run.arguments.hf_format,
                dtype=pick_dtype(run.arguments.hf_dtype, precision=run.settings.precision),
                ranks=run.ranks,
                files=files,
                facts=self._facts(),
            )

    def _facts(self) -> TrainingFacts:
        """Return what the model card of a checkpoint says of the run so far."""
        run = self.run
        return TrainingFacts(
            arguments=run.arguments,
            layout=f"{run.mesh.layout}, ZeRO-{run.settings.zero_stage}, {run.settings.precision}",
            step=self._progress.step,
            tokens=self._tokens(),
            loss=None if self._last is None else self._last.loss,
            eval_loss=None if self._evaluation is None else self._evaluation.eval_loss,
        )

    def _finish(self) -> None:
        """Evaluate, unless the run is stopped, and save what has not been saved."""
        bar, step = self._bar, self._progress.step
        with self._clock.paused():
            if not self._stop.agreed:
                self._evaluate()
            if self._stop.agreed:
                what = "saving" if self._saves else "not saving"
                bar.say(f"told to stop: {what} step {step}, then leaving")
            is_last, failure = not self._stop.agreed, None
            try:
                self._saver.wait()
            except CheckpointWriteError as error:
                bar.say(f"a save in the background has failed; trying step {step} before leaving with its error")
                failure, self._progress.saved_step = error, None
            try:
                if self._saves and self._lacks_checkpoint(is_last=is_last):
                    self._save(is_last=is_last)
                self._saver.wait()
            except CheckpointWriteError as error:
                if failure is None:
                    raise
                raise failure from error
            if failure is not None:
                raise failure

    def _lacks_checkpoint(self, *, is_last: bool) -> bool:
        """Return whether the run has to be saved as it is now; a checkpoint that it resumed from may do. Collective.

        A folder named like this step proves nothing: it may be broken, or of another run of training from an older
        checkpoint.
        """
        run, progress = self.run, self._progress
        if progress.step != progress.saved_step:
            return True
        hf = step_folder(run.folder.checkpoints, progress.step) / FOLDER
        wants_hf = is_last and run.arguments.hf_save != "never"
        return wants_hf and not on_first(hf.is_dir, ranks=run.ranks)

    def _results(self) -> TrainResults:
        progress = self._progress

        def find() -> tuple[Path | None, Path | None]:
            if progress.step != progress.saved_step:
                return None, None
            checkpoint = path_of_step(self.run.folder.checkpoints, progress.step)
            return checkpoint, checkpoint / FOLDER if (checkpoint / FOLDER).is_dir() else None

        checkpoint, hf_folder = on_first(find, ranks=self.run.ranks)
        return TrainResults(
            steps=progress.step,
            tokens=self._tokens(),
            last=self._last,
            evaluation=self._evaluation,
            checkpoint=checkpoint,
            hf_folder=hf_folder,
            stopped=self._stop.agreed,
        )


def _is_due(step: int, *, every: int) -> bool:
    return every > 0 and step % every == 0
