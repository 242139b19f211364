"""Our model on one process against transformers' Mixtral, Qwen3-MoE and OLMoE with the same weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.config import GatherMoeConfig
from modeling.model import GatherMoeForCausalLM
from modeling.spec import stock_type
from tests.referee import FP32_ATOL, assert_all_match, full_state, mixed_config, referee_model, tiny_config

CONFIGS: dict[str, tuple[str, Any]] = {
    "mixtral": ("mixtral", lambda: tiny_config(qk_norm="none")),
    "mixtral, tied": ("mixtral", lambda: tiny_config(qk_norm="none", tie_word_embeddings=True)),
    "qwen3_moe, dense first": ("qwen3_moe", lambda: mixed_config(qk_norm="head")),
    "qwen3_moe, every second": (
        "qwen3_moe",
        lambda: mixed_config(mlp_only_layers=[], decoder_sparse_step=2, norm_topk_prob=True, num_hidden_layers=4),
    ),
    "olmoe": ("olmoe", lambda: tiny_config(qk_norm="full", norm_topk_prob=False)),
    "olmoe, clipped": ("olmoe", lambda: tiny_config(qk_norm="full", norm_topk_prob=True, clip_qkv=0.5)),
    "linear positions": (
        "mixtral",
        lambda: tiny_config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
    ),
}
EVERY = pytest.mark.parametrize("name", list(CONFIGS))


class Pair:
    """Our model and the stock one with the same weights, both in evaluation mode."""

    def __init__(self, name: str, *, attention: str = "sdpa") -> None:
        kind, make = CONFIGS[name]
        self.config: GatherMoeConfig = make()
        assert stock_type(self.config) == kind
        self.config._attn_implementation = attention
        state = full_state(self.config)
        self.ours = referee_model(self.config, state, own=True).eval()
        self.stock = referee_model(self.config, state).eval()
        assert isinstance(self.ours, GatherMoeForCausalLM)
        assert self.stock.config.model_type == kind
        self.stock.config._attn_implementation = attention


def ids_and_labels() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 50, (3, 16), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 4:9] = -100
    return ids, labels


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@EVERY
def test_logits_loss_and_gradients_match_the_stock_model(name: str, attention: str) -> None:
    pair = Pair(name, attention=attention)
    ids, labels = ids_and_labels()
    got, want = (model(input_ids=ids, labels=labels) for model in (pair.ours, pair.stock))
    torch.testing.assert_close(got.logits, want.logits, atol=FP32_ATOL, rtol=0)
    torch.testing.assert_close(got.loss, want.loss, atol=FP32_ATOL, rtol=0)
    got.loss.backward()
    want.loss.backward()
    ours, stock = ({key: p.grad for key, p in model.named_parameters()} for model in (pair.ours, pair.stock))
    assert ours.keys() == stock.keys()
    assert_all_match(ours, stock)
    assert all(gradient.any() for gradient in ours.values())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@EVERY
def test_outputs_on_request_are_those_of_the_stock_model_and_of_its_base(name: str, attention: str) -> None:
    pair = Pair(name, attention=attention)
    ids, _ = ids_and_labels()
    options = {"output_hidden_states": True, "output_router_logits": True, "output_attentions": attention == "eager"}
    with torch.no_grad():
        got, want = (model(ids, **options) for model in (pair.ours, pair.stock))
        base, stock_base = (model.model(ids, output_hidden_states=True) for model in (pair.ours, pair.stock))
    config = pair.config
    assert len(got.hidden_states) == len(want.hidden_states) == config.num_hidden_layers + 1
    assert len(got.router_logits) == config.num_hidden_layers - len(config.dense_layers)
    assert got.router_logits[0].shape == (3 * 16, config.num_experts)
    if attention == "eager":
        assert len(got.attentions) == config.num_hidden_layers
        assert got.attentions[0].shape == (3, config.num_attention_heads, 16, 16)
    for field in ("hidden_states", "attentions", "router_logits") if attention == "eager" else ("router_logits",):
        for ours, theirs in zip(getattr(got, field), getattr(want, field), strict=True):
            torch.testing.assert_close(ours, theirs.reshape(ours.shape), atol=FP32_ATOL, rtol=0)
    torch.testing.assert_close(base.last_hidden_state, stock_base.last_hidden_state, atol=FP32_ATOL, rtol=0)
    for ours, theirs in zip(base.hidden_states, stock_base.hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs, atol=FP32_ATOL, rtol=0)


def test_outputs_stay_away_unless_asked_for() -> None:
    out = Pair("mixtral").ours(ids_and_labels()[0])
    assert (out.hidden_states, out.attentions, out.router_logits, out.loss, out.aux_loss) == (None,) * 5


@EVERY
def test_generate_gives_the_stock_tokens_with_and_without_a_cache(name: str) -> None:
    pair = Pair(name)
    prompt = ids_and_labels()[0][:, :5]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    want = pair.stock.generate(prompt, **options)
    assert torch.equal(pair.ours.generate(prompt, use_cache=True, **options), want)
    assert torch.equal(pair.ours.generate(prompt, use_cache=False, **options), want)
    assert want.shape == (3, 17)


def test_a_cache_stands_for_the_tokens_it_has_seen() -> None:
    pair = Pair("qwen3_moe, dense first")
    ids, _ = ids_and_labels()
    with torch.no_grad():
        whole = pair.ours(ids).logits
        first = pair.ours(ids[:, :7], use_cache=True)
        parts, cache = [first.logits], first.cache
        for start, end in ((7, 8), (8, 12), (12, 16)):
            step = pair.ours(ids[:, start:end], cache=cache, use_cache=True)
            parts, cache = [*parts, step.logits], step.cache
    assert cache.get_seq_length() == 16
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=FP32_ATOL, rtol=0)
    assert pair.ours(ids, use_cache=False).cache is None


def test_beam_search_and_sampling_run() -> None:
    pair = Pair("mixtral")
    prompt = ids_and_labels()[0][:1, :5]
    options = {"max_new_tokens": 6, "pad_token_id": 0}
    want = pair.stock.generate(prompt, num_beams=3, **options)
    assert torch.equal(pair.ours.generate(prompt, num_beams=3, **options), want)
    torch.manual_seed(0)
    sampled = pair.ours.generate(prompt, do_sample=True, num_return_sequences=4, **options)
    assert sampled.shape == (4, 11)
    assert len({tuple(row) for row in sampled.tolist()}) > 1


def test_logits_to_keep_cuts_the_head_not_the_model() -> None:
    pair = Pair("mixtral")
    ids, labels = ids_and_labels()
    whole = pair.ours(ids).logits
    torch.testing.assert_close(pair.ours(ids, logits_to_keep=2).logits, whole[:, -2:])
    torch.testing.assert_close(pair.ours(ids, logits_to_keep=torch.tensor([0, 5])).logits, whole[:, [0, 5]])
    # The loss is over all targets whatever logits are handed out.
    want = pair.ours(ids, labels=labels).loss
    torch.testing.assert_close(pair.ours(ids, labels=labels, logits_to_keep=2).loss, want)
    torch.testing.assert_close(pair.ours(ids, labels=labels, output_logits=False).loss, want)


@pytest.mark.requirement("R-LOSS-04")
def test_the_model_shifts_labels_once() -> None:
    pair = Pair("mixtral")
    ids, _ = ids_and_labels()
    log_probs = pair.ours(ids).logits.log_softmax(-1)
    by_hand = -torch.stack([log_probs[b, s, ids[b, s + 1]] for b in range(3) for s in range(15)]).mean()
    for options in ({}, {"output_logits": False}):
        torch.testing.assert_close(pair.ours(ids, labels=ids, **options).loss, by_hand)
        shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
        torch.testing.assert_close(pair.ours(ids, shift_labels=shifted, **options).loss, by_hand)
        twice = pair.ours(ids, labels=shifted, **options).loss
        assert abs(twice.item() - by_hand.item()) > 1e-2


def test_inputs_embeds_stand_for_input_ids() -> None:
    pair = Pair("qwen3_moe, dense first")
    ids, labels = ids_and_labels()
    embeds = pair.ours.get_input_embeddings()(ids)
    got, want = pair.ours(inputs_embeds=embeds, labels=labels), pair.ours(input_ids=ids, labels=labels)
    assert torch.equal(got.logits, want.logits)
    assert torch.equal(got.loss, want.loss)
