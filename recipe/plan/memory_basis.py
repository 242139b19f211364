"""Which parts of a memory plan were held against the storages of real or fake steps, and which were only read."""

from recipe.plan.job import Job
from recipe.plan.memory_rows import MEASURED, READ, is_packed


def attention_basis(job: Job) -> str:
    """The kernels for packed documents run on a GPU only."""
    return READ if is_packed(job) and job.device == "cuda" else MEASURED


def experts_basis(job: Job) -> str:
    """A backend that a GPU alone runs, options of the wire that change types on the way, and a limit to the rows."""
    wire = job.wire
    changed = wire.token_dtype != "auto" or wire.combine_dtype != "auto" or wire.resident_experts
    limited = job.model.get("capacity_factor") is not None
    return READ if changed or limited or job.experts_backend == "triton" else MEASURED


def zero_basis(job: Job) -> str:
    """Buckets that overlap with the backward."""
    return READ if job.zero.get("overlap_comm") else MEASURED
