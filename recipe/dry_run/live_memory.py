"""Which tensor storages live while code runs, real or fake: the most bytes at once, by what they are, and where made.

Every storage that an operator takes or gives counts once, from its first sight to the death of its last tensor. What an
operator's kernel allocates and frees inside is not seen, nor is the memory of a collective's own implementation.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GATHERS = ("all_gather", "allgather")  # in the names of operators whose result holds other ranks' numbers
# The part of a path that says what its code makes; the innermost frame that matches decides, but below the loss all is
# the loss's.
LOSS = "modeling/vocabulary.py"
EMBEDDING = "VocabularyEmbedding"  # in the same file
KINDS_OF_CODE = (
    ("modeling/", "activations"),
    ("recipe/", "buffers"),
    ("deepspeed/", "buffers"),
    ("torch/optim/", "optimizer"),
    ("transformers/", "activations"),
)


class Storage(NamedTuple):
    """One storage that was alive at the peak: its size, what it is, and the line of code that made it."""

    num_bytes: int
    kind: str
    where: str


class _Life:
    """From birth to death, in numbers of events."""

    __slots__ = ("born", "died", "kind", "num_bytes", "where")

    def __init__(self, num_bytes: int, *, born: int, kind: str, where: str) -> None:
        self.num_bytes, self.born, self.kind, self.where = num_bytes, born, kind, where
        self.died: int | None = None


class LiveMemory(TorchDispatchMode):
    """While it is entered, storages are followed; afterwards it tells about the peak since the last `restart`.

    A storage's kind is "gathered" for results of an all-gather, else by the code that made it ("logits", "activations",
    "buffers" for DeepSpeed's, "optimizer", "other"), unless `name` says better, which it can at any time of its life.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lives: list[_Life] = []
        self._number_of: dict[int, int] = {}  # by the storage's address as a Python object, while it lives
        self._alive_bytes = 0
        self._num_events = 0
        self._peak_bytes = 0
        self._peak_event = 0

    @property
    def alive_bytes(self) -> int:
        return self._alive_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once since the last restart."""
        return self._peak_bytes

    def restart(self) -> None:
        """Look for the peak from now on; what is alive stays known."""
        self._num_events += 1
        self._peak_bytes, self._peak_event = self._alive_bytes, self._num_events

    def name(self, tensors: Iterable[Tensor | None], *, kind: str) -> None:
        """Say what these tensors' storages are; those not seen yet are seen from now on."""
        for tensor in tensors:
            if tensor is not None:
                self._lives[self._see(tensor, kind=kind, where="named")].kind = kind

    def name_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let what a backward brings to these parameters be called so."""
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: self.name([gradient], kind="gradients"))

    def at_peak(self) -> list[Storage]:
        """The storages alive at the peak, the largest first."""
        now = self._peak_event
        alive = (life for life in self._lives if life.born <= now and (life.died is None or life.died > now))
        found = [Storage(life.num_bytes, life.kind, life.where) for life in alive]
        return sorted(found, key=lambda storage: -storage.num_bytes)

    def bytes_at_peak(self) -> Counter[str]:
        """The same, summed by kind."""
        sums: Counter[str] = Counter()
        for storage in self.at_peak():
            sums[storage.kind] += storage.num_bytes
        return sums

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, place = func.__name__, None
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta" and not self._knows(leaf):
                place = place or _place()
                self._see(leaf, kind=place.kind, where=f"{place.where} {name}")
        if any(part in name for part in GATHERS):
            # The output comes first, by c10d's and by the functional collectives' convention alike.
            self.name((t for t in tree_leaves(args[0]) if isinstance(t, Tensor)), kind="gathered")
        return result

    def _knows(self, tensor: Tensor) -> bool:
        return id(tensor.untyped_storage()) in self._number_of

    def _see(self, tensor: Tensor, *, kind: str, where: str) -> int:
        """The number of the tensor's storage, which is new if it has none yet."""
        storage = tensor.untyped_storage()
        key = id(storage)
        number = self._number_of.get(key)
        if number is None:
            number = self._number_of[key] = len(self._lives)
            self._count(storage.nbytes())
            self._lives.append(_Life(storage.nbytes(), born=self._num_events, kind=kind, where=where))
            weakref.finalize(storage, self._end, key, number).atexit = False
        return number

    def _end(self, key: int, number: int) -> None:
        life = self._lives[number]
        del self._number_of[key]
        self._count(-life.num_bytes)
        life.died = self._num_events

    def _count(self, num_bytes: int) -> None:
        self._num_events += 1
        self._alive_bytes += num_bytes
        if self._alive_bytes > self._peak_bytes:
            self._peak_bytes, self._peak_event = self._alive_bytes, self._num_events


class _Place(NamedTuple):
    kind: str
    where: str


def _place() -> _Place:
    """The innermost line of code that says what it makes."""
    frame: FrameType | None = sys._getframe(2)
    found = None
    while frame is not None:
        path = frame.f_code.co_filename
        name = frame.f_code.co_qualname
        if path.endswith(LOSS) and not name.startswith(EMBEDDING):
            return _Place("logits", f"{LOSS}:{frame.f_lineno}")
        if found is None and name.startswith("_start_slices"):  # of experts, joined on arrival
            found = _at(frame, "modeling/", "gathered")
        if found is None:
            found = next((_at(frame, part, kind) for part, kind in KINDS_OF_CODE if part in path), None)
        frame = frame.f_back
    return found or _Place("other", "")


def _at(frame: FrameType, part: str, kind: str) -> _Place:
    path = frame.f_code.co_filename
    return _Place(kind, f"{path[path.rindex(part) :]}:{frame.f_lineno}")
