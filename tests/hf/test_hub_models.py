"""Models of the Hugging Face hub by name: from the cache, from a download that one rank of each cache makes, or not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants, errors

from recipe.hf.hub import DOWNLOADED, fetch_model
from recipe.settings.flags import Arguments
from recipe.settings.model import read_model
from recipe.settings.model_source import HubModel, explain, is_on_hub
from recipe.shared.ranks import OneRank
from tests.hub_samples import COMMIT, http_error, make_model, put_in_cache, save_tokenizer
from tests.launching import launch, run_main, words_of
from tests.ranks import run_ranks
from tests.thread_ranks import on_threads
from tests.training import read_metrics, write_ds_config, write_inputs

NAME = "someone/tiny"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    make_model(kind="qwen3_moe", **sizes).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def fault_of(**arguments: Any) -> str:
    with pytest.raises(ValueError, match="cannot be used") as caught:
        read_model(Arguments(**arguments))
    (line,) = str(caught.value).splitlines()[1:]
    return line


@pytest.mark.parametrize("flag", ["model_name_or_path", "config_name"])
def test_a_name_in_the_cache_is_the_model_itself(flag: str, cache: Path, model_folder: Path) -> None:
    put_in_cache(cache, name=NAME, folder=model_folder)
    want = read_model(Arguments(model_name_or_path=str(model_folder))).kwargs
    assert read_model(Arguments(**{flag: NAME})).kwargs == want
    assert read_model(Arguments(**{flag: NAME}, model_revision=COMMIT)).kwargs == want
    other = {"folder": model_folder, "commit": "d" * 40, "branch": "v2"}
    put_in_cache(cache, name=NAME, **other)
    assert read_model(Arguments(**{flag: NAME}, model_revision="v2")).kwargs == want
    assert "config.json of someone/tiny at revision v3" in fault_of(**{flag: NAME}, model_revision="v3")


def test_what_is_here_wins_over_the_hub(
    cache: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_cache(cache, name=NAME, folder=model_folder)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder, tmp_path / NAME)
    config = tmp_path / NAME / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 32}))
    assert not is_on_hub(NAME)
    assert read_model(Arguments(model_name_or_path=NAME)).kwargs["max_position_embeddings"] == 32
    assert "--model_revision v2 is for models on the hub, and someone/tiny is none" in fault_of(
        model_name_or_path=NAME, model_revision="v2"
    )


GATED = "is gated on the hub: ask for access at https://huggingface.co/someone/tiny, then log in with"
PRIVATE = "has no model someone/tiny; if it is a private one, log in with `hf auth login` or"
REASONS = [
    (errors.GatedRepoError, GATED),
    (errors.RepositoryNotFoundError, PRIVATE),
    (errors.RevisionNotFoundError, "someone/tiny on the hub has no revision v9"),
    (errors.RemoteEntryNotFoundError, "someone/tiny at revision v9 on the hub has no config.json"),
    (errors.HfHubHTTPError, "cannot be fetched from the hub https://huggingface.co: HfHubHTTPError: a long answer"),
]


@pytest.mark.parametrize(("kind", "words"), REASONS)
def test_why_the_hub_gave_nothing_is_said(kind: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> str:
        raise http_error(kind)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    line = fault_of(model_name_or_path=NAME, model_revision="v9")
    assert f"--model_name_or_path {NAME} is no folder (looked from {Path.cwd()}), and " in line
    assert words in line


def test_offline_and_unreachable_are_told_apart(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = fault_of(config_name=NAME)
    assert f"HF_HUB_OFFLINE is set and the cache {cache} does not hold config.json of {NAME}" in line
    assert f"--config_name {NAME} is neither a preset (demo, " in line
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    error = errors.LocalEntryNotFoundError("check your connection")
    words = explain(error, model=HubModel(NAME), wanted="config.json")
    assert words.startswith("the hub https://huggingface.co cannot be reached (check your connection) and the cache ")


def test_a_path_that_is_none_is_not_looked_for_on_the_hub() -> None:
    assert "'runs/more/hf' cannot be the name of a model on the hub, which reads like ORG/NAME" in fault_of(
        model_name_or_path="runs/more/hf"
    )


def test_a_download_takes_no_pickles_and_no_second_copy() -> None:
    from huggingface_hub.utils import filter_repo_objects

    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.model"]
    wanted += ["chat_template.jinja", "merges.txt", "generation_config.json"]
    others = ["pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors", "model.pt", "README.md"]
    assert list(filter_repo_objects(wanted + others, **DOWNLOADED)) == wanted


def test_a_cache_without_weights_and_a_repository_without_safetensors(
    cache: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = put_in_cache(cache, name=NAME, folder=model_folder)
    said: list[str] = []
    assert fetch_model(HubModel(NAME), ranks=OneRank(), say=said.append) == snapshot
    assert f"{NAME} is commit {COMMIT} on the hub" in said[0]
    (snapshot / "model.safetensors").unlink()
    offline = f"HF_HUB_OFFLINE is set and the cache {cache} does not hold model.safetensors of {NAME} at revision ccc"
    with pytest.raises(ValueError, match=offline):
        fetch_model(HubModel(NAME), ranks=OneRank(), say=said.append)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **options: str(snapshot))
    with pytest.raises(ValueError, match=r"someone/tiny at revision c+ on the hub has no model\.safetensors"):
        fetch_model(HubModel(NAME), ranks=OneRank(), say=said.append)

    def fail(*args: Any, **options: Any) -> str:
        raise RuntimeError("the transfer broke off")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ValueError, match=r"cannot be fetched from the hub .*: RuntimeError: the transfer broke off"):
        fetch_model(HubModel(NAME), ranks=OneRank(), say=said.append)


def fetch_on_rank(
    rank: int, world_size: int, root: Path, *, shared: bool, failing: int | None = None, lost: bool = False
) -> tuple[Any, int]:
    """Fetch with a hub that is a folder; the folder that this rank sees, or its error, and how often it downloaded."""
    import huggingface_hub

    host = "one" if shared else f"host-{rank // 2}"
    cache = root / f"cache of {host}"
    downloads = []

    def config_of(name: str, file: str, *, revision: str | None = None) -> str:
        path = cache / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT / file
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / "model" / file, path)
        return str(path)

    def download(name: str, *, revision: str, **patterns: Any) -> str:
        downloads.append(revision)
        if rank == failing:
            raise OSError("no space left on device")
        return str(put_in_cache(root / "elsewhere" if lost else cache, name=name, folder=root / "model"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(huggingface_hub, "hf_hub_download", config_of)
        patch.setattr(huggingface_hub, "snapshot_download", download)
        from recipe.shared.errors import RunError
        from recipe.shared.ranks import TorchRanks

        try:
            folder = fetch_model(HubModel(NAME), ranks=TorchRanks(), say=lambda line: None, host=host)
        except (ValueError, RunError) as error:
            return str(error), len(downloads)
        assert (folder / "model.safetensors").is_file()
        assert downloads == [COMMIT] * len(downloads)
        return folder, len(downloads)


def test_one_rank_of_each_cache_downloads_and_all_hear_of_a_failure(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "model")
    shared = run_ranks(fetch_on_rank, 4, tmp_path, shared=True)
    assert [count for _, count in shared] == [1, 0, 0, 0]
    assert len({folder for folder, _ in shared}) == 1
    apart = run_ranks(fetch_on_rank, 4, tmp_path, shared=False)
    assert [count for _, count in apart] == [1, 0, 1, 0]
    assert len({folder for folder, _ in apart}) == 2
    (partial,) = (tmp_path / "cache of host-1").glob("*/snapshots/*")
    (partial / "tokenizer.json").unlink()  # weights alone are not the model, so host-1 downloads again
    failed = run_ranks(fetch_on_rank, 4, tmp_path, shared=False, failing=2)
    (text,) = {text for text, _ in failed}
    assert f"weights of {NAME} at revision {COMMIT} cannot be fetched from the hub" in text
    assert "OSError: no space left on device" in text
    shutil.rmtree(tmp_path / "cache of host-0")
    lost = run_ranks(fetch_on_rank, 4, tmp_path, shared=False, lost=True)
    (text,) = {text for text, _ in lost}
    assert f"does not see {NAME} at revision {COMMIT} although a rank of its host" in text


def test_a_model_that_changes_on_the_hub_while_a_run_starts_is_noticed(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipe.train import prepare

    kwargs = read_model(Arguments(model_name_or_path=str(model_folder))).kwargs
    request: Any = prepare.Request(Arguments(model_name_or_path=NAME), None, kwargs, None)  # type: ignore[arg-type]
    monkeypatch.setattr(prepare, "fetch_model", lambda model, **options: model_folder)
    assert prepare.find_weights(request, ranks=OneRank(), say=print) == model_folder
    changed = request._replace(model={**kwargs, "num_experts": 8})
    with pytest.raises(ValueError, match=f"{NAME} on the hub changed while the run started; start it again"):
        prepare.find_weights(changed, ranks=OneRank(), say=print)


def test_a_host_whose_folder_has_no_tokenizer_stops_the_others(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any of them waits for the others in what follows."""
    import recipe.train.prepare as prepare

    (tmp_path / "config.json").touch()
    monkeypatch.setattr(prepare, "claim_repository", lambda arguments, *, ranks: None)
    folders = {0: model_folder, 1: tmp_path}
    monkeypatch.setattr(prepare, "find_weights", lambda request, *, ranks, say: folders[ranks.rank])
    request: Any = prepare.Request(Arguments(model_name_or_path=NAME), None, {}, None)  # type: ignore[arg-type]
    outsiders: Any = {"mesh": None, "folder": None, "say": print}
    for outcome in on_threads(2, lambda ranks: prepare.prepare_run(request, ranks=ranks, **outsiders)):
        assert isinstance(outcome, ValueError)
        assert f"--model_name_or_path {tmp_path} holds no tokenizer" in str(outcome)


