"""What the details in a checkpoint's manifest say of its model."""

from collections.abc import Mapping
from typing import Any

from modeling.spec import NEEDED, ModelSizes, spec_of

MODEL_PREFIX = "model."


def sizes_in(details: Mapping[str, Any]) -> ModelSizes | None:
    """The sizes of the model that a run saved with its checkpoint; None where others wrote the details."""
    model = {name.removeprefix(MODEL_PREFIX): value for name, value in details.items() if name.startswith(MODEL_PREFIX)}
    return spec_of(model).sizes if model.keys() >= set(NEEDED) else None
