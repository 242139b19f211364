"""`gather-moe place`: spreads a model's experts over the ranks by their measured loads."""

import argparse
from pathlib import Path

from recipe.shared.command import Command


def _add_place_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="a run folder, of which the latest checkpoint is taken, a checkpoint, or a Hugging Face folder",
    )
    parser.add_argument("--out", type=Path, help="write a Hugging Face folder with the experts numbered anew")
    parser.add_argument("--ep", type=int, help="ranks that share the experts; the checkpoint's own by default")
    parser.add_argument("--counts", type=Path, metavar="FILE", help="the expert_counts.json of another checkpoint")


def _place_experts(arguments: argparse.Namespace) -> int:
    """Print how even the ranks' work could be; weights are only read where a folder is to be written."""
    from recipe.train.placement import describe, place_model, write_placed

    model = place_model(arguments.source, counts_file=arguments.counts, num_ranks=arguments.ep)
    for line in describe(model):
        print(line)
    if arguments.out is None:
        print("nothing was written; --out FOLDER writes the weights with the experts in these places")
        return 0
    write_placed(model, out=arguments.out)
    print(f"wrote {arguments.out}; train on from it with --model_name_or_path {arguments.out}")
    return 0


COMMANDS = (
    Command(
        name="place",
        help="spread a model's experts over the ranks by their measured loads",
        add_arguments=_add_place_arguments,
        run=_place_experts,
    ),
)
