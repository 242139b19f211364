"""Replayed blocks train like eager ones, bit for bit; the graphs are emulated and ruin what nobody may keep."""

import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import recipe.engine.graphs
from modeling.attention import AttentionInputs, Documents, RotaryTables, eager_attention
from modeling.decoder import OwnTokens
from modeling.model import GatherMoeForCausalLM
from recipe.engine.graphs import MAX_KEYS, Buffers, install_graphs, read_by_host, remove_graphs, take_apart
from tests.emulated_graphs import EmulatedCapture
from tests.referee import mixed_config, our_model, split_options

NUM_LAYERS, NUM_STEPS = 3, 3
MAX_OUTPUTS = 5  # of a block, which has more weights than that
Batches = list[dict[str, Any]]


class Trained(NamedTuple):
    """Losses of all micro-batches; gradients of the last step and weights after it, by name."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def make_model(**changes: Any) -> GatherMoeForCausalLM:
    options, execution = split_options({"experts_backend": "grouped", "router_aux_loss_coef": 0.01} | changes)
    return our_model(mixed_config(**options), execution=execution)


def graphed_model(**changes: Any) -> tuple[GatherMoeForCausalLM, EmulatedCapture]:
    model, capture = make_model(**changes), EmulatedCapture()
    install_graphs(model, capture=capture)
    return model, capture


def batches(*, num: int = 9, shape: tuple[int, int] = (2, 16), seed: int = 0) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num):
        ids = torch.randint(0, 50, shape, generator=generator)
        yield {"input_ids": ids, "labels": ids, "document_starts": ((0,),) * shape[0], "use_cache": False}


def run_once(model: GatherMoeForCausalLM, batch: dict[str, Any]) -> None:
    model(**batch).loss.backward()


def train(model: GatherMoeForCausalLM, micro_batches: Batches) -> Trained:
    """Three AdamW steps that share the micro-batches evenly."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], {}
    per_step = len(micro_batches) // NUM_STEPS
    for i, micro_batch in enumerate(micro_batches, start=1):
        loss = model(**micro_batch, output_logits=False).loss
        loss.backward()
        losses.append(loss.item())
        if i % per_step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
    return Trained(losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()})


def padded(num: int) -> Batches:
    """Batches with other padding in each."""
    found = []
    for i, batch in enumerate(batches(num=num)):
        mask = torch.arange(16) < torch.tensor([[16 - i], [9 + i]])
        labels = batch["labels"].masked_fill(~mask, -100)
        inputs = {"input_ids": batch["input_ids"], "labels": labels, "use_cache": False}
        found.append(inputs | {"attention_mask": mask.long()})
    return found


def packed(num: int) -> Batches:
    """Batches of packed documents that begin in two ways by turns, each of which needs graphs of its own."""
    starts = (((0,), (0, 7)), ((0, 5), (0, 3, 11)))
    return [batch | {"document_starts": starts[i % 2]} for i, batch in enumerate(batches(num=num))]


def plain(num: int) -> Batches:
    return list(batches(num=num))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("make", "num", "num_kinds", "changes"),
    [
        *((plain, num, 1, {"experts_backend": backend}) for num in (3, 9) for backend in ("grouped", "loop")),
        *((padded, 6, 1, {"qk_norm": norm}) for norm in ("none", "full")),
        (packed, 9, 2, {}),
    ],
)
def test_training_with_graphs_is_training(
    make: Callable[[int], Batches], num: int, num_kinds: int, changes: dict[str, Any], checkpointing: bool
) -> None:
    eager = make_model(**changes)
    graphed, capture = graphed_model(**changes)
    if checkpointing:
        eager.gradient_checkpointing_enable()
        graphed.gradient_checkpointing_enable()
    want, got = train(eager, make(num)), train(graphed, make(num))
    assert got.losses == want.losses
    for ours, theirs in ((got.gradients, want.gradients), (got.weights, want.weights)):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name
    assert capture.num_recordings == 2 * NUM_LAYERS * num_kinds
    assert capture.num_replays == 2 * NUM_LAYERS * (num - num_kinds)  # the first one of a kind is eager


def test_two_forwards_may_come_before_their_backwards() -> None:
    gradients = []
    for model in (make_model(), graphed_model()[0]):
        for batch in batches(num=2):
            model(**batch).loss.backward()
        model.zero_grad()
        losses = [model(**batch).loss for batch in batches(num=2, seed=1)]
        (losses[0] + 2 * losses[1]).backward()
        gradients.append([p.grad for p in model.parameters()])
    for got, want in zip(*gradients, strict=True):
        assert torch.equal(got, want)


