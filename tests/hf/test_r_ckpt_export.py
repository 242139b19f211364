"""What an exported folder says of itself: the real vocabulary, the precision asked for, tokenizer and generation."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modeling.config import GatherMoeConfig
from tests.clean_process import run_clean
from tests.engine_runs import Case, accumulate, slow, start_engine
from tests.exports import FakeTokenizer, export, read_export, sample_ids
from tests.hub_samples import save_tokenizer
from tests.ranks import run_ranks
from tests.referee import Training, full_state, random_batch, referee_model, tiny_config

CHAT = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}"
OPEN_TOKENIZER = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, native = sys.argv[1], sys.argv[2] == "native"
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=native)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=native)
ids = tokenizer("ab", return_tensors="pt", return_token_type_ids=False)
new = model.generate(**ids, max_new_tokens=5, do_sample=False)
chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
print(json.dumps([tokenizer.decode(ids.input_ids[0]), chat, model.generation_config.eos_token_id, new.shape[1]]))
assert "modeling" not in sys.modules and "recipe" not in sys.modules
"""


@pytest.mark.parametrize("tied", [slow(False), True])
def test_r_ckpt_15_the_padded_vocabulary_stays_inside_of_tied_and_untied_tables(tied: bool, tmp_path: Path) -> None:
    """51 entries over 4 ranks are 52 rows in training."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(vocab_size=51, tie_word_embeddings=tied)
    state, folder = full_state(config), tmp_path / "hf"
    run_ranks(export, 4, config, state, Case(tp=4, ep=4, stage=1), folder, ("auto", torch.float32))
    tensors = read_export(folder)
    tables = {name: tensor for name, tensor in tensors.items() if "embed_tokens" in name or "lm_head" in name}
    assert len(tables) == (1 if tied else 2)
    assert {tuple(tensor.shape) for tensor in tables.values()} == {(51, 32)}
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 51
    logits = AutoModelForCausalLM.from_pretrained(folder).eval()(sample_ids()).logits
    ours = referee_model(config, state, own=True).eval()(sample_ids()).logits
    assert logits.shape[-1] == 51
    torch.testing.assert_close(logits, ours[..., :51], atol=1e-5, rtol=0)


def export_both(rank: int, world_size: int, config: GatherMoeConfig, state: dict[str, Tensor], root: Path) -> None:
    """Take a step in bf16, so that the masters are no numbers of bf16 any more, then export in two precisions."""
    from recipe.hf.export import ExportOptions, export_hugging_face
    from recipe.shared.ranks import TorchRanks

    case = Case(dp=2, stage=2, bf16=True)
    engine = start_engine(config, state, case, training=Training())
    accumulate(engine, random_batch(), case)
    engine.update(learning_rate=1e-3)
    for dtype in (torch.float32, torch.bfloat16):
        folder, options = root / str(dtype), ExportOptions("auto", dtype)
        export_hugging_face(engine, folder, tokenizer=FakeTokenizer(), options=options, ranks=TorchRanks())


def test_r_ckpt_16_an_export_has_the_precision_asked_for_and_float32_is_the_masters(tmp_path: Path) -> None:
    config = tiny_config()
    run_ranks(export_both, 2, config, full_state(config), tmp_path)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        found[dtype] = read_export(folder)
        assert {tensor.dtype for tensor in found[dtype].values()} == {dtype}
        described = json.loads((folder / "config.json").read_text())
        assert described["dtype"] == described["torch_dtype"] == str(dtype).removeprefix("torch.")
    wide, narrow = found[torch.float32], found[torch.bfloat16]
    assert wide.keys() == narrow.keys()
    for name, tensor in wide.items():
        assert torch.equal(tensor.bfloat16(), narrow[name]), name
    moved = [name for name, tensor in wide.items() if not torch.equal(tensor, narrow[name].float())]
    assert len(moved) > len(wide) / 2, "weights that bf16 cannot hold are the optimizer's own"
    sizes = [sum(t.numel() * t.element_size() for t in tensors.values()) for tensors in (wide, narrow)]
    assert sizes[0] == 2 * sizes[1]


def export_with_tokenizer(rank: int, world_size: int, root: Path) -> None:
    from transformers import AutoTokenizer

    from recipe.hf.export import ExportOptions, export_hugging_face
    from recipe.shared.ranks import TorchRanks

    tokenizer = AutoTokenizer.from_pretrained(root / "tokenizer")
    config = tiny_config(vocab_size=257)
    engine = start_engine(config, full_state(config), Case())
    for hf_format in ("native", "auto"):
        options = ExportOptions(hf_format, torch.float32)
        export_hugging_face(engine, root / hf_format, tokenizer=tokenizer, options=options, ranks=TorchRanks())


@pytest.mark.slow
def test_r_ckpt_14_tokenizer_chat_template_and_generation_travel_to_a_clean_process(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer", chat_template=CHAT)
    run_ranks(export_with_tokenizer, 1, tmp_path)
    for hf_format in ("native", "auto"):
        said = run_clean(OPEN_TOKENIZER, [str(tmp_path / hf_format), hf_format], tmp_path)
        text, chat, eos_id, length = json.loads(said.splitlines()[-1])
        assert (text, chat, eos_id) == ("ab", "[user] hi", 0)
        assert 2 < length <= 7
