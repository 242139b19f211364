"""Runs a decoder block's forward and its backward as one CUDA graph each, captured once and replayed for equal shapes.

A graph reads and writes fixed addresses. Tensors are copied into buffers before a replay and out of them after it, so
nothing outside ever holds a buffer, and all blocks share one set. The forward leaves nothing behind but what autograd
keeps of any function, the inputs; the backward's graph computes the block again from them, which routes alike since
routing is deterministic. Collectives are inside; hooks, accumulation and the optimizer are outside.
"""

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from inspect import unwrap
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers.utils.output_capturing import _active_collector

from modeling.attention import AttentionInputs
from modeling.decoder import GatherMoeDecoderLayer, OwnTokens
from modeling.execution import VARLEN
from modeling.model import GatherMoeForCausalLM

MAX_KEYS = 8  # shapes per block that are remembered; the one that was not used for longest goes first


class Work(NamedTuple):
    """A function of no arguments that reads `inputs` and weights, and leaves its results in `outputs`.

    All of them keep their addresses, and hold what they should only from just before a replay to just after it.
    """

    run: Callable[[], None]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


# Captures work after warm-up runs; returns its replay. Tests emulate it on a CPU.
Capture = Callable[[Work], Callable[[], None]]


class CudaCapture:
    """Captures CUDA graphs whose intermediate results share one memory pool, since no two of them run at a time."""

    NUM_WARM_UPS = 2  # libraries set up their workspaces in the first runs, which a graph must not contain

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, work: Work) -> Callable[[], None]:
        """Capture `work`; fails only for what this thread does wrong: NCCL's watchdog may ask for events meanwhile."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._stream = self._stream or torch.cuda.Stream()
        stream, current = self._stream, torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(self.NUM_WARM_UPS):
                work.run()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            work.run()
        return graph.replay


class Buffers:
    """Tensors at fixed addresses, shared by the graphs of all blocks whose tensors have the same shapes and types.

    They live as long as a graph uses them.
    """

    def __init__(self) -> None:
        self._lent: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()

    def lend(self, tensors: Iterable[Tensor], *, role: str) -> tuple[Tensor, ...]:
        """Return one buffer per tensor, of its shape, type and device, not filled; no two of one call are the same."""
        buffers = []
        for number, tensor in enumerate(tensors):
            key = (role, number, tensor.shape, tensor.dtype, tensor.device)
            buffer = self._lent.get(key)
            if buffer is None:
                buffer = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                self._lent[key] = buffer
            buffers.append(buffer)
        return tuple(buffers)


class _Arguments(NamedTuple):
    """What a block is called with: its tensors, the hidden states first, and all else, with `...` for each tensor."""

    tensors: tuple[Tensor, ...]
    constants: tuple[Any, ...]
    spec: TreeSpec

    def key(self) -> Hashable:
        """Return what is equal where the same graphs serve both calls."""
        return self.spec, self.constants, tuple((t.shape, t.dtype, t.device) for t in self.tensors)


def take_apart(hidden_states: Tensor, inputs: AttentionInputs, tokens: OwnTokens) -> _Arguments:
    """Separate tensors, which are copied, from the rest, which a graph has built in."""
    if inputs.documents is not None and inputs.implementation in VARLEN:
        # Their kernels read where documents begin from a tensor, so the host's copy does not matter.
        inputs = inputs._replace(documents=inputs.documents._replace(starts=()))
    leaves, spec = tree_flatten((hidden_states, inputs, tokens))
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    return _Arguments(tensors, tuple(... if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec)


def read_by_host(inputs: AttentionInputs, *, num_sequences: int) -> bool:
    """Whether the attention function looks at numbers before it starts a kernel.

    transformers' flash attention does where it gets a mask of padding, and where it gets the positions of a lone
    sequence, in which it looks for documents.
    """
    if inputs.documents is not None or inputs.implementation not in VARLEN:
        return False
    return inputs.mask is not None or (num_sequences == 1 and inputs.options.get("position_ids") is not None)


class _Recording(NamedTuple):
    """A block's two graphs for one key."""

    forward: Callable[[], None]
    backward: Callable[[], None]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    differentiable: tuple[bool, ...]
    output_gradients: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    addresses: tuple[int, ...]


