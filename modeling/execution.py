"""How a training step is executed, as opposed to which function the model computes: one frozen `Execution`.

Standard library only. It travels beside the mesh, never in the model's configuration, so nothing that is exported says
anything about it. A checkpoint loads with the defaults, on one process.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .layout import STRATEGIES

EXPERTS_BACKENDS = ("auto", "loop", "grouped", "triton")
TOKEN_DTYPES = ("auto", "float8_e4m3")
COMBINE_DTYPES = ("auto", "float32")
# The allowed values of every option that names one of several.
CHOICES = {
    "strategy": STRATEGIES,
    "experts_backend": EXPERTS_BACKENDS,
    "token_dtype": TOKEN_DTYPES,
    "combine_dtype": COMBINE_DTYPES,
}

# Attention implementations, torch's "varlen" and those of transformers, by how they keep packed documents apart.
VARLEN = ("varlen", "flash_attention_2", "flash_attention_3", "flash_attention_4")  # boundaries in a tensor
PER_DOCUMENT = ("sdpa", "eager")  # one call per document
BY_MASK = ("flex_attention",)

# Copies are chosen and shared by looking at all sets of ranks, of which there are 2 ** ep.
MAX_RANKS_WITH_COPIES = 12


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One for a whole model.

    strategy          how tokens meet experts that several ranks share (moe.py); "auto" is what sends least (cost.py)
    overlap           transfers between the ranks are cut in chunks that travel while others are worked on
    overlap_chunks    how many; None is as many as pay (cost.py)
    regather          the backward gathers tokens again instead of keeping them, and so it makes the gate and up
                      products of whole experts in fixed buffers, which have up to ep times the rows there are
    experts_backend   "auto" is "loop" on a CPU; on a GPU "grouped", or "triton" where that would wait for the host
    token_dtype       in which tokens travel to the experts: "auto" is the model's, or "float8_e4m3"
    combine_dtype     in which the ranks' parts of the experts' sums travel: "auto" is the model's, or "float32"
    resident_experts  slots on every rank for copies of other ranks' experts (copies.py)
    cuda_graph        every decoder block is captured and replayed as CUDA graphs (recipe/engine/graphs.py)
    """

    strategy: str = "gather_tokens"
    overlap: bool = False
    overlap_chunks: int | None = None
    regather: bool = False
    experts_backend: str = "auto"
    token_dtype: str = "auto"
    combine_dtype: str = "auto"
    resident_experts: int = 0
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is not known; choose one of {list(allowed)}")
        if self.overlap_chunks is not None and self.overlap_chunks < 1:
            raise ValueError(f"overlap_chunks={self.overlap_chunks} must be at least 1; None chooses")
        if self.resident_experts < 0:
            raise ValueError(f"resident_experts={self.resident_experts} must be at least 0, which makes no copies")
        for name in ("token_dtype", "combine_dtype"):
            for fault in dtype_faults(getattr(self, name), strategy=self.strategy):
                raise ValueError(f"{name}={fault}")


def dtype_faults(value: str, *, strategy: str) -> Iterator[str]:
    """What keeps a `token_dtype` or `combine_dtype` from being used, in words."""
    if value != "auto" and strategy != "gather_tokens":
        yield (
            f'"{value}" is for strategy "gather_tokens", the only one that gathers tokens and sums them, not for '
            f'"{strategy}"; use "auto"'
        )


def resident_faults(execution: Execution, *, num_experts: int, num_ranks: int) -> Iterator[str]:
    """What keeps the slots for copies from being used where `num_ranks` (ep) share the experts, in words."""
    num_copies, strategy = execution.resident_experts, execution.strategy
    if not num_copies:
        return
    if num_ranks == 1:
        yield (
            f"resident_experts={num_copies} needs ep > 1: with ep=1 every rank holds a slice of every expert, which is "
            "even already; use 0"
        )
        return
    if strategy != "gather_tokens":
        yield (
            f"resident_experts={num_copies} is for strategy gather_tokens, where every rank knows all routing, not for "
            f"{strategy}; use 0"
        )
    try:
        check_copies(num_experts, num_ranks=num_ranks, num_copies=num_copies)
    except ValueError as error:
        yield f"resident_experts={num_copies}: {error}"


def check_copies(num_experts: int, *, num_ranks: int, num_copies: int) -> None:
    """ValueError where ranks cannot hold that many copies of other ranks' experts."""
    check_experts_divide(num_experts, num_ranks=num_ranks)
    if num_copies and num_ranks > MAX_RANKS_WITH_COPIES:
        raise ValueError(
            f"copies of experts on ep={num_ranks} ranks would take work on 2 ** {num_ranks} sets of ranks; "
            f"use ep of at most {MAX_RANKS_WITH_COPIES}, or no copies"
        )
    others = num_experts - num_experts // num_ranks
    if not 0 <= num_copies <= others:
        raise ValueError(
            f"{num_copies} copies do not fit: of num_experts={num_experts} over ep={num_ranks} a rank can copy "
            f"0 to {others}"
        )


def check_experts_divide(num_experts: int, *, num_ranks: int) -> None:
    """ValueError where the ranks cannot hold equally many whole experts."""
    if num_ranks < 1 or num_experts % num_ranks:
        allowed = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ValueError(f"{num_experts} experts cannot be spread over ep={num_ranks}; ep must be one of {allowed}")
