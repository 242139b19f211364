"""What a checkpoint is and whether it is sound, from its manifest and files; torch is loaded only to look at values."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from recipe.checkpoint.details import sizes_in
from recipe.checkpoint.find import checkpoints_below
from recipe.checkpoint.folders import StepFolder, step_in_name
from recipe.checkpoint.manifest import MANIFEST_NAME, Manifest, file_faults, read_manifest
from recipe.shared.errors import (
    CheckpointBrokenError,
    CheckpointError,
    CheckpointMissingError,
    NoCompleteCheckpointError,
)
from recipe.shared.flops import count_parameters
from recipe.shared.units import byte_bar, size

HF_CONFIG = "hf/config.json"
MANY_FAULTS = 10  # more are counted only


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A checkpoint in a folder of them. `faults` is empty where it is complete.

    `checksums` as in Inspection: the contents of those that are newer than the one looked into have been compared, too.
    """

    folder: Path
    step: int
    details: Mapping[str, Any]
    num_bytes: int
    checksums: bool
    faults: tuple[CheckpointBrokenError, ...]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """All there is to say of a checkpoint.

    form         "native" (DeepSpeed's files, of one layout) or "whole" (of none)
    details      what the run stored with it
    parameters   "total" and "active" per token; None where the details do not say what the model is
    hf           model_type and dtype of hf/; None where it is absent or broken
    parts_bytes  sizes of the folders and files at the top
    checksums    contents were compared, not only sizes
    values       per kind of tensor, see values.py; None where it was not asked for
    """

    folder: Path
    step: int
    form: str
    details: Mapping[str, Any]
    parameters: Mapping[str, int] | None
    hf: Mapping[str, Any] | None
    parts_bytes: Mapping[str, int]
    num_files: int
    checksums: bool
    faults: tuple[CheckpointBrokenError, ...]
    values: Mapping[str, Mapping[str, Any]] | None = None


class Inspected(NamedTuple):
    """What a path holds: the checkpoints, all about the one looked into, and the error to end with, if any."""

    checkpoints: list[Summary]
    inspection: Inspection | None
    error: CheckpointError | None


def inspect_path(given: Path, *, checksums: bool, values: bool) -> Inspected:
    """Look into a checkpoint, or, of a run folder or folder of checkpoints, into the newest complete one.

    Raises CheckpointMissingError where there is none, CheckpointBrokenError where its manifest cannot be read.
    """
    folders = _checkpoints_at(given)
    if not folders:
        inspection = inspect_checkpoint(given.resolve(), checksums=checksums, values=values)
        return Inspected([], inspection, inspection.faults[0] if inspection.faults else None)
    checkpoints = [_summarise(folder) for folder in folders]
    reasons = []
    for number, checkpoint in reversed(list(enumerate(checkpoints))):
        if not checkpoint.faults:
            inspection = inspect_checkpoint(checkpoint.folder, checksums=checksums, values=values)
            checkpoints[number] = replace(checkpoint, faults=inspection.faults, checksums=checksums)
            if not inspection.faults:
                return Inspected(checkpoints, inspection, None)
        reasons.append(f"  - {checkpoints[number].faults[0]}")
    error = NoCompleteCheckpointError("\n".join([f"no checkpoint in {given} is complete:", *reasons]))
    return Inspected(checkpoints, None, error)


def inspect_checkpoint(folder: Path, *, checksums: bool, values: bool) -> Inspection:
    """Compare a checkpoint with its manifest; where it is sound and `values` are wanted, look at all its numbers."""
    manifest = read_manifest(folder)
    faults = list(_faults(folder, manifest, checksums=checksums))
    hf, config = None, folder / HF_CONFIG
    if HF_CONFIG in manifest.files and config not in [fault.file for fault in faults]:
        try:
            hf = _read_hf(config)
        except CheckpointBrokenError as error:
            faults.append(error)
    sizes = sizes_in(manifest.details)
    return Inspection(
        folder=folder,
        step=manifest.step,
        form=manifest.details.get("format", "native"),
        details=manifest.details,
        parameters=None if sizes is None else count_parameters(sizes)._asdict(),
        hf=hf,
        parts_bytes=_parts(manifest),
        num_files=len(manifest.files),
        checksums=checksums,
        faults=tuple(faults),
        values=_read_values(folder, manifest) if values and not faults else None,
    )


def as_json(inspected: Inspected) -> str:
    """One object: the checkpoints, those passed over, the one looked into, and the error in words."""
    checkpoints, inspection, error = inspected
    content = {
        "checkpoints": [asdict(checkpoint) for checkpoint in checkpoints],
        "passed_over": list(_passed_over(inspected)),
        "checkpoint": None if inspection is None else asdict(inspection),
        "error": error,
    }
    return json.dumps(content, indent=1, default=str)


def describe(inspected: Inspected) -> Iterator[str]:
    """The lines that the command prints."""
    if inspected.checkpoints:
        yield f"{'step':>9}  {'layout':<22}  {'ZeRO':>4}  {'form':<6}  {'tokens':>17}  {'size':>11}  state"
        yield from map(_table_line, inspected.checkpoints)
    if inspected.inspection is not None:
        yield from ([""] if inspected.checkpoints else [])
        yield from (f"passed over {line}" for line in _passed_over(inspected))
        yield from (f"{name:<11} {text}" for name, text in _describe_one(inspected.inspection))


