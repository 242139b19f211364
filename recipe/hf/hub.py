"""The Hugging Face hub: a model downloaded once for every file system that the ranks see, and a trained one uploaded.

The token is the one of `hf auth login` or HF_TOKEN. Calls that take long run in a thread, so that their rank goes on
meeting the others meanwhile.
"""

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipe.hf.load import missing_files
from recipe.settings.flags import Arguments
from recipe.settings.model_source import (
    CONFIG_NAME,
    HubModel,
    MissingFilesError,
    explain,
    fetch_config,
    hub_errors,
)
from recipe.shared.build_once import once_per_file_system
from recipe.shared.errors import UploadError
from recipe.shared.ranks import Ranks
from recipe.shared.together import on_every, on_first, run_in_steps

# Configurations, weights and tokenizers; never pickles, whatever else a repository has.
# Other formats' folders are left out, and the same weights once more under other names.
DOWNLOADED: Mapping[str, Any] = {
    "allow_patterns": ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"],
    "ignore_patterns": ["*/*", "consolidated*"],
}
# Of an earlier push, which may have had other files: a reader opens a single file of weights before an index of many.
REPLACED = ("*.safetensors", "*.safetensors.index.json", "*.py", "*.jinja")
LOG_IN = "log in with `hf auth login` or set HF_TOKEN, with a token that may write"
POLL_S = 0.1


def fetch_model(model: HubModel, *, ranks: Ranks, say: Callable[[str], None], host: str | None = None) -> Path:
    """Return the folder of a model of the hub, complete for this rank. Collective.

    Rank 0 downloads what its cache lacks (HF_HOME says where it is); where hosts share no cache, so does one rank of
    each other host. All take the commit that rank 0 finds. `host` is this machine's name. ValueError on all ranks
    alike, with what to do about it, where the hub does not give the model.
    """
    commit = on_first(lambda: fetch_config(model).parent.name, ranks=ranks)
    pinned = HubModel(model.name, commit)
    say(f"model: {model} is commit {commit} on the hub; what the cache lacks of it is downloaded")
    run_in_steps(in_steps(lambda: _fetch(pinned, ())) if ranks.rank == 0 else None, ranks=ranks)
    # A cache may hold a part of a repository, and only who has asked the hub knows which files there are.
    files = on_first(lambda: _files_of(pinned), ranks=ranks)
    once_per_file_system(
        lambda: in_steps(lambda: _fetch(pinned, files)),
        is_present=lambda: not _lacking(pinned, files),
        what=str(pinned),
        ranks=ranks,
        host=host,
    )
    return on_every(lambda: fetch_config(pinned).parent, ranks=ranks)


def _fetch(model: HubModel, files: Sequence[str]) -> None:
    """Download, and check that weights and `files` are there."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(model.name, revision=model.revision, **DOWNLOADED)
    except hub_errors() as error:
        raise ValueError(explain(error, model=model, wanted="weights")) from error
    missing = _missing(Path(folder), files)
    if missing:
        raise ValueError(explain(MissingFilesError(), model=model, wanted=" and no ".join(missing[:3])))


def _files_of(model: HubModel) -> list[str]:
    """Return the names of a model's files in this rank's cache, without those that a download leaves out."""
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    names = sorted(path.name for path in fetch_config(model).parent.iterdir() if path.is_file())
    return list(filter_repo_objects(names, **DOWNLOADED))


def _lacking(model: HubModel, files: Sequence[str]) -> list[str]:
    """Return what this rank lacks of weights and `files`; the configuration alone where even that is missing."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model.name, CONFIG_NAME, revision=model.revision)
    if not isinstance(config, str):
        return [CONFIG_NAME]
    return _missing(Path(config).parent, files)


def _missing(folder: Path, files: Sequence[str]) -> list[str]:
    return missing_files(folder) or [name for name in files if not (folder / name).exists()]


def claim_repository(arguments: Arguments, *, ranks: Ranks, api: Any = None) -> str | None:
    """Return the repository that --push_to_hub uploads to, created if need be; None without the flag. Collective.

    ValueError on all ranks alike where there is no token, or it may not write there. `api` is a HfApi.
    """
    if not arguments.push_to_hub:
        return None
    from huggingface_hub import HfApi, constants, get_token

    name = arguments.hub_model_id or Path(arguments.output_dir or "").resolve().name

    def claim() -> str:
        if constants.HF_HUB_OFFLINE:
            raise ValueError(f"--push_to_hub to {name} needs the hub, and HF_HUB_OFFLINE is set")
        hub = api or HfApi()
        if hub.token is None and get_token() is None:
            raise ValueError(f"--push_to_hub to {name} needs a token, and there is none; {LOG_IN}")
        try:
            made = hub.create_repo(name, private=arguments.hub_private_repo, exist_ok=True)
            # For a repository that exists, that asked for nothing: only this says whether the token may write there.
            hub.auth_check(made.repo_id, write=True)
        except hub_errors() as error:
            raise ValueError(
                f"--push_to_hub cannot write to {name} on the hub ({type(error).__name__}: {error}); {LOG_IN}, or name "
                "another place by --hub_model_id"
            ) from error
        return str(made.repo_id)

    return on_first(claim, ranks=ranks)


def push_to_hub(
    repository: str, *, folder: Path, step: int, ranks: Ranks, say: Callable[[str], None], api: Any = None
) -> None:
    """Upload the files of `folder` as one commit, however long it takes. Collective.

    The same commit deletes weights, code and chat templates of the repository that `folder` does not have.

    UploadError on all ranks alike where that fails. The folder stays as it is.
    """
    from huggingface_hub import HfApi

    folder = folder.resolve()
    urls: list[str] = []
    options: dict[str, Any] = {"commit_message": f"Step {step}", "delete_patterns": list(REPLACED)}

    def commit() -> None:
        done = (api or HfApi()).upload_folder(repo_id=repository, folder_path=folder, **options)
        urls.append(str(done.commit_url))

    def upload() -> Generator[None, None, None]:
        try:
            yield from in_steps(commit)
        except Exception as error:  # the hub's library raises many kinds, and the weights are as safe after any of them
            raise UploadError(folder, repository, f"{type(error).__name__}: {error}") from error

    say(f"hub: uploading {folder} to {repository}")
    run_in_steps(upload() if ranks.rank == 0 else None, ranks=ranks)
    say(f"hub: {urls[0] if urls else repository}")


def in_steps(work: Callable[[], object]) -> Generator[None, None, None]:
    """Run `work` in a thread, yielding every POLL_S until it is done; raise what it raises.

    Where the generator is closed early, the thread ends with the process at the latest.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
        yield
    if errors:
        raise errors[0]
