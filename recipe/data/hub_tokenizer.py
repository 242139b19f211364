"""Brings a tokenizer of the Hugging Face hub into the cache of every file system that the ranks see, once for each."""

from collections.abc import Generator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from recipe.settings.model_source import HubModel, MissingFilesError, explain, hub_errors, is_on_hub
from recipe.shared.build_once import once_per_file_system
from recipe.shared.ranks import Ranks
from recipe.shared.together import on_every, on_first

FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]  # what tokenizers are made of, their templates too


class _Found(NamedTuple):
    """What the first rank downloaded."""

    source: HubModel  # its revision is a commit
    files: tuple[str, ...]


def fetch_tokenizer(name: str, *, ranks: Ranks, host: str | None = None) -> str:
    """The folder to load the tokenizer `name` from, on the hub or not; collective.

    One rank asks the hub, which commit it is and for what its cache lacks (HF_HOME says where that is), and one of each
    host whose cache then lacks that commit; all others read. `host` is this machine's name. ValueError on all ranks
    alike where the hub does not give it.
    """
    found = on_first(lambda: _find(name) if is_on_hub(name) else None, ranks=ranks)
    if found is None:
        return name
    once_per_file_system(
        lambda: _download(found.source),
        is_present=lambda: _is_present(found),
        what=f"the tokenizer {found.source}",
        ranks=ranks,
        host=host,
    )
    return on_every(lambda: str(_snapshot(found.source, local_files_only=True)), ranks=ranks)


def _find(name: str) -> _Found:
    folder = _snapshot(HubModel(name), local_files_only=False)
    here = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = tuple(file for file in here if any(fnmatch(file, pattern) for pattern in FILES))
    if not files:
        raise ValueError(_refusal(MissingFilesError(), HubModel(name)))
    return _Found(HubModel(name, folder.name), files)


def _download(source: HubModel) -> Generator[None, None, None]:
    _snapshot(source, local_files_only=False)
    yield


def _snapshot(source: HubModel, *, local_files_only: bool) -> Path:
    """The folder in the cache that is named after the commit."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                source.name, revision=source.revision, allow_patterns=FILES, local_files_only=local_files_only
            )
        )
    except hub_errors() as error:
        raise ValueError(_refusal(error, source)) from error


def _is_present(found: _Found) -> bool:
    from huggingface_hub import try_to_load_from_cache

    name, commit = found.source
    return all(isinstance(try_to_load_from_cache(name, file, revision=commit), str) for file in found.files)


def _refusal(error: Exception, source: HubModel) -> str:
    return f"the tokenizer {source.name!r} cannot be loaded: {explain(error, model=source, wanted='tokenizer')}"
