"""What names in a trace mean: kernels, operators, modules and collectives, of any program that the profiler watched."""

import re
from collections.abc import Sequence

from recipe.shared.scopes import Scope

# The first pattern that is found decides; what no range and no module around a kernel says, its name may.
KERNEL_KINDS = (
    (re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE), "attention"),
    (re.compile(r"grouped|group_gemm|moe", re.IGNORECASE), "experts"),
    (re.compile(r"adam|multi_tensor|lamb|foreach", re.IGNORECASE), "optimizer"),
    (re.compile(r"nll_loss|cross_entropy|log_softmax", re.IGNORECASE), "head"),
    (re.compile(r"gemm|nvjet|cutlass|xmma|cublas|::(b|add|badd)?mm\b|::linear|::matmul", re.IGNORECASE), "products"),
    (re.compile(r"embedding|indexSelect", re.IGNORECASE), "embedding"),
    (re.compile(r"norm", re.IGNORECASE), "norms"),
)
MODULE_PREFIX = "nn.Module: "  # with_stack=True adds these
# Names of models are in those of their modules: Qwen3MoeRMSNorm is no expert.
MODULE_KINDS = (
    (re.compile(r"norm(?:gated|\dd)?$", re.IGNORECASE), "norms"),  # LayerNormMLP is more than one
    (re.compile(r"embedding", re.IGNORECASE), "embedding"),
    (re.compile(r"For[A-Z]\w+$|LMHeadModel$"), "head"),  # what is around the decoder
    (re.compile(r"Model$"), "embedding"),  # what is around its blocks
    (re.compile(r"attention|attn", re.IGNORECASE), "attention"),
    (re.compile(r"router|gate$|gating|topk", re.IGNORECASE), "router"),
    (re.compile(r"expert|moe|sparse", re.IGNORECASE), "experts"),
    (re.compile(r"mlp|feedforward|feed_forward|ffn", re.IGNORECASE), "dense"),
    (re.compile(r"lmhead|lm_head|crossentropy|cross_entropy", re.IGNORECASE), "head"),
)
BLOCK = re.compile(r"(?:DecoderLayer|EncoderLayer|TransformerLayer|TransformerBlock|DecoderBlock|^Block)_(\d+)$")
OPTIMIZER_PREFIX = "Optimizer.step#"
# Symmetric memory has kernels of its own, called Sym or Symk.
NCCL = re.compile(r"[nr]ccl(?:Symk?)?(?:Dev|Generic)?Kernel(?:_(?P<op>[A-Za-z]+))?")
# Without underscores: NCCL's names, torch's, gloo's and c10d's.
OPS = {
    "allgather": "all_gather",
    "allgatherintotensor": "all_gather",
    "allgatherintotensorcoalesced": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescattertensorcoalesced": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreducecoalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
    "sendrecv": "send_recv",
    "barrier": "barrier",
}
# In these every rank needs something of every other, so that all end together.
AMONG_ALL = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "barrier")
DTYPE_BYTES = {
    **dict.fromkeys(("double", "long", "longint", "int64"), 8),
    **dict.fromkeys(("float", "int", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "half", "short", "shortint", "uint16"), 2),
    **dict.fromkeys(("byte", "char", "unsignedchar", "signedchar", "bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8e4m3fn", "float8e5m2", "float8e4m3fnuz", "float8e5m2fnuz"), 1),
}


def kind_of_kernel(name: str) -> str:
    """Of a kernel or an operator that nothing around it says more about."""
    return _first(KERNEL_KINDS, name) or "other"


def module_scope(name: str) -> Scope | None:
    """Of `nn.Module: Qwen3MoeAttention_7`: the number counts modules of a class, so only a block's is its layer's."""
    if not name.startswith(MODULE_PREFIX):
        return None
    name = name.removeprefix(MODULE_PREFIX)
    block = BLOCK.search(name)
    if block is not None:
        return Scope("norms", int(block[1]))
    kind = _first(MODULE_KINDS, re.sub(r"_\d+$", "", name))
    return None if kind is None else Scope(kind)


def collective_op(name: str) -> str | None:
    """The operation of a name like _allgather_base, c10d::allreduce_, gloo:all_to_all or AllGather; None: unknown."""
    bare = re.sub(r"_|base", "", name.removeprefix("c10d::").removeprefix("gloo:")).lower()
    return OPS.get(bare)


def dtype_bytes(name: str) -> int | None:
    """Bytes of a number of such a type, under any of the names that traces have for it; None: unknown."""
    return DTYPE_BYTES.get(re.sub(r"c10::|[_ ]", "", name).lower())


def _first(table: Sequence[tuple[re.Pattern[str], str]], name: str) -> str | None:
    return next((kind for pattern, kind in table if pattern.search(name)), None)
