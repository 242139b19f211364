"""What weights, gradients and the optimizer take under DeepSpeed 0.19.8, by ZeRO stage and moment of a step.

Read in its source (runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py) and held against measured peaks. P are
the numbers that a rank of the group holds, D the data-parallel ranks, b bytes per number that is computed with.
"""

from typing import NamedTuple

from recipe.plan.job import Job
from recipe.plan.memory_rows import Row
from recipe.plan.parameters import RankParameters
from recipe.plan.zero3_fetches import Thresholds
from recipe.plan.zero3_memory import WholeWeights, whole_weights
from recipe.plan.zero_defaults import PLAIN_BUCKET, zero_number
from recipe.plan.zero_traffic import way_of

Rows = list[Row]


class ZeroMemory(NamedTuple):
    """The states of one rank.

    total     P
    largest   of the parameters
    bucket, sub_group   DeepSpeed's settings, in numbers
    whole     weights that are fetched from other ranks, None where none are
    gloo      its reduce-scatter makes a copy
    """

    stage: int
    total: int
    largest: int
    dp: int
    b: int
    accumulation: int
    bucket: int
    num_buckets: int
    sub_group: int
    whole: WholeWeights | None
    gloo: bool

    @property
    def part(self) -> int:
        """P / D."""
        return -(-self.total // self.dp)

    @property
    def is_bf16_optimizer(self) -> bool:
        return self.stage == 1 and self.b == 2

    @property
    def filled(self) -> int:
        """Numbers that are reduced at once."""
        return min(self.total, max(self.bucket, self.largest))


def zero_memory(job: Job, held: RankParameters) -> ZeroMemory:
    """`job.zero` is the engine's block, its sizes as numbers."""
    sizes, stage = job.sizes, job.zero_stage
    parts = stage == 3 and job.layout.dp > 1
    overlaps = job.zero.get("overlap_comm", False)
    return ZeroMemory(
        stage=stage,
        total=held.total(sizes),
        largest=held.largest,
        dp=job.layout.dp,
        b=job.element_bytes,
        accumulation=job.accumulation,
        bucket=zero_number(job.zero, "reduce_bucket_size"),
        num_buckets=2 if overlaps and stage in (1, 2) else 1,
        sub_group=zero_number(job.zero, "sub_group_size"),
        whole=whole_weights(sizes, job.layout, Thresholds.of(job.zero), way=way_of(job)) if parts else None,
        gloo=job.device == "cpu",
    )


def lasting_rows(z: ZeroMemory) -> Rows:
    """What stays from step to step, once there has been one."""
    if z.stage == 0:
        return [
            Row("weights", "weights", "P b", z.total * z.b),
            Row("moments", "optimizer", "8 P", 8 * z.total),
        ]
    rows = [
        Row("weights", "weights", "P b / D" if z.stage == 3 else "P b", z.b * (z.part if z.stage == 3 else z.total)),
        Row("float32 weights", "optimizer", "4 P / D", 4 * z.part),
        Row("moments", "optimizer", "8 P / D", 8 * z.part),
    ]
    if z.is_bf16_optimizer:
        rows.append(Row("float32 gradients", "gradients", "4 P", 4 * z.total))
    if z.stage == 3:
        rows.append(Row("float32 gradients", "gradients", "4 P / D", 4 * z.part))
        rows.append(Row("reduce bucket", "buffers", "4 reduce_bucket_size", 4 * z.bucket))
    if z.whole:
        rows.append(Row("small weights, never parted", "gathered", "P_small b", z.b * z.whole.unparted))
    return rows


def forward_rows(z: ZeroMemory) -> Rows:
    """In the last micro-batch's forward: what the ones before have left."""
    if z.accumulation == 1 or z.stage == 3:
        return []
    if z.stage == 2:
        return [Row("float32 gradients of the own part", "gradients", "4 P / D", 4 * z.part)]
    gradients = Row("gradients", "gradients", "b P", z.b * z.total)
    return [gradients, _bucket(z, 4)] if z.stage == 1 and not z.is_bf16_optimizer else [gradients]


def backward_rows(z: ZeroMemory, *, done: int) -> Rows:
    """When the gradients of `done` numbers have been made, in the last micro-batch."""
    again = z.accumulation > 1
    if z.stage <= 1:
        num = z.total if again else done
        rows = [Row("gradients", "gradients", "b P" if again else "b P so far", z.b * num)]
        return rows if z.stage == 0 or z.is_bf16_optimizer else [*rows, _bucket(z, 4)]
    if z.stage == 2:
        rows = [_bucket(z, z.b)]
        # Without float32 copies a micro-batch's own part is made beside the sum of those before.
        started = done > z.bucket
        parts = again + started if z.b == 4 else int(again or started)
        return [*rows, Row("float32 gradients of the own part", "gradients", "4 P / D", 4 * z.part * parts)]
    return []


def whole_rows(z: ZeroMemory, module: str, *, is_backward: bool) -> Rows:
    """ZeRO-3's whole weights while a module is at work, by its name in `held_modules`."""
    if z.whole is None:
        return []
    num = (z.whole.backward if is_backward else z.whole.forward)[module].at_work
    return [Row("fetched weights", "gathered", "b (P of the module and of those kept or ahead)", z.b * num)]


def arriving_rows(z: ZeroMemory, *modules: str, is_backward: bool) -> Rows:
    """The same when the weights of one of these modules arrive, whichever are most; empty where none do."""
    if z.whole is None:
        return []
    found = z.whole.backward if is_backward else z.whole.forward
    num = max(found[module].arriving for module in modules)
    row = Row("weights as they arrive, and whole", "gathered", "b (P as above, and again of a call)", z.b * num)
    return [row] if num else []


def sent_rows(z: ZeroMemory) -> Rows:
    """A bucket on its way: flattened again, and in float32."""
    each = 4 * (1 + z.gloo) if z.stage == 3 else 4 if z.b == 4 else z.b + 4
    return [Row("a bucket as sent", "buffers", f"{each} reduce_bucket_size, or P", each * z.filled)]


def reduce_rows(z: ZeroMemory) -> Rows:
    """Beside what lasts and the gradients: while the last bucket is summed over the data-parallel ranks."""
    if z.stage == 0:
        num = min(z.total, PLAIN_BUCKET + z.largest)
        return [
            Row("gradients", "gradients", "b P", z.b * z.total),
            Row("the same as sent", "buffers", "b P", z.b * num),
        ]
    if z.is_bf16_optimizer:
        whole = 4 * z.total if z.total < PLAIN_BUCKET else 0  # a single tensor is sent as it is
        gradients = Row("gradients", "gradients", "b P", z.b * z.total)
        return [gradients, Row("float32 gradients as sent", "buffers", "4 P", whole)]
    sent = sent_rows(z)
    again = z.accumulation > 1
    later = z.filled < z.total  # there was a reduction before, whose result this rank's part keeps
    if z.stage == 1:
        left, own = z.total - z.filled, 0
        if later and z.part > z.filled:
            left, own = max(0, left - z.filled), z.part
        gradients = Row("gradients not yet reduced, and reduced ones", "gradients", "4 P (1 + 1 / D)", 4 * (left + own))
        return [gradients, _bucket(z, 4), *sent]
    if z.stage == 2:
        parts = (again + later) if z.b == 4 else 1
        reduced = Row("float32 gradients of the own part", "gradients", "4 P / D", 4 * z.part * parts)
        return [reduced, _bucket(z, z.b), *sent]
    return sent


def update_rows(z: ZeroMemory) -> Rows:
    """Beside what lasts: in the optimizer's step."""
    if z.stage == 0:
        norm = Row("a gradient and its squares in float64", "buffers", "16 P_largest", 16 * z.largest)
        return [Row("gradients", "gradients", "b P", z.b * z.total), norm]
    if z.is_bf16_optimizer:
        return [Row("gradients", "gradients", "b P", z.b * z.total)]
    if z.stage == 3:
        num = 4 * min(z.part, z.sub_group)
        return [Row("gradients as the optimizer takes them", "gradients", "4 P / D", num)]
    own = Row("float32 gradients of the own part", "gradients", "4 P / D", 4 * z.part)
    norm = Row("largest gradient in the norm's type", "buffers", "8 P_largest", 8 * min(z.largest, z.part))
    if z.b == 4 and z.part * 4 > norm.num_bytes:
        return [own, Row("the same in one tensor", "gradients", "4 P / D", 4 * z.part)]
    return [own, norm]


def _bucket(z: ZeroMemory, num_bytes: int) -> Row:
    num = num_bytes * z.num_buckets * z.bucket
    return Row("reduce bucket", "buffers", f"{num_bytes} reduce_bucket_size", num)
