"""Uploads what a run has trained to the Hugging Face hub, and finds out at its start whether it may.

The token is the one of `hf auth login` or HF_TOKEN. Only rank 0 talks to the hub.
"""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from recipe.hf.in_thread import in_steps
from recipe.settings.flags import Arguments
from recipe.settings.model_source import hub_errors
from recipe.shared.errors import UploadError
from recipe.shared.ranks import Ranks
from recipe.shared.together import on_first, run_in_steps

# Of an earlier push, which may have had other files: a reader opens a single file of weights before an index of many.
REPLACED = ("*.safetensors", "*.safetensors.index.json", "*.py", "*.jinja")
LOG_IN = "log in with `hf auth login` or set HF_TOKEN, with a token that may write"


def claim_repository(arguments: Arguments, *, ranks: Ranks, api: Any = None) -> str | None:
    """The repository that --push_to_hub uploads to, made where it does not exist; None without the flag. Collective.

    ValueError on all ranks alike where there is no token, or it may not write there. `api` is a HfApi.
    """
    if not arguments.push_to_hub:
        return None
    return on_first(lambda: _claim(arguments, api=_api(api)), ranks=ranks)


def push_to_hub(
    repository: str, *, folder: Path, step: int, ranks: Ranks, say: Callable[[str], None], api: Any = None
) -> None:
    """Upload the files of `folder` as one commit, however long it takes. Collective.

    The same commit deletes weights, code and chat templates that the repository has and `folder` has not.

    UploadError on all ranks alike where that fails. The folder stays as it is.
    """
    folder = folder.resolve()
    urls: list[str] = []

    def upload() -> Generator[None, None, None]:
        message = f"Step {step}"
        try:
            yield from in_steps(lambda: urls.append(_upload(repository, folder, message, api=_api(api))))
        except Exception as error:  # the hub's library raises many kinds, and the weights are as safe after any of them
            raise UploadError(folder, repository, f"{type(error).__name__}: {error}") from error

    say(f"hub: uploading {folder} to {repository}")
    run_in_steps(upload() if ranks.rank == 0 else None, ranks=ranks)
    say(f"hub: {urls[0] if urls else repository}")


def _claim(arguments: Arguments, *, api: Any) -> str:
    from huggingface_hub import constants, get_token

    name = arguments.hub_model_id or Path(arguments.output_dir or "").resolve().name
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"--push_to_hub to {name} needs the hub, and HF_HUB_OFFLINE is set")
    if api.token is None and get_token() is None:
        raise ValueError(f"--push_to_hub to {name} needs a token, and there is none; {LOG_IN}")
    try:
        made = api.create_repo(name, private=arguments.hub_private_repo, exist_ok=True)
        # For a repository that exists, that asked for nothing: only this says whether the token may write there.
        api.auth_check(made.repo_id, write=True)
    except hub_errors() as error:
        raise ValueError(
            f"--push_to_hub cannot write to {name} on the hub ({type(error).__name__}: {error}); {LOG_IN}, or name "
            "another place by --hub_model_id"
        ) from error
    repository: str = made.repo_id
    return repository


def _upload(repository: str, folder: Path, message: str, *, api: Any) -> str:
    done = api.upload_folder(
        repo_id=repository, folder_path=folder, commit_message=message, delete_patterns=list(REPLACED)
    )
    return str(done.commit_url)


def _api(api: Any) -> Any:
    from huggingface_hub import HfApi

    return HfApi() if api is None else api