class GraphedBlock:
    """Replaces a block's forward: eager outside training and for the first call of a kind, then replayed.

    The first call also warms up what a capture must find ready: communicators, kernels that are compiled or tuned.
    """

    def __init__(self, block: GatherMoeDecoderLayer, *, capture: Capture, buffers: Buffers) -> None:
        self._block, self._capture, self._buffers = block, capture, buffers
        self._eager: Callable[..., tuple[Tensor, ...]] = block.forward
        # Without activation checkpointing, which the backward's graph makes pointless.
        self._forward: Callable[..., tuple[Tensor, ...]] = unwrap(type(block).forward).__get__(block)
        self._state = (*block.parameters(), *block.buffers())
        self._recordings: OrderedDict[Hashable, _Recording | None] = OrderedDict()

    def __call__(self, hidden_states: Tensor, *, inputs: AttentionInputs, tokens: OwnTokens) -> tuple[Tensor, ...]:
        """Take and return what the block's own forward does."""
        trained = self._block.training and torch.is_grad_enabled() and inputs.cache is None
        # Outputs of modules inside a block, router logits say, are collected by hooks, which no replay would run.
        if not trained or _active_collector.get() or read_by_host(inputs, num_sequences=tokens.num_sequences):
            return self._eager(hidden_states, inputs=inputs, tokens=tokens)
        arguments = take_apart(hidden_states, inputs, tokens)
        recording = self._look_up(arguments)
        if recording is None:
            return self._eager(hidden_states, inputs=inputs, tokens=tokens)
        return _Replay.apply(recording, *arguments.tensors, *recording.weights)

    def _look_up(self, arguments: _Arguments) -> _Recording | None:
        """Return the graphs for such arguments, captured at their second sight; None at the first."""
        key = (arguments.key(), tuple(p.requires_grad for p in self._state))
        if key not in self._recordings:
            self._recordings[key] = None
            if len(self._recordings) > MAX_KEYS:
                self._recordings.popitem(last=False)
            return None
        self._recordings.move_to_end(key)
        recording = self._recordings[key] or self._record(arguments)
        self._recordings[key] = recording
        if recording.addresses != self._addresses():
            raise RuntimeError(
                f"the weights of layer {self._block.self_attn.layer_idx} were moved in memory after their graphs had "
                "been captured, which would go on reading the old addresses; install graphs after whatever moves "
                "weights"
            )
        return recording

    def _addresses(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self._state)

    def _record(self, arguments: _Arguments) -> _Recording:
        """Run the block once on the buffers to learn its outputs' and gradients' shapes, then capture both ways."""
        constants, spec = arguments.constants, arguments.spec
        weights = tuple(p for p in self._block.parameters() if p.requires_grad)
        inputs = self._buffers.lend(arguments.tensors, role="input")
        _copy_in(inputs, arguments.tensors)

        def run(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
            rest = iter(tensors)
            leaves = [next(rest) if constant is ... else constant for constant in constants]
            hidden_states, attention_inputs, tokens = tree_unflatten(leaves, spec)
            return self._forward(hidden_states, inputs=attention_inputs, tokens=tokens)

        def differentiate() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                hidden_states = inputs[0].detach().requires_grad_()
                outs = [out for out in run((hidden_states, *inputs[1:])) if out.requires_grad]
                return torch.autograd.grad(outs, (hidden_states, *weights), output_gradients, materialize_grads=True)

        with torch.enable_grad():
            outs = run((inputs[0].detach().requires_grad_(), *inputs[1:]))
        differentiable = tuple(out.requires_grad for out in outs)
        outputs = self._buffers.lend(outs, role="output")
        output_gradients = self._buffers.lend((out for out in outs if out.requires_grad), role="output gradient")
        del outs  # and with them all that the run has saved
        gradients = self._buffers.lend(differentiate(), role="gradient")
        forward = _leave_in(outputs, lambda: run(inputs))
        backward = _leave_in(gradients, differentiate)
        return _Recording(
            forward=self._capture(Work(forward, inputs, outputs)),
            backward=self._capture(Work(backward, (*inputs, *output_gradients), gradients)),
            inputs=inputs,
            outputs=outputs,
            differentiable=differentiable,
            output_gradients=output_gradients,
            gradients=gradients,
            weights=weights,
            addresses=self._addresses(),
        )


class _Replay(torch.autograd.Function):
    """A block by its graphs; takes and returns tensors that are no buffers."""

    @staticmethod
    def forward(ctx: Any, recording: _Recording, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = tensors[: len(recording.inputs)]
        ctx.recording = recording
        ctx.save_for_backward(*given)
        _copy_in(recording.inputs, given)
        recording.forward()
        outputs = _take_out(recording.outputs)
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, recording.differentiable, strict=True) if not d))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        recording: _Recording = ctx.recording
        _copy_in(recording.inputs, ctx.saved_tensors)
        wanted = [g for g, d in zip(gradients, recording.differentiable, strict=True) if d]
        _copy_in(recording.output_gradients, wanted)
        recording.backward()
        grad_hidden_states, *grad_weights = _take_out(recording.gradients)
        return None, grad_hidden_states, *[None] * (len(recording.inputs) - 1), *grad_weights


def _copy_in(buffers: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for buffer, tensor in zip(buffers, tensors, strict=True):
        buffer.copy_(tensor.detach())


def _take_out(buffers: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return copies: whoever keeps one, a parameter its gradient say, must not see the next replay's numbers in it."""
    return tuple(buffer.clone() for buffer in buffers)


def _leave_in(buffers: Sequence[Tensor], make: Callable[[], Sequence[Tensor]]) -> Callable[[], None]:
    """Wrap `make` so that its results are copied to `buffers`: all other memory is free for the next capture."""

    def run() -> None:
        with torch.no_grad():
            _copy_in(buffers, make())

    return run


def install_graphs(model: GatherMoeForCausalLM, *, capture: Capture) -> None:
    """Let every decoder block of `model` capture and replay itself while it is trained.

    Call it when the weights have their final addresses, after `deepspeed.initialize` and not with ZeRO-3.
    Parameter names stay as they are.
    """
    buffers = Buffers()
    for block in model.model.layers:
        block.forward = GraphedBlock(block, capture=capture, buffers=buffers)  # type: ignore[method-assign, assignment]


def remove_graphs(model: GatherMoeForCausalLM) -> None:
    """Give blocks that have graphs their own forward back, and free the graphs.

    To be done before the process group ends: NCCL waits in vain for a communicator that a graph still holds.
    """
    graphed = [block for block in model.model.layers if isinstance(block.forward, GraphedBlock)]
    for block in graphed:
        del block.forward
    if graphed:
        gc.collect()  # what was captured and the block that it works for hold each other
