"""How many kernels a step launches, for the host that must launch them one by one where nothing is a graph."""

from recipe.plan.job import Job
from recipe.plan.model_traffic import num_chunks
from recipe.plan.passes import PASSES

# Operators of one layer besides the passes, products and attention that have a price: views are free, these are not.
OTHER_FORWARD, OTHER_BACKWARD = 12, 20


def num_launches(job: Job, *, fused: bool = False) -> int:
    """Of a whole step on one rank, the optimizer's few left out; `fused`: a pass is one kernel, which ours are not."""
    chunks, sizes = num_chunks(job), job.sizes
    kernels = {name: 1 if fused else one.num_kernels for name, one in PASSES.items()}
    attention = kernels["norm"] * 3 + kernels["rotate"] * 2 + OTHER_FORWARD + 2 * chunks
    attention_back = kernels["norm_backward"] * 3 + kernels["rotate"] * 2 + OTHER_BACKWARD + 2 * chunks
    active = sizes.num_experts_per_tok
    if job.static_rows:
        forward = chunks * (8 + kernels["activation"] + 4 * active)
        backward = chunks * (12 + kernels["activation_backward"] + 4 * active) + 10
    else:
        num = chunks * sizes.num_experts // job.layout.ep
        forward = num * (3 + kernels["activation"] + kernels["add_rows"])
        backward = num * (4 + kernels["activation_backward"] + kernels["add_rows"]) + num // chunks * 6
    moe = kernels["norm"] + kernels["routing"] / 2 + OTHER_FORWARD + forward
    moe_back = kernels["norm_backward"] + kernels["routing"] / 2 + OTHER_BACKWARD + backward
    dense, dense_back = kernels["norm"] + OTHER_FORWARD, kernels["norm_backward"] + OTHER_BACKWARD
    times = 2 if job.recompute else 1
    layers: float = sizes.num_hidden_layers * (times * attention + attention_back)
    layers += sizes.num_moe_layers * (times * moe + moe_back) + len(sizes.dense_layers) * (times * dense + dense_back)
    return round(job.accumulation * layers)
