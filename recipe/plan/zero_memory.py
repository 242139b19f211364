"""What weights, gradients and the optimizer take under DeepSpeed 0.19.8, by ZeRO stage and moment of a step.

Read in its source (runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py) and held against measured peaks. The
letters are those of `Letters`: a rank of a group holds P numbers, in buckets of M, and its part of them is P / dp.
"""

from math import ceil

from recipe.plan.job import Job
from recipe.plan.memory_lines import Letters, Line, Lines
from recipe.plan.traffic import weights_of
from recipe.plan.zero3 import PLAIN_BUCKET, zero_number
from recipe.settings.resolve import BUCKET_KEY


class ZeroMemory:
    """The states of one rank under one stage; `job.zero` is the engine's block, its sizes as numbers.

    bucket       M
    num_buckets  two where one is filled while the other is summed
    weights      what ZeRO-3 fetches from other ranks; None where nothing is
    part         numbers of this rank's part
    filled       numbers that are reduced at once
    """

    def __init__(self, job: Job, s: Letters) -> None:
        self.s, self.stage, self.accumulates = s, job.zero_stage, job.accumulation > 1
        self.bucket = s.term(zero_number(job.zero, BUCKET_KEY), "M")
        self.num_buckets = 2 if job.zero.get("overlap_comm", False) and self.stage in (1, 2) else 1
        self.sub_group = zero_number(job.zero, "sub_group_size")
        self.weights = weights_of(job) if self.stage == 3 and job.layout.dp > 1 else None
        self.part = ceil(s.P / s.dp)
        self.filled = min(s.P, max(self.bucket, s.P_largest))

    @property
    def is_bf16_optimizer(self) -> bool:
        return self.stage == 1 and self.s.b == 2

    def lasting(self) -> Lines:
        """Return what stays from step to step, once there has been one."""
        s, stage, part = self.s, self.stage, self.part
        if stage == 0:
            return [Line("weights", "weights", s.P * s.b), Line("moments", "optimizer", 8 * s.P)]
        lines = [
            Line("weights", "weights", s.b * (part if stage == 3 else s.P)),
            Line("float32 weights and moments", "optimizer", 12 * part),
        ]
        if self.is_bf16_optimizer:
            lines.append(Line("float32 gradients", "gradients", 4 * s.P))
        if stage == 3:
            lines.append(Line("float32 gradients", "gradients", 4 * part))
            lines.append(Line("reduce bucket", "buffers", 4 * self.bucket))
        if self.weights is not None:
            unparted = s.term(self.weights.unparted, "P_unparted")
            lines.append(Line("small weights, never parted", "gathered", unparted * s.b))
        return lines

    def forward(self) -> Lines:
        """Return what earlier micro-batches have left in the forward of the last one."""
        if not self.accumulates or self.stage == 3:
            return []
        if self.stage == 2:
            return [self._own_gradients()]
        return [self._gradients(self.s.P), *self._wide_bucket()]

    def backward(self, *, done: float) -> Lines:
        """Return what there is when the gradients of `done` numbers have been made in the last micro-batch."""
        if self.stage <= 1:
            return [self._gradients(self.s.P if self.accumulates else done), *self._wide_bucket()]
        if self.stage == 3:
            return []
        # Without float32 copies a micro-batch's own part is made beside the sum of those before.
        started = done > self.bucket
        copies = self.accumulates + started if self.s.b == 4 else int(self.accumulates or started)
        return [self._bucket(self.s.b), *([self._own_gradients(copies)] if copies else [])]

    def whole(self, module: str, *, is_backward: bool) -> Lines:
        """Return ZeRO-3's whole weights while a module is at work, by its name in `held_modules`."""
        if self.weights is None:
            return []
        number = self.s.term(self.weights.at_work[module, is_backward], "P_fetched")
        return [Line("weights of the module, of those kept and those fetched ahead", "gathered", number * self.s.b)]

    def sent(self) -> Lines:
        """Return a bucket on its way: flattened again, and in float32."""
        s = self.s
        each = 4 * (1 + s.gloo) if self.stage == 3 else 4 if s.b == 4 else 4 + s.b
        return [Line("a bucket as sent", "buffers", each * self.filled)]

    def reduction(self) -> Lines:
        """Return what there is while the last bucket is summed over the data-parallel ranks."""
        s, filled, part = self.s, self.filled, self.part
        if self.stage == 0:
            sent = Line("the same as sent", "buffers", s.b * min(s.P, PLAIN_BUCKET + s.P_largest))
            return [self._gradients(s.P), sent]
        if self.is_bf16_optimizer:
            as_sent = [Line("float32 gradients as sent", "buffers", 4 * s.P)] if s.P < PLAIN_BUCKET else []
            return [self._gradients(s.P), *as_sent]  # a single tensor is sent as it is
        later = filled < s.P  # there was a reduction before, whose result this rank's part keeps
        if self.stage == 1:
            left = s.P - filled
            if later and part > filled:
                left = max(0, left - filled) + part
            left_and_reduced = Line("gradients not yet reduced, and reduced ones", "gradients", 4 * left)
            return [left_and_reduced, *self._wide_bucket(), *self.sent()]
        if self.stage == 2:
            copies = self.accumulates + later if s.b == 4 else 1
            own = [self._own_gradients(copies)] if copies else []
            return [*own, self._bucket(s.b), *self.sent()]
        return self.sent()

    def update(self) -> Lines:
        """Return what there is in the optimizer's step."""
        s, part = self.s, self.part
        if self.stage == 0:
            norm = Line("a gradient and its squares in float64", "buffers", 16 * s.P_largest)
            return [self._gradients(s.P), norm]
        if self.is_bf16_optimizer:
            return [self._gradients(s.P)]
        if self.stage == 3:
            return [Line("gradients as the optimizer takes them", "gradients", 4 * min(part, self.sub_group))]
        norm = Line("largest gradient in the norm's type", "buffers", 8 * min(s.P_largest, part))
        joined = Line("the same in one tensor", "gradients", 4 * part)
        return [self._own_gradients(), max(norm, joined, key=lambda line: line.num_bytes) if s.b == 4 else norm]

    def _gradients(self, number: float) -> Line:
        return Line("gradients", "gradients", self.s.b * number)

    def _own_gradients(self, copies: int = 1) -> Line:
        return Line("float32 gradients of the own part", "gradients", 4 * copies * self.part)

    def _bucket(self, num_bytes: float) -> Line:
        return Line("reduce bucket", "buffers", num_bytes * self.num_buckets * self.bucket)

    def _wide_bucket(self) -> Lines:
        return [self._bucket(4)] if self.stage == 1 and not self.is_bf16_optimizer else []