def keep_views(buffers: Any) -> tuple[Any, ...]:
    """What a wrapper must not do, and torch.cuda.make_graphed_callables does."""
    return tuple(buffer.detach() for buffer in buffers)


def gradients_after(monkeypatch: pytest.MonkeyPatch, *, take_out: Callable[..., Any]) -> dict[str, Tensor]:
    """Of two micro-batches whose replays hand out their results by `take_out`; the recordings were made before."""
    model, _ = graphed_model()
    first, second, *accumulated = batches(num=4)
    run_once(model, first)
    run_once(model, second)
    model.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(recipe.engine.graphs, "_take_out", take_out)
        for batch in accumulated:
            run_once(model, batch)
    return {name: p.grad for name, p in model.named_parameters()}


def test_a_kept_view_of_a_buffer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = recipe.engine.graphs._take_out
    right = gradients_after(monkeypatch, take_out=copy)
    outputs = gradients_after(monkeypatch, take_out=lambda b: keep_views(b) if len(b) <= MAX_OUTPUTS else copy(b))
    gradients = gradients_after(monkeypatch, take_out=lambda b: keep_views(b) if len(b) > MAX_OUTPUTS else copy(b))
    assert all(tensor.isfinite().all() for tensor in right.values())
    assert not torch.equal(outputs["model.embed_tokens.weight"], right["model.embed_tokens.weight"])
    in_blocks = [name for name in right if ".layers." in name]
    assert in_blocks
    assert not any(torch.equal(gradients[name], right[name]) for name in in_blocks)
    assert any(gradients[name].isnan().all() for name in in_blocks)


def test_an_input_that_is_not_copied_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_in = recipe.engine.graphs._copy_in
    model, _ = graphed_model()
    micro_batches = list(batches(num=3))
    for batch in micro_batches[:2]:
        model(**batch).loss.backward()
    # Rotary tables, say, which are the same in every call and might be thought to stay.
    monkeypatch.setattr(recipe.engine.graphs, "_copy_in", lambda buffers, tensors: copy_in(buffers[:1], tensors[:1]))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        model(**micro_batches[2])


def test_the_shape_unused_for_longest_is_forgotten() -> None:
    model, capture = graphed_model()
    shapes = [next(batches(num=1, shape=(1, 2 + i))) for i in range(MAX_KEYS + 1)]
    for batch in shapes[:MAX_KEYS]:
        run_once(model, batch)
        run_once(model, batch)
    run_once(model, shapes[0])  # used again, so that the second is now the oldest
    before = capture.num_recordings
    assert before == MAX_KEYS * 2 * NUM_LAYERS
    run_once(model, shapes[MAX_KEYS])
    replays = capture.num_replays
    run_once(model, shapes[0])
    assert capture.num_recordings == before
    assert capture.num_replays == replays + 2 * NUM_LAYERS
    run_once(model, shapes[1])
    run_once(model, shapes[1])
    assert capture.num_recordings == before + 2 * NUM_LAYERS


def test_graphs_are_gone_when_they_are_removed() -> None:
    """A process group cannot end before what was captured of it."""
    model, capture = graphed_model()
    own = type(model.model.layers[0]).forward
    for batch in batches(num=3):
        run_once(model, batch)
    assert capture.num_replays
    assert any(ref() is not None for ref in capture._outputs)
    remove_graphs(model)
    assert all(ref() is None for ref in capture._outputs)
    assert all(block.forward.__func__ is own for block in model.model.layers)
    replays = capture.num_replays
    run_once(model, next(batches()))
    assert capture.num_replays == replays
    remove_graphs(model)  # again, as for a model that never had any


def test_buffers_are_shared_and_go_with_their_last_user() -> None:
    buffers = Buffers()
    like = [torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, dtype=torch.int64)]
    lent = buffers.lend(like, role="input")
    assert len({buffer.data_ptr() for buffer in lent}) == 3
    again = buffers.lend(like, role="input")
    assert all(a is b for a, b in zip(lent, again, strict=True))
    assert all(a is not b for a, b in zip(lent, buffers.lend(like, role="output"), strict=True))
    del lent, again
    gc.collect()
    assert len(buffers._lent) == 0


def test_what_a_replay_cannot_give_is_computed_eagerly() -> None:
    """Evaluation, outputs from inside a block, and calls with a cache."""
    model, capture = graphed_model()
    [batch] = batches(num=1)
    for _ in range(2):
        run_once(model, batch)
    before = capture.num_replays
    want, cache = make_model()(**batch, output_router_logits=True), DynamicCache(config=model.config)
    for _ in range(3):
        got = model(**batch, output_router_logits=True)
        assert len(got.router_logits) == len(want.router_logits) == NUM_LAYERS - 1
        cache.crop(-cache.get_seq_length())
        model(input_ids=batch["input_ids"], cache=cache, use_cache=True)
        assert cache.get_seq_length() == 16
    with torch.no_grad():
        model(**batch)
    model.eval()
    model(**batch)
    assert capture.num_replays == before
    model.train()
    run_once(model, batch)
    assert capture.num_replays == before + 2 * NUM_LAYERS


