"""What a micro-batch asks of a device, operator by operator: launches, bytes through memory, FLOPs, waits of the host.

Every operator of torch's dispatcher is a launch that reads its inputs and writes its results once, but views, which are
free, and collectives, which the ledger books. Of experts' rows (modeling/rows.py) only those that are there count: as
many as a perfectly even routing brings. Tensors are fake ones of a CPU: operators that CUDA fuses and a CPU does not
are counted as the CPU's.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from modeling.attention import GatherMoeAttention
from modeling.comm import current_scope
from modeling.decoder import GatherMoeDecoderLayer
from modeling.experts import GatherMoeExperts
from modeling.layers import RmsNorm, SplitNorm
from modeling.moe import GatherMoeMlp
from modeling.operators import NAMESPACE
from modeling.router import GatherMoeRouter

# Parts by what computes them, the innermost first; of a layer all that is none of these is "other".
PARTS: Mapping[type[nn.Module], str] = {
    GatherMoeRouter: "router",
    GatherMoeExperts: "experts",
    RmsNorm: "norms",
    SplitNorm: "norms",
    GatherMoeMlp: "dense",
    GatherMoeAttention: "attention",
    GatherMoeDecoderLayer: "other",
}
SCOPES = {"experts": "experts", "head": "head", "routing": "router"}  # parts that a scope of the model names
OUTSIDE = "embedding, last norm, loss"
LAYER_PARTS = ("experts", "router", "attention", "dense", "norms", "other")

# Operators that only name memory, and those that make the host wait for the device or copy its own numbers there.
FREE = {
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "set_"),
    *("detach", "alias", "_unsafe_view", "_reshape_alias", "device", "sym_size", "is_same_size"),
}
WAITS = {
    *("_local_scalar_dense", "item", "nonzero", "masked_select", "bincount", "equal", "lift_fresh", "lift_fresh_copy"),
    *("_unique2", "unique_dim", "unique_consecutive"),
}
# Of what these read, only as much as they take; the place of what is looked up among the arguments.
LOOK_UPS = ("index", "index_select", "gather", "embedding")
ADDS = ("index_add_", "index_add", "index_put_", "scatter_", "scatter_add_", "scatter_add", "embedding_dense_backward")
WRITE_ONLY = ("copy_", "zero_", "fill_")


class Kernels(NamedTuple):
    """What some operators of a part take together.

    phase  "forward" or "backward"; what is recomputed in a backward is a part of it
    """

    phase: str
    part: str
    name: str
    launches: float
    read_bytes: float
    written_bytes: float
    flops: float

    @property
    def bytes(self) -> float:
        return self.read_bytes + self.written_bytes

    def times(self, number: float) -> "Kernels":
        return Kernels(*self[:3], *(value * number for value in self[3:]))


class Work(NamedTuple):
    """Launches, bytes read and written, and FLOPs of one call."""

    launches: float
    read_bytes: float
    written_bytes: float
    flops: float = 0.0


class KernelCount(TorchDispatchMode):
    """Counts from `with` to its end.

    share_of_rows  of the rows that buffers of the experts have room for, those that are there

    rows                  of each phase, part and operator
    host_waits            what made the host wait, by whether it was in a layer and its name
    largest_rows_bytes    the largest tensor of experts' rows
    """

    def __init__(self, model: nn.Module, *, share_of_rows: float) -> None:
        super().__init__()
        self._model, self._share = model, share_of_rows
        self._sums: dict[tuple[str, str, str], list[float]] = {}
        self._parts: list[str] = [OUTSIDE]
        # Where in autograd's numbering of what it records which part begins.
        self._starts, self._started = [0], [OUTSIDE]
        self.host_waits: Counter[tuple[bool, str]] = Counter()
        self.largest_rows_bytes = 0
        self._hooks = ExitStack()

    def __enter__(self) -> "KernelCount":
        for module in self._model.modules():
            part = next((name for kind, name in PARTS.items() if isinstance(module, kind)), None)
            if part is not None:
                before = module.register_forward_pre_hook(lambda *_, part=part: self._begin(part))
                after = module.register_forward_hook(lambda *_: self._end())
                self._hooks.callback(before.remove)
                self._hooks.callback(after.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    @property
    def rows(self) -> tuple[Kernels, ...]:
        return tuple(Kernels(*key, *sums) for key, sums in self._sums.items())

    @property
    def own_bytes(self) -> float:
        """Bytes that our own operators are declared to move."""
        return sum(row.bytes for row in self.rows if row.name in {**OUR_WORK, **ON_ELEMENTS})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._opname
        if name in WAITS:
            self.wait(name)
        if func.namespace in ("c10d", "prim") or func.is_view or name in FREE:
            return result
        if func.namespace == NAMESPACE and name in ON_ELEMENTS:
            work = ON_ELEMENTS[name](args)
        elif func.namespace == NAMESPACE and name in OUR_WORK:
            work = OUR_WORK[name](self._share, args, result)
            sizes = [
                each.nbytes for each in tree_leaves((args, result)) if isinstance(each, Tensor) and each.dim() == 2
            ]
            self.largest_rows_bytes = max([self.largest_rows_bytes, *sizes])
        else:
            work = _work(func, args, kwargs or {}, result)
        sums = self._sums.setdefault((*self._place(), name), [0.0] * 4)
        for i, value in enumerate(work):
            sums[i] += value
        return result

    def wait(self, name: str) -> None:
        """Count a wait of the host."""
        self.host_waits[self._place()[1] in LAYER_PARTS, name] += 1

    def _begin(self, part: str) -> None:
        is_outside = self._parts[-1] == OUTSIDE and part != "other"  # the last norm
        self._parts.append(OUTSIDE if is_outside else part)
        self._note()

    def _end(self) -> None:
        self._parts.pop()
        self._note()

    def _note(self) -> None:
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._started.append(self._parts[-1])

    def _place(self) -> tuple[str, str]:
        """The phase and the part of what is running."""
        node = torch._C._current_autograd_node()
        scope = SCOPES.get(current_scope())
        if node is None:
            return "forward", scope or self._parts[-1]
        if len(self._parts) > 1:  # a block that is being recomputed
            return "backward", scope or self._parts[-1]
        number = node._sequence_nr()
        # Sums of gradients are made when the last of them comes, and have no number.
        part = OUTSIDE if number >= 2**63 else self._started[bisect_right(self._starts, number) - 1]
        return "backward", scope or part


class KernelReport(NamedTuple):
    """Operators of one layer, of a MoE one if there is any; operators and waits of a micro-batch with all layers."""

    layer: tuple[Kernels, ...]
    micro_batch: tuple[Kernels, ...]
    host_waits: Mapping[str, int]
    largest_rows_bytes: int

    @classmethod
    def of(cls, counts: Sequence[tuple[KernelCount, int]]) -> "KernelReport":
        """Put together what was counted of models of one layer each, and how many layers are like it."""
        first = counts[0][0]
        whole = [row for row in first.rows if row.part not in LAYER_PARTS]
        waits = Counter[str]({name: num for (in_layer, name), num in first.host_waits.items() if not in_layer})
        for count, number in counts:
            whole += [row.times(number) for row in count.rows if row.part in LAYER_PARTS]
            waits.update({name: num * number for (in_layer, name), num in count.host_waits.items() if in_layer})
        layer = tuple(row for row in first.rows if row.part in LAYER_PARTS)
        return cls(layer, tuple(whole), waits, max(count.largest_rows_bytes for count, _ in counts))

    def total(self, phase: str, *, part: str | None = None, rows: tuple[Kernels, ...] | None = None) -> Kernels:
        """Sum the operators of a phase, and of one part if one is named; of the layer, or of other rows."""
        found = [r for r in rows or self.layer if r.phase == phase and part in (None, r.part)]
        sums = [math.fsum(work) for work in zip(*(row[3:] for row in found), strict=True)] or [0.0] * 4
        return Kernels(phase, part or "all", "all", *sums)


def _work(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    name, schema = func._opname, func._schema
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
    storages = {each.untyped_storage()._cdata for each in given}
    fresh = sum(_bytes(each) for each in made if each.untyped_storage()._cdata not in storages)
    changed = [
        value
        for argument, value in zip(schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
    ]
    read, written = sum(map(_bytes, given)), fresh + sum(map(_bytes, changed))
    if name in LOOK_UPS:
        read = fresh + sum(map(_bytes, given[1:]))
    elif name in ADDS:
        source = max(map(_bytes, given[1:]), default=0)
        read, written = sum(map(_bytes, given[1:])) + source, source + fresh
    elif name in WRITE_ONLY:
        read -= sum(map(_bytes, changed))
    flops = 0.0
    if func._overloadpacket in flop_registry:
        flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
    elif "attention_for_cpu" in name:
        flops = _attention_flops(args, kwargs, is_backward="backward" in name)
    return Work(1, read, written, flops)


def _attention_flops(args: Any, kwargs: Any, *, is_backward: bool) -> float:
    query, key = args[1:3] if is_backward else args[:2]
    batch, heads, length, size = query.shape
    products = 5 if is_backward else 2
    is_causal = any(value is True for value in (*args, *kwargs.values()))
    return 2.0 * products * batch * heads * length * key.shape[2] * size * (0.5 if is_causal else 1.0)


def _bytes(x: Tensor) -> int:
    """Return the bytes of a tensor's numbers in memory, each once however often an expanded tensor shows it."""
    distinct = math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0 or size == 0)
    return distinct * x.element_size()


