"""What users of transformers do with a language model: ways to generate, a cache's older name, loading in parts."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from modeling.execution import Execution
from modeling.model import GatherMoeForCausalLM
from tests.modeling.test_model_padding import prompts, trained_model
from tests.referee import mixed_config, tiny_config

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 7}


def continued(model: GatherMoeForCausalLM, prompt: Tensor) -> Tensor:
    """Four tokens, then six more from the cache of those."""
    first = model.generate(prompt, max_new_tokens=4, return_dict_in_generate=True, **GREEDY)
    return model.generate(first.sequences, cache=first.cache, max_new_tokens=6, **GREEDY)


def from_embeddings(model: GatherMoeForCausalLM, prompt: Tensor) -> Tensor:
    embeds = model.get_input_embeddings()(prompt)
    return torch.cat([prompt, model.generate(inputs_embeds=embeds, max_new_tokens=10, **GREEDY)], dim=1)


def with_options(**options: Any) -> Callable[[GatherMoeForCausalLM, Tensor], Tensor]:
    return lambda model, prompt: model.generate(prompt, max_new_tokens=10, **options, **GREEDY)


WAYS: dict[str, Callable[[GatherMoeForCausalLM, Tensor], Tensor]] = {
    "static_cache": with_options(cache_implementation="static"),
    "prefill_in_chunks": with_options(prefill_chunk_size=4),
    "prompt_lookup": with_options(prompt_lookup_num_tokens=3),
    "assisted": lambda model, prompt: with_options(assistant_model=model)(model, prompt),
    "continued": continued,
    "from_embeddings": from_embeddings,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_greedy_decoding_gives_the_same_tokens(way: str) -> None:
    model, (prompt, *_) = trained_model(), prompts()
    want = model.generate(prompt, max_new_tokens=10, use_cache=False, **GREEDY)
    assert len(set(want[0].tolist())) > 4
    assert torch.equal(WAYS[way](model, prompt), want)


def test_r_ft_03_a_static_cache_leaves_padding_out() -> None:
    model, (_, _, batch, mask) = trained_model(), prompts()
    want = model.generate(batch, attention_mask=mask, max_new_tokens=10, **GREEDY)
    got = model.generate(batch, attention_mask=mask, max_new_tokens=10, cache_implementation="static", **GREEDY)
    assert torch.equal(got, want)


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.model], ids=["with_head", "without"])
def test_a_cache_under_its_older_name_is_used(part: Callable[[GatherMoeForCausalLM], nn.Module]) -> None:
    model, (prompt, *_) = part(trained_model()), prompts()
    with torch.no_grad():
        want = model(prompt)[0][:, -2:]
        cache = DynamicCache()
        with pytest.warns(FutureWarning, match=r"`past_key_values` is deprecated .* Use `cache` instead"):
            model(prompt[:, :-2], past_key_values=cache)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = model(prompt[:, -2:], cache=cache)[0]
    torch.testing.assert_close(got, want)


def test_weights_that_a_folder_lacks_start_as_a_new_models_do() -> None:
    config = mixed_config(router_bias=True)
    model = GatherMoeForCausalLM.from_pretrained(None, config=config, state_dict={})
    for name, weight in model.named_parameters():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            assert 0.8 < weight.std().item() / config.initializer_range < 1.2, name
    assert all(not buffer.any() for buffer in model.buffers())


def test_only_a_model_with_router_biases_asks_for_them_in_float32() -> None:
    assert not GatherMoeForCausalLM(tiny_config())._keep_in_fp32_modules_strict
    biased = GatherMoeForCausalLM(tiny_config(router_bias=True))
    assert biased._keep_in_fp32_modules_strict == {"e_score_correction_bias"}


@pytest.mark.slow
def test_a_bf16_model_with_grouped_products_is_exported_as_a_graph() -> None:
    """The loop over experts reads how many rows each has; torch's grouped product traces in bf16 alone."""
    execution = Execution(experts_backend="grouped")
    model = GatherMoeForCausalLM(tiny_config(qk_norm="head"), execution=execution).eval().bfloat16()
    ids = prompts()[0]
    with torch.no_grad():
        program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
        assert torch.equal(program.module()(input_ids=ids, use_cache=False).logits, model(ids).logits)
