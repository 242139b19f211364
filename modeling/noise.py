"""Random numbers that are a function of a counter: the same in every layout, and when they are computed again.

The generator is a 64-bit mix of the counter (the finaliser of SplitMix64, Steele et al., OOPSLA 2014).
"""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor


class NoiseOrigin(NamedTuple):
    """Which noise the tokens of a call get: `first_token` is the number of its first one in the training stream."""

    seed: int
    first_token: int


def stream_key(name: str, *, seed: int) -> int:
    """A 64-bit key, signed, for the stream of numbers named by (seed, name)."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def token_counters(token_t: Tensor, *, origin: NoiseOrigin, layer_idx: int) -> Tensor:
    """Where each token's numbers of a layer begin, int64 [t]; `token_t` [t] counts the call's tokens of the group."""
    key = stream_key(f"router jitter {layer_idx}", seed=origin.seed)
    return mix(token_t + signed((key + origin.first_token) % 2**64))


def jitter(x_tD: Tensor, counter_t: Tensor, *, width: float) -> Tensor:
    """x_tD [t, D] times uniform numbers of [1 - width, 1 + width), one per element (Switch, 2101.03961, §2.2).

    Drawn from the token's counter and the channel in 24 bits, exact in float32.
    """
    channel_D = torch.arange(x_tD.shape[-1], device=x_tD.device)
    bits_tD = shift(mix(counter_t[:, None] + channel_D), 40)
    return x_tD * (bits_tD.to(x_tD.dtype).mul_(width * 2.0**-23).add_(1.0 - width))


def mix(x: Tensor) -> Tensor:
    """A bijection of 64-bit integers whose every output bit depends on every input bit; int64 wraps as needed."""
    x = x + signed(0x9E3779B97F4A7C15)
    x = (x ^ shift(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shift(x, 31)


def shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def signed(value: int) -> int:
    """A whole number below 2^64 as the int64 with the same bits."""
    return value - 2**64 if value >= 2**63 else value
