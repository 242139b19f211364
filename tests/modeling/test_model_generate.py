"""Padding changes nothing for the tokens beside it, and what users of transformers do with a language model."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from modeling.execution import Execution
from modeling.init import build_model, cut, shard_table
from modeling.layout import ParallelLayout
from modeling.mesh import build_mesh
from modeling.model import GatherMoeForCausalLM
from tests.ranks import run_ranks
from tests.referee import full_state, mixed_config, referee_model, tiny_config

SHORT, LONG, STEPS = 2, 9, 200
PATTERN = torch.tensor([7, 3, 11, 3, 19, 23, 5, 42, 11, 30])


@cache
def trained_model() -> GatherMoeForCausalLM:
    """TINY after 200 steps on a repeating pattern, so that what it generates varies."""
    config = tiny_config(qk_norm="head")
    model = referee_model(config, full_state(config), own=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        shifts = torch.randint(0, len(PATTERN), (4,), generator=generator)
        ids = torch.stack([PATTERN.roll(int(shift)).repeat(3)[:24] for shift in shifts])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert isinstance(model, GatherMoeForCausalLM)
    return model.eval()


def prompts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A long prompt, a short one, and both as one left-padded batch with its mask. The pad id is a real token too."""
    long = PATTERN[:LONG][None]
    short = PATTERN[4 : 4 + SHORT][None]
    batch = torch.cat([long, torch.cat([torch.full((1, LONG - SHORT), 7), short], dim=1)])
    mask = torch.ones_like(batch)
    mask[1, : LONG - SHORT] = 0
    return long, short, batch, mask


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.requirement("R-FT-03")
def test_left_padded_prompts_generate_what_they_generate_alone(use_cache: bool, attention: str) -> None:
    model = trained_model()
    model.config._attn_implementation = attention
    long, short, batch, mask = prompts()
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "use_cache": use_cache, "pad_token_id": 7}
    together = model.generate(batch, attention_mask=mask, **options)[:, LONG:]
    for row, prompt in enumerate((long, short)):
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[:, prompt.shape[1] :]
        assert together[row].tolist() == alone[0].tolist()
        assert len(set(alone[0].tolist())) > 4  # else the test would say little


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.requirement("R-FT-03")
def test_left_padded_logits_are_those_without_padding(positions: bool, attention: str) -> None:
    model = trained_model()
    model.config._attn_implementation = attention
    _, short, batch, mask = prompts()
    options = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if positions else {}
    with torch.no_grad():
        got = model(input_ids=batch, attention_mask=mask, **options).logits[1, -SHORT:]
        want = model(input_ids=short).logits[0]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def five_tokens() -> Tensor:
    return torch.randint(0, 50, (1, 5), generator=torch.Generator().manual_seed(0))


def padded_batch(side: str) -> tuple[Tensor, Tensor, Tensor]:
    """The five tokens padded to 16 with a real token's id, next to a full sequence; ids, mask, labels."""
    full = torch.randint(0, 50, (1, 16), generator=torch.Generator().manual_seed(1))
    here = slice(0, 5) if side == "right" else slice(11, 16)
    row, mask = torch.full((1, 16), 9), torch.zeros(1, 16, dtype=torch.int64)
    row[:, here], mask[:, here] = five_tokens(), 1
    labels = torch.where(mask == 1, row, -100)
    labels[:, here.start] = -100  # nothing real comes before it
    ids = torch.cat([row, full])
    return ids, torch.cat([mask, torch.ones_like(full)]), torch.cat([labels, torch.full_like(full, -100)])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.requirement("R-MOE-11")
