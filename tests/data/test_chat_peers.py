"""The labels of conversations are those of transformers and TRL, and a run trains on them alone in every layout."""

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipe.data.packing import IGNORED
from tests.data_samples import (
    FIVE_TURNS,
    MARKED,
    encode_row,
    one_turn,
    prepare,
    small_bpe,
    word_tokenizer,
    write_json,
)
from tests.ranks import run_ranks
from tests.training import WORDS, read_metrics, train_on_ranks, write_ds_config, write_inputs

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end|>", "<b>"]
PIECES = ("def ", "über ", "\N{GRINNING FACE}", "import x\n", "  two", " <|im_end|>", "日本 ", " return")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = small_bpe(tmp_path_factory.mktemp("bpe"), vocab_size=500)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL, "bos_token": "<b>"})
    return tokenizer


def trl_template(name: str) -> str:
    """The text of a template that TRL brings, read without importing TRL."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def random_conversation(generator: random.Random) -> list[dict[str, str]]:
    def text() -> str:
        return "".join(generator.choices(PIECES, k=generator.randint(1, 8))) + "."

    system = [{"role": "system", "content": text()}] * generator.randint(0, 1)
    turns = [("user", text()) if turn % 2 == 0 else ("assistant", text()) for turn in range(generator.randint(2, 7))]
    return system + [{"role": role, "content": content} for role, content in turns]


def encode(tokenizer: Any, fields: dict[str, Any], *, name: str = "chat") -> tuple[list[int], list[int]]:
    """Ids and labels of a row."""
    ids, trained = encode_row(tokenizer, fields, name=name)
    return ids, np.where(trained, ids, IGNORED).tolist()


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3", "cohere2", "phi3"])
def test_markers_give_what_apply_chat_template_gives(bpe: Any, name: str) -> None:
    bpe.chat_template = trl_template(f"{name}_training")
    generator = random.Random(0)
    for _ in range(5):
        messages = random_conversation(generator)
        want = bpe.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, labels = encode(bpe, {"messages": messages})
        num_ids = len(want["input_ids"])
        assert ids[num_ids:] in ([], [bpe.eos_token_id])
        assert ids[:num_ids] == want["input_ids"]
        assert sum(want["assistant_masks"]) > 0
        assert [int(label != IGNORED) for label in labels[:num_ids]] == want["assistant_masks"]


@pytest.mark.parametrize("name", ["qwen3_instruct_2507", "llama3", "cohere2", "lfm2"])
def test_without_markers_the_labels_are_those_with_markers(bpe: Any, name: str) -> None:
    generator = random.Random(1)
    for _ in range(5):
        fields = {"messages": random_conversation(generator)}
        bpe.chat_template = trl_template(name)
        without = encode(bpe, fields)
        bpe.chat_template = trl_template(f"{name}_training")
        assert without == encode(bpe, fields)


@pytest.mark.slow
def test_labels_are_those_of_sft_trainer(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import MixtralConfig, MixtralForCausalLM
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    tokenizer = word_tokenizer(template=MARKED + "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}")
    tokenizer.pad_token = "<unk>"
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_local_experts": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=210, **sizes, **heads))
    plain: dict[str, Any] = {"report_to": "none", "use_cpu": True, "bf16": False, "max_length": None}

    def check(rows: list[dict[str, Any]], *, name: str, **chosen: Any) -> None:
        args = SFTConfig(output_dir=str(tmp_path), **plain, **chosen)
        data: Any = Dataset.from_list(rows)
        data = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer).train_dataset
        for row, want in zip(rows, data, strict=True):
            assert encode(tokenizer, row, name=name) == (want["input_ids"], want["labels"])

    check([one_turn("w1 w2", "w3"), {"messages": FIVE_TURNS}], name="chat", assistant_only_loss=True)
    pairs = [{"prompt": "w1 w2", "completion": " w3"}, {"prompt": "w1", "completion": " w2 w3 <eos>"}]
    check(pairs, name="prompt_completion")
    check([{"prompt": FIVE_TURNS[:4], "completion": FIVE_TURNS[4:]}], name="prompt_completion")


TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def conversations(path: Path) -> str:
    words = random.Random(3)
    texts = [" ".join(words.choices(WORDS, k=words.randint(1, 12))) for _ in range(120)]
    return write_json(path, [one_turn(*texts[i : i + 2]) for i in range(0, 120, 2)])


def plain_loss(folder: Path, blocks: Any) -> float:
    """Nats per label of the stock model in this process, each document of each block by itself."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    nll, num_labels = 0.0, 0
    for index in range(len(blocks)):
        ids, labels, starts, _ = blocks[index]
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            with torch.no_grad():
                logits = model(torch.from_numpy(ids[None, start:end])).logits[0, :-1]
            want = torch.from_numpy(labels[start + 1 : end])
            nll += torch.nn.functional.cross_entropy(logits, want, ignore_index=IGNORED, reduction="sum").item()
            num_labels += int((want != IGNORED).sum())
    return nll / num_labels


@pytest.mark.slow
def test_a_run_trains_on_responses_alone_in_every_layout(tmp_path: Path) -> None:
    flags = write_inputs(tmp_path)
    run_ranks(train_on_ranks, 1, flags | {"max_steps": 1})
    base = tmp_path / "run" / "checkpoints" / "latest" / "hf"
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    del flags["config_name"], flags["train_vocab_size"]
    data: dict[str, Any] = {"validation_split_percentage": 20, "block_size": 32}
    data |= {"train_file": conversations(tmp_path / "chat.jsonl"), "chat_template": str(tmp_path / "chat.jinja")}
    flags |= {"model_name_or_path": base, "max_steps": 3} | data
    losses = []
    for name, num_ranks, tp in (("chat1", 1, 1), ("chat-dp2", 2, 1), ("chat-tp2", 2, 2)):
        num_sequences = 2 * tp // num_ranks
        of_layout = {"output_dir": tmp_path / name, "per_device_train_batch_size": num_sequences}
        said = run_ranks(train_on_ranks, num_ranks, flags | of_layout | write_ds_config(tmp_path, parallel={"tp": tp}))
        metrics = read_metrics(tmp_path / name)
        losses.append([metrics[step]["loss"] for step in (1, 2, 3)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[2] == pytest.approx(losses[0], abs=1e-5)
    assert any("read as chat, because its first row has 'messages'" in line for line in said[0][1])
    report = json.loads((tmp_path / "chat1" / "run.json").read_text())["data"]
    assert 0.2 < report["train"]["num_trained_tokens"] / report["train"]["num_tokens"] < 0.6
    assert report["train"]["num_padding_tokens"] > 0
    folder = tmp_path / "chat1" / "checkpoints" / "latest" / "hf"
    blocks = prepare(tmp_path, tokenizer_name=str(base), **data).validation
    want = read_metrics(tmp_path / "chat1", key="eval_loss")[3]["eval_loss"]
    assert plain_loss(folder, blocks) == pytest.approx(want, abs=1e-5)
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
