"""What a pass through a rank's experts is given and gives back, whichever backend runs it."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from .transfers import Chunks, GatheredChunks


class Slices(NamedTuple):
    """Weights of experts, whole or a rank's slice of each: gate_up [n, 2f, D], gate rows first, and down [n, D, f]."""

    gate_up: Tensor
    down: Tensor


class ExpertsCall(NamedTuple):
    """One micro-batch for the experts here. Tokens are in chunk order throughout.

    slots_TA    [T, A] int64  which of the e experts here each pair is for, or, from e on, which of the copies; any
                              other number: for none of them
    weights_TA  [T, A]        what the experts' outputs are summed with, float32 at least
    gate_up     [e, 2f, D]    gate rows first
    down        [e, D, f]
    copies      the same of C experts that live on other ranks; None where there are none
    """

    slots_TA: Tensor
    weights_TA: Tensor
    gate_up: Tensor
    down: Tensor
    chunks: Chunks
    copies: Slices | None = None


class WeightGradients(NamedTuple):
    """Of the experts here, and of the copies of others' where there are any."""

    own: Slices
    copies: Slices | None


class ExpertsPass(Protocol):
    """One forward, or one backward, over chunks of tokens in their order."""

    def to_keep(self) -> Tensor | None:
        """What a forward leaves for the backward besides its inputs; None where it leaves nothing."""

    def forward_chunk(self, k: int, x_cD: Tensor) -> Tensor:
        """Tokens [c, D] of chunk k -> the weighted sums of their experts here, [c, D] in float32 at least."""

    def backward_chunk(self, k: int, grad_cD: Tensor, tokens: GatheredChunks) -> Tensor:
        """The gradient of chunk k's sums and its tokens -> the tokens' gradient [c, D] in float32 at least."""

    def routing_gradient(self) -> Tensor:
        """The gradient of the routing weights [T, A] in chunk order, after the last chunk's backward."""

    def weight_gradients(self, grad_TD: Tensor, x_TD: Tensor) -> WeightGradients:
        """The gradients of the experts, after the last chunk's backward, from all gradients and tokens."""


MakePass = Callable[[ExpertsCall, Tensor | None], ExpertsPass]  # the second: what a forward left, in its backward
