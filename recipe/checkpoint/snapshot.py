"""A copy in host memory of whatever torch.save would write, as it is now, so that training may change the original."""

import io
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Snapshot(NamedTuple):
    """A pickled object without its tensors' contents, and the contents in host memory: one uint8 tensor per storage.

    Tensors that share a storage share its copy, so a snapshot takes as many bytes as the file would.
    """

    skeleton: bytes
    storages: list[Tensor]

    @property
    def is_pinned(self) -> bool:
        return any(storage.is_pinned() for storage in self.storages)


def take_snapshot(value: object) -> Snapshot:
    """Copy `value`, everything in it included.

    From a GPU the contents are copied into pinned memory without waiting: they are complete after the next
    torch.cuda.synchronize(), and work that is queued later may overwrite the originals. The allocator of pinned memory
    rounds a storage up to the next power of two.
    """
    skeleton = io.BytesIO()
    pickler = _Pickler(skeleton)
    pickler.dump(value)
    return Snapshot(skeleton.getvalue(), pickler.storages)


def restore_snapshot(snapshot: Snapshot) -> Any:
    """Return an equal object, every tensor on the CPU, in the snapshot's memory."""
    return _Unpickler(io.BytesIO(snapshot.skeleton), snapshot.storages).load()


class _Pickler(pickle.Pickler):
    """Pickles tensors as views of numbered storages, whose contents it copies the first time it meets them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.storages: list[Tensor] = []
        self._numbers: dict[tuple[torch.device, int, int], int] = {}

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (Tensor, nn.Parameter):
            return NotImplemented
        view = (value.dtype, value.storage_offset(), tuple(value.size()), value.stride())
        return _view, (value.untyped_storage(), *view, isinstance(value, nn.Parameter), value.requires_grad)

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.UntypedStorage):
            return None
        key = (value.device, value.data_ptr(), value.nbytes())
        if key not in self._numbers:
            self._numbers[key] = len(self.storages)
            self.storages.append(_copy(value))
        return self._numbers[key]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: list[Tensor]) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, number: int) -> torch.UntypedStorage:
        return self._storages[number].untyped_storage()


def _copy(storage: torch.UntypedStorage) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    on_gpu = storage.device.type == "cuda"
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu).copy_(whole, non_blocking=on_gpu)


def _view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    is_parameter: bool,
    requires_grad: bool,
) -> Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
    if is_parameter:
        return nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)