def _passed_over(inspected: Inspected) -> Iterator[str]:
    """Why the checkpoints that are newer than the one looked into were not looked into."""
    if inspected.inspection is not None:
        for checkpoint in inspected.checkpoints:
            if checkpoint.step > inspected.inspection.step:
                yield f"{checkpoint.folder.name}: {checkpoint.faults[0]}"


def _table_line(checkpoint: Summary) -> str:
    details, faults = checkpoint.details, checkpoint.faults
    state = "complete" if checkpoint.checksums else "complete by size"
    if faults:
        state = f"broken: {faults[0].file.name}: {faults[0].reason}"
    return (
        f"{checkpoint.step:>9}  {_layout(details):<22}  {details.get('zero_stage', '-'):>4}  "
        f"{details.get('format', 'native'):<6}  {_count(details.get('tokens')):>17}  "
        f"{size(checkpoint.num_bytes):>11}  {state}"
    )


def _describe_one(found: Inspection) -> Iterator[tuple[str, str]]:
    details = found.details
    yield "checkpoint", str(found.folder)
    yield "step", f"{found.step} of {details.get('max_steps', '?')}"
    form = "of any layout; saved as" if found.form == "whole" else "DeepSpeed's files of"
    precision, stage = details.get("precision", "?"), details.get("zero_stage", "?")
    yield "state", f"{found.form}, {form} {_layout(details)}, ZeRO-{stage}, {precision}"
    yield (
        "data",
        f"{_count(details.get('tokens'))} tokens seen, at block {_count(details.get('position'))} of "
        f"{_count(details.get('num_train_blocks'))} a pass, {details.get('block_size', '?')} tokens each",
    )
    yield from (("", f"token store {name}") for name in details.get("data", ()))
    if found.parameters is not None:
        total, active = found.parameters["total"], found.parameters["active"]
        yield "model", f"{total:,} parameters, {active:,} active per token"
    if found.hf is not None:
        yield "hf/", f"{found.hf['model_type']} in {found.hf['dtype']}"
    yield "sizes", ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in found.parts_bytes.items())
    compared = "sizes and SHA-256 checksums" if found.checksums else "sizes (contents not compared)"
    if not found.faults:
        yield "health", f"complete: {compared} of {found.num_files} files are as the manifest says"
    for fault in found.faults[:MANY_FAULTS]:
        yield "health", f"broken: {fault}"
    if found.faults[MANY_FAULTS:]:
        yield "", f"and {len(found.faults) - MANY_FAULTS} more faults"
    for kind, value in (found.values or {}).items():
        yield (
            kind,
            f"{value['num_elements']:,} numbers, norm {value['norm']:.6g}, from {value['min']:.6g} to "
            f"{value['max']:.6g}, {value['num_not_finite']:,} not finite",
        )


def _checkpoints_at(given: Path) -> list[StepFolder]:
    """The checkpoints below a path; empty where the path itself is one."""
    if not given.is_dir():
        raise CheckpointMissingError(f"{given} cannot be inspected: it is no folder")
    return checkpoints_below(given, purpose="inspected")


def _summarise(folder: StepFolder) -> Summary:
    try:
        manifest = read_manifest(folder.path)
    except CheckpointBrokenError as error:
        return Summary(folder=folder.path, step=folder.step, details={}, num_bytes=0, checksums=False, faults=(error,))
    return Summary(
        folder=folder.path,
        step=folder.step,
        details=manifest.details,
        num_bytes=sum(manifest.sizes_bytes.values()),
        checksums=False,
        faults=tuple(_faults(folder.path, manifest, checksums=False)),
    )


def _faults(folder: Path, manifest: Manifest, *, checksums: bool) -> Iterator[CheckpointBrokenError]:
    """What is wrong with a checkpoint whose manifest can be read; with a progress bar where contents are read."""
    if step_in_name(folder) not in (None, manifest.step):
        yield CheckpointBrokenError(folder / MANIFEST_NAME, f"is of step {manifest.step}, not of {folder.name}")
    with byte_bar("checking", num_bytes=sum(manifest.sizes_bytes.values()), show=checksums) as bar:
        for name, size_bytes in manifest.sizes_bytes.items():
            yield from file_faults(folder, manifest, names=[name], checksums=checksums)
            bar.update(size_bytes)


def _parts(manifest: Manifest) -> dict[str, int]:
    parts: dict[str, int] = {}
    for name, size_bytes in manifest.sizes_bytes.items():
        top, *rest = name.split("/")
        part = f"{top}/" if rest else top
        parts[part] = parts.get(part, 0) + size_bytes
    return parts


def _read_hf(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return {"model_type": config["model_type"], "dtype": config["dtype"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointBrokenError(path, f"is no model's configuration ({error!r})") from error


def _read_values(folder: Path, manifest: Manifest) -> dict[str, dict[str, Any]]:
    from recipe.checkpoint.open_state import open_training_state
    from recipe.checkpoint.values import scan_values

    scanned = scan_values(open_training_state(folder, details=manifest.details))
    return {kind: values._asdict() for kind, values in scanned.items()}


def _layout(details: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={details.get(name, '?')}" for name in ("dp", "tp", "ep"))


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "?"
