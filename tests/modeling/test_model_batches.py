"""Batches of our pipeline through the model: labels shifted once, documents apart, padded sequences of no effect."""

from pathlib import Path
from typing import Any

import pytest
import torch

from modeling.init import build_model, cut, shard_table
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh
from modeling.model import GatherMoeForCausalLM
from recipe.data.batches import MicroBatch, evaluation_batches
from recipe.data.loader import LoaderOptions, StepLoader
from tests.data_samples import prepare
from tests.ranks import run_ranks
from tests.referee import full_state, mixed_config

BLOCK = 16
CONFIG = {"vocab_size": 210, "max_position_embeddings": BLOCK}


def data(folder: Path) -> Any:
    """Documents of one to twenty tokens, and their end tokens, in blocks of 16."""
    texts = [" ".join(f"w{(7 * d + i) % 200}" for i in range(1 + d * 5 % 20)) for d in range(15)]
    return prepare(folder, texts, block_size=BLOCK).train


def model_of(**changes: Any) -> GatherMoeForCausalLM:
    config = mixed_config(**CONFIG, **changes)
    model = GatherMoeForCausalLM(config)
    model.load_state_dict(full_state(config))
    return model


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
    model, losses = model_of(), []
    for row, starts in zip(batch.input_ids, batch.document_starts, strict=True):
        for start, end in zip(starts, (*starts[1:], BLOCK), strict=True):
            document = row[start:end]
            log_probs = model(input_ids=document[None]).logits[0].log_softmax(-1)
            losses += [-log_probs[t, document[t + 1]] for t in range(len(document) - 1)]
    assert len(losses) == batch.num_targets
    for options_of_call in ({}, {"output_logits": False}):
        got = model(**inputs_of(batch), **options_of_call).lm_loss
        torch.testing.assert_close(got, torch.stack(losses).mean(), atol=1e-5, rtol=0)


def padded_batch(folder: Path) -> MicroBatch:
    """An evaluation batch whose last sequences are padding."""
    blocks = data(folder)
    *_, last = evaluation_batches(blocks, num_sequences=3, dp=1, dp_rank=0)
    assert last.token_mask is not None
    assert 0 < last.token_mask.any(dim=1).sum() < 3
    return last


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("training", [False, True])
def test_sequences_of_padding_have_no_effect(tmp_path: Path, training: bool, attention: str) -> None:
    batch = padded_batch(tmp_path)
    assert batch.token_mask is not None
    real = int(batch.token_mask.any(dim=1).sum())
    model = model_of(router_aux_loss_coef=0.5, router_z_loss_coef=0.1).train(training)
    model.config._attn_implementation = attention
    got = model(**inputs_of(batch))
    inputs = {key: value[:real] for key, value in inputs_of(batch).items()}
    want = model(**(inputs | {"attention_mask": None}))
    assert torch.isfinite(got.logits).all()
    torch.testing.assert_close(got.logits[:real], want.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.loss, want.loss, atol=1e-5, rtol=0)
    assert torch.equal(got.sums.expert_counts, want.sums.expert_counts)


def _under_a_mesh(rank: int, world_size: int, batch: MicroBatch) -> None:
    want = model_of().eval()(**inputs_of(batch))
    config = mixed_config(**CONFIG)
    state = full_state(config)
    mesh = build_mesh(ParallelLayout(tp=world_size, ep=world_size), num_key_value_heads=2)
    model = build_model(config, mesh=mesh, seed=0).eval()
    table = shard_table(config, mesh)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(cut(state[name], table.shard(name, tuple(state[name].shape), group_rank=rank)))
    with torch.no_grad():
        got = model(**inputs_of(batch))
    assert got.logits is None
    torch.testing.assert_close(got.loss, want.loss.detach(), atol=1e-5, rtol=0)


def test_sequences_of_padding_have_no_effect_under_a_mesh(tmp_path: Path) -> None:
    run_ranks(_under_a_mesh, 2, padded_batch(tmp_path))
