"""A shuffled order of n items that is computed, not stored: position i of an epoch says its item in constant memory."""

import hashlib

NUM_ROUNDS = 6
MASK_64 = (1 << 64) - 1


class EpochOrder:
    """A permutation of range(num_items) that depends on (num_items, seed, epoch) alone.

    A Feistel network permutes the numbers of an even number of bits, at least as many as num_items needs; a number that
    falls outside range(num_items) is permuted again until one falls inside (cycle walking; fewer than four tries on
    average). Luby and Rackoff, "How to construct pseudorandom permutations", 1988; Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002, section 4.
    """

    def __init__(self, num_items: int, *, seed: int, epoch: int) -> None:
        self.epoch = epoch
        self._num_items = num_items
        self._half_bits = max(1, ((num_items - 1).bit_length() + 1) // 2)
        self._half_mask = (1 << self._half_bits) - 1
        key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * NUM_ROUNDS).digest()
        self._keys = [int.from_bytes(key[start : start + 8], "little") for start in range(0, len(key), 8)]

    def __len__(self) -> int:
        return self._num_items

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self._num_items:
            raise IndexError(f"position {position} of an epoch of {self._num_items} items")
        item = self._permute(position)
        while item >= self._num_items:
            item = self._permute(item)
        return item

    def _permute(self, number: int) -> int:
        left, right = number >> self._half_bits, number & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._half_mask)
        return left << self._half_bits | right


def _mix(number: int) -> int:
    """Spread every bit of a 64-bit number over all 64: the finaliser of SplitMix64 (Steele, Lea, Flood, 2014)."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK_64
    return number ^ number >> 31
