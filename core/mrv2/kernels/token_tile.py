"""What the products of some tokens share: tiles for the matrix units, and the norm of their input on its way in.

From some five tokens on, multiplying them one by one costs more than a weight's bytes, up to some hundred it is still
those that count. So a program takes rows of the weight and all the tokens, as few rows as keep all processors reading.
The RMS norm is spread over the product: elements are multiplied with the norm's weight as they are loaded, their
squares are summed beside it, and the result is divided. Its one rounding is that of the elements, where the norm by
itself rounds twice.

A loop keeps some tiles on their way. Launched dependently, a program asks for nothing before it waits: bringing weights
into the L2 cache ahead took more from what the kernel before still had to read than it gained.
"""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrv2.kernels.dependent import await_previous, release_next
from mrv2.kernels.registry import jit, tl, triton

FROM_TOKENS, MOST_TOKENS = 5, 128
"""Tokens from which on these tiles are quicker than `vector_tile`'s, and that the kernels take: all in one tile."""

SHARED = 100 << 10
"""Bytes of tiles on their way: two programs fit on a processor, so that the next kernel's can begin."""

ARRIVALS = 1024
"""Programs that a product may be cut into by rows, where others share their length."""


@dataclass(frozen=True, slots=True)
class TokenTile:
    """How a product is cut."""

    rows: int  # of the weight, per program: 16 or a larger power of two; of all matrices together
    depth: int  # elements of a row that are multiplied at once, a power of two
    splits: int  # programs that share the length of a row
    stages: int  # tiles on their way
    num_warps: int

    def span(self, size: int) -> int:
        """Elements of a row of `size` per program, in whole steps."""
        return -(-size // (self.splits * self.depth)) * self.depth


def token_block(num_tokens: int) -> int:
    """Tokens of a tile: the matrix units take 16 and powers of two."""
    return max(16, 1 << (num_tokens - 1).bit_length())


def choose_token_tile(num_tokens: int, num_rows: int, size: int, *, splits: bool = False) -> TokenTile:
    """For `num_rows` rows of `size` elements of half precision; `splits`: programs may share the length of a row."""
    block = token_block(num_tokens)
    rows = 32 if block <= 64 else 64
    share = 1
    if splits:  # few rows don't fill the processors by themselves
        share = max(1, min(triton.cdiv(size, 512), 128 * rows // num_rows))
    depth = 64 if block > 32 else 128 if splits else 256
    stages = min(max(2, SHARED // (2 * depth * (block + rows))), triton.cdiv(size, share * depth) + 1, 6)
    return TokenTile(rows, depth, share, stages, 4 if block <= 64 else 8)


def takes_tokens(x: Tensor) -> bool:
    """Whether the kernels can take products of `x` [num_tokens, ...]."""
    return 1 <= x.shape[0] <= MOST_TOKENS


def make_arrivals(device: torch.device) -> Tensor:
    """What `project_onto` counts programs in, [ARRIVALS] int32: 0 between launches, so one stream's only.

    Made outside a graph capture: memory from a graph's own pool would be zeroed at replay only.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not capturing, "run the step once before capturing it"
    return torch.zeros(ARRIVALS, dtype=torch.int32, device=device)


@jit()
def load_tile(base, row, k, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """Elements `k` [K] of rows `row` [N] of a matrix of SIZE columns, [N, K]; zeros past the end of a row."""
    at = base + row.to(tl.int64)[:, None] * SIZE + k[None, :]
    return tl.load(at) if EVEN else tl.load(at, mask=(k < SIZE)[None, :], other=0.0)


@jit()
def load_gain(gain, k, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """Elements `k` of the norm's weight, [1, K] float32."""
    at = gain + k[None, :]
    return (tl.load(at) if EVEN else tl.load(at, mask=(k < SIZE)[None, :], other=0.0)).to(tl.float32)


@jit()
def load_tokens(
    x,
    residual,
    summed,
    token,
    num_tokens,
    k,
    writes,
    SIZE: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Elements `k` [K] of the tokens, [M, K]: of `x`, or of the rounded sums `x + residual`, which go to `summed` as
    far as `k < writes`. Tokens past the last are the last.
    """
    row = tl.minimum(token, num_tokens - 1)
    value = load_tile(x, row, k, SIZE, EVEN)
    if HAS_RESIDUAL:
        other = load_tile(residual, row, k, SIZE, EVEN)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        inside = (token < num_tokens)[:, None] & (k < writes)[None, :]
        tl.store(summed + token.to(tl.int64)[:, None] * SIZE + k[None, :], value, mask=inside)
    return value


@jit()
def multiply(
    x,
    residual,
    gain,
    summed,
    weight,
    row,
    num_tokens,
    begin,
    writes,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Products of all tokens with rows `row` [ROWS] of the weight over its elements begin .. begin + SPAN.

    EVEN: no row ends within. With NORM the input is multiplied with `gain` and rounded.

    Returns:
        float32 [TOKENS, ROWS], and each token's sum of squares [TOKENS], 0 without NORM.
    """
    token = tl.arange(0, TOKENS)
    lane = begin + tl.arange(0, DEPTH)
    dtype: tl.constexpr = weight.dtype.element_ty
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    squares = tl.zeros([TOKENS, DEPTH], tl.float32)
    await_previous(DEPENDENT)
    if NORM:
        gains = load_gain(gain, lane, SIZE, False)
    for start in tl.range(0, SPAN, DEPTH, num_stages=STAGES):
        k = lane + start
        rows = load_tile(weight, row, k, SIZE, EVEN)
        value = load_tokens(x, residual, summed, token, num_tokens, k, writes, SIZE, EVEN, HAS_RESIDUAL)
        if NORM:
            # Too narrow to be kept on its way as tiles are: asked for one step ahead.
            next_gains = load_gain(gain, k + DEPTH, SIZE, False)
            wide = value.to(tl.float32)
            squares += wide * wide
            value = (wide * gains).to(dtype)
            gains = next_gains
        acc = tl.dot(value, tl.trans(rows), acc, input_precision="ieee")
    release_next(DEPENDENT)
    return acc, tl.sum(squares, 1)
