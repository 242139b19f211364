"""Settles how the ranks of a group use the wire: the "parallel" keys that say what travels when, and in which type."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from modeling.layout import ModelSizes, ParallelLayout
from modeling.placement import resident_faults
from recipe.settings.flags import convert
from recipe.settings.sources import Sources

TOKEN_DTYPES = ("auto", "float8_e4m3")
COMBINE_DTYPES = ("auto", "float32")


@dataclass(frozen=True, kw_only=True)
class WireOptions:
    """Under the names that the model's configuration has for them; see modeling/wire.py and expert_copies.py."""

    overlap: bool
    overlap_chunks: int | None
    regather: bool
    token_dtype: str
    combine_dtype: str
    resident_experts: int = 0


def settle_wire(
    sources: Sources, *, block: Mapping[str, Any], sizes: ModelSizes, layout: ParallelLayout, strategy: str
) -> WireOptions:
    """Every "auto" decided and noted, every value that cannot hold a fault."""
    shares = layout.tp > 1
    dtype = partial(_dtype, sources, block=block, layout=layout, strategy=strategy)
    return WireOptions(
        overlap=_switch(
            sources,
            block=block,
            key="overlap",
            auto=shares,
            why="transfers travel while others are worked on" if shares else "there is one rank in a group",
        ),
        overlap_chunks=_chunks(sources, block=block),
        regather=_switch(
            sources,
            block=block,
            key="regather",
            auto=layout.ep > 1,
            why=f"gathered tokens are {'gathered again in the backward' if layout.ep > 1 else 'kept'}, ep={layout.ep}",
        ),
        token_dtype=dtype(key="token_dtype", choices=TOKEN_DTYPES),
        combine_dtype=dtype(key="combine_dtype", choices=COMBINE_DTYPES),
        resident_experts=_copies(sources, block=block, sizes=sizes, layout=layout, strategy=strategy),
    )


def _switch(sources: Sources, *, block: Mapping[str, Any], key: str, auto: bool, why: str) -> bool:
    value = block.get(key, "auto")
    if value == "auto":
        sources.notes.append(f'"parallel.{key}": "auto" became {str(auto).lower()}: {why}')
        return auto
    if not isinstance(value, bool):
        sources.faults.append(f'"parallel.{key}": {value!r} is not one of "auto", true, false')
    return value is True


def _chunks(sources: Sources, *, block: Mapping[str, Any]) -> int | None:
    value = block.get("overlap_chunks", "auto")
    if value == "auto":
        return None
    try:
        number = int(convert(value, kind=int))
    except ValueError as error:
        sources.faults.append(f'"parallel.overlap_chunks" in {sources.file}: {error}; give one or "auto"')
        return None
    if number < 1:
        sources.faults.append(f'"parallel.overlap_chunks": {number} must be at least 1; "auto" takes what pays')
        return None
    return number


def _copies(
    sources: Sources, *, block: Mapping[str, Any], sizes: ModelSizes, layout: ParallelLayout, strategy: str
) -> int:
    try:
        number = int(convert(block.get("resident_experts", 0), kind=int))
    except ValueError as error:
        sources.faults.append(f'"parallel.resident_experts" in {sources.file}: {error}; give a number of copies or 0')
        return 0
    faults = resident_faults(number, num_experts=sizes.num_experts, num_ranks=layout.ep, strategy=strategy)
    sources.faults += [f'"parallel": {fault}' for fault in faults]
    return max(number, 0)


def _dtype(
    sources: Sources,
    *,
    block: Mapping[str, Any],
    key: str,
    choices: tuple[str, ...],
    layout: ParallelLayout,
    strategy: str,
) -> str:
    value = block.get(key, choices[0])
    if value not in choices:
        sources.faults.append(f'"parallel.{key}": {value!r} is not one of {", ".join(choices)}')
        return choices[0]
    if value != choices[0] and layout.tp == 1:
        sources.faults.append(
            f'"parallel.{key}": "{value}" has no effect with tp=1, where nothing travels; use "{choices[0]}" or a '
            "larger tp"
        )
    elif value != choices[0] and strategy != "gather_tokens":
        sources.faults.append(
            f'"parallel.{key}": "{value}" is for strategy "gather_tokens", the only one that gathers tokens and sums '
            f'them, not for "{strategy}"; use "{choices[0]}"'
        )
    return str(value)
