"""Brings a model of the Hugging Face hub into the cache of every file system that the ranks see, once for each."""

import socket
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

from recipe.data.together import on_every_rank, on_first_rank, run_in_steps
from recipe.hf.folder import missing_files
from recipe.hf.in_thread import in_steps
from recipe.ranks import Ranks
from recipe.settings.model_source import HubModel, MissingFilesError, explain, fetch_config, hub_errors

# Configurations, weights and tokenizers; never pickles, whatever else a repository has.
ALLOWED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")
LEFT_OUT = ("*/*", "consolidated*")  # other formats' folders, and the same weights once more under other names


class _View(NamedTuple):
    """What one rank sees."""

    host: str
    present: bool


def fetch_model(model: HubModel, *, ranks: Ranks, say: Callable[[str], None], host: str | None = None) -> Path:
    """The folder of a model of the hub, complete for this rank; collective.

    One rank downloads what the cache lacks (HF_HOME says where it is), and where hosts share no cache one more of each.
    All take the commit that the first one finds. `host` is this machine's name. ValueError on all ranks alike where the
    hub does not give the model, in words that say what to do.
    """
    host = socket.gethostname() if host is None else host
    commit = on_first_rank(lambda: fetch_config(model).parent.name, ranks=ranks)
    pinned = HubModel(model.name, commit)
    say(f"model: {model} is commit {commit} on the hub; what the cache lacks of it is downloaded")
    run_in_steps(_download(pinned) if ranks.rank == 0 else None, ranks=ranks)
    views: list[_View] = ranks.gather(_View(host, _is_present(pinned)))
    first: dict[str, int] = {}
    for rank, view in enumerate(views):
        if not view.present:
            first.setdefault(view.host, rank)
    run_in_steps(_download(pinned) if ranks.rank in first.values() else None, ranks=ranks)
    return on_every_rank(lambda: _folder_of(pinned), ranks=ranks)


def _download(model: HubModel) -> Generator[None, None, None]:
    return in_steps(lambda: _fetch(model))


def _fetch(model: HubModel) -> None:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            model.name, revision=model.revision, allow_patterns=list(ALLOWED), ignore_patterns=list(LEFT_OUT)
        )
    except hub_errors() as error:
        raise ValueError(explain(error, model=model, wanted="weights")) from error
    missing = missing_files(Path(folder))
    if missing:
        raise ValueError(explain(MissingFilesError(), model=model, wanted=" and no ".join(missing[:3])))


def _is_present(model: HubModel) -> bool:
    """Whether this rank sees the weights; where it does not see the configuration, either, it has to be fetched."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model.name, "config.json", revision=model.revision)
    return isinstance(config, str) and not missing_files(Path(config).parent)


def _folder_of(model: HubModel) -> Path:
    if not _is_present(model):
        raise RuntimeError(f"{model} was downloaded on host {socket.gethostname()}, but is not in this rank's cache")
    return fetch_config(model).parent
