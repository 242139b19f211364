"""Small models of transformers' own classes, and a cache of the Hugging Face hub that holds them without a network."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

COMMIT = "c" * 40
SIZES: dict[str, Any] = {
    "vocab_size": 304,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def make_model(*, kind: str, **changes: Any) -> Any:
    """A model of transformers' class for `kind`, its weights large enough to tell it from another."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(kind, **{**SIZES, **changes}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.06 * torch.randn(parameter.shape, generator=generator))
    return model


def save_tokenizer(folder: Path, *, chat_template: str | None = None) -> None:
    """Bytes and an end of the text, 257 entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(["<|endoftext|>", *letters])}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)


def put_in_cache(cache: Path, *, name: str, folder: Path, commit: str = COMMIT, branch: str = "main") -> Path:
    """Lay `folder` into a cache, as if the hub's `name` had been downloaded; the snapshot's folder."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / branch).write_text(commit)
    snapshot = repository / "snapshots" / commit
    shutil.copytree(folder, snapshot, dirs_exist_ok=True)
    return snapshot


def http_error(kind: type[Any], text: str = "a long answer of the server") -> Any:
    """An error of huggingface_hub as it comes with an answer of the server."""
    return kind(text, response=SimpleNamespace(headers={}, request=None))
