"""The training loop: steps, log lines, evaluations and checkpoints, from any checkpointed step to the last one."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from modeling.placement import place_experts
from recipe.checkpoint.background import open_saver
from recipe.checkpoint.commit import Save
from recipe.checkpoint.count_experts import ExpertCounter
from recipe.checkpoint.elastic import resume_training
from recipe.checkpoint.expert_counts import NAME as COUNTS_NAME
from recipe.checkpoint.expert_counts import ExpertCounts, read_expert_counts, write_expert_counts
from recipe.checkpoint.files import Files
from recipe.checkpoint.find import Checkpoint
from recipe.checkpoint.folders import path_of_step, step_folder
from recipe.checkpoint.native import save_native
from recipe.checkpoint.size_estimate import CheckpointSize
from recipe.data.batches import evaluation_batches
from recipe.data.check_batches import check_batches
from recipe.data.loader import LoaderOptions, Step, StepLoader
from recipe.engine.engine import Engine
from recipe.hf.export import FOLDER, ExportOptions, export_hugging_face
from recipe.hf.model_card import TrainingFacts
from recipe.launch.processes import find_deepspeed_command
from recipe.launch.stop import StopSignal
from recipe.settings.schedule import learning_rate_at
from recipe.shared.errors import CheckpointWriteError
from recipe.shared.flops import find_peak
from recipe.shared.together import on_every, on_first
from recipe.train.metrics import (
    EvalRecord,
    StepMeter,
    StepRecord,
    StepState,
    TrainingClock,
    combine_ranks,
    make_eval_record,
    make_step_record,
    read_peak_memory_bytes,
)
from recipe.train.move_experts import move_experts
from recipe.train.recording import StepRecorder
from recipe.train.records import MetricsWriter, ProgressBar, describe_evaluation
from recipe.train.replicas import check_replicas
from recipe.train.results import TrainResults
from recipe.train.run import Run, check_resumable, checkpoint_details, merge_rank_states, pick_dtype


class TrainingLoop:
    """Holds what changes while training: the step, the position in the data, and the sums since the last log line."""

    def __init__(
        self, run: Run, engine: Engine, *, checkpoint: Checkpoint | None, checkpoint_size: CheckpointSize
    ) -> None:
        """`checkpoint` is what training goes on from, `checkpoint_size` what one to be saved will take."""
        self.run, self._engine, self._size = run, engine, checkpoint_size
        self._saves = run.arguments.save_strategy != "no"
        self._meter = StepMeter()
        self._step = self._position = 0
        self._already_s = 0.0  # training time behind the sums of an unfinished log line
        self._expert_counts = ExpertCounter(step=0, saved=None)
        self._saved_step: int | None = None  # of the last checkpoint that this run wrote or, as its own, went on from
        self._last: StepRecord | None = None
        self._evaluation: EvalRecord | None = None
        self._stop = StopSignal(run.ranks, command=find_deepspeed_command())
        if checkpoint is not None:
            check_resumable(run, checkpoint)
            state = resume_training(
                engine,
                checkpoint,
                details=checkpoint_details(run, position=0),
                seed=run.arguments.seed,
                merge=merge_rank_states,
                ranks=run.ranks,
                say=run.say,
            )
            self._meter.restore(state["meter"], device=engine.ds.device)
            self._already_s = state["elapsed_s"]
            engine.restore_loads(state["loads"])
            self._step, self._position = checkpoint.step, checkpoint.details["position"]
            self._look_into(checkpoint)
            if run.arguments.place_experts:
                self._place_experts(checkpoint.folder)
        self._recorder = StepRecorder(run, engine, after_step=self._step)
        self._writer = self._open_metrics()
        # All ranks of a machine measure at once, so that the sum is what they can do together.
        run.ranks.barrier()
        peak = find_peak(run.world.device, precision=run.settings.precision)
        self._peak_flops_per_s = math.fsum(run.ranks.gather(peak.flops_per_s))
        run.say(f"MFU is relative to {self._peak_flops_per_s / 1e12:.3f} TFLOP/s ({peak.source}, all ranks)")

    def train(self) -> TrainResults:
        """Run to the last step, evaluate, and save; or, after SIGTERM to any rank, to the end of a step, and save."""
        max_steps = self.run.settings.schedule.max_steps
        assert max_steps is not None
        bar = ProgressBar(max_steps, first_step=self._step, show=self.run.ranks.rank == 0, say=self.run.say)
        writer = self._writer
        steps = self._loader(bar).steps(self._position)
        self._clock = TrainingClock(already_s=self._already_s)
        try:
            saver = open_saver(self.run.ranks, background=self.run.arguments.async_save)
            with self._stop, self._recorder, saver as self._saver:
                self._go_through(steps, bar, writer, max_steps=max_steps)
                self._finish(bar, writer)
        finally:
            steps.close()  # type: ignore[attr-defined]
            bar.close()
            if writer is not None:
                writer.close()
        return self._results()

    def _go_through(
        self, steps: Iterator[Step], bar: ProgressBar, writer: MetricsWriter | None, *, max_steps: int
    ) -> None:
        """Take steps up to the last one, or until the ranks agree to stop."""
        run, first = self.run, True
        while self._step < max_steps and not self._stop.agreed:
            self._recorder.begin(self._step + 1)
            step = next(steps)
            if first:
                check_batches(step.micro_batches, ranks=run.ranks, tp=run.mesh.layout.tp)
                first = False
            self._stop.watch()
            self._saver.watch()
            grad_norm = self._take(step, bar)
            self._recorder.end(self._step)
            bar.advance()
            if self._step % run.arguments.logging_steps == 0 or self._step == max_steps:
                self._last = self._log(grad_norm)
                bar.show(self._last)
                if writer is not None:
                    writer.write(self._last)
            self._between_steps(bar, writer, is_last=self._step == max_steps)

    def _take(self, step: Step, bar: ProgressBar) -> float:
        """One optimizer step."""
        run, engine = self.run, self._engine
        self._step += 1
        counts = engine.count(step.micro_batches)
        sums = engine.accumulate(step.micro_batches, counts=counts)
        schedule, peak = run.settings.schedule, run.settings.optimizer.learning_rate
        grad_norm = engine.update(learning_rate=learning_rate_at(self._step, schedule=schedule, peak=peak))
        self._position = step.position
        self._expert_counts.add(sums.expert_counts)
        self._meter.add(
            sums,
            num_targets=sum(batch.num_targets for batch in step.micro_batches),
            num_tokens=sum(batch.num_tokens for batch in step.micro_batches),
            squared_lengths=sum(batch.squared_lengths for batch in step.micro_batches),
        )
        if counts.num_targets == 0:
            bar.say(f"step {self._step}: an empty step, no token of its batch has a target")
        if not math.isfinite(grad_norm):
            bar.say(f"step {self._step}: the gradient norm is {grad_norm}; {engine.skipped_steps} steps skipped so far")
        return grad_norm

    def _log(self, grad_norm: float) -> StepRecord:
        """Combine the sums of all ranks since the last line. Collective."""
        run = self.run
        totals = self._meter.take(peak_memory_bytes=read_peak_memory_bytes(run.world.device))
        combined = combine_ranks(run.ranks.gather(totals), tp=run.mesh.layout.tp)
        schedule, peak = run.settings.schedule, run.settings.optimizer.learning_rate
        state = StepState(
            step=self._step,
            lr=learning_rate_at(self._step, schedule=schedule, peak=peak),
            grad_norm=grad_norm,
            tokens=self._position * run.settings.block_size,
            skipped_steps=self._engine.skipped_steps,
            elapsed_s=self._clock.lap(),
        )
        return make_step_record(combined, state=state, sizes=run.config.sizes, peak_flops_per_s=self._peak_flops_per_s)

    def _look_into(self, checkpoint: Checkpoint) -> None:
        """Whether the checkpoint that was loaded is one of this run, and what it says of the experts. Collective."""
        own, counts = step_folder(self.run.folder.checkpoints, checkpoint.step), checkpoint.folder / COUNTS_NAME

        def look() -> tuple[bool, ExpertCounts | None]:
            is_own = checkpoint.folder.resolve() == own.resolve()
            return is_own, read_expert_counts(counts) if counts.exists() else None

        is_own, saved = on_first(look, ranks=self.run.ranks)
        self._saved_step = checkpoint.step if is_own else None
        self._expert_counts = ExpertCounter(step=checkpoint.step, saved=saved)

    def _place_experts(self, folder: Path) -> None:
        """Even the ranks' work out by the loads in a checkpoint that has just been loaded. Collective."""
        counts = read_expert_counts(folder / COUNTS_NAME)
        placements = [place_experts(layer, num_ranks=self.run.mesh.layout.ep) for layer in counts.counts]
        numbers = [placement.numbers for placement in placements]
        move_experts(self._engine, numbers)
        self._meter.renumber_experts(numbers)
        self._expert_counts.renumber(numbers)
        before, after = (max(values) for values in zip(*((p.rho_now, p.rho) for p in placements), strict=True))
        self.run.say(
            f"experts placed by the routing of steps {counts.first_step} to {counts.last_step}: in the most uneven "
            f"layer the busiest rank's load over the mean goes from {before:.3f} to {after:.3f}"
        )

    def _between_steps(self, bar: ProgressBar, writer: MetricsWriter | None, *, is_last: bool) -> None:
        """What is due after a step that is not the last one."""
        arguments = self.run.arguments
        if self._stop.ask():
            return
        if _is_due(self._step, every=arguments.check_replicas_steps):
            check_replicas(self._engine, self.run.ranks)
        if is_last:
            return
        self._saver.check()
        with self._clock.paused():
            if _is_due(self._step, every=arguments.eval_steps):
                self._evaluate(bar, writer)
            if self._saves and not self._stop.agreed and _is_due(self._step, every=arguments.save_steps):
                self._save(is_last=False)
                self._stop.ask()  # saving may have taken long

    def _finish(self, bar: ProgressBar, writer: MetricsWriter | None) -> None:
        """Evaluate, unless the run is stopped, and save what has not been saved."""
        with self._clock.paused():
            if not self._stop.agreed:
                self._evaluate(bar, writer)
            if self._stop.agreed:
                what = "saving" if self._saves else "not saving"
                bar.say(f"told to stop: {what} step {self._step}, then leaving")
            is_last, failure = not self._stop.agreed, None
            try:
                self._saver.wait()
            except CheckpointWriteError as error:
                bar.say(f"a save in the background has failed; trying step {self._step} before leaving with its error")
                failure, self._saved_step = error, None
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
        """Whether the run has to be saved as it is now; one that was complete when it was resumed may not. Collective.

        A folder of this step proves nothing: it may be broken, or what training came to on another way here.
        """
        run = self.run
        if self._step != self._saved_step:
            return True
        hf = step_folder(run.folder.checkpoints, self._step) / FOLDER
        wants_hf = is_last and run.arguments.hf_save != "never"
        return wants_hf and not on_first(hf.is_dir, ranks=run.ranks)

    def _evaluate(self, bar: ProgressBar, writer: MetricsWriter | None) -> None:
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
        self._evaluation = make_eval_record(result.nll, num_targets=result.num_targets, step=self._step)
        bar.say(describe_evaluation(self._evaluation))
        if writer is not None:
            writer.write(self._evaluation)

    def _save(self, *, is_last: bool) -> None:
        run, arguments = self.run, self.run.arguments
        with_hf = arguments.hf_save == "every" or (arguments.hf_save == "last" and is_last)
        save = Save(
            root=run.folder.checkpoints,
            step=self._step,
            keep=arguments.save_total_limit,
            details=checkpoint_details(run, position=self._position),
            expected_bytes=self._size.total_bytes(with_hf=with_hf),
        )
        self._saver.save(save, write=partial(self._write_files, with_hf=with_hf))
        self._saved_step = self._step

    def _write_files(self, folder: Path, files: Files, *, with_hf: bool) -> None:
        run = self.run
        rank_state = {
            "meter": self._meter.state(),
            "elapsed_s": self._clock.elapsed_s(),
            "loads": self._engine.loads(),
        }
        counts = self._expert_counts.save(self._step, ranks=run.ranks, tp=run.mesh.layout.tp)

        def write() -> None:
            save_native(self._engine, folder, rank_state=rank_state, files=files)
            if counts is not None and run.ranks.rank == 0:
                write_expert_counts(folder, counts.counts, first_step=counts.first_step, last_step=counts.last_step)

        # Whoever fails here must not leave the others in the export's collectives.
        on_every(write, ranks=run.ranks)
        if with_hf:
            dtype = pick_dtype(run.arguments.hf_dtype, precision=run.settings.precision)
            options = ExportOptions(run.arguments.hf_format, dtype, facts=self._facts())
            export_hugging_face(
                self._engine,
                folder / FOLDER,
                tokenizer=run.data.tokenizer,
                options=options,
                ranks=run.ranks,
                files=files,
            )

    def _facts(self) -> TrainingFacts:
        """What the model card of a checkpoint says of the run so far."""
        run = self.run
        return TrainingFacts(
            arguments=run.arguments,
            layout=f"{run.mesh.layout}, ZeRO-{run.settings.zero_stage}, {run.settings.precision}",
            step=self._step,
            tokens=self._position * run.settings.block_size,
            loss=None if self._last is None else self._last.loss,
            eval_loss=None if self._evaluation is None else self._evaluation.eval_loss,
        )

    def _loader(self, bar: ProgressBar) -> StepLoader:
        run = self.run
        options = LoaderOptions(
            num_sequences=run.settings.num_sequences,
            seed=run.arguments.seed,
            dp=run.mesh.layout.dp,
            dp_rank=run.mesh.dp_rank,
            accumulation=run.settings.accumulation,
            num_workers=run.arguments.dataloader_num_workers,
        )
        return StepLoader(run.data.train.first(run.num_train_blocks), options=options, say=bar.say)

    def _open_metrics(self) -> MetricsWriter | None:
        """On the first rank; where it cannot be opened there, no rank goes on."""
        run = self.run

        def open_writer() -> MetricsWriter | None:
            if run.ranks.rank > 0:
                return None
            return MetricsWriter(
                run.folder.path,
                after_step=self._step or None,
                tensorboard="tensorboard" in run.arguments.report_to,
                say=run.say,
            )

        return on_every(open_writer, ranks=run.ranks)

    def _results(self) -> TrainResults:
        def find() -> tuple[Path | None, Path | None]:
            if self._step != self._saved_step:
                return None, None
            checkpoint = path_of_step(self.run.folder.checkpoints, self._step)
            return checkpoint, checkpoint / FOLDER if (checkpoint / FOLDER).is_dir() else None

        checkpoint, hf_folder = on_first(find, ranks=self.run.ranks)
        return TrainResults(
            steps=self._step,
            tokens=self._position * self.run.settings.block_size,
            last=self._last,
            evaluation=self._evaluation,
            checkpoint=checkpoint,
            hf_folder=hf_folder,
            stopped=self._stop.agreed,
        )


def _is_due(step: int, *, every: int) -> bool:
    return every > 0 and step % every == 0
