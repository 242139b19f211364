"""Safetensors that any reader of the model type opens, written by all ranks without any rank holding the whole model.

Experts travel one at a time, each to the rank of the group that writes it; other tensors are gathered one at a time.
The ranks of the first group write, the others only help ZeRO put a shard together.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from modeling.config import FileTensor, file_tensors
from modeling.init import full_shapes, paste, shard_table, stored_tensors
from modeling.mesh import ParallelMesh
from modeling.model import GatherMoeForCausalLM
from modeling.shard_table import Shard
from recipe.checkpoint.files import Files
from recipe.checkpoint.tensor_file import INDEX_SUFFIX, MAX_FILE_BYTES, bytes_of, file_names, write_index
from recipe.shared.ranks import Ranks
from recipe.shared.together import on_every

STEM = "model"
INDEX_NAME = STEM + INDEX_SUFFIX
SAMPLED_PER_FILE = 2  # tensors read back after writing


class WrittenFile(NamedTuple):
    """A file that was written: shapes by tensor name, and the digests of a few tensors."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    digests: dict[str, str]
    num_bytes: int


def write_weights(
    folder: Path,
    *,
    model: GatherMoeForCausalLM,
    mesh: ParallelMesh,
    model_type: str,
    dtype: torch.dtype,
    files: Files,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Give all weights to `files`, to be written below `folder` and checked there. Collective over the whole world.

    All are written in `dtype`, from the optimizer's float32 copies where there are any, but the routers' biases, which
    stay in float32, as in other models' files.

    Beside one gathered tensor a rank holds at most one file's tensors, or those of all its files where `files` writes
    later. Completing `files` raises RanksFailedError, the same on every rank, where a file could not be written, or
    where the files do not hold exactly the tensors of the model with their shapes and, for a sample, their bytes.
    """
    from recipe.checkpoint.native import full_precision_shard  # with DeepSpeed, which reading weights does without

    table = shard_table(model.config, mesh)
    shapes = full_shapes(model, config=model.config, table=table)
    writer = _FileWriter(folder, rank=mesh.rank, max_file_bytes=max_file_bytes, files=files)
    stored = stored_tensors(model)
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        targets = file_tensors(name, num_experts=model.config.num_experts, model_type=model_type)
        for target in targets:
            inner = shape if target.expert is None else shape[1:]
            expected[target.name] = inner if target.half is None else (inner[0] // 2, *inner[1:])
        tensor = stored[name]
        local = full_precision_shard(tensor) if isinstance(tensor, nn.Parameter) else tensor
        if mesh.dp_rank == 0:
            shards = [table.shard(name, shape, group_rank=rank) for rank in range(mesh.layout.tp)]
            for file_name, whole in _whole_tensors(name, local, targets, shards=shards, mesh=mesh):
                writer.add(file_name, whole.to(dtype) if isinstance(tensor, nn.Parameter) else whole)
    writer.flush()
    files.then(lambda ranks: _name_and_check(folder, writer.written, expected=expected, ranks=ranks))


def _name_and_check(
    folder: Path, mine: list[WrittenFile], *, expected: dict[str, tuple[int, ...]], ranks: Ranks
) -> None:
    """Give all ranks' files their final names, write the index, and read everything back. Collective."""
    by_rank: list[list[WrittenFile]] = ranks.gather(mine)
    written = [file for files in by_rank for file in files]
    final = [file._replace(name=name) for file, name in zip(written, file_names(len(written), stem=STEM), strict=True)]

    def rename() -> None:
        for old, new in zip(written, final, strict=True):
            if old in mine:
                (folder / old.name).rename(folder / new.name)

    def check() -> None:
        if ranks.rank == 0:
            if len(final) > 1:
                file_of = {name: file.name for file in final for name in file.shapes}
                write_index(folder, stem=STEM, file_of=file_of, total_bytes=sum(file.num_bytes for file in final))
            _check_names(final, expected)
        for file in final[ranks.rank :: ranks.world_size]:
            _check_file(folder / file.name, file)

    on_every(rename, ranks=ranks)
    on_every(check, ranks=ranks)


def _whole_tensors(
    name: str, local: Tensor, targets: list[FileTensor], *, shards: list[Shard], mesh: ParallelMesh
) -> Iterator[tuple[str, Tensor]]:
    """Yield those of the targets, made of one parameter, that this rank has to write. Collective over the group."""
    if targets[0].expert is None:
        # The same on every rank.
        writer = int(hashlib.blake2b(name.encode(), digest_size=4).hexdigest(), 16) % mesh.layout.tp
        if mesh.group is None or shards[0].is_replicated:
            whole = local if mesh.group_rank == writer else None
        else:
            whole = _gather_from(local, shards, range(mesh.layout.tp), mesh=mesh, writer=writer)
        if whole is not None:
            yield targets[0].name, whole
        return
    first_expert = shards[mesh.group_rank].ranges[0][0][0]
    slices = [
        replace(shard, ranges=shard.ranges[1:], shape=shard.shape[1:], full_shape=shard.full_shape[1:])
        for shard in shards
    ]
    for expert in range(shards[0].full_shape[0]):
        holders = [rank for rank, shard in enumerate(shards) if shard.ranges[0][0][0] <= expert < shard.ranges[0][0][1]]
        if mesh.group_rank not in holders:
            continue
        # One of its holders writes an expert, so that a whole expert, [2F, D] or [D, F], never travels.
        writer = holders[expert % len(holders)]
        part = local[expert - first_expert]
        whole = part if len(holders) == 1 else _gather_from(part, slices, holders, mesh=mesh, writer=writer)
        for target in targets:
            if whole is not None and target.expert == expert:
                yield target.name, whole if target.half is None else whole.chunk(2, dim=0)[target.half]


def _gather_from(
    local: Tensor, shards: list[Shard], holders: Iterable[int], *, mesh: ParallelMesh, writer: int
) -> Tensor | None:
    """Gather on the writer by point-to-point messages, since the holders may be a part of the group."""
    first = mesh.dp_rank * mesh.layout.tp  # global rank of the group's first
    if mesh.group_rank != writer:
        dist.send(local.contiguous(), dst=first + writer, group=mesh.group)
        return None
    whole = local.new_zeros(shards[writer].full_shape)
    for holder in holders:  # one part after the other, so that never all of them are here beside the whole
        part = local
        if holder != writer:
            part = torch.empty(shards[holder].shape, dtype=local.dtype, device=local.device)
            dist.recv(part, src=first + holder, group=mesh.group)
        paste(whole, part, shards[holder])
    return whole


class _FileWriter:
    """Collects tensors and gives them to `files` whenever they fill a file; `written` are the files written."""

    def __init__(self, folder: Path, *, rank: int, max_file_bytes: int, files: Files) -> None:
        self._folder, self._rank, self._max_file_bytes, self._files = folder, rank, max_file_bytes, files
        self._tensors: dict[str, Tensor] = {}
        self._num_bytes = self._num_files = 0
        self.written: list[WrittenFile] = []

    def add(self, name: str, tensor: Tensor) -> None:
        num_bytes = tensor.numel() * tensor.element_size()
        if self._tensors and self._num_bytes + num_bytes > self._max_file_bytes:
            self.flush()
        # A copy, since a view of a larger tensor would keep or even write all of it.
        self._tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        self._num_bytes += num_bytes

    def flush(self) -> None:
        """Give the tensors collected since the last file."""
        if not self._tensors:
            return
        name = f"part-{self._rank:05d}-{self._num_files:05d}.safetensors"
        self._files.write(self._folder / name, partial(self._write, self._tensors))
        self._num_files += 1
        self._tensors, self._num_bytes = {}, 0

    def _write(self, tensors: dict[str, Tensor], path: Path) -> None:
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{path.name}: {error}") from error
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        sample = list(tensors)[:: max(1, len(tensors) // SAMPLED_PER_FILE)][:SAMPLED_PER_FILE]
        digests = {key: _digest(tensors[key]) for key in sample}
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self.written.append(WrittenFile(path.name, shapes, digests, num_bytes))


def _check_names(files: list[WrittenFile], expected: dict[str, tuple[int, ...]]) -> None:
    found = {name: shape for file in files for name, shape in file.shapes.items()}
    num_written = sum(len(file.shapes) for file in files)
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    misshapen = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    if missing or unexpected or misshapen or num_written != len(expected):
        raise RuntimeError(
            f"the exported weights are wrong: {num_written} tensors written for {len(expected)}; "
            f"missing {missing[:5]}, unexpected {unexpected[:5]}, of another shape {misshapen[:5]}"
        )


def _check_file(path: Path, file: WrittenFile) -> None:
    """Read back: every tensor is there with its shape, none is empty, and the sampled ones are the same bytes."""
    with safe_open(path, framework="pt") as reader:
        shapes = {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
        if shapes != file.shapes or any(0 in shape for shape in shapes.values()):
            raise RuntimeError(f"{path} does not hold what was written to it, or holds an empty tensor")
        for name, digest in file.digests.items():
            if _digest(reader.get_tensor(name)) != digest:
                raise RuntimeError(f"{path}: the tensor {name} was read back with other bytes than were written")


def _digest(tensor: Tensor) -> str:
    return hashlib.blake2b(bytes_of(tensor), digest_size=16).hexdigest()
