"""Our class on one process: equal to transformers' stock models, and saved and loaded by the Auto classes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from modeling.config import GatherMoeConfig
from modeling.model import GatherMoeForCausalLM, GatherMoeModel
from modeling.spec import stock_type
from tests.referee import (
    FP32_ATOL,
    assert_all_match,
    full_state,
    mixed_config,
    our_model,
    random_batch,
    referee_model,
    tiny_config,
)

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
    return random_batch(num_sequences=3)[:2]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@EVERY
def test_all_that_the_stock_model_gives_is_given(name: str, attention: str) -> None:
    """Logits, loss and gradients; what is given on request; and what its base gives."""
    pair = Pair(name, attention=attention)
    ids, labels = ids_and_labels()
    got, want = (model(input_ids=ids, labels=labels) for model in (pair.ours, pair.stock))
    assert_close(got.logits, want.logits)
    assert_close(got.loss, want.loss)
    got.loss.backward()
    want.loss.backward()
    ours, stock = ({key: p.grad for key, p in model.named_parameters()} for model in (pair.ours, pair.stock))
    assert ours.keys() == stock.keys()
    assert_all_match(ours, stock)
    assert all(gradient.any() for gradient in ours.values())

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
        for one, other in zip(getattr(got, field), getattr(want, field), strict=True):
            assert_close(one, other.reshape(one.shape))
    assert_close(base.last_hidden_state, stock_base.last_hidden_state)
    for one, other in zip(base.hidden_states, stock_base.hidden_states, strict=True):
        assert_close(one, other)


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=FP32_ATOL, rtol=0)


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
    assert_close(torch.cat(parts, dim=1), whole)
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


FOLDER_CONFIGS: dict[str, Any] = {
    "tiny": lambda: tiny_config(),
    "dense first, head norms": lambda: mixed_config(),
    "tied": lambda: tiny_config(tie_word_embeddings=True, vocab_size=51),
    "full norms, clipped, dense": lambda: mixed_config(qk_norm="full", clip_qkv=0.5),
    "no experts": lambda: tiny_config(num_experts=0, num_experts_per_tok=0, intermediate_size=48),
}
EVERY_FOLDER = pytest.mark.parametrize("name", list(FOLDER_CONFIGS))
IDS = torch.arange(24).view(2, 12)


def model_of(name: str) -> GatherMoeForCausalLM:
    return our_model(FOLDER_CONFIGS[name]()).eval()


@EVERY_FOLDER
@pytest.mark.requirement("R-CKPT-13")
def test_a_saved_model_comes_back_bitwise_by_the_auto_classes(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is GatherMoeConfig
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is GatherMoeForCausalLM
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    of_the_file = ("_name_or_path", "dtype", "architectures")
    saved = {key: value for key, value in model.config.to_dict().items() if key not in of_the_file}
    assert loaded.config.to_dict().items() >= saved.items()
    for (key, a), b in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b), key
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    is_tied = model.config.tie_word_embeddings
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.embed_tokens.weight" in tensors
    assert ("lm_head.weight" in tensors) != is_tied
    assert (loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()) == is_tied
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is GatherMoeModel
    assert torch.equal(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)


def test_files_hold_one_tensor_per_expert_matrix(tmp_path: Path) -> None:
    model = model_of("dense first, head norms")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    width = model.config.moe_intermediate_size
    experts = model.model.layers[1].mlp.experts
    for e in range(model.config.num_experts):
        prefix = f"model.layers.1.mlp.experts.{e}"
        assert torch.equal(tensors[f"{prefix}.gate_proj.weight"], experts.gate_up_proj[e, :width])
        assert torch.equal(tensors[f"{prefix}.up_proj.weight"], experts.gate_up_proj[e, width:])
        assert torch.equal(tensors[f"{prefix}.down_proj.weight"], experts.down_proj[e])
    assert not any(key.endswith(("gate_up_proj", "experts.down_proj")) for key in tensors)
    assert "model.layers.0.mlp.gate_proj.weight" in tensors


def test_sharded_files_and_low_precision(tmp_path: Path) -> None:
    model = model_of("tiny").bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    wide = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


def test_defaults_of_the_configuration_follow_from_its_sizes() -> None:
    config = GatherMoeConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=6, decoder_sparse_step=2)
    assert (config.num_key_value_heads, config.head_dim, config.mlp_only_layers) == (4, 16, [])
    assert config.dense_layers == (0, 2, 4)
    assert config.num_local_experts == config.num_experts == 128
    assert config.sizes.intermediate_size == config.intermediate_size
    assert GatherMoeConfig(num_hidden_layers=2).sizes.intermediate_size == 0


@pytest.mark.parametrize("lacking", [False, True], ids=["new", "of a folder without them"])
def test_fresh_weights_are_drawn_for_every_parameter(lacking: bool) -> None:
    """Through transformers' own initialiser, which meets modules it does not know."""
    config = mixed_config(router_bias=True)
    torch.manual_seed(0)
    if lacking:
        model = GatherMoeForCausalLM.from_pretrained(None, config=config, state_dict={})
    else:
        model = GatherMoeForCausalLM(config)
    for key, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), key
        else:
            assert parameter.std().item() == pytest.approx(config.initializer_range, rel=0.2), key
    assert all(not buffer.any() for buffer in model.buffers())
    experts = model.model.layers[1].mlp.experts.gate_up_proj
    assert not torch.equal(experts[0], experts[1])


@pytest.mark.parametrize("name", ["tied", "tiny"])
@pytest.mark.parametrize("size", [60, 40])
def test_the_vocabulary_can_be_resized(name: str, size: int) -> None:
    model = model_of(name)
    before = model.model.embed_tokens.weight.detach().clone()
    model.resize_token_embeddings(size)
    assert model.config.vocab_size == size
    kept = min(size, before.shape[0])
    assert torch.equal(model.model.embed_tokens.weight[:kept], before[:kept])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == "tied")
    ids = torch.tensor([[1, size - 1, 3, size - 1]])
    out = model(ids, labels=ids)
    assert out.logits.shape[-1] == size
    torch.testing.assert_close(model(ids, labels=ids, output_logits=False).loss, out.loss)


def test_how_a_step_is_executed_is_no_part_of_a_configuration(caplog: pytest.LogCaptureFixture) -> None:
    """Files of earlier versions name it: without effect, and with a warning where it had one."""
    config = GatherMoeConfig(strategy="gather_tokens", overlap=True)
    assert not {"strategy", "overlap"} & config.to_dict().keys()
    said = caplog.text
    assert "overlap=True in a GatherMoeConfig has no effect" in said
    assert "execution=Execution(overlap=True)" in said
    assert "strategy" not in said