def test_a_rank_that_the_hub_refuses_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What all ranks of a host see alike only the first says; the hub may answer each of them something else."""
    import run_pretrain

    monkeypatch.setattr(run_pretrain, "GRACE_S", 0.0)
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    words = ["--output_dir=run", "--train_file=x.txt"]
    assert run_pretrain.main([*words, f"--model_name_or_path={NAME}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"rank 3: the model (--model_name_or_path {NAME}) cannot be used: --model_name_or_path {NAME}"
    )
    assert f"HF_HUB_OFFLINE is set and the cache {constants.HF_HUB_CACHE} does not hold config.json of {NAME}" in line
    assert run_pretrain.main([*words, "--config_name=demo", "--config_overrides=zzz=1"]) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_run_starts_from_a_dense_model_of_the_hub_in_a_process_without_a_network(tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    make_model(kind="llama").save_pretrained(dense)
    save_tokenizer(dense, chat_template="{{ messages[0]['content'] }}")
    put_in_cache(tmp_path / "home" / "hub", name=NAME, folder=dense)
    flags = write_inputs(tmp_path) | write_ds_config(tmp_path) | {"max_steps": 1, "learning_rate": 0.0}
    del flags["config_name"], flags["train_vocab_size"]
    flags |= {"model_name_or_path": NAME, "upcycle_num_experts": 4, "upcycle_top_k": 2, "license": "mit"}
    done = launch(words_of(flags), HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout
    assert f"model: {NAME} is commit {COMMIT} on the hub" in done.stdout
    assert "model: 4 experts made of each feed-forward" in done.stdout
    run = tmp_path / "run"
    hf_folder = run / "checkpoints" / "latest" / "hf"
    assert json.loads((hf_folder / "config.json").read_text())["model_type"] == "mixtral"
    assert "messages[0]" in (hf_folder / "chat_template.jinja").read_text()
    assert read_metrics(run, key="eval_loss")[1]["eval_loss"] > 1
    card = ModelCard.load(hf_folder / "README.md")
    assert (card.data.base_model, card.data.license) == (NAME, "mit")
    assert "| layout | dp=1 tp=1 ep=1 etp=1, ZeRO-" in card.text
    assert "| evaluation loss, nats per token | " in card.text
    flags |= {"model_name_or_path": dense, "output_dir": tmp_path / "other", "push_to_hub": True}
    done = run_main(words_of(flags), tmp_path)
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("--push_to_hub to other needs the hub, and HF_HUB_OFFLINE is set") == 1
