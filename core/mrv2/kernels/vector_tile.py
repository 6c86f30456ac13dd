"""What the products of a few tokens share: how rows of a weight are spread over programs, and the norm before them.

A product of one to a few vectors is a stream of weights: each element is used once per token. So a program takes a few
whole rows of the weight, asks for all of them at once, and prepares its input, a norm included, while they arrive;
that every program does this anew costs less than a launch. All rows of a layer's weight are in flight together.
"""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mrv2.kernels.dependent import await_previous
from mrv2.kernels.registry import jit, tl, triton

MOST_TOKENS = 8
"""Tokens that the kernels take: each adds a vector to what a thread holds."""

LONGEST_ROW = 16384
"""Elements of a row, padded to a power of two, that the threads of one program can hold."""

ELEMENTS, WARPS = 64, 4
"""Weights that a thread holds, and warps of a program, unless a row is too long for that. `benchmarks/tune_decode.py`
compares others."""

MOST_ROWS = 16


@dataclass(frozen=True, slots=True)
class VectorTile:
    """How a product is cut: rows of the weight per program, and its warps."""

    rows: int
    num_warps: int


def choose_vector_tile(size: int, *, matrices: int = 1) -> VectorTile:
    """For rows of `size` elements, as many of each of the `matrices` that a program reads together."""
    row = triton.next_power_of_2(size)
    num_warps = max(WARPS, row // (32 * ELEMENTS))
    rows = 32 * ELEMENTS * num_warps // (row * matrices)
    return VectorTile(min(max(rows, 1), MOST_ROWS), num_warps)


def takes_vectors(x: Tensor, size: int) -> bool:
    """Whether the kernels can take products of `x` [num_tokens, ...] with rows of `size` elements."""
    return 1 <= x.shape[0] <= MOST_TOKENS and triton.next_power_of_2(size) <= LONGEST_ROW


@jit()
def load_rows(weight, row, num_rows, SIZE: tl.constexpr, ROW: tl.constexpr):
    """Rows `row` [N] of a weight [num_rows, SIZE], padded with zeros to [N, ROW]. Rows past the end are the last."""
    k = tl.arange(0, ROW)[None, :]
    at = weight + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * SIZE + k
    return tl.load(at) if SIZE == ROW else tl.load(at, mask=k < SIZE, other=0.0)


@jit()
def await_inputs(DEPENDENT: tl.constexpr):
    """`await_previous`, and in any case: what comes before this is asked for before what comes after. The compiler
    would ask for weights only when it needs them, which is after the norm.
    """
    if DEPENDENT:
        await_previous(DEPENDENT)
    else:
        tl.debug_barrier()


@jit()
def load_vectors(x, num_tokens, SIZE: tl.constexpr, ROW: tl.constexpr, TOKENS: tl.constexpr):
    """A tuple of the TOKENS rows of `x` [num_tokens, SIZE], padded with zeros to [ROW]."""
    k = tl.arange(0, ROW)
    vectors = ()
    for t in tl.static_range(TOKENS):
        size = tl.where(num_tokens > t, SIZE, 0)
        vector = tl.load(x + t * SIZE + k, mask=k < size, other=0.0)
        vectors = vectors + (vector,)  # type: ignore[assignment]  # noqa: RUF005  # Triton can't unpack
    return vectors


@jit()
def normalise(value, gain, eps, SIZE: tl.constexpr, dtype: tl.constexpr):
    """RMS norm of a float32 vector of SIZE elements, rounded as `add_rms_norm` rounds it; float32."""
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    return ((value * scale).to(dtype).to(tl.float32) * gain).to(dtype).to(tl.float32)


@jit()
def load_normed(
    x,
    residual,
    gain,
    eps,
    summed,
    num_tokens,
    writes,
    SIZE: tl.constexpr,
    ROW: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """A tuple of the norms of the rows of `x`, or of the rounded sums `x + residual`, of whose elements the first
    `writes` go to `summed`; float32 vectors [ROW]. `gain` is a vector already.
    """
    k = tl.arange(0, ROW)
    dtype: tl.constexpr = x.dtype.element_ty
    vectors = load_vectors(x, num_tokens, SIZE, ROW, TOKENS)
    if HAS_RESIDUAL:
        others = load_vectors(residual, num_tokens, SIZE, ROW, TOKENS)
    normed = ()
    for t in tl.static_range(TOKENS):
        value = vectors[t].to(tl.float32)
        if HAS_RESIDUAL:
            rounded = (value + others[t].to(tl.float32)).to(dtype)
            tl.store(summed + t * SIZE + k, rounded, mask=k < tl.where(num_tokens > t, writes, 0))
            value = rounded.to(tl.float32)
        vector = normalise(value, gain, eps, SIZE, dtype)
        normed = normed + (vector,)  # type: ignore[assignment]  # noqa: RUF005
    return normed
