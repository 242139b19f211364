"""What the host would read where a layer asks for counts, and products give, if the routing were perfectly even."""

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor, nn

from modeling.expert_rows import HostReads
from modeling.experts import GatherMoeExperts
from recipe.dry_run.products import ShapeProducts
from recipe.plan.job import Job


def stand_in(model: nn.Module, job: Job) -> None:
    """Let every expert get equally many rows, and every rank from every other, up to what does not divide."""
    pairs = job.num_tokens * job.sizes.num_experts_per_tok
    # What a rank's experts work on is as much as its own tokens ask for where weights or rows travel.
    rows = pairs // (job.layout.ep if job.moe_strategy == "gather_tokens" else job.layout.tp)
    host_reads = HostReads(_even_ends(rows), _even_splits(pairs // job.layout.tp))
    for module in model.modules():
        if isinstance(module, GatherMoeExperts):
            module.host_reads, module.products = host_reads, ShapeProducts()


def even_share(job: Job, *, rank: int) -> float:
    """The rows that `rank` sends in an exchange, over the mean of all ranks: 1 where they divide."""
    size = job.layout.tp
    if job.moe_strategy != "all_to_all" or size == 1:
        return 1.0
    total = job.num_tokens * job.sizes.num_experts_per_tok // size
    own = _parts(total, size=size)[rank % size]
    return (total - own) / (total * (size - 1) / size)


def _even_ends(total: int) -> Callable[[Tensor], list[list[int]]]:
    def read(ends: Tensor) -> list[list[int]]:
        num_slots, num_chunks = ends.shape
        parts = num_slots * num_chunks
        return [[total * (s * num_chunks + k + 1) // parts for k in range(num_chunks)] for s in range(num_slots)]

    return read


def _even_splits(total: int) -> Callable[[Tensor], list[list[int]]]:
    def read(splits: Tensor) -> list[list[int]]:
        counts = _parts(total, size=splits.shape[1])
        return [counts, counts]

    return read


def _parts(total: int, *, size: int) -> list[int]:
    """As equal as whole numbers are."""
    return [end - start for start, end in pairwise(total * i // size for i in range(size + 1))]
