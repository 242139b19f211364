"""How a model's layers use the wire: what is chunked and overlapped, what is gathered twice, and in which types."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .config import GatherMoeConfig
from .cost import settle_num_chunks
from .fp8 import Fp8GatherInChunks
from .gathered_linear import Gathering
from .transfers import Chunks, GatherInChunks, TokenTransfer, one_chunk


class Wire(NamedTuple):
    """One for a whole model.

    overlap     transfers travel while others are worked on
    num_chunks  in how many chunks; None: with overlap as many as pay for the tensor and the link, else one
    regather    gathered tokens are gathered again in the backward instead of kept
    sum_dtype   in which the experts' partial sums travel; None: in the tokens' type
    fp8_tokens  tokens travel to the experts in 8 bits (fp8.py)
    """

    overlap: bool
    num_chunks: int | None
    regather: bool
    sum_dtype: torch.dtype | None
    fp8_tokens: bool = False

    def chunks(self, x_tD: Tensor, group: ProcessGroup | None) -> Chunks:
        """How tensors of the shape and type of x_tD [t, D] are cut."""
        num_tokens = x_tD.shape[0]
        if group is None:
            return one_chunk(num_tokens)
        num = settle_num_chunks(
            num_tokens,
            # A ring passes on what every other rank has.
            sent_bytes=(dist.get_world_size(group) - 1) * x_tD.numel() * x_tD.element_size(),
            device=x_tD.device.type,
            overlap=self.overlap,
            wanted=self.num_chunks,
        )
        return Chunks(num, self.overlap, num_tokens, group)

    def gathering(self, x_tD: Tensor, group: ProcessGroup) -> Gathering:
        """The same, for products whose input is gathered."""
        return Gathering(self.chunks(x_tD, group), self.regather)

    def expert_tokens(self, x_tD: Tensor, group: ProcessGroup) -> TokenTransfer:
        """Start to gather x_tD [t, D] for the experts."""
        kind = Fp8GatherInChunks if self.fp8_tokens else GatherInChunks
        return TokenTransfer(kind(x_tD, self.chunks(x_tD, group)), kind if self.regather else None, self.sum_dtype)


def wire_of(config: GatherMoeConfig) -> Wire:
    """What a configuration says about the wire."""
    sum_dtype = torch.float32 if config.combine_dtype == "float32" else None
    fp8_tokens = config.token_dtype == "float8_e4m3"
    return Wire(config.overlap, config.overlap_chunks, config.regather, sum_dtype, fp8_tokens)
