"""Generation from padded prompts, with models of every type, and what else users of transformers do with one."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from modeling.execution import Execution
from modeling.model import GatherMoeForCausalLM
from tests.engine_runs import slow
from tests.exports import CONFIGS
from tests.referee import FP32_ATOL, LOGITS_ATOL, full_state, our_model, referee_model, tiny_config

SHORT, LONG, STEPS = 2, 9, 200
PATTERN = torch.tensor([7, 3, 11, 3, 19, 23, 5, 42, 11, 30])


@cache
def trained_model(kind: str = "tiny") -> Any:
    """TINY, or a model of `tests.exports`, after 200 steps on a repeating pattern, so that what it generates varies."""
    config = tiny_config(qk_norm="head") if kind == "tiny" else CONFIGS[kind]()
    model: Any = referee_model(config, full_state(config), own=kind == "tiny")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        shifts = torch.randint(0, len(PATTERN), (4,), generator=generator)
        ids = torch.stack([PATTERN.roll(int(shift)).repeat(3)[:24] for shift in shifts])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval()


def prompts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A long prompt, a short one, and both as one left-padded batch with its mask. The pad id is a real token too."""
    long = PATTERN[:LONG][None]
    short = PATTERN[4 : 4 + SHORT][None]
    batch = torch.cat([long, torch.cat([torch.full((1, LONG - SHORT), 7), short], dim=1)])
    mask = torch.ones_like(batch)
    mask[1, : LONG - SHORT] = 0
    return long, short, batch, mask


EVERY_KIND = pytest.mark.parametrize(
    ("kind", "attention"),
    [("tiny", "sdpa"), ("tiny", "eager"), *(slow(kind, "sdpa") for kind in CONFIGS)],
)


@EVERY_KIND
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.requirement("R-FT-03")
def test_left_padded_prompts_generate_what_they_generate_alone(kind: str, use_cache: bool, attention: str) -> None:
    model = trained_model(kind)
    model.config._attn_implementation = attention
    long, short, batch, mask = prompts()
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "use_cache": use_cache, "pad_token_id": 7}
    together = model.generate(batch, attention_mask=mask, **options)[:, LONG:]
    for row, prompt in enumerate((long, short)):
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[:, prompt.shape[1] :]
        assert together[row].tolist() == alone[0].tolist()
        assert len(set(alone[0].tolist())) > 4  # else the test would say little


@EVERY_KIND
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.requirement("R-FT-03")
def test_left_padded_logits_are_those_without_padding(kind: str, positions: bool, attention: str) -> None:
    model = trained_model(kind)
    model.config._attn_implementation = attention
    _, short, batch, mask = prompts()
    options = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if positions else {}
    with torch.no_grad():
        got = model(input_ids=batch, attention_mask=mask, **options).logits[1, -SHORT:]
        want = model(input_ids=short).logits[0]
    torch.testing.assert_close(got, want, atol=FP32_ATOL if kind == "tiny" else LOGITS_ATOL, rtol=0)


def test_the_token_used_for_padding_is_trained_where_it_is_real() -> None:
    """What is padding is said by the mask, never by the id: an EOS token used for padding still has to be learnt."""
    for pad in (None, 9):
        model = our_model(tiny_config(pad_token_id=pad))
        ids = torch.tensor([[1, 9, 2, 9, 3, 4]])
        model(input_ids=ids, labels=ids).loss.backward()
        assert model.get_input_embeddings().weight.grad[9].abs().max() > 0


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


@pytest.mark.requirement("R-FT-03")
def test_a_static_cache_leaves_padding_out() -> None:
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
