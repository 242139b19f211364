"""What a CUDA graph cannot hold: modes that refuse operators whose shapes depend on data, and reads by the host."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling.attention import AttentionInputs, eager_attention, rotary_tables

# Operators whose output shape depends on values, or that hand a value to the host.
REFUSED = {
    *("nonzero", "nonzero_numpy", "argwhere", "masked_select", "unique_dim", "_unique", "_unique2"),
    *("unique_consecutive", "unique_dim_consecutive", "bincount", "histc", "repeat_interleave", "_local_scalar_dense"),
    *("item", "is_nonzero", "equal", "allclose", "combinations"),
}
BOOLEAN_INDEX = ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")


# On CPU these read a tensor's memory without any operator, so they are refused by their names.
HOST_READS = (
    *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu, Tensor.item),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
)


class StaticOperators(TorchDispatchMode):
    """Refuses operators that depend on data, boolean indices among them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in REFUSED and func._overloadname != "self_int":
            raise RuntimeError(f"{func} depends on data")
        if name in BOOLEAN_INDEX:
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    raise RuntimeError(f"{func} with a boolean index depends on data")
        return func(*args, **(kwargs or {}))


class NoHostReads(TorchFunctionMode):
    """Refuses functions that hand a tensor's numbers to Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_tensor = func in (torch.tensor_split, Tensor.tensor_split) and isinstance(args[1], Tensor)
        if func in HOST_READS or by_tensor:
            raise RuntimeError(f"{func.__name__} depends on data")
        return func(*args, **(kwargs or {}))


@contextmanager
def static_shapes() -> Iterator[None]:
    with NoHostReads(), StaticOperators():
        yield


def plain_inputs(config: Any, *, block_size: int, dtype: torch.dtype) -> AttentionInputs:
    """Of sequences that are one document each."""
    return AttentionInputs(
        rotary=rotary_tables(config, torch.arange(block_size)[None], dtype=dtype),
        mask=None,
        documents=None,
        function=ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", eager_attention),
        implementation="sdpa",
        cache=None,
        options={},
    )
