"""A model's name as a file or folder of this machine, or as a repository of the Hugging Face hub.

Loads without torch: of the hub only configurations are read here, weights come after the ranks have met.
"""

from pathlib import Path
from typing import NamedTuple

CONFIG_NAME = "config.json"


class HubModel(NamedTuple):
    """A repository of the hub. `revision` is a branch, tag or commit, None the main branch."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name} at revision {self.revision}"


class HubError(ValueError):
    """The hub did not give what was asked; it may answer each process otherwise."""


class MissingFilesError(FileNotFoundError):
    """A repository that was fetched has not all that a model is made of."""


def is_on_hub(name: str) -> bool:
    """Return whether a model's name is one of the hub: whatever exists here under that name wins."""
    return not Path(name).exists()


def fetch_config(model: HubModel) -> Path:
    """Return the repository's config.json in this machine's cache, downloaded if missing or older than the hub's.

    HubError, in the words of `explain`, if the hub does not give it. The folder it is in is named after the commit.
    """
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model.name, CONFIG_NAME, revision=model.revision))
    except hub_errors() as error:
        raise HubError(explain(error, model=model, wanted=CONFIG_NAME)) from error


def hub_errors() -> tuple[type[Exception], ...]:
    """Return the errors that a request to the hub can end with.

    HTTPError is that of the HTTP library underneath, whichever it is; a RuntimeError comes from the library that
    moves large files, and where the server's answer lacks something.
    """
    from huggingface_hub import errors

    http_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    return (OSError, http_error, errors.HFValidationError, RuntimeError)


def explain(error: Exception, *, model: HubModel, wanted: str) -> str:
    """Say why a repository did not give what was `wanted` of it, and what helps."""
    from huggingface_hub import constants, errors

    log_in = "log in with `hf auth login` or set HF_TOKEN"
    cache = f"the cache {constants.HF_HUB_CACHE} does not hold {wanted} of {model}"
    if isinstance(error, errors.HFValidationError):
        return f"{model.name!r} cannot be the name of a model on the hub, which reads like ORG/NAME"
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{model.name}"
        return f"{model} is gated on the hub: ask for access at {page}, then {log_in}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub {constants.ENDPOINT} has no model {model.name}; if it is a private one, {log_in}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model.name} on the hub has no revision {model.revision}"
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set and {cache}"
    if isinstance(error, errors.RemoteEntryNotFoundError | MissingFilesError):
        return f"{model} on the hub has no {wanted}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"the hub {constants.ENDPOINT} cannot be reached ({error.__cause__ or error}) and {cache}"
    return f"{wanted} of {model} cannot be fetched from the hub {constants.ENDPOINT}: {type(error).__name__}: {error}"
