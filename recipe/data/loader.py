"""The endless stream of training steps, whose position is one integer: the number of sequences already consumed.

Sequence p of the stream is item p % n of epoch p // n in that epoch's order. The step that starts at p gives sequence
p + (a*dp + d)*B + b to micro-batch a, data-parallel rank d, row b. So the stream is the same for every dp and every
accumulation, and to resume is to start at the saved integer. No random state is used or touched.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from recipe.data.batches import MicroBatch, stack_blocks
from recipe.data.order import EpochOrder
from recipe.data.packing import PackedBlocks
from recipe.data.tokenise import map_in_order


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How the stream is shared by dp ranks and read."""

    num_sequences: int  # B, of one group's micro-batch
    seed: int
    dp: int = 1
    dp_rank: int = 0
    accumulation: int = 1
    num_workers: int = 0  # threads that prepare micro-batches ahead; 0 prepares each when it is asked for
    shuffle: bool = True

    @property
    def sequences_per_step(self) -> int:
        return self.num_sequences * self.dp * self.accumulation


class Step(NamedTuple):
    """The micro-batches of this rank's group between two optimizer updates."""

    micro_batches: list[MicroBatch]  # [accumulation]
    position: int  # of the stream after this step: what a checkpoint keeps


class _Request(NamedTuple):
    """A micro-batch before it is read."""

    positions: range  # in the stream
    indices: list[int]  # of the blocks there


class StepLoader:
    """Training steps over packed blocks, from any position on; the stream wraps from epoch to epoch for ever.

    Every rank gets the same number of steps by construction. `say` is told about each new epoch.
    """

    def __init__(
        self, blocks: PackedBlocks, *, options: LoaderOptions, say: Callable[[str], None] = lambda text: None
    ) -> None:
        faults = _faults(options)
        if faults:
            raise ValueError("the loader options do not hold:\n" + "\n".join(f"  - {fault}" for fault in faults))
        if not len(blocks):
            raise ValueError(
                f"{blocks.num_tokens} tokens do not fill one block of block_size={blocks.block_size}; "
                "give more text or choose a smaller block_size"
            )
        self._blocks = blocks
        self._options = options
        self._say = say

    def steps(self, position: int) -> Iterator[Step]:
        """Yield the steps from `position` on, without end. Close the iterator to end its threads early."""
        if position < 0:
            raise ValueError(f"position={position} must be a number of sequences, at least 0")
        accumulation, per_step = self._options.accumulation, self._options.sequences_per_step
        batches = self._batches(position)
        try:
            for start in count(position, per_step):
                self._announce(start)
                yield Step([next(batches) for _ in range(accumulation)], start + per_step)
        finally:
            batches.close()

    def _announce(self, start: int) -> None:
        """Say so if the step that starts here begins an epoch or reaches into the next one."""
        num_blocks = len(self._blocks)
        last = start + self._options.sequences_per_step - 1
        epoch = last // num_blocks
        if start == 0 or epoch > (start - 1) // num_blocks:
            self._say(
                f"data: epoch {epoch} ({num_blocks} blocks) begins at sequence {epoch * num_blocks} of the stream"
            )

    def _requests(self, position: int) -> Iterator[_Request]:
        """Yield which blocks each micro-batch of this rank holds."""
        options, num_blocks = self._options, len(self._blocks)
        order = self._order_of(position // num_blocks)
        first = position + options.dp_rank * options.num_sequences
        for begin in count(first, options.dp * options.num_sequences):
            positions = range(begin, begin + options.num_sequences)
            indices = []
            for sequence in positions:
                epoch, index = divmod(sequence, num_blocks)
                order = order if order.epoch == epoch else self._order_of(epoch)
                indices.append(order[index] if options.shuffle else index)
            yield _Request(positions, indices)

    def _order_of(self, epoch: int) -> EpochOrder:
        return EpochOrder(len(self._blocks), seed=self._options.seed, epoch=epoch)

    def _load(self, request: _Request) -> MicroBatch:
        chosen = [self._blocks[index] for index in request.indices]
        return stack_blocks(
            chosen, positions=request.positions, num_sequences=len(chosen), block_size=self._blocks.block_size
        )

    def _batches(self, position: int) -> Generator[MicroBatch, None, None]:
        """Yield the micro-batches of this rank in order, prepared ahead by threads if there are any."""
        requests, num_workers = self._requests(position), self._options.num_workers
        if num_workers:
            yield from map_in_order(requests, work=self._load, num_workers=num_workers, name="loader")
        else:
            yield from map(self._load, requests)


def _faults(options: LoaderOptions) -> list[str]:
    faults = [
        f"{name}={getattr(options, name)} must be at least {least}"
        for name, least in (("num_sequences", 1), ("dp", 1), ("accumulation", 1), ("num_workers", 0))
        if getattr(options, name) < least
    ]
    if not 0 <= options.dp_rank < options.dp:
        faults.append(f"dp_rank={options.dp_rank} must lie between 0 and dp - 1 = {options.dp - 1}")
    return faults
