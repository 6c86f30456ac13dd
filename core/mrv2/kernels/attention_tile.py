"""One tile of paged keys and values, which the attention kernels share."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

from mrv2.kernels.registry import jit, tl

LOG2_E = 1.4426950408889634
"""Powers of two are what the hardware has: scores are kept in this unit."""


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """What `attend_tile` multiplies scores with, before tanh and after; the second is unused without a cap."""
    return (scale * LOG2_E, 1.0) if soft_cap is None else (scale / soft_cap, soft_cap * LOG2_E)


@jit()
def attend_tile(
    q,
    q_pos,
    acc,
    top,
    total,
    start,
    lo,
    hi,
    cache,
    block_stride,
    kv_stride,
    table,
    scale,
    cap,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Online softmax of queries q [M, D] at positions q_pos [M] over keys start .. start + BLOCK_N.

    Only keys lo <= n < hi are read; unless MASKED, that's all of them, and every query sees them. `cache`
    points at the first block's keys of this head, `table` at the request's row. Returns the new acc [M, D],
    top [M], in units of log2, and total [M].
    """
    n = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    if BLOCK_SIZE % BLOCK_N == 0:  # one block holds the tile
        block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
    else:
        block = tl.load(table + n // BLOCK_SIZE, mask=n < hi, other=0).to(tl.int64)
    base = block * block_stride + (n % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)
    keys = cache + base[:, None] + d[None, :]
    # What isn't the request's own may be NaN, and a weight of zero wouldn't undo that: it isn't read.
    inside = (d < HEAD_DIM)[None, :]
    if MASKED:
        inside = inside & ((n >= lo) & (n < hi))[:, None]
    k = tl.load(keys, mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFT_CAP:
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores)))  # cap * tanh(scores)
    if MASKED:
        visible = n[None, :] <= q_pos[:, None]
        if WINDOW > 0:
            visible = visible & (n[None, :] > q_pos[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    reference = new_top
    if MASKED:  # a query may have seen nothing yet, and -inf minus -inf is NaN
        reference = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(top - reference)
    total = total * shrink + tl.sum(weights, 1)
    v = tl.load(keys + kv_stride, mask=inside, other=0.0)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total
