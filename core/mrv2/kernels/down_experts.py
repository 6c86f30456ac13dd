"""The second half of the experts' MLPs: back to the hidden size, times the weight the router gave."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mrv2.kernels.expert_tile import GROUP, down_tile, expert_rows, locate_tile
from mrv2.kernels.registry import jit, kernel, tl, triton


def down_experts_ref(
    *,
    x: Tensor,
    w2: Tensor,
    weights: Tensor,
    order: Tensor,
    offsets: Tensor,
    blocks: Tensor,
    block_rows: int,
    out: Tensor,
) -> None:
    """Torch twin of `down_experts`."""
    flat = weights.flatten()
    for expert, rows in expert_rows(offsets):
        assignments = order[rows].long()
        out[assignments] = F.linear(x[rows], w2[expert]) * flat[assignments, None]


@kernel(twin=down_experts_ref)
def down_experts(
    *,
    x: Tensor,
    w2: Tensor,
    weights: Tensor,
    order: Tensor,
    offsets: Tensor,
    blocks: Tensor,
    block_rows: int,
    out: Tensor,
) -> None:
    """Row a of `out` is `weights[a] * (w2 @ x[r])` of the row r that holds assignment a. Sums are float32.

    Args:
        x: [num_tokens * top_k, size], contiguous, from `gate_up_experts`.
        w2: [num_experts, hidden, size] of the same dtype, contiguous.
        weights: [num_tokens, top_k], contiguous.
        order: from `group_by_expert`.
        offsets: from `group_by_expert`.
        blocks: from `group_by_expert`.
        block_rows: what `blocks` was made with; 16 at least, a power of two.
        out: out, [num_tokens * top_k, hidden], contiguous, same dtype; rows of assignments left out aren't written.
    """
    size, hidden = x.shape[1], out.shape[1]
    assert w2.shape[1:] == (hidden, size)
    assert x.is_contiguous() and w2.is_contiguous() and weights.is_contiguous() and out.is_contiguous()  # noqa: PT018
    if len(blocks) == 0:
        return
    tile = down_tile(block_rows, x.dtype)
    num_tiles = triton.cdiv(hidden, tile.cols)
    _down_experts_kernel[(len(blocks) * num_tiles,)](
        x,
        w2,
        weights,
        order,
        offsets,
        blocks,
        out,
        HIDDEN=hidden,
        SIZE=size,
        NUM_TILES=num_tiles,
        GROUP=GROUP,
        BLOCK_M=block_rows,
        BLOCK_N=tile.cols,
        BLOCK_K=tile.depth,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@jit()
def _down_experts_kernel(
    x,
    w2,
    weights,
    order,
    offsets,
    blocks,
    out,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block, tile = locate_tile(NUM_TILES, GROUP)
    expert = tl.load(blocks + 2 * block)
    if expert >= 0:
        first = tl.load(blocks + 2 * block + 1)
        row = first + tl.arange(0, BLOCK_M)
        real = row < tl.load(offsets + expert + 1)
        assignment = tl.load(order + row, mask=real, other=0).to(tl.int64)
        weight = tl.load(weights + assignment, mask=real, other=0.0).to(tl.float32)
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        # Rows and columns past the end repeat one inside: loads need no mask, and what comes of it isn't stored.
        col = expert.to(tl.int64) * HIDDEN + tl.minimum(n, HIDDEN - 1)
        k = tl.arange(0, BLOCK_K)
        xs = x + tl.where(real, row, first).to(tl.int64)[:, None] * SIZE + k[None, :]
        ws = w2 + col[None, :] * SIZE + k[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, SIZE, BLOCK_K):
            if SIZE % BLOCK_K == 0:
                inputs = tl.load(xs + start)
                w = tl.load(ws + start)
            else:
                inside = k < SIZE - start
                inputs = tl.load(xs + start, mask=inside[None, :], other=0.0)
                w = tl.load(ws + start, mask=inside[:, None], other=0.0)
            acc = tl.dot(inputs, w, acc, input_precision="ieee")
        value = (acc * weight[:, None]).to(out.dtype.element_ty)
        target = out + assignment[:, None] * HIDDEN + n[None, :]
        tl.store(target, value, mask=real[:, None] & (n < HIDDEN)[None, :])
