"""Documents packed in one block do not see each other, whichever attention does it."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from modeling.attention import check_isolation, document_positions, find_documents
from modeling.model import GatherMoeForCausalLM
from tests.referee import full_state, mixed_config

BLOCK = 16
STARTS = ((0, 3, 11), (0,), (0, 9))
IMPLEMENTATIONS = ["sdpa", "eager"]


def model_with(implementation: str, **changes: Any) -> GatherMoeForCausalLM:
    config = mixed_config(**changes)
    config._attn_implementation = implementation
    model = GatherMoeForCausalLM(config)
    model.load_state_dict(full_state(config))
    return model.eval()


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.requirement("R-LEN-02")
def test_gradients_stay_inside_a_document(implementation: str) -> None:
    model, ids = model_with(implementation), block_ids()
    embeds = model.model.embed_tokens(ids).detach().requires_grad_()
    out = model.model(inputs_embeds=embeds, document_starts=STARTS).last_hidden_state
    (grad,) = torch.autograd.grad(out[0, 3:11].square().sum(), embeds)
    assert grad[0].any(dim=-1).tolist() == [3 <= s < 11 for s in range(BLOCK)]
    assert not grad[1:].any()


@pytest.mark.requirement("R-LEN-02")
def test_eager_attention_gives_the_same_logits() -> None:
    ids = block_ids()
    want = packed_logits(model_with("sdpa"), ids)
    torch.testing.assert_close(packed_logits(model_with("eager"), ids), want, atol=1e-5, rtol=0)


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
    message = r"attn_implementation='half_blind' is not known to keep packed documents apart; choose one of \['eager'"
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
    assert found.max_length == BLOCK
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
