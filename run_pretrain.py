"""Pretrain a Mixture-of-Experts language model: `deepspeed run_pretrain.py --ds_config ds_configs/NAME.json`."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.launch.start import check_world_size, rank_from, read_world, start_ranks, stop_ranks
from recipe.launch.stop import EarlyEnd
from recipe.settings.arguments import parse_arguments
from recipe.settings.model import read_model, sizes_of
from recipe.shared.errors import COMPLETE, STOPPED, STOPPED_EARLY, USER_ERROR, RanksFailedError, RunError

if TYPE_CHECKING:
    from recipe.train.loop import TrainingLoop, TrainResults
    from recipe.train.prepare import Request

GRACE_S = 15.0

Say = Callable[[str], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the whole training and return the exit code, one of recipe/shared/errors.py.

    What the user can mend ends in one message, everything else in a traceback.
    """
    from recipe.settings.model_source import HubError

    rank = rank_from(os.environ)
    say: Say = print_line if rank == 0 else lambda line: None
    with ExitStack() as stack:
        with EarlyEnd(say, code=STOPPED_EARLY):
            try:
                request = read_request(argv)
            except ValueError as error:
                # Before the ranks meet, all of a node see the same, but each hears for itself what the hub says.
                return fail(error, rank=rank_from(os.environ, "LOCAL_RANK"), only_first=not isinstance(error, HubError))
            for note in request.settings.notes:
                say(f"settings: {note}")
            stack.callback(stop_ranks, request.world)
            try:
                join_ranks(request, say)
                loop = prepare(request, stack, say)
            except (ValueError, ImportError, RunError) as error:
                return fail(error, rank=rank)
        try:
            results = loop.train()
            if rank == 0:
                report(results, loop)
            upload(results, loop, say)
        except RunError as error:
            return fail(error, rank=rank)
        # The launcher ends all ranks as soon as one has ended.
        loop.run.ranks.barrier()
    return STOPPED if results.stopped else COMPLETE


def read_request(argv: Sequence[str] | None) -> "Request":
    """Settle what the user said: flags, DeepSpeed JSON and model, for the ranks that were started."""
    arguments = parse_arguments(argv)
    world = read_world(os.environ)
    check_world_size(world, expected=arguments.expect_world_size)
    model = read_model(arguments)

    from recipe.train.prepare import request_faults, settle_request

    return settle_request(arguments, world=world, model=model, faults=request_faults(arguments, model.kwargs))


def join_ranks(request: "Request", say: Say) -> None:
    """Make this process fit to be one of the ranks, and meet the others."""
    from recipe.train.prepare import choose_threads, quieten_libraries

    quieten_libraries(is_first=request.world.rank == 0)
    choose_threads(request)
    start_ranks(request.world, environ=os.environ, say=say)


def prepare(request: "Request", stack: ExitStack, say: Say) -> "TrainingLoop":
    """Claim the output folder, find the checkpoint, make data, model and engine, open training. The ranks have met."""
    import torch.distributed as dist

    from modeling.mesh import build_mesh
    from recipe.checkpoint.find import find_checkpoint
    from recipe.checkpoint.run_folder import claim_run_folder
    from recipe.engine.graphs import remove_graphs
    from recipe.shared.json_files import write_json
    from recipe.shared.ranks import TorchRanks
    from recipe.train.disk_room import check_disk_room
    from recipe.train.loop import TrainingLoop
    from recipe.train.prepare import describe_run, prepare_engine, prepare_run

    arguments, settings = request.arguments, request.settings
    mesh = build_mesh(settings.layout, num_key_value_heads=sizes_of(request.model).num_key_value_heads)
    say(f"layout: {mesh.layout}, {settings.precision}, ZeRO-{settings.zero_stage}")
    # Decisions between hosts have a group of their own, also where tensors travel by NCCL.
    ranks = TorchRanks(dist.new_group(backend="gloo"))

    output_dir, resume = Path(arguments.output_dir or ""), arguments.resume_from_checkpoint
    folder = claim_run_folder(output_dir, ranks=ranks, resume=resume, overwrite=arguments.overwrite_output_dir)
    stack.enter_context(folder)
    checkpoint = find_checkpoint(folder.checkpoints, resume=resume, ranks=ranks, say=say)
    run = prepare_run(request, mesh=mesh, ranks=ranks, folder=folder, say=say)
    engine = prepare_engine(run)
    stack.callback(remove_graphs, engine.model)
    size = check_disk_room(run, engine, checkpoint=checkpoint)
    folder.discard_old_run(ranks=ranks, say=say)  # not before the new one is known to start
    if ranks.rank == 0:
        write_json(output_dir / "run.json", describe_run(run))
    return TrainingLoop(run, engine, checkpoint=checkpoint, checkpoint_size=size)


def report(results: "TrainResults", loop: "TrainingLoop") -> None:
    """Write train_results.json and print how good the model is, against what, and the one line that opens it."""
    from recipe.hf.export import opening_code
    from recipe.shared.json_files import write_json
    from recipe.train.loop import results_dict

    run = loop.run
    write_json(run.folder.path / "train_results.json", results_dict(results, run))
    last = results.evaluation
    if last is not None and last.eval_loss is not None:
        which = "final eval loss" if last.step == results.steps else f"at step {last.step} eval loss"
        print_line(
            f"{which} {last.eval_loss:.4f} nats per token; "
            f"guessing by token frequency alone: {run.data.report['unigram_entropy_nats']:.4f}"
        )
    if results.stopped and results.checkpoint is None:
        print_line("nothing was saved, as --save_strategy no asks")
    elif results.stopped:
        print_line(f"{results.checkpoint} is of step {results.steps}; go on with --resume_from_checkpoint auto")
    elif results.hf_folder is not None:
        print_line("open it with:")
        code = f"from transformers import AutoModelForCausalLM; print({opening_code(results.hf_folder)})"
        print_line(f'python -c "{code}"')


def upload(results: "TrainResults", loop: "TrainingLoop", say: Say) -> None:
    """Push the trained weights to the hub where --push_to_hub asks for it. Collective."""
    from recipe.hf.hub import push_to_hub

    run = loop.run
    if run.repository is not None and results.hf_folder is not None and not results.stopped:
        push_to_hub(run.repository, folder=results.hf_folder, step=results.steps, ranks=run.ranks, say=say)


def fail(error: Exception, *, rank: int, only_first: bool = False) -> int:
    """Print a mistake once and return its exit code; a rank other than the first says in one line that it ends, too.

    Where an exception that nobody expected made some ranks fail, those print its traceback. The launcher ends all ranks
    as soon as one has ended, so the others give the first one time to speak.
    """
    cause = error.__cause__
    if isinstance(error, RanksFailedError) and cause is not None and not isinstance(cause, OSError):
        traceback.print_exception(cause)
    if rank == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        if not only_first:
            print(f"rank {rank}: {first_line(error)}", file=sys.stderr, flush=True)
        time.sleep(GRACE_S)
    return getattr(error, "exit_code", USER_ERROR)


def first_line(error: Exception) -> str:
    """Return the first line of a message; with the second, where that is the first of a list."""
    first, *rest = (str(error) or type(error).__name__).splitlines()
    return f"{first} {rest[0].strip().removeprefix('- ')}" if first.endswith(":") and rest else first


def print_line(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