def test_the_backward_computes_a_block_again_just_once() -> None:
    """With activation checkpointing switched on, too, which only eager calls heed."""
    model, _ = graphed_model()
    model.gradient_checkpointing_enable()
    first, second, third = batches(num=3)
    run_once(model, first)
    run_once(model, second)
    calls = []
    model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    model(**third).loss.backward()
    assert len(calls) == 2


def test_frozen_weights_get_no_gradient() -> None:
    model, capture = graphed_model()
    [batch] = batches(num=1)
    for _ in range(2):
        run_once(model, batch)
    frozen = model.get_parameter("model.layers.1.mlp.experts.down_proj")
    frozen.requires_grad_(False)
    model.zero_grad()
    for _ in range(2):
        run_once(model, batch)
    assert frozen.grad is None
    assert model.get_parameter("model.layers.1.mlp.experts.gate_up_proj").grad is not None
    assert capture.num_recordings == 2 * (NUM_LAYERS + 1)  # that layer's anew


def test_weights_that_were_moved_are_not_read_at_their_old_place() -> None:
    model, _ = graphed_model()
    [batch] = batches(num=1)
    for _ in range(2):
        run_once(model, batch)
    weight = model.get_parameter("model.layers.2.self_attn.q_proj.weight")
    weight.data = weight.data.clone()
    with pytest.raises(
        RuntimeError, match=r"the weights of layer 2 were moved .*; install graphs after whatever moves"
    ):
        run_once(model, batch)


def attention_inputs(implementation: str, *, starts: tuple[tuple[int, ...], ...], num_lengths: int) -> AttentionInputs:
    documents = Documents(starts, torch.zeros(num_lengths, dtype=torch.int32), 16, 16)
    tables = RotaryTables(torch.zeros(1, 16, 8), torch.zeros(1, 16, 8))
    return AttentionInputs(tables, None, documents, len, implementation, None, {})  # type: ignore[arg-type]


def key_of(implementation: str, *, starts: tuple[tuple[int, ...], ...], num_lengths: int = 5) -> Any:
    tokens = OwnTokens(1, torch.arange(16) // 16, None)
    inputs = attention_inputs(implementation, starts=starts, num_lengths=num_lengths)
    return take_apart(torch.zeros(16, 32), inputs, tokens).key()


def test_document_starts_matter_where_the_host_reads_them() -> None:
    assert key_of("sdpa", starts=((0, 4),)) == key_of("sdpa", starts=((0, 4),))
    assert key_of("sdpa", starts=((0, 4),)) != key_of("sdpa", starts=((0, 5),))
    assert key_of("sdpa", starts=((0, 4),)) != key_of("sdpa", starts=((0, 4, 9),))
    assert key_of("flash_attention_2", starts=((0, 4),)) == key_of("flash_attention_2", starts=((0, 5, 9),))
    other_length = key_of("flash_attention_2", starts=((0, 4),), num_lengths=9)
    assert key_of("flash_attention_2", starts=((0, 4),)) != other_length


def test_flash_attention_that_looks_at_numbers_is_eager() -> None:
    positions = torch.arange(16)[None]
    packed = attention_inputs("flash_attention_2", starts=((0, 4),), num_lengths=5)
    plain = packed._replace(documents=None, options={"position_ids": positions})
    assert read_by_host(plain, num_sequences=1)
    assert not read_by_host(plain, num_sequences=2)
    assert not read_by_host(plain._replace(options={}), num_sequences=1)
    assert not read_by_host(packed._replace(options={"position_ids": positions}), num_sequences=1)
    assert read_by_host(plain._replace(mask=torch.ones(2, 16)), num_sequences=2)
    assert not read_by_host(plain._replace(mask=torch.ones(2, 16), implementation="sdpa"), num_sequences=1)
    model, capture = graphed_model()
    layer = model.model.layers[1]
    sdpa = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", eager_attention)
    tokens = OwnTokens(1, torch.arange(16) // 16, None)
    for _ in range(3):
        layer(torch.zeros(1, 16, 32), inputs=plain._replace(function=sdpa), tokens=tokens)
    assert capture.num_recordings == 0
    for _ in range(3):
        layer(torch.zeros(1, 16, 32), inputs=plain._replace(function=sdpa, options={}), tokens=tokens)
    assert capture.num_recordings == 2
