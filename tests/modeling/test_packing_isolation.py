"""Batches of our pipeline: documents packed in one block do not see each other, and padding has no effect."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen  # defines the operators
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from modeling.attention import check_isolation, document_positions, find_documents
from modeling.model import GatherMoeForCausalLM
from recipe.data.batches import MicroBatch, evaluation_batches
from recipe.data.loader import LoaderOptions, StepLoader
from tests.data_samples import prepare
from tests.referee import assert_all_match, gradients_of, mixed_config, our_model

BLOCK = 16
STARTS = ((0, 3, 11), (0,), (0, 9))
IMPLEMENTATIONS = ["sdpa", "eager"]


def model_with(implementation: str = "sdpa", **changes: Any) -> GatherMoeForCausalLM:
    config = mixed_config(**changes)
    config._attn_implementation = implementation
    return our_model(config).eval()


def block_ids() -> Tensor:
    return torch.randint(0, 50, (len(STARTS), BLOCK), generator=torch.Generator().manual_seed(3))


def documents() -> list[tuple[int, slice]]:
    """Every document as its sequence and its positions."""
    return [
        (b, slice(start, end))
        for b, starts in enumerate(STARTS)
        for start, end in zip(starts, (*starts[1:], BLOCK), strict=True)
    ]


@torch.no_grad()
def packed_logits(model: GatherMoeForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    return model(input_ids=ids, document_starts=STARTS, **options).logits


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"attention_mask": True}], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.requirement("R-LEN-02")
def test_a_packed_document_is_like_the_document_alone(implementation: str, options: dict[str, Any]) -> None:
    model, ids = model_with(implementation), block_ids()
    if "attention_mask" in options:
        options = {"attention_mask": torch.ones_like(ids)}
    packed = packed_logits(model, ids, **options)
    for b, here in documents():
        with torch.no_grad():
            alone = model(input_ids=ids[b : b + 1, here]).logits[0]
        torch.testing.assert_close(packed[b, here], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.requirement("R-LEN-02")
def test_a_document_does_not_move_when_another_changes(implementation: str) -> None:
    model, ids = model_with(implementation), block_ids()
    changed = ids.clone()
    changed[0, 1] = (ids[0, 1] + 1) % 50
    before, after = packed_logits(model, ids), packed_logits(model, changed)
    moved = (before - after).abs().amax(-1) > 1e-6
    assert moved[0].tolist() == [False, True, True] + [False] * 13
    assert not moved[1:].any()


@pytest.mark.slow
@pytest.mark.requirement("R-LEN-02")
def test_flex_attention_gives_the_same_logits() -> None:
    """Not compiled, which takes half a minute on a CPU: the mask is what matters."""
    ids = block_ids()
    want = packed_logits(model_with("sdpa"), ids)
    flex = model_with("flex_attention")
    with torch.compiler.set_stance("force_eager"):
        for options in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(ids)}):
            torch.testing.assert_close(packed_logits(flex, ids, **options), want, atol=1e-5, rtol=0)


@pytest.mark.requirement("R-LEN-02")
def test_an_implementation_that_cannot_isolate_is_refused() -> None:
    model, ids = model_with("sdpa"), block_ids()
    AttentionInterface.register("half_blind", sdpa_attention_forward)
    model.config._attn_implementation = "half_blind"
    message = (
        r"attn_implementation='half_blind' is not known to keep packed documents apart; choose one of \['eager', "
        r"'flash_attention_2', 'flash_attention_3', 'flash_attention_4', 'flex_attention', 'sdpa', 'varlen'\]$"
    )
    with pytest.raises(ValueError, match=message):
        packed_logits(model, ids)
    with pytest.raises(ValueError, match=message):
        model(input_ids=ids, document_starts=((0,),) * 3)
    with pytest.raises(ValueError, match="choose one of"):
        check_isolation("flash_attention_99")


def test_documents_cannot_be_packed_behind_a_cache() -> None:
    model, ids = model_with("sdpa"), block_ids()
    cache = model(input_ids=ids, use_cache=True).cache
    with pytest.raises(ValueError, match="document_starts cannot be combined with a cache"):
        model(input_ids=ids, document_starts=STARTS, cache=cache)


@pytest.mark.parametrize("starts", [((0, 3, 11), (0,)), ((1, 3), (0,), (0,)), ((0, 3, 3), (0,), (0,)), ((0, 16),) * 3])
def test_starts_that_do_not_describe_the_batch_are_refused(starts: Any) -> None:
    with pytest.raises(ValueError, match=r"document_starts=.* must hold, for each of 3 sequences, positions that rise"):
        model_with("sdpa")(input_ids=block_ids(), document_starts=starts)


def test_boundaries_are_a_list_of_fixed_length() -> None:
    here = {"block_size": BLOCK, "device": torch.device("cpu")}
    found = find_documents(STARTS, implementation="flash_attention_2", **here)
    assert found is not None
    total = len(STARTS) * BLOCK
    assert found.cu_seqlens.tolist() == [0, 3, 11, 16, 32, 41, total, total, total]
    assert found.cu_seqlens.dtype == torch.int32
    assert (found.max_length, found.block_size) == (BLOCK, BLOCK)
    short = find_documents(((0, 4, 8, 12),), implementation="flash_attention_2", **here)
    assert (short.max_length, short.block_size) == (BLOCK // 4, BLOCK)
    whole = find_documents(((0,), (0,)), implementation="varlen", **here)
    assert (whole.cu_seqlens.tolist(), whole.max_length) == ([0, BLOCK, 2 * BLOCK], BLOCK)
    assert find_documents(STARTS, implementation="sdpa", **here).cu_seqlens is None
    assert find_documents(((0,), (0,)), implementation="flash_attention_2", **here) is None


def test_positions_begin_again_in_every_document() -> None:
    positions = document_positions(((0, 3), (0,)), block_size=5, device=torch.device("cpu"))
    assert positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]


def test_varlen_kernels_get_the_flattened_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What flash attention would be called with, checked by a stand-in that honours its arguments."""
    seen: list[dict[str, Any]] = []

    def varlen(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        seen.append({"mask": mask, "shape": tuple(q.shape), **options})
        bounds = options["cu_seq_lens_q"].tolist()
        parts = [
            sdpa_attention_forward(module, *(x[:, :, a:b] for x in (q, k, v)), None, scaling=options["scaling"])[0]
            for a, b in itertools.pairwise(bounds)
            if b > a
        ]
        return torch.cat(parts, dim=1), None

    model, ids = model_with("sdpa"), block_ids()
    want = packed_logits(model, ids)
    AttentionInterface.register("flash_attention_2", varlen)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    got = packed_logits(model, ids)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert seen[0]["shape"] == (1, 4, len(STARTS) * BLOCK, 8)
    assert seen[0]["mask"] is None
    assert (seen[0]["max_length_q"], seen[0]["max_length_k"]) == (BLOCK, BLOCK)
    assert torch.equal(seen[0]["cu_seq_lens_q"], seen[0]["cu_seq_lens_k"])


class FlashOnCpu(TorchDispatchMode):
    """torch's varlen attention, whose kernels are a GPU's, by its definition, forward and backward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.ops.torch_attn._varlen_attn.default:
            q, k, v, ends, _, longest, _, is_causal, scale = args[:9]
            assert max(b - a for a, b in itertools.pairwise(ends.tolist())) <= longest
            assert is_causal
            out = torch.cat([part @ values for part, _, values in documents_of(q, k, v, ends, scale)], dim=1)
            return out.transpose(0, 1).contiguous(), q.new_zeros(q.shape[1], len(q)), q.new_zeros(2, dtype=torch.uint64)
        if func == torch.ops.torch_attn._varlen_attn_backward.default:
            grad, q, k, v, _, _, ends = args[:7]
            return gradients_by_document(grad, q, k, v, ends, scale=args[12])
        return func(*args, **(kwargs or {}))


def documents_of(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Weights [h, S, S], keys and values [h, S, K] of every document."""
    found = []
    for start, end in itertools.pairwise(ends.tolist()):
        queries, keys, values = (x[start:end].transpose(0, 1) for x in (q, k, v))
        keys, values = (x.repeat_interleave(len(queries) // len(x), dim=0) for x in (keys, values))
        future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        scores = (queries @ keys.transpose(1, 2) * scale).masked_fill(future, -torch.inf)
        found.append((scores.softmax(-1), keys, values))
    return found


def gradients_by_document(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *, scale: float) -> list[Tensor]:
    """FlashAttention (2205.14135), appendix B.2, without its tiles."""
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    bounds = list(itertools.pairwise(ends.tolist()))
    for (start, end), (weights, keys, values) in zip(bounds, documents_of(q, k, v, ends, scale), strict=True):
        here = grad[start:end].transpose(0, 1)
        of_weights = here @ values.transpose(1, 2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        queries = q[start:end].transpose(0, 1)
        parts = (of_scores @ keys, of_scores.transpose(1, 2) @ queries, weights.transpose(1, 2) @ here)
        for out, part in zip(grads, parts, strict=True):
            out[start:end] = part.unflatten(0, (out.shape[1], -1)).sum(1).transpose(0, 1)
    return grads


@pytest.mark.parametrize("starts", [STARTS, ((0,),) * 3, ((0, 4, 8, 12),) * 3], ids=str)
@pytest.mark.requirement("R-LEN-02")
def test_torchs_varlen_trains_as_sdpa_does(starts: tuple[tuple[int, ...], ...]) -> None:
    ids, losses, gradients = block_ids(), [], []
    for implementation in ("sdpa", "varlen"):
        model = model_with(implementation).train()
        with FlashOnCpu():
            loss = model(input_ids=ids, labels=ids, document_starts=starts).loss
            loss.backward()
        losses.append(loss.detach())
        gradients.append(gradients_of(model))
    torch.testing.assert_close(*losses)
    assert_all_match(*gradients)


def test_varlen_refuses_dropout_where_it_would_drop_nothing() -> None:
    model = model_with("varlen", attention_dropout=0.1).train()
    with pytest.raises(ValueError, match=r"'varlen' knows no dropout, and attention_dropout=0\.1; use 'sdpa'"):
        packed_logits(model, block_ids())


def test_varlen_without_boundaries_is_sdpa() -> None:
    """Evaluating with padding, and generating with a cache: on a CPU, too."""
    ids, mask = block_ids(), torch.ones(len(STARTS), BLOCK, dtype=torch.int64)
    mask[0, -3:] = 0
    want, got = (model_with(name) for name in ("sdpa", "varlen"))
    with torch.no_grad():
        assert torch.equal(
            got(input_ids=ids, attention_mask=mask).logits, want(input_ids=ids, attention_mask=mask).logits
        )
    kwargs = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(got.generate(ids, **kwargs), want.generate(ids, **kwargs))


PACKED = ((0, 4, 11), (0, 9), (0,))  # in each sequence the last is padding
DOCUMENTS = ((0, slice(0, 4)), (0, slice(4, 11)), (1, slice(0, 9)))


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.requirement("R-MOE-11")
def test_documents_packed_beside_padding_train_as_they_do_one_by_one(attention: str) -> None:
    alone, packed = model_with().train(), model_with(attention).train()
    ids = torch.randint(0, 50, (3, 16), generator=torch.Generator().manual_seed(2))
    mask, labels = torch.zeros(3, 16, dtype=torch.bool), torch.full((3, 16), -100)
    for row, here in DOCUMENTS:
        mask[row, here] = True
        labels[row, here.start + 1 : here.stop] = ids[row, here.start + 1 : here.stop]
    share = {"num_items_in_batch": int((labels != -100).sum())}

    got = packed(input_ids=ids, labels=labels, document_starts=PACKED, attention_mask=mask, **share)
    got.loss.backward()
    loss, counts = torch.tensor(0.0), torch.zeros(2, 8)
    for row, here in DOCUMENTS:
        one = ids[row : row + 1, here]
        want = alone(input_ids=one, labels=one, **share)
        want.loss.backward()
        torch.testing.assert_close(got.logits[row, here], want.logits[0], atol=1e-5, rtol=0)
        loss, counts = loss + want.loss, counts + want.sums.expert_counts
    torch.testing.assert_close(got.loss, loss, atol=1e-5, rtol=0)
    assert torch.equal(got.sums.expert_counts, counts)
    assert counts.sum().item() == 2 * 3 * (4 + 7 + 9)
    assert_all_match(gradients_of(packed), gradients_of(alone))


WORDS = {"vocab_size": 210, "max_position_embeddings": BLOCK}


def data(folder: Path) -> Any:
    """Documents of one to twenty tokens, and their end tokens, in blocks of 16."""
    texts = [" ".join(f"w{(7 * d + i) % 200}" for i in range(1 + d * 5 % 20)) for d in range(15)]
    return prepare(folder, texts, block_size=BLOCK).train


def inputs_of(batch: MicroBatch) -> dict[str, Any]:
    inputs = {"input_ids": batch.input_ids, "labels": batch.labels, "document_starts": batch.document_starts}
    return inputs if batch.token_mask is None else {**inputs, "attention_mask": batch.token_mask}


@torch.no_grad()
@pytest.mark.requirement("R-LOSS-04")
def test_a_batch_of_our_pipeline_is_shifted_once(tmp_path: Path) -> None:
    """By hand: every document alone, -log p(x[t+1] | x[:t]) for all its tokens but the first."""
    options = LoaderOptions(num_sequences=3, shuffle=False, seed=0)
    [batch], _ = next(StepLoader(data(tmp_path), options=options).steps(0))
    assert sum(len(starts) for starts in batch.document_starts) > 4
    model, losses = model_with(**WORDS).train(), []
    for row, starts in zip(batch.input_ids, batch.document_starts, strict=True):
        for start, end in zip(starts, (*starts[1:], BLOCK), strict=True):
            document = row[start:end]
            log_probs = model(input_ids=document[None]).logits[0].log_softmax(-1)
            losses += [-log_probs[t, document[t + 1]] for t in range(len(document) - 1)]
    assert len(losses) == batch.num_targets
    for options_of_call in ({}, {"output_logits": False}):
        got = model(**inputs_of(batch), **options_of_call).lm_loss
        torch.testing.assert_close(got, torch.stack(losses).mean(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("training", [False, True])
def test_sequences_of_padding_have_no_effect(tmp_path: Path, training: bool, attention: str) -> None:
    *_, batch = evaluation_batches(data(tmp_path), num_sequences=3, dp=1, dp_rank=0)
    assert batch.token_mask is not None
    real = int(batch.token_mask.any(dim=1).sum())
    assert 0 < real < 3
    model = model_with(attention, **WORDS, router_aux_loss_coef=0.5, router_z_loss_coef=0.1).train(training)
    got = model(**inputs_of(batch))
    inputs = {key: value[:real] for key, value in inputs_of(batch).items()}
    want = model(**(inputs | {"attention_mask": None}))
    assert torch.isfinite(got.logits).all()
    torch.testing.assert_close(got.logits[:real], want.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.loss, want.loss, atol=1e-5, rtol=0)
    assert torch.equal(got.sums.expert_counts, want.sums.expert_counts)
