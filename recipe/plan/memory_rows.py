"""A line of a memory plan, and the sizes of a step that its formulas are written in."""

from dataclasses import dataclass
from typing import NamedTuple

from modeling.layout import ModelSizes
from recipe.plan.job import Job
from recipe.plan.model_traffic import head_rows, num_chunks

MEASURED = "measured: its moment's sum against the storages of real and of fake steps"
READ = "read in the code"
ASSUMED = "assumed"


class Row(NamedTuple):
    """Bytes of one rank that are alive at a moment.

    kind     a field of MemoryPlan
    formula  in the letters of `StepSizes`
    basis    where the formula is from; that it was measured is said of a whole block
    """

    what: str
    kind: str
    formula: str
    num_bytes: float
    basis: str = READ


class Block(NamedTuple):
    """Lines that come and go together, and their sum."""

    rows: list[Row]
    num_bytes: float


def block_of(rows: list[Row], *, basis: str) -> Block:
    return Block([row._replace(basis=basis) for row in rows], sum(row.num_bytes for row in rows))


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """One rank's share of a micro-batch.

    t, T     tokens here, tokens of the group; the same where the group is one rank (N)
    D, E, A  hidden size, experts of the model, experts per token
    h, q, k  query heads here; numbers of q, and of k or v, for all tokens
    f, e, R  width of the experts that are computed with, how many, and the rows they get
    w        width of a dense layer here
    v, c     rows of the vocabulary here, tokens whose logits exist at once
    b        bytes per number; `extra` 4 where float32 copies of b=2 numbers are made, else 0
    cut      the share of the tokens that travels or is worked on at once
    joins    documents are attended to one by one, and their outputs joined
    sent     tokens for whose transfer gloo's reduce-scatter needs a second buffer: T, or 0
    """

    N: int
    t: int
    T: int
    D: int
    E: int
    A: int
    h: int
    q: int
    k: int
    f: int
    e: int
    R: float
    w: int
    v: int
    c: int
    b: int
    extra: int
    cut: float
    sent: int
    regather: bool
    static: bool
    strategy: str
    qk_norm: str
    clips: bool
    joins: bool

    @property
    def keeps_gathered(self) -> bool:
        """Whether gathered tokens wait for the backward."""
        return self.N > 1 and not self.regather

    @property
    def worked_on(self) -> float:
        """Tokens that the experts here sum for: the group's, this rank's, or the rows that came."""
        if self.strategy == "all_to_all" and self.N > 1:
            return self.R
        return self.t if self.strategy == "gather_weights" else self.T

    @property
    def recomputes_rows(self) -> bool:
        """Whether the experts' buffers of fixed size are made again in the backward: see modeling/experts.py."""
        return self.static and self.N > 1 and self.strategy == "gather_tokens" and self.e < self.E


def is_packed(job: Job) -> bool:
    """Whether blocks hold more than one document."""
    return job.attention_length is not None and job.attention_length < job.block_size


def step_sizes(job: Job) -> StepSizes:
    """Of a micro-batch."""
    sizes, layout, tp = job.sizes, job.layout, job.layout.tp
    tokens, t = job.num_tokens, job.tokens_per_rank
    strategy = job.moe_strategy if tp > 1 else "gather_tokens"
    num_here = sizes.num_experts if strategy == "gather_weights" else sizes.num_experts // layout.ep
    chunks = num_chunks(job)
    return StepSizes(
        N=tp,
        t=t,
        T=tokens,
        D=sizes.hidden_size,
        E=sizes.num_experts,
        A=sizes.num_experts_per_tok,
        h=sizes.num_attention_heads // tp,
        q=tokens * sizes.num_attention_heads // tp * sizes.head_dim,
        k=tokens * max(sizes.num_key_value_heads // tp, 1) * sizes.head_dim,
        f=sizes.moe_intermediate_size // (1 if strategy == "gather_weights" else layout.etp),
        e=num_here,
        R=_rows(job, sizes=sizes, strategy=strategy, num_here=num_here),
        w=sizes.intermediate_size // tp,
        v=-(-sizes.vocab_size // tp),
        c=min(-(-tokens // chunks), head_rows(job)),
        b=job.element_bytes,
        extra=4 if job.element_bytes < 4 else 0,
        cut=1 / chunks,
        sent=tokens if job.device == "cpu" and tp > 1 else 0,
        regather=job.wire.regather,
        static=job.static_rows,
        strategy=strategy,
        qk_norm=sizes.qk_norm,
        clips=job.model.get("clip_qkv") is not None,
        joins=is_packed(job) and job.device == "cpu",
    )


def _rows(job: Job, *, sizes: ModelSizes, strategy: str, num_here: int) -> float:
    """Of the busiest rank, or the most that could come; slices of every expert are all equally busy."""
    active, tp = sizes.num_experts_per_tok, job.layout.tp
    if tp == 1 or strategy == "gather_weights":
        return job.tokens_per_rank * active
    if strategy == "all_to_all" or not job.static_rows:
        return job.num_tokens * active / job.layout.ep * (job.rho if job.layout.ep > 1 else 1)
    return job.num_tokens * min(active, num_here)
