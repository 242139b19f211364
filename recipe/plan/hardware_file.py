"""What a probe measured, as the content of a JSON file, which is read strictly."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipe.plan.hardware_values import AttentionRate, Efficiencies, Fit, Hardware, Link, Measured, ProductRate
from recipe.plan.job import ELEMENT_BYTES
from recipe.plan.rates import PASSES

FORMAT = 1  # rises with every change that makes older numbers mean something else
PRODUCT_KINDS = ("forward", "input_gradient", "weight_gradient", "expert")
LINK_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
AGAIN = "measure again with `gather-moe probe`"
LARGEST = 1e300  # neither infinity nor what is no number

# Makes a value of what the JSON has under a name, or raises a ValueError that names it.
Decoder = Callable[[Any, str], Any]


def hardware_as_json(hardware: Hardware, *, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file; `machine` says where and how it was measured, for people."""
    return {"format": FORMAT, "machine": dict(machine), "hardware": asdict(hardware)}


def read_hardware(path: Path) -> Hardware:
    """Return the hardware of a file; a ValueError says what is wrong with it and what to do."""
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
        return _hardware(_keys(whole, ("format", "machine", "hardware"), "the file")["hardware"])
    except ValueError as error:
        raise ValueError(f"hardware file {path} cannot be used: {error}; {AGAIN}") from None


def _hardware(block: Any) -> Hardware:
    passes = {name: _rows(lambda size, seconds: (size, seconds), length=2) for name in PASSES}
    measured = _block(
        Measured,
        products=_block(dict, **dict.fromkeys(PRODUCT_KINDS, _rows(ProductRate, length=3))),
        attention=_rows(AttentionRate, length=4),
        passes=_block(dict, **passes),
    )
    link = _block(
        Link,
        alpha_s=_at_least_0,
        bytes_per_s=_positive,
        busy=_share,
        ops=_mapping(_fit, known=LINK_OPS, may_be_empty=True),
    )
    fields: dict[str, Decoder] = {
        "name": _text,
        "device": _device,
        "memory_bytes": _count,
        "ranks_per_node": _count,
        "peak_flops_per_s": _mapping(_positive),
        "memory_bytes_per_s": _positive,
        "intra": _optional(link),
        "inter": _optional(link),
        "efficiencies": _block(Efficiencies, **dict.fromkeys(Efficiencies.__annotations__, _positive)),
        "launch_s": _positive,
        "sources": _mapping(_text),
        "measured": _mapping(measured, known=ELEMENT_BYTES),
        "compute_capability": _optional(_capability),
    }
    _keys(block, fields, "hardware")
    made = Hardware(**{key: decode(block[key], key) for key, decode in fields.items()})
    if missing := sorted(made.measured.keys() - made.peak_flops_per_s.keys()):
        raise ValueError(f"peak_flops_per_s has no {', '.join(missing)}, which was measured")
    return made


def _block(make: Callable[..., Any], **decoders: Decoder) -> Decoder:
    """Decode a block with just these keys."""

    def decode(block: Any, name: str) -> Any:
        _keys(block, decoders, name)
        return make(**{key: decoder(block[key], f"{name}.{key}") for key, decoder in decoders.items()})

    return decode


def _mapping(decoder: Decoder, *, known: Iterable[str] | None = None, may_be_empty: bool = False) -> Decoder:
    """Decode a block of any keys, or of some of the known ones."""

    def decode(block: Any, name: str) -> Any:
        _check_block(block, name)
        if not block and not may_be_empty:
            raise ValueError(f"{name} is empty")
        for key in block:
            if known is not None and key not in known:
                raise ValueError(f"{key!r} in {name} is not one of {', '.join(known)}")
        return {key: decoder(value, f"{name}.{key}") for key, value in block.items()}

    return decode


def _rows(make: Callable[..., Any], *, length: int) -> Decoder:
    """Decode lists of positive numbers, each to what `make` makes of it."""

    def decode(rows: Any, name: str) -> Any:
        if not isinstance(rows, list) or not rows:
            raise ValueError(f"{name} is {_short(rows)}, not a list of measurements")
        return tuple(make(*(_positive(number, name) for number in _row(row, length, name))) for row in rows)

    return decode


def _optional(decoder: Decoder) -> Decoder:
    return lambda value, name: None if value is None else decoder(value, name)


def _fit(numbers: Any, name: str) -> Fit:
    row = _row(numbers, len(Fit._fields), name)
    decoders = {"alpha_s": _at_least_0, "bytes_per_s": _positive, "residual": _at_least_0, "max_bytes": _at_least_0}
    return Fit(**{key: decode(row[i], f"{name}.{key}") for i, (key, decode) in enumerate(decoders.items())})


def _capability(value: Any, name: str) -> tuple[int, int]:
    major, minor = _row(value, 2, name)
    return _count(major, name), int(_at_least_0(minor, name))


def _device(value: Any, name: str) -> str:
    if value not in ("cpu", "cuda"):
        raise ValueError(f"its device is {value!r}, not cpu or cuda")
    return str(value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_short(value)}, not a text")
    return value


def _count(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {_short(value)}, not a whole number from 1 on")
    return value


def _positive(value: Any, name: str) -> float:
    return _number(value, name, fits=lambda number: 0 < number <= LARGEST, words="a positive number")


def _at_least_0(value: Any, name: str) -> float:
    return _number(value, name, fits=lambda number: 0 <= number <= LARGEST, words="a number from 0 on")


def _share(value: Any, name: str) -> float:
    return _number(value, name, fits=lambda number: 0 <= number <= 1, words="a share between 0 and 1")


def _number(value: Any, name: str, *, fits: Callable[[float], bool], words: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not fits(value):
        raise ValueError(f"{name} is {_short(value)}, not {words}")
    return value


def _row(row: Any, length: int, name: str) -> list[Any]:
    if not isinstance(row, list) or len(row) != length:
        raise ValueError(f"{name} has {_short(row)}, not {length} numbers")
    return row


def _check_block(block: Any, name: str) -> None:
    if not isinstance(block, dict):
        raise ValueError(f"{name} is {_short(block)}, not a block of names and values")


def _keys(block: Any, names: Iterable[str], name: str) -> Mapping[str, Any]:
    """Return a block after checking that it has just these names."""
    wanted = set(names)
    _check_block(block, name)
    if missing := sorted(wanted - block.keys()):
        raise ValueError(f"{missing[0]!r} is missing in {name}")
    if unknown := sorted(block.keys() - wanted):
        raise ValueError(f"{unknown[0]!r} in {name} is not known")
    found: Mapping[str, Any] = block
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
