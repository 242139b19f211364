"""Uploading to the hub: allowed or refused at the start, a way on after a failure, and a model card that is true."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants, errors
from huggingface_hub.utils import filter_repo_objects

from modeling.config import GatherMoeConfig
from recipe.hf.config import config_dict
from recipe.hf.hub import claim_repository, push_to_hub
from recipe.hf.model_card import TrainingFacts, model_card
from recipe.settings.arguments import parse_arguments
from recipe.settings.flags import Arguments
from recipe.shared.errors import UploadError
from recipe.shared.ranks import OneRank, Ranks
from tests.hub_samples import http_error
from tests.referee import tiny_config
from tests.thread_ranks import on_threads


class FakeHub:
    """A HfApi that belongs to "me" and may write to some repositories."""

    def __init__(self, *, may_write: tuple[str, ...] = ("me/mine",), error: Exception | None = None) -> None:
        self.token: str | None = "secret"
        self.may_write, self.error = may_write, error
        self.made: list[tuple[str, bool | None]] = []
        self.commits: list[tuple[str, str]] = []
        self.files = {".gitattributes"}  # of me/mine

    def create_repo(self, name: str, *, private: bool | None, exist_ok: bool) -> Any:
        assert exist_ok
        full = name if "/" in name else f"me/{name}"
        self.made.append((full, private))
        return SimpleNamespace(repo_id=full)

    def auth_check(self, name: str, *, write: bool) -> None:
        assert write
        if name not in self.may_write:
            raise http_error(errors.HfHubHTTPError, "403 Forbidden")

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str, delete_patterns: list[str]) -> Any:
        if self.error is not None:
            raise self.error
        self.commits.append((repo_id, commit_message))
        self.files -= set(filter_repo_objects(self.files, allow_patterns=delete_patterns))
        self.files |= {path.name for path in folder_path.iterdir()}
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def asked(**arguments: Any) -> Arguments:
    return Arguments(push_to_hub=True, **{"output_dir": "runs/mine", **arguments})


def folder_in(tmp_path: Path) -> Path:
    """A step's hf/ behind a link, as `latest` is one."""
    folder = tmp_path / "step-6" / "hf"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (tmp_path / "latest").symlink_to("step-6")
    return tmp_path / "latest" / "hf"


def test_the_repository_is_made_and_may_be_written_before_training_starts() -> None:
    hub = FakeHub(may_write=("me/mine", "org/name"))
    assert claim_repository(Arguments(output_dir="runs/mine"), ranks=OneRank(), api=hub) is None
    assert claim_repository(asked(), ranks=OneRank(), api=hub) == "me/mine"
    named = asked(hub_model_id="org/name", hub_private_repo=True)
    assert claim_repository(named, ranks=OneRank(), api=hub) == "org/name"
    assert hub.made == [("me/mine", None), ("org/name", True)]


def test_who_may_not_write_hears_it_at_once_on_all_ranks() -> None:
    hub = FakeHub()
    outcomes = on_threads(2, lambda ranks: claim_repository(asked(hub_model_id="org/name"), ranks=ranks, api=hub))
    for error in outcomes:
        assert isinstance(error, ValueError)
        assert "--push_to_hub cannot write to org/name on the hub (HfHubHTTPError: 403 Forbidden); log in" in str(error)
    assert len(hub.made) == 1, "only the first rank asks"


def test_no_token_and_no_network_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub()
    hub.token = None
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ValueError, match=r"--push_to_hub to mine needs a token, and there is none; log in with `hf"):
        claim_repository(asked(), ranks=OneRank(), api=hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="--push_to_hub to mine needs the hub, and HF_HUB_OFFLINE is set"):
        claim_repository(asked(), ranks=OneRank(), api=hub)
    assert hub.made == []


