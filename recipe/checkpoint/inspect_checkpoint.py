"""What a checkpoint is and whether it is sound, from its manifest and files; torch is loaded only to look at values."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from modeling.spec import NEEDED, ModelSizes, spec_of
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

if TYPE_CHECKING:
    import torch

    from recipe.checkpoint.training_state import TrainingState

HF_CONFIG = "hf/config.json"
MANY_FAULTS = 10  # more are counted only
MODEL_PREFIX = "model."  # of the model's settings in the details


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One of the checkpoints in a folder. `faults` is empty where it is complete.

    `checksums` is true where contents were compared, not only sizes: of the one inspected and of newer ones.
    """

    folder: Path
    step: int
    details: Mapping[str, Any]
    num_bytes: int
    checksums: bool
    faults: tuple[CheckpointBrokenError, ...]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Everything that is said of the checkpoint inspected."""

    folder: Path
    step: int
    form: str  # "native" (DeepSpeed's files, of one layout) or "whole" (of none)
    details: Mapping[str, Any]  # what the run stored with it
    parameters: Mapping[str, int] | None  # "total", and "active" per token; None where no model is in the details
    hf: Mapping[str, Any] | None  # model_type and dtype of hf/; None where it is absent or broken
    parts_bytes: Mapping[str, int]  # of the folders and files at the top
    num_files: int
    checksums: bool  # contents were compared, not only sizes
    faults: tuple[CheckpointBrokenError, ...]
    values: Mapping[str, Mapping[str, Any]] | None = None  # a Values per kind of tensor; None where not asked for


class Inspected(NamedTuple):
    """The result of inspecting a path: its checkpoints, the one inspected, and the error to end with, if any."""

    checkpoints: list[Summary]
    inspection: Inspection | None
    error: CheckpointError | None


def inspect_path(given: Path, *, checksums: bool, values: bool) -> Inspected:
    """Inspect a checkpoint, or, of a run folder or folder of checkpoints, the newest complete one.

    Raises CheckpointMissingError where there is none, CheckpointBrokenError where its manifest cannot be read.
    """
    if not given.is_dir():
        raise CheckpointMissingError(f"{given} cannot be inspected: it is no folder")
    folders = checkpoints_below(given, purpose="inspected")
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
    """Compare a checkpoint with its manifest; where it is sound and `values` are wanted, read all its numbers."""
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
    """Return a JSON object: the checkpoints, those passed over, the one inspected, and the error in words."""
    checkpoints, inspection, error = inspected
    content = {
        "checkpoints": [asdict(checkpoint) for checkpoint in checkpoints],
        "passed_over": list(_passed_over(inspected)),
        "checkpoint": None if inspection is None else asdict(inspection),
        "error": error,
    }
    return json.dumps(content, indent=1, default=str)


def describe(inspected: Inspected) -> Iterator[str]:
    """Yield the lines that the command prints."""
    if inspected.checkpoints:
        yield f"{'step':>9}  {'layout':<22}  {'ZeRO':>4}  {'form':<6}  {'tokens':>17}  {'size':>11}  state"
        yield from map(_table_line, inspected.checkpoints)
    if inspected.inspection is not None:
        yield from ([""] if inspected.checkpoints else [])
        yield from (f"passed over {line}" for line in _passed_over(inspected))
        yield from (f"{name:<11} {text}" for name, text in _describe_one(inspected.inspection))


def _passed_over(inspected: Inspected) -> Iterator[str]:
    """Yield why checkpoints that are newer than the one inspected were passed over."""
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


def _summarise(folder: StepFolder) -> Summary:
    try:
        manifest = read_manifest(folder.path)
        faults = tuple(_faults(folder.path, manifest, checksums=False))
    except CheckpointBrokenError as error:
        manifest, faults = Manifest(step=folder.step, files={}), (error,)
    return Summary(
        folder=folder.path,
        step=folder.step,
        details=manifest.details,
        num_bytes=sum(manifest.sizes_bytes.values()),
        checksums=False,
        faults=faults,
    )


def _faults(folder: Path, manifest: Manifest, *, checksums: bool) -> Iterator[CheckpointBrokenError]:
    """Yield what is wrong with a checkpoint whose manifest can be read; with a progress bar where contents are read."""
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
    from recipe.checkpoint.native_files import open_training_state

    scanned = scan_values(open_training_state(folder, details=manifest.details))
    return {kind: asdict(values) for kind, values in scanned.items()}


@dataclass
class Values:
    """Statistics over all tensors of a kind; norm, min and max of the finite numbers, 0, inf and -inf without any."""

    num_tensors: int = 0
    num_elements: int = 0
    num_not_finite: int = 0
    norm: float = 0.0
    min: float = math.inf
    max: float = -math.inf

    def add(self, piece: "torch.Tensor") -> None:
        finite = piece[piece.isfinite()]
        self.num_elements += piece.numel()
        self.num_not_finite += piece.numel() - finite.numel()
        self.norm = math.hypot(self.norm, finite.double().norm().item())
        if finite.numel():
            self.min = min(self.min, finite.min().item())
            self.max = max(self.max, finite.max().item())


def scan_values(state: "TrainingState") -> dict[str, Values]:
    """Read every number of a state, a piece at a time; return the statistics by kind of tensor."""
    from recipe.checkpoint.training_state import entries_of, read_pieces

    found: dict[str, Values] = {}
    entries = entries_of(state)
    with byte_bar("reading", num_bytes=sum(entry.num_bytes for entry in entries)) as bar:
        for entry in entries:
            values = found.setdefault(entry.kind, Values())
            values.num_tensors += 1
            for piece in read_pieces(state, entry):
                values.add(piece)
                bar.update(piece.nbytes)
    return found


def sizes_in(details: Mapping[str, Any]) -> ModelSizes | None:
    """Return the sizes of the model from a checkpoint's details; None where another program wrote them."""
    model = {name.removeprefix(MODEL_PREFIX): value for name, value in details.items() if name.startswith(MODEL_PREFIX)}
    return spec_of(model).sizes if model.keys() >= set(NEEDED) else None


def _layout(details: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={details.get(name, '?')}" for name in ("dp", "tp", "ep"))


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "?"