# Bytes of our own operators by the share of rows that are there, from the arguments in modeling/rows.py's order.
# test_rows.py holds them against what the kernels load and store.
def _sort(share: float, args: Any, result: Any) -> Work:
    slots_TA, (pair_R, row_TA, offsets_e) = args[0], result
    # Counted, then placed; the rows' ends are copied out of what all blocks counted.
    return Work(4, 2 * slots_TA.nbytes, row_TA.nbytes + share * pair_R.nbytes + offsets_e.nbytes)


def _permute(share: float, args: Any, result: Tensor) -> Work:
    pair_R, through_TA = args[1], args[4]
    look_up = share * pair_R.nbytes * (1 if through_TA is None else 2)
    return Work(1, share * result.nbytes + look_up, share * result.nbytes)


def _combine(share: float, args: Any, result: Tensor) -> Work:
    return Work(1, share * args[0].nbytes + args[1].nbytes, result.nbytes)


def _swiglu(share: float, args: Any, result: Tensor) -> Work:
    gate_up_R2f, _, pair_R = args[:3]
    return Work(1, share * (gate_up_R2f.nbytes + 2 * pair_R.nbytes), share * result.nbytes)


def _swiglu_back(share: float, args: Any, result: Tensor) -> Work:
    grad_Rf, gate_up_R2f, _, pair_R = args[:4]
    written = share * (gate_up_R2f.nbytes + grad_Rf.nbytes + pair_R.nbytes) + result.nbytes  # zeros first
    return Work(2, share * (grad_Rf.nbytes + gate_up_R2f.nbytes + 2 * pair_R.nbytes), written)