def test_the_folder_is_one_commit_of_the_first_rank_with_nothing_left_of_an_earlier_push(tmp_path: Path) -> None:
    """That one was of a native type in one file; a reader would open it before the index of the new ones."""
    hub, folder, said = FakeHub(), folder_in(tmp_path), []
    new = {"config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"}
    for name in new:
        (folder / name).write_text("{}")
    hub.files |= {"config.json", "model.safetensors", "model.py", "chat_template.jinja", "evaluation.md"}

    def push(ranks: Ranks) -> None:
        say = said.append if ranks.rank == 0 else lambda line: None
        push_to_hub("me/mine", folder=folder, step=6, ranks=ranks, say=say, api=hub)

    assert on_threads(2, push) == [None, None]
    assert hub.commits == [("me/mine", "Step 6")]
    assert hub.files == {".gitattributes", "evaluation.md", *new}
    assert said == [f"hub: uploading {tmp_path / 'step-6' / 'hf'} to me/mine", "hub: https://hub/me/mine/commit/1"]


FAILURES = [
    http_error(errors.HfHubHTTPError, "502 Bad Gateway"),
    OSError("connection reset"),
    RuntimeError("Error while uploading 'model.safetensors' to the Hub."),
    ValueError("LFS batch API returned errors"),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_failed_upload_says_where_the_weights_are_and_how_to_go_on(error: Exception, tmp_path: Path) -> None:
    hub, folder = FakeHub(error=error), folder_in(tmp_path)

    def push(ranks: Ranks) -> None:
        push_to_hub("me/mine", folder=folder, step=6, ranks=ranks, say=lambda line: None, api=hub)

    place = tmp_path / "step-6" / "hf"
    for outcome in on_threads(2, push):
        assert isinstance(outcome, UploadError)
        assert outcome.exit_code == 19
        assert str(outcome).startswith(f"the upload to me/mine failed: {type(error).__name__}: {error}\n")
        assert str(outcome).endswith(f"the weights are safe in {place}; upload them with: hf upload me/mine {place}")
    assert (place / "config.json").is_file()


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--hub_model_id=me/x"], "--hub_model_id is for what --push_to_hub uploads; add that, or leave it out"),
        (["--hub_private_repo"], "--hub_private_repo is for what --push_to_hub uploads"),
        (["--push_to_hub", "--save_strategy=no"], "uploads what --save_strategy no does not write; leave one of them"),
        (["--push_to_hub", "--hf_save=never"], "weights that --hf_save never does not write; use --hf_save last"),
        (["--push_to_hub", "--hub_token=x"], "--hub_token on the command line is not available: who reads the command"),
        (["--push_to_hub", "--hub_strategy=end"], "weights are uploaded once, at the end of the run"),
    ],
)
def test_flags_of_the_hub_that_do_not_fit(words: list[str], fault: str) -> None:
    with pytest.raises(ValueError, match="cannot be used") as caught:
        parse_arguments(["--config_name=demo", "--output_dir=run", *words])
    assert fault in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


def values_of(config: GatherMoeConfig | None = None, *, kind: str = "mixtral") -> dict[str, Any]:
    return config_dict(config or tiny_config(), model_type=kind, dtype="bfloat16")


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


def test_what_is_of_the_hub_is_decided_before_the_run_makes_files_and_paths_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    arguments = parse_arguments(["--model_name_or_path=some/base", "--output_dir=some", "--dataset_name=here"])
    (tmp_path / "some" / "base").mkdir(parents=True)
    (tmp_path / "here").rmdir()
    data = ModelCard(model_card(values_of(), facts=TrainingFacts(arguments, "dp=1", 0, 0))).data.to_dict()
    assert (data["base_model"], data.get("datasets")) == ("some/base", None)
    card = card_of(model_name_or_path=str(tmp_path), dataset_name=str(tmp_path))
    assert not {"base_model", "datasets"} & card.data.to_dict().keys()
    assert str(tmp_path) not in card.content
    assert "Trained on from other weights." in card.text


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
