"""Resolves a DeepSpeed configuration and flags for the smallest model, as several test files need it."""

from collections.abc import Sequence
from typing import Any

import pytest

from modeling.spec import ModelSizes
from recipe.settings.arguments import parse_arguments
from recipe.settings.resolve import ResolvedConfig, WorldInfo, resolve_config
from tests import referee

TINY = ModelSizes(**referee.TINY, intermediate_size=0)


def resolve(
    ds_config: dict[str, Any] | None = None,
    *flags: str,
    world: WorldInfo | int = 4,
    sizes: ModelSizes = TINY,
    dropout: float = 0.0,
    **extra: Sequence[str],
) -> ResolvedConfig:
    """TINY on four ranks of one node, with blocks of 16, unless told otherwise; `extra_faults` and `extra_notes`."""
    block_size = [] if any(flag.startswith("--block_size") for flag in flags) else ["--block_size=16"]
    words = ["--config_name=demo", "--output_dir=run", *block_size, *flags]
    ranks = WorldInfo(world_size=world, local_world_size=world) if isinstance(world, int) else world
    arguments = parse_arguments(words)
    return resolve_config(
        arguments, deepspeed_json=ds_config or {}, ranks=ranks, sizes=sizes, attention_dropout=dropout, **extra
    )


def faults_of(ds_config: dict[str, Any] | None = None, *flags: str, **world: Any) -> str:
    """The message that resolving the same settings ends with."""
    with pytest.raises(ValueError, match=r"the settings .* cannot be used") as caught:
        resolve(ds_config, *flags, **world)
    return str(caught.value)
