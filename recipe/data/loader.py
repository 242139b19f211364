"""The endless stream of training steps, whose position is one integer: the number of sequences already consumed.

Sequence p of the stream is item p % n of epoch p // n in that epoch's order, which is computed, not stored. The step
that starts at p gives sequence p + (a*dp + d)*B + b to micro-batch a, data-parallel rank d, row b. So the stream is the
same for every dp and every accumulation, and to resume is to start at the saved integer. No random state is used or
touched.
"""

import hashlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from recipe.data.batches import MicroBatch, stack_blocks
from recipe.data.packing import PackedBlocks
from recipe.data.tokenise import map_in_order

NUM_ROUNDS = 6
MASK_64 = (1 << 64) - 1


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


class StepLoader:
    """Training steps over packed blocks, from any position on; the stream wraps from epoch to epoch for ever.

    Every rank gets the same number of steps by construction. `say` is told about each new epoch.
    """

    def __init__(
        self, blocks: PackedBlocks, *, options: LoaderOptions, say: Callable[[str], None] = lambda text: None
    ) -> None:
        assert len(blocks) > 0, "prepare_data refuses a text that fills no block"
        assert 0 <= options.dp_rank < options.dp, f"dp_rank={options.dp_rank} of dp={options.dp}"
        self._blocks = blocks
        self._options = options
        self._say = say

    def steps(self, position: int) -> Iterator[Step]:
        """Yield the steps from `position` on, without end. Close the iterator to end its threads early."""
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

    def _batches(self, position: int) -> Generator[MicroBatch, None, None]:
        """Yield the micro-batches of this rank in order, prepared ahead by threads if there are any."""
        options = self._options
        first = position + options.dp_rank * options.num_sequences
        starts = count(first, options.dp * options.num_sequences)
        if options.num_workers:
            yield from map_in_order(starts, work=self._load, num_workers=options.num_workers, name="loader")
        else:
            yield from map(self._load, starts)

    def _load(self, start: int) -> MicroBatch:
        """Read the micro-batch whose first sequence is at `start` in the stream."""
        options, num_blocks = self._options, len(self._blocks)
        positions = range(start, start + options.num_sequences)
        chosen = []
        for position in positions:
            epoch, index = divmod(position, num_blocks)
            if options.shuffle:
                index = shuffled_item(index, num_items=num_blocks, seed=options.seed, epoch=epoch)
            chosen.append(self._blocks[index])
        return stack_blocks(chosen, positions=positions, num_sequences=len(chosen), block_size=self._blocks.block_size)


def shuffled_item(position: int, *, num_items: int, seed: int, epoch: int) -> int:
    """Return what is at `position` of a permutation of range(num_items) that depends on the other arguments alone.

    A Feistel network permutes the numbers of an even number of bits, at least as many as num_items needs; a number that
    falls outside range(num_items) is permuted again until one falls inside (cycle walking; fewer than four tries on
    average). Luby and Rackoff, "How to construct pseudorandom permutations", 1988; Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002, section 4.
    """
    assert 0 <= position < num_items, f"position {position} of an epoch of {num_items} items"
    half_bits = max(1, ((num_items - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * NUM_ROUNDS).digest()
    keys = [int.from_bytes(digest[start : start + 8], "little") for start in range(0, len(digest), 8)]
    item = num_items
    while item >= num_items:
        left, right = position >> half_bits, position & half_mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & half_mask)
        item = position = left << half_bits | right
    return item


def _mix(number: int) -> int:
    """Spread every bit of a 64-bit number over all 64: the finaliser of SplitMix64 (Steele, Lea, Flood, 2014)."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK_64
    return number ^ number >> 31
