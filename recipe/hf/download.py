"""Brings a model of the Hugging Face hub into the cache of every file system that the ranks see, once for each."""

from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from recipe.hf.folder import missing_files
from recipe.hf.in_thread import in_steps
from recipe.settings.model_source import (
    CONFIG_NAME,
    HubModel,
    MissingFilesError,
    explain,
    fetch_config,
    hub_errors,
)
from recipe.shared.build_once import once_per_file_system
from recipe.shared.ranks import Ranks
from recipe.shared.together import on_every, on_first, run_in_steps

# Configurations, weights and tokenizers; never pickles, whatever else a repository has.
ALLOWED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")
LEFT_OUT = ("*/*", "consolidated*")  # other formats' folders, and the same weights once more under other names


def fetch_model(model: HubModel, *, ranks: Ranks, say: Callable[[str], None], host: str | None = None) -> Path:
    """The folder of a model of the hub, complete for this rank; collective.

    One rank downloads what the cache lacks (HF_HOME says where it is), and where hosts share no cache one more of each.
    All take the commit that the first one finds. `host` is this machine's name. ValueError on all ranks alike where the
    hub does not give the model, in words that say what to do.
    """
    commit = on_first(lambda: fetch_config(model).parent.name, ranks=ranks)
    pinned = HubModel(model.name, commit)
    say(f"model: {model} is commit {commit} on the hub; what the cache lacks of it is downloaded")
    run_in_steps(_download(pinned) if ranks.rank == 0 else None, ranks=ranks)
    # A cache may hold a part of a repository, and only who has asked the hub knows which files there are.
    files = on_first(lambda: _files_of(pinned), ranks=ranks)
    once_per_file_system(
        lambda: _download(pinned, files),
        is_present=lambda: not _lacking(pinned, files),
        what=str(pinned),
        ranks=ranks,
        host=host,
    )
    return on_every(lambda: fetch_config(pinned).parent, ranks=ranks)


def _download(model: HubModel, files: Sequence[str] = ()) -> Generator[None, None, None]:
    return in_steps(lambda: _fetch(model, files))


def _fetch(model: HubModel, files: Sequence[str]) -> None:
    """Download, and see that weights and `files` have come."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            model.name, revision=model.revision, allow_patterns=list(ALLOWED), ignore_patterns=list(LEFT_OUT)
        )
    except hub_errors() as error:
        raise ValueError(explain(error, model=model, wanted="weights")) from error
    missing = _missing(Path(folder), files)
    if missing:
        raise ValueError(explain(MissingFilesError(), model=model, wanted=" and no ".join(missing[:3])))


def _files_of(model: HubModel) -> list[str]:
    """The names of what this rank's cache holds of a model, without what a download leaves out."""
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    names = sorted(path.name for path in fetch_config(model).parent.iterdir() if path.is_file())
    return list(filter_repo_objects(names, allow_patterns=list(ALLOWED), ignore_patterns=list(LEFT_OUT)))


def _lacking(model: HubModel, files: Sequence[str]) -> list[str]:
    """What this rank does not see of weights and `files`, or just the configuration, without which nothing is there."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model.name, CONFIG_NAME, revision=model.revision)
    if not isinstance(config, str):
        return [CONFIG_NAME]
    return _missing(Path(config).parent, files)


def _missing(folder: Path, files: Sequence[str]) -> list[str]:
    return missing_files(folder) or [name for name in files if not (folder / name).exists()]
