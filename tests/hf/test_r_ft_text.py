"""Exported folders in use: batches padded on the left say what single prompts say, and vocabularies can grow."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from recipe.hf.fine_tuning import check_saved, save_finetuned
from tests.engine_runs import read_export
from tests.hf.test_r_ckpt import CONFIGS, export
from tests.hf.test_r_ft_adapters import open_model, plain_engine, plain_settings
from tests.parity import Case, full_state, mixed_config, tiny_config
from tests.ranks import run_ranks

PAD, VOCAB, ADDED = 0, 51, 3
Exported = Callable[[str], Path]


def counting(first: int, stride: int, *, length: int) -> list[int]:
    """Tokens 1 to 50 in steps of a stride, around and around: two of them say how it goes on."""
    return [(first + stride * i) % (VOCAB - 1) + 1 for i in range(length)]


def trained(folder: Path) -> Any:
    """The folder's model after 150 steps of learning to count."""
    generator = torch.Generator().manual_seed(0)
    model = open_model(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        draws = torch.randint(0, 50, (16, 2), generator=generator).tolist()
        batch = torch.tensor([counting(first, stride % 3 + 1, length=20) for first, stride in draws])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config.eos_token_id = None
    return model.eval()


def padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    """Input ids and attention mask with the padding on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_r_ft_03_left_padding_changes_no_token(name: str, exported: Exported) -> None:
    model = trained(exported(name))
    prompts = [counting(4, 1, length=2), counting(30, 2, length=9), counting(17, 3, length=5)]
    batch = padded(prompts)
    for use_cache in (True, False):
        options = {"max_new_tokens": 10, "do_sample": False, "use_cache": use_cache, "pad_token_id": PAD}
        together = model.generate(**batch, **options)[:, batch["input_ids"].shape[1] :].tolist()
        alone = [model.generate(**padded([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]
        assert together == alone
        assert all(len(set(tokens)) > 3 for tokens in alone), "the model has not learnt to say different things"
    logits = model(**batch).logits
    for row, prompt in enumerate(prompts):
        want = model(input_ids=torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits[row, -len(prompt) :], want, atol=1e-4, rtol=0)


class Growth(NamedTuple):
    """Rows of the embedding and of the head right after the resize and after one step, and the sizes told."""

    before: list[Tensor]
    after: list[Tensor]
    told: set[int]


def grow(rank: int, world_size: int, folder: Path, stage: int, out: Path) -> Growth:
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    from recipe.checkpoint.native import full_precision_shard

    settings = plain_settings(stage, num_sequences=4)

    def rows(model: Any) -> list[Tensor]:
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        return [full_precision_shard(end.weight).clone() for end in ends]

    with ExitStack() as stack:
        keep_alive = HfDeepSpeedConfig(settings)  # from_pretrained then loads into ZeRO-3's parts
        stack.callback(unset_hf_deepspeed_config)
        model = open_model(folder).train()
        torch.manual_seed(0)
        model.resize_token_embeddings(VOCAB + ADDED)
        engine = plain_engine(model, settings)
        before = rows(model)
        ids = torch.arange(4 * 14).view(4, 14).clamp(max=VOCAB + ADDED - 1)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        save_finetuned(engine.module, out)
        told = {model.config.vocab_size, model.lm_head.out_features, model.get_input_embeddings().num_embeddings}
        assert keep_alive.is_zero3() == (stage == 3)
        return Growth(before, rows(model), told)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gather_moe"])
def test_r_ft_04_three_more_tokens(kind: str, tied: bool, stage: int, tmp_path: Path) -> None:
    make = tiny_config if kind == "qwen3_moe" else mixed_config
    config = make(vocab_size=VOCAB, qk_norm="head" if kind == "qwen3_moe" else "none", tie_word_embeddings=tied)
    state = full_state(config)
    assert run_ranks(export, 1, config, state, Case(), tmp_path / "hf", ("auto", torch.float32)) == [kind]
    [growth] = run_ranks(grow, 1, tmp_path / "hf", stage, tmp_path / "grown")
    assert growth.told == {VOCAB + ADDED}
    names = ["model.embed_tokens.weight", "model.embed_tokens.weight" if tied else "lm_head.weight"]
    for name, before, after in zip(names, growth.before, growth.after, strict=True):
        assert before.shape == after.shape == (VOCAB + ADDED, config.hidden_size)
        assert torch.equal(before[:VOCAB], state[name])
        assert ((before != after).any(dim=1))[VOCAB:].all()
    check_saved(tmp_path / "grown")
    assert all(tensor.numel() for tensor in read_export(tmp_path / "grown").values())
    model = open_model(tmp_path / "grown")
    assert model.config.vocab_size == VOCAB + ADDED
    for end, after in zip((model.get_input_embeddings(), model.get_output_embeddings()), growth.after, strict=True):
        assert torch.equal(end.weight, after)
    assert model(torch.tensor([[VOCAB + ADDED - 1]])).logits.shape == (1, 1, VOCAB + ADDED)
