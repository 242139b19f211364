"""What a probe measured, as the content of a JSON file, which is read strictly."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from recipe.plan.hardware_values import (
    AttentionRate,
    Curve,
    Efficiencies,
    Fit,
    Hardware,
    Link,
    Measured,
    ProductRate,
)
from recipe.plan.job import ELEMENT_BYTES
from recipe.plan.passes import PASSES

FORMAT = 1  # rises with every change that makes older numbers mean something else
PRODUCT_KINDS = ("forward", "input_gradient", "weight_gradient", "expert")
LINK_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
AGAIN = "measure again with `gather-moe probe`"

Made = TypeVar("Made")


def hardware_as_json(hardware: Hardware, *, machine: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file; `machine` says where and how it was measured, for people."""
    return {"format": FORMAT, "machine": dict(machine), "hardware": asdict(hardware)}


def read_hardware(path: Path) -> Hardware:
    """The hardware of a file; a ValueError that says what is wrong with it and what to do."""
    try:
        whole = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"hardware file {path} does not exist; write it with `gather-moe probe --out {path}`"
        ) from None
    except OSError as error:
        raise ValueError(f"hardware file {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"hardware file {path} is no JSON ({error}); {AGAIN}") from None
    found = whole.get("format") if isinstance(whole, dict) else None
    if found != FORMAT:
        age = "an older" if not isinstance(found, int) or found < FORMAT else "a newer"
        raise ValueError(f"hardware file {path} has {age} format ({found}) than this program's {FORMAT}; {AGAIN}")
    try:
        block = _keys(whole, ("format", "machine", "hardware"), name="the file")
        return _hardware(block["hardware"])
    except ValueError as error:
        raise ValueError(f"hardware file {path} cannot be used: {error}; {AGAIN}") from None


def _hardware(block: Any) -> Hardware:
    names = {field.name for field in fields(Hardware)}
    _keys(block, names, name="hardware")
    if block["device"] not in ("cpu", "cuda"):
        raise ValueError(f"its device is {block['device']!r}, not cpu or cuda")
    measured = {
        _one_of(precision, ELEMENT_BYTES, name="measured"): _measured(part, name=f"measured.{precision}")
        for precision, part in _mapping(block["measured"], name="measured").items()
    }
    peaks = {
        precision: _positive(peak, name=f"peak_flops_per_s.{precision}")
        for precision, peak in _mapping(block["peak_flops_per_s"], name="peak_flops_per_s").items()
    }
    if missing := sorted(measured.keys() - peaks.keys()):
        raise ValueError(f"peak_flops_per_s has no {', '.join(missing)}, which was measured")
    reached = _keys(block["efficiencies"], Efficiencies.__annotations__, name="efficiencies")
    capability = block["compute_capability"]
    return Hardware(
        name=_text(block["name"], name="name"),
        device=block["device"],
        memory_bytes=_count(block["memory_bytes"], name="memory_bytes"),
        ranks_per_node=_count(block["ranks_per_node"], name="ranks_per_node"),
        peak_flops_per_s=peaks,
        memory_bytes_per_s=_positive(block["memory_bytes_per_s"], name="memory_bytes_per_s"),
        intra=None if block["intra"] is None else _link(block["intra"], name="intra"),
        inter=None if block["inter"] is None else _link(block["inter"], name="inter"),
        efficiencies=Efficiencies(**{key: _positive(n, name=f"efficiencies.{key}") for key, n in reached.items()}),
        launch_s=_positive(block["launch_s"], name="launch_s"),
        sources={key: _text(n, name=f"sources.{key}") for key, n in _mapping(block["sources"], name="sources").items()},
        measured=measured,
        compute_capability=None if capability is None else _capability(capability),
    )


def _link(block: Any, *, name: str) -> Link:
    _keys(block, [field.name for field in fields(Link)], name=name)
    ops = _mapping(block["ops"], name=f"{name}.ops", may_be_empty=True)
    return Link(
        alpha_s=_at_least_0(block["alpha_s"], name=f"{name}.alpha_s"),
        bytes_per_s=_positive(block["bytes_per_s"], name=f"{name}.bytes_per_s"),
        busy=_share(block["busy"], name=f"{name}.busy"),
        ops={_one_of(op, LINK_OPS, name=f"{name}.ops"): _fit(fit, name=f"{name}.ops.{op}") for op, fit in ops.items()},
    )


def _fit(numbers: Any, *, name: str) -> Fit:
    row = _row(numbers, length=len(Fit._fields), name=name)
    return Fit(
        _at_least_0(row[0], name=f"{name}.alpha_s"),
        _positive(row[1], name=f"{name}.bytes_per_s"),
        _at_least_0(row[2], name=f"{name}.residual"),
        _at_least_0(row[3], name=f"{name}.max_bytes"),
    )


def _measured(block: Any, *, name: str) -> Measured:
    _keys(block, [field.name for field in fields(Measured)], name=name)
    kinds = _keys(block["products"], PRODUCT_KINDS, name=f"{name}.products")
    curves = _keys(block["passes"], PASSES, name=f"{name}.passes")
    return Measured(
        products={
            kind: _rows(rates, make=ProductRate, length=3, name=f"{name}.products.{kind}")
            for kind, rates in kinds.items()
        },
        attention=_rows(block["attention"], make=AttentionRate, length=4, name=f"{name}.attention"),
        passes={key: _curve(curve, name=f"{name}.passes.{key}") for key, curve in curves.items()},
    )


def _curve(rows: Any, *, name: str) -> Curve:
    return _rows(rows, make=lambda size, seconds: (size, seconds), length=2, name=name)


def _rows(rows: Any, *, make: Callable[..., Made], length: int, name: str) -> tuple[Made, ...]:
    """Lists of positive numbers as what `make` makes of each."""
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{name} is {_short(rows)}, not a list of measurements")
    return tuple(make(*(_positive(n, name=name) for n in _row(row, length=length, name=name))) for row in rows)


def _row(row: Any, *, length: int, name: str) -> list[Any]:
    if not isinstance(row, list) or len(row) != length:
        raise ValueError(f"{name} has {_short(row)}, not {length} numbers")
    return row


def _mapping(block: Any, *, name: str, may_be_empty: bool = False) -> Mapping[str, Any]:
    if not isinstance(block, dict):
        raise ValueError(f"{name} is {_short(block)}, not a block of names and values")
    if not block and not may_be_empty:
        raise ValueError(f"{name} is empty")
    return block


def _keys(block: Any, names: Iterable[str], *, name: str) -> Mapping[str, Any]:
    """A block with just these names."""
    found, wanted = _mapping(block, name=name), set(names)
    if missing := sorted(wanted - found.keys()):
        raise ValueError(f"{missing[0]!r} is missing in {name}")
    if unknown := sorted(found.keys() - wanted):
        raise ValueError(f"{unknown[0]!r} in {name} is not known")
    return found


def _one_of(value: str, known: Iterable[str], *, name: str) -> str:
    if value not in known:
        raise ValueError(f"{value!r} in {name} is not one of {', '.join(known)}")
    return value


def _text(value: Any, *, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_short(value)}, not a text")
    return value


def _capability(value: Any) -> tuple[int, int]:
    major, minor = _row(value, length=2, name="compute_capability")
    number = _at_least_0(minor, name="compute_capability")
    return _count(major, name="compute_capability"), int(number)


def _count(value: Any, *, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {_short(value)}, not a whole number from 1 on")
    return value


def _within(value: Any, least: float, most: float, *, name: str, words: str, above: bool = False) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or (above and value == least):
        raise ValueError(f"{name} is {_short(value)}, not {words}")
    return value  # type: ignore[no-any-return]


_LARGEST = 1e300  # neither infinity nor what is no number
_positive = partial(_within, least=0.0, most=_LARGEST, words="a positive number", above=True)
_at_least_0 = partial(_within, least=0.0, most=_LARGEST, words="a number from 0 on")
_share = partial(_within, least=0.0, most=1.0, words="a share between 0 and 1")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
