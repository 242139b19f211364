"""Predicted peaks for experts' buffers of fixed size beside those of the real model on fake tensors in a fake group."""

from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh
from modeling.model import GatherMoeForCausalLM
from recipe.dry_run.live_memory import LiveMemory
from recipe.plan.memory import moments
from recipe.plan.model_traffic import HEAD_CHUNK_BYTES
from tests.engine_runs import Case
from tests.plan.test_memory_ranks import Measured, config_of, job_of
from tests.referee import split_options

pytestmark = pytest.mark.slow

STATIC = {
    "experts_backend": "grouped",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 256,
}


def fake_peak(measured: Measured, *, device: str) -> int:
    """Forward and backward of one micro-batch in bf16 as the first rank, without an optimizer.

    Of the device only the size of the head's slices is taken.
    """
    case, config = measured.case, config_of(measured)
    dist.init_process_group("fake", rank=0, world_size=case.dp * case.tp, store=FakeStore())
    torch.set_default_dtype(torch.bfloat16)
    try:
        layout = ParallelLayout(dp=case.dp, tp=case.tp, ep=case.ep)
        mesh = build_mesh(layout, num_key_value_heads=config.num_key_value_heads)
        chunk_bytes = patch("modeling.vocabulary.CHUNK_BYTES", HEAD_CHUNK_BYTES[device])
        with chunk_bytes, FakeTensorMode(), LiveMemory() as memory:
            model = GatherMoeForCausalLM(config, mesh=mesh, execution=split_options(measured.model)[1]).train()
            if case.checkpointing:
                model.gradient_checkpointing_enable()
            memory.name(model.parameters(), kind="weights")
            memory.name_gradients(model.parameters())
            ids = torch.zeros(measured.num_sequences, measured.block_size, dtype=torch.int64)
            starts = tuple(range(0, measured.block_size, measured.document_length or measured.block_size))
            output = model(input_ids=ids, labels=ids, document_starts=(starts,) * len(ids), output_logits=False)
            output.loss.backward()
        return memory.peak_bytes
    finally:
        torch.set_default_dtype(torch.float32)
        dist.destroy_process_group()


def check(measured: Measured, alone: ProcessPoolExecutor, *, device: str) -> None:
    peak = alone.submit(fake_peak, measured, device=device).result(timeout=60)
    assert predicted(measured, device=device) == pytest.approx(peak, rel=0.08)


def predicted(measured: Measured, *, device: str) -> float:
    """Bytes at the fullest moment of forward and backward, without what only the optimizer has."""
    found = moments(job_of(measured, device=device))
    passes = [moment for moment in found if moment.name == "loss" or moment.name.startswith("backward")]
    return max(sum(row.num_bytes for row in moment.rows if row.kind != "optimizer") for moment in passes)


MANY = {"num_experts": 32, "num_experts_per_tok": 8}
WIDE = {"mlp_only_layers": [0], "intermediate_size": 16_384}
HEADS = {"num_attention_heads": 64, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
CHUNKS = {"overlap": True, "overlap_chunks": 4}


@pytest.mark.parametrize(
    ("model", "case"),
    [
        ({}, Case(dp=2, tp=4, ep=4)),
        ({"regather": True}, Case(tp=4, ep=2)),
        ({"strategy": "gather_weights"}, Case(tp=4)),
        ({"qk_norm": "head"}, Case(tp=8, ep=8, checkpointing=True)),
        (CHUNKS, Case(dp=16, tp=4, ep=4)),
        (MANY, Case(dp=128, tp=8, ep=8)),
        (MANY, Case(dp=4)),
        (WIDE, Case(tp=4, ep=4)),
        (WIDE | CHUNKS, Case(tp=4, ep=4, checkpointing=True)),
        (WIDE | {"regather": True}, Case(tp=4, checkpointing=True)),
        ({"mlp_only_layers": [1], "intermediate_size": 4096}, Case(checkpointing=True)),
        (HEADS | CHUNKS, Case(tp=4, ep=4, checkpointing=True)),
        (HEADS | {"qk_norm": "head"}, Case(tp=4, checkpointing=True)),
        ({"vocab_size": 50_000}, Case(dp=2, tp=4, ep=4)),
        ({"vocab_size": 50_000, "tie_word_embeddings": True}, Case(checkpointing=True)),
    ],
    ids=str,
)
def test_the_peak_with_static_rows_is_predicted(model: dict[str, Any], case: Case, alone: ProcessPoolExecutor) -> None:
    measured = Measured(STATIC | model, case._replace(bf16=True), num_sequences=4, block_size=2048)
    check(measured, alone, device="cuda")


def test_the_peak_with_packed_documents_is_predicted(alone: ProcessPoolExecutor) -> None:
    case = Case(bf16=True, checkpointing=True)
    check(Measured(STATIC | HEADS, case, num_sequences=4, block_size=2048, document_length=512), alone, device="cpu")