def _clear_empty(share: float, args: Any, result: None) -> Work:
    return Work(1, args[1].nbytes, 0.0)  # nothing is without rows where routing is even


def _multiply(share: float, args: Any, result: Tensor) -> Work:
    x_RI, weight_eOI = args[:2]
    flops = 2.0 * share * x_RI.shape[0] * weight_eOI.shape[1] * weight_eOI.shape[2]
    return Work(2, share * x_RI.nbytes + weight_eOI.nbytes, share * result.nbytes, flops)


def _multiply_outer(share: float, args: Any, result: Tensor) -> Work:
    grad_RO, x_RI = args[:2]
    flops = 2.0 * share * grad_RO.numel() * x_RI.shape[1]
    return Work(2, share * (grad_RO.nbytes + x_RI.nbytes), result.nbytes, flops)


OUR_WORK: Mapping[str, Callable[[float, Any, Any], Work]] = {
    "sort_rows": _sort,
    "permute": _permute,
    "combine": _combine,
    "swiglu": _swiglu,
    "swiglu_back": _swiglu_back,
    "clear_empty": _clear_empty,
    "multiply": _multiply,
    "multiply_outer": _multiply_outer,
}


# The same of operators.py. A table's halves are the same angles, of which one is read; a row's numbers are few.
def _turn(args: Any) -> Work:
    x, cos, sin = args[:3]
    return Work(1, x.nbytes + (_bytes(cos) + _bytes(sin)) / 2, x.nbytes)


def _logit_sums_(args: Any) -> Work:
    logits_cv, column_c, num_real = args
    row_bytes = column_c.nbytes + 4 * len(logits_cv)
    return Work(2, len(logits_cv) * num_real * logits_cv.element_size() + row_bytes, 24 * len(logits_cv))


def _logit_gradients(args: Any) -> Work:
    logits_cv, column_c, _, highest_c, factor_c, num_real = args
    row_bytes = column_c.nbytes + highest_c.nbytes + factor_c.nbytes
    return Work(1, len(logits_cv) * num_real * logits_cv.element_size() + row_bytes, logits_cv.nbytes)


def _wide_linear(args: Any) -> Work:
    """A product of what is in bfloat16 as it is; else of wide copies, which are read and written once more."""
    x, weight = args
    out_bytes, flops = 4 * len(x) * len(weight), 2.0 * x.numel() * len(weight)
    if x.dtype == weight.dtype == torch.bfloat16:
        return Work(1, x.nbytes + weight.nbytes, out_bytes, flops)
    casts, copied = _wide_copies(x, weight)
    return Work(1 + casts, 4 * (x.numel() + weight.numel()) + x.nbytes * casts, out_bytes + copied, flops)


def _wide_linear_back(args: Any) -> Work:
    """In bfloat16 the gradient in parts: six passes, a look, two products of three times the depth, and a sum."""
    grad, x, weight, _ = args
    flops = 4.0 * x.numel() * len(weight)
    if not x.dtype == weight.dtype == torch.bfloat16:
        casts, copied = _wide_copies(x, weight)
        read = 2 * grad.nbytes + 4 * (x.numel() + weight.numel()) + copied
        return Work(2 + 2 * casts, read, x.nbytes + weight.nbytes + copied, flops)
    parts_bytes, weights_bytes = 6 * grad.numel(), 3 * weight.nbytes
    read = 5 * grad.nbytes + 4 * parts_bytes + x.nbytes + weight.nbytes + 3 * weights_bytes
    written = 2 * grad.nbytes + 2 * parts_bytes + x.nbytes + 4 * weights_bytes + weight.nbytes
    return Work(11, read, written, 3 * flops)


def _wide_copies(*tensors: Tensor) -> tuple[int, int]:
    """How many of these are copied to float32, and the bytes of the copies."""
    narrow = [4 * x.numel() for x in tensors if x.element_size() < 4]
    return len(narrow), sum(narrow)


ON_ELEMENTS: Mapping[str, Callable[[Any], Work]] = {
    "wide_linear": _wide_linear,
    "wide_linear_back": _wide_linear_back,
    "turn": _turn,
    "logit_sums_": _logit_sums_,
    "logit_gradients_": _logit_gradients,
}
