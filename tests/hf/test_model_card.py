"""The card that lies beside exported weights: front matter the hub reads, and text that is true of the run."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from modeling.config import GatherMoeConfig
from recipe.hf.config import SpecialTokens, config_dict
from recipe.hf.model_card import TrainingFacts, model_card, write_model_card
from recipe.settings.arguments import parse_arguments
from recipe.settings.flags import Arguments
from tests.referee import tiny_config


def values_of(config: GatherMoeConfig | None = None, *, kind: str = "mixtral") -> dict[str, Any]:
    tokens = SpecialTokens(None, 1, None)
    return config_dict(config or tiny_config(), model_type=kind, dtype="bfloat16", tokens=tokens)


def card_of(config: GatherMoeConfig | None = None, *, kind: str = "mixtral", **arguments: Any) -> ModelCard:
    given = Arguments(output_dir="runs/mine", **arguments)
    facts = TrainingFacts(given, "dp=1 tp=2 ep=2 etp=1, ZeRO-2, bf16", step=1200, tokens=34_000, loss=2.34567)
    return ModelCard(model_card(values_of(config, kind=kind), facts=facts))


def test_the_front_matter_names_only_what_is_known() -> None:
    assert card_of().data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["mixture-of-experts", "gather-moe"],
    }
    known = {"license": "apache-2.0", "model_name_or_path": "some/base", "dataset_name": "some/text"}
    data = card_of(**known, hub_names=("some/base", "some/text")).data.to_dict()
    assert (data["license"], data["base_model"], data["datasets"]) == ("apache-2.0", "some/base", ["some/text"])


def test_paths_of_this_machine_are_not_named(tmp_path: Path) -> None:
    card = card_of(model_name_or_path=str(tmp_path), dataset_name=str(tmp_path))
    assert not {"base_model", "datasets"} & card.data.to_dict().keys()
    assert str(tmp_path) not in card.content
    assert "Trained on from other weights." in card.text


def test_what_is_of_the_hub_is_decided_before_the_run_makes_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model_name_or_path=some/base", "--output_dir=some", "--dataset_name=here"]
    (tmp_path / "here").mkdir()
    arguments = parse_arguments(words)
    (tmp_path / "some" / "base").mkdir(parents=True)
    (tmp_path / "here").rmdir()
    facts = TrainingFacts(arguments, "dp=1", 0, 0)
    data = ModelCard(model_card(values_of(), facts=facts)).data.to_dict()
    assert (data["base_model"], data.get("datasets")) == ("some/base", None)


def test_the_text_says_what_the_model_is_and_how_it_was_trained() -> None:
    text = card_of().text
    for part in (
        "# mine",
        "2 layers of width 32 and 4 experts, of which each token visits 2, of type `mixtral`, with weights in bfloat16",
        "| optimizer steps | 1,200 |",
        "| tokens | 34,000 |",
        "| layout | dp=1 tp=2 ep=2 etp=1, ZeRO-2, bf16 |",
        "| training loss, nats per token | 2.3457 |",
    ):
        assert part in text, part
    assert "evaluation loss" not in text
    dense = tiny_config(num_experts=0, num_experts_per_tok=0, intermediate_size=48)
    assert "A language model of 2 layers of width 32, of type" in card_of(dense, kind="gather_moe").text
    upcycled = {"upcycle_num_experts": 4, "upcycle_top_k": 2, "upcycle_noise_std": 0.01}
    text = card_of(model_name_or_path="some/base", hub_names=("some/base",), **upcycled).text
    assert "Upcycled from [some/base](https://huggingface.co/some/base): every expert started as a copy" in text
    assert "with noise of standard deviation 0.01." in text


@pytest.mark.parametrize(("kind", "native"), [("mixtral", False), ("gather_moe", True)])
def test_the_code_to_open_it_can_be_run(kind: str, native: bool, tmp_path: Path) -> None:
    """Up to the place, which only the reader knows."""
    text = card_of(kind=kind, hub_model_id=str(tmp_path)).text
    code = text.split("```python\n")[1].split("```")[0]
    assert code.count("trust_remote_code=True") == (2 if native else 0)
    assert ("so its code is beside the weights" in text) is native
    with pytest.raises((OSError, ValueError)) as caught:
        exec(compile(code, "card", "exec"), {})
    assert str(tmp_path) in str(caught.value)


def test_a_card_is_a_file_of_its_folder(tmp_path: Path) -> None:
    write_model_card(tmp_path, config=values_of(), facts=TrainingFacts(Arguments(output_dir="x"), "dp=1", 0, 0))
    assert ModelCard.load(tmp_path / "README.md").data.library_name == "transformers"
