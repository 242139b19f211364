"""The model card of an exported folder, README.md: where the model comes from, how it was trained, how to open it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCardData

from recipe.settings.flags import Arguments

CARD_NAME = "README.md"


class TrainingFacts(NamedTuple):
    """The run so far as a card describes it: losses in nats per token are the last known ones, or None.

    layout  how the ranks share the model, in words
    """

    arguments: Arguments
    layout: str
    step: int
    tokens: int
    loss: float | None = None
    eval_loss: float | None = None


def model_card(config: Mapping[str, Any], *, facts: TrainingFacts) -> str:
    """Return the card of the model that `config`, the content of its config.json, describes.

    Front matter as the hub reads it (license, base model and data set only where known), then text.
    """
    arguments = facts.arguments
    title = arguments.hub_model_id or Path(arguments.output_dir or "model").resolve().name
    native = "auto_map" in config
    # The tokenizer's class is found by way of the configuration, whose code has to be trusted, too.
    trust = ", trust_remote_code=True" if native else ""
    code = f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{arguments.hub_model_id or "PATH"}"  # where this folder is
model = AutoModelForCausalLM.from_pretrained(name{trust})
tokenizer = AutoTokenizer.from_pretrained(name{trust})
```"""
    paragraphs = [
        f"---\n{_front_matter(arguments)}\n---",
        f"# {title}",
        f"{_kind(config)}, of type `{config['model_type']}`, with weights in {config['dtype']}.",
        _origin(arguments),
        "## Open it",
        code,
        "No type of transformers says everything this model is, so its code is beside the weights." if native else "",
        "## Training",
        "Trained with gather-moe, which splits attention and experts over one group of ranks.",
        "\n".join(_training_table(facts)),
    ]
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _front_matter(arguments: Arguments) -> str:
    """Return in YAML what the hub reads of a card; what is not known is left out."""
    data_set = _hub_name(arguments.dataset_name, arguments=arguments)
    data = ModelCardData(
        license=arguments.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["mixture-of-experts", "gather-moe"],
        base_model=_hub_name(arguments.model_name_or_path, arguments=arguments),
        datasets=None if data_set is None else [data_set],
    )
    return data.to_yaml()


def _kind(config: Mapping[str, Any]) -> str:
    sizes = f"{config['num_hidden_layers']} layers of width {config['hidden_size']}"
    if not config["num_experts"]:
        return f"A language model of {sizes}"
    return (
        f"A mixture-of-experts language model of {sizes} and {config['num_experts']} experts, of which each token "
        f"visits {config['num_experts_per_tok']}"
    )


def _origin(arguments: Arguments) -> str:
    """Say which weights the run began with; nothing of fresh ones."""
    if arguments.model_name_or_path is None:
        return ""
    base = _hub_name(arguments.model_name_or_path, arguments=arguments)
    source = "other weights" if base is None else f"[{base}](https://huggingface.co/{base})"
    if arguments.upcycle_num_experts is None:
        return f"Trained on from {source}."
    std = arguments.upcycle_noise_std
    noise = f" with noise of standard deviation {std}" if std else ""
    return f"Upcycled from {source}: every expert started as a copy of the dense feed-forward{noise}."


def _training_table(facts: TrainingFacts) -> Iterator[str]:
    arguments = facts.arguments
    rows = {
        "optimizer steps": f"{facts.step:,}",
        "tokens": f"{facts.tokens:,}",
        "sequence length": f"{arguments.block_size:,}",
        "layout": facts.layout,
        "seed": str(arguments.seed),
        "training loss, nats per token": None if facts.loss is None else f"{facts.loss:.4f}",
        "evaluation loss, nats per token": None if facts.eval_loss is None else f"{facts.eval_loss:.4f}",
    }
    yield "| | |"
    yield "|---|---|"
    for name, value in rows.items():
        if value is not None:
            yield f"| {name} | {value} |"


def _hub_name(name: str | None, *, arguments: Arguments) -> str | None:
    """Return the name where it is one of the hub, None where it names something on this machine only."""
    return name if name in arguments.hub_names else None
