"""Counter-based Gumbel noise: Philox 4x32-10 bits, then an exponential, then its logarithm.

The noise of a token is a function of (seed, position, stream, token id) and of nothing else, so a draw
depends neither on batch mates nor on how many tokens are looked at.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Philox 4x32: round multipliers and key increments, from the paper's table 2 and section 4.3.
_MUL_0, _MUL_1 = 0xD2511F53, 0xCD9E8D57
_KEY_0, _KEY_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_MASK = 0xFFFFFFFF

_CHUNK = 1 << 14
"""Counters computed at a time: some 100 kB per temporary, which stays in a core's own cache."""


def philox(seeds: Tensor, counter: Tensor, position: Tensor, stream: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10 at counter `(counter, position, stream, 0)` under each row's 64-bit key.

    Args:
        seeds: [n, 1] int64, the key: low word first.
        counter: [n or 1, k] int64.
        position: [n, 1] int64.
        stream: of the same row's independent draws, which one.

    Returns:
        Four tensors [n, k] int64 with 32-bit words.
    """
    # int64 holds the products' bits: they wrap in the sign, and every word is masked before it multiplies.
    c0 = counter.expand(seeds.shape[0], -1) & _MASK
    c1 = (position & _MASK).expand_as(c0).clone()
    c2 = torch.full_like(c0, stream & _MASK)
    c3 = torch.zeros_like(c0)
    key_0, key_1 = seeds & _MASK, (seeds >> 32) & _MASK
    product_0, product_1 = torch.empty_like(c0), torch.empty_like(c0)
    for _ in range(_ROUNDS):
        torch.mul(c0, _MUL_0, out=product_0)
        torch.mul(c2, _MUL_1, out=product_1)
        torch.bitwise_right_shift(product_1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(key_0).bitwise_and_(_MASK)
        torch.bitwise_right_shift(product_0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(key_1).bitwise_and_(_MASK)
        c1, product_1 = product_1, c1
        c3, product_0 = product_0, c3
        key_0, key_1 = (key_0 + _KEY_0) & _MASK, (key_1 + _KEY_1) & _MASK
    return c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Standard Gumbel value of each 32-bit word: `-log(-log1p(-v))` with `v = (bits + 0.5) / 2**32`.

    In double precision v is exact for every word and never 1, so the value is finite (about -3.13 to 22.9).
    """
    v = bits.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return v.neg_().log1p_().neg_().log_().neg_().to(torch.float32)


def gumbel_noise(seeds: Tensor, positions: Tensor, stream: int, vocab: int, token_ids: Tensor | None = None) -> Tensor:
    """The noise that a draw adds to its logits.

    Args:
        seeds: [num_reqs] int64, already gathered through the row mapping.
        positions: [num_reqs] int64, absolute position of the token to be drawn.
        stream: which of the independent draws at that position.
        vocab: size of the vocabulary.
        token_ids: [num_reqs, k]: evaluate at these ids only; the values equal the full ones bit for bit.

    Returns:
        [num_reqs, vocab] float32, or [num_reqs, k].
    """
    seeds, positions = seeds[:, None], positions[:, None].to(torch.int64)
    if token_ids is not None:
        token_ids = token_ids.to(torch.int64)
        words = torch.stack(philox(seeds, token_ids >> 2, positions, stream), dim=-1)
        return gumbel_from_bits(words.gather(-1, (token_ids & 3)[..., None])[..., 0])
    counters = torch.arange((vocab + 3) // 4, device=seeds.device)[None]
    step = max(1, _CHUNK // max(1, counters.shape[1]))
    noise = torch.empty(seeds.shape[0], counters.shape[1] * 4, dtype=torch.float32, device=seeds.device)
    for start in range(0, seeds.shape[0], step):
        part = slice(start, start + step)
        words = torch.stack(philox(seeds[part], counters, positions[part], stream), dim=-1)
        noise[part] = gumbel_from_bits(words.flatten(1))
    return noise[:, :vocab]