def test_padding_is_routed_nowhere_and_teaches_nothing(side: str) -> None:
    config = mixed_config(router_aux_loss_coef=0.0)
    state = full_state(config)
    ids, mask, labels = padded_batch(side)
    here = slice(0, 5) if side == "right" else slice(11, 16)

    alone = referee_model(config, state, own=True)
    want = alone(input_ids=five_tokens(), labels=five_tokens())
    want.loss.backward()
    full = referee_model(config, state, own=True)(input_ids=ids[1:], labels=labels[1:])

    padded = referee_model(config, state, own=True)
    got = padded(input_ids=ids, attention_mask=mask, labels=labels)
    got.loss.backward()
    torch.testing.assert_close(got.logits[0, here], want.logits[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(got.loss, want.loss, atol=1e-5, rtol=0)
    assert torch.equal(got.sums.expert_counts, want.sums.expert_counts + full.sums.expert_counts)
    assert got.sums.expert_counts.sum().item() == 2 * 3 * (5 + 16)
    for (name, a), b in zip(padded.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


PACKED = ((0, 4, 11), (0, 9), (0,))  # in each sequence the last is padding
DOCUMENTS = ((0, slice(0, 4)), (0, slice(4, 11)), (1, slice(0, 9)))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.requirement("R-MOE-11")
def test_documents_packed_beside_padding_train_as_they_do_one_by_one(attention: str) -> None:
    config = mixed_config(router_aux_loss_coef=0.0)
    state = full_state(config)
    alone, packed = (referee_model(config, state, own=True) for _ in range(2))
    packed.config._attn_implementation = attention
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
    for (name, a), b in zip(packed.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
@pytest.mark.requirement("R-MOE-11")
def test_auxiliary_losses_count_valid_tokens_only(scope: str) -> None:
    config = mixed_config(router_aux_loss_coef=0.5, router_z_loss_coef=0.1, balance_scope=scope)
    state = full_state(config)
    ids, mask, labels = padded_batch("right")
    padded, cut_off = (referee_model(config, state, own=True) for _ in range(2))
    got = padded(input_ids=ids[:1], attention_mask=mask[:1], labels=labels[:1])
    want = cut_off(input_ids=ids[:1, :5], labels=labels[:1, :5])
    for name in ("loss", "lm_loss", "aux_loss", "z_loss"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=1e-6, rtol=0)
    got.loss.backward()
    want.loss.backward()
    for (name, a), b in zip(padded.named_parameters(), cut_off.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b[1].grad, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_the_token_used_for_padding_is_trained_where_it_is_real() -> None:
    """What is padding is said by the mask, never by the id: an EOS token used for padding still has to be learnt."""
    for pad in (None, 9):
        config = tiny_config(pad_token_id=pad)
        model = referee_model(config, full_state(tiny_config()), own=True)
        ids = torch.tensor([[1, 9, 2, 9, 3, 4]])
        model(input_ids=ids, labels=ids).loss.backward()
        assert model.get_input_embeddings().weight.grad[9].abs().max() > 0


def _padded_under_a_mesh(rank: int, world_size: int, ep: int, side: str) -> Any:
    config = mixed_config(router_aux_loss_coef=0.5, router_z_loss_coef=0.1, pad_token_id=9)
    state = full_state(mixed_config())
    ids, mask, labels = padded_batch(side)
    plain = referee_model(config, state, own=True)
    want = plain(input_ids=ids, attention_mask=mask, labels=labels)
    want.loss.backward()

    mesh = build_mesh(ParallelLayout(tp=world_size, ep=ep), num_key_value_heads=config.sizes.num_key_value_heads)
    model = build_model(config, mesh=mesh, seed=0)
    table = shard_table(config, mesh)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(cut(state[name], table.shard(name, tuple(state[name].shape), group_rank=rank)))
    got = model(input_ids=ids, attention_mask=mask, labels=labels)
    got.loss.backward()
    for name in ("loss", "lm_loss", "aux_loss", "z_loss"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=1e-5, rtol=0)
    assert torch.equal(got.sums.expert_counts, want.sums.expert_counts)
    for name, parameter in model.named_parameters():
        shard = table.shard(name, tuple(state[name].shape), group_rank=rank)
        gradient = cut(plain.get_parameter(name).grad, shard)
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("ep", "side"), [(2, "left"), (1, "right")])
@pytest.mark.requirement("R-MOE-11")
def test_padding_under_a_mesh_is_as_on_one_process(ep: int, side: str) -> None:
    run_ranks(_padded_under_a_mesh, 2, ep, side)


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
