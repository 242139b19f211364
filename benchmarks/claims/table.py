"""A table of numbers that stand beside the claims: computed rows, and how their cells are printed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from claims.claim import Unit

Cell = str | int | float | bool | None


class Column(NamedTuple):
    """`unit` and `digits` after the point are for numbers, which are kept in the unit's base."""

    key: str
    title: str
    unit: Unit | None = None
    digits: int = 0


Row = Mapping[str, Cell]


@dataclass(frozen=True, kw_only=True)
class Table:
    """`rows` computes them; every row has a cell for every column. `notes` are sentences below the table."""

    key: str
    title: str
    intro: str
    columns: tuple[Column, ...]
    rows: Callable[[], tuple[Row, ...]]
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


def cell_text(value: Cell, column: Column) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    size = 1 if column.unit is None else column.unit.size
    return f"{value / size:,.{column.digits}f}"


def column_title(column: Column) -> str:
    """With the unit in it, where numbers have one."""
    return column.title if column.unit is None or not column.unit.name else f"{column.title}, {column.unit.name}"
