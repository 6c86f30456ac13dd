"""The first half of the experts' MLPs: `act(gate(x)) * up(x)`, of each token by each of its experts."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mrv2.kernels.expert_tile import GROUP, expert_rows, gate_up_tile, locate_tile
from mrv2.kernels.gated_act import ACTIVATIONS, FORMULAS, activate
from mrv2.kernels.registry import jit, kernel, tl, triton


def gate_up_experts_ref(
    *,
    x: Tensor,
    w13: Tensor,
    order: Tensor,
    offsets: Tensor,
    blocks: Tensor,
    block_rows: int,
    top_k: int,
    act: str,
    out: Tensor,
) -> None:
    """Torch twin of `gate_up_experts`."""
    tokens = order.long() // top_k
    for expert, rows in expert_rows(offsets):
        gate, up = F.linear(x[tokens[rows]], w13[expert]).chunk(2, -1)
        out[rows] = ACTIVATIONS[act](gate) * up


@kernel(twin=gate_up_experts_ref)
def gate_up_experts(
    *,
    x: Tensor,
    w13: Tensor,
    order: Tensor,
    offsets: Tensor,
    blocks: Tensor,
    block_rows: int,
    top_k: int,
    act: str,
    out: Tensor,
) -> None:
    """Row r of `out` is `act(gate @ x) * (up @ x)` of assignment order[r], by its expert. Sums are float32.

    Args:
        x: [num_tokens, hidden], rows contiguous.
        w13: [num_experts, 2 * size, hidden] of the same dtype, contiguous: gate, then up.
        order: from `group_by_expert`.
        offsets: from `group_by_expert`.
        blocks: from `group_by_expert`.
        block_rows: what `blocks` was made with; 16 at least, a power of two.
        top_k: experts per token.
        act: a key of `ACTIVATIONS`.
        out: out, [num_tokens * top_k, size], contiguous, same dtype; rows of assignments left out aren't written.
    """
    hidden, size = x.shape[1], out.shape[1]
    assert w13.shape[1:] == (2 * size, hidden)
    assert w13.is_contiguous() and out.is_contiguous()  # noqa: PT018
    assert x.stride(1) == 1
    if len(blocks) == 0:
        return
    tile = gate_up_tile(block_rows, x.dtype)
    num_tiles = triton.cdiv(size, tile.cols)
    _gate_up_experts_kernel[(len(blocks) * num_tiles,)](
        x,
        x.stride(0),
        w13,
        order,
        offsets,
        blocks,
        out,
        HIDDEN=hidden,
        SIZE=size,
        TOP_K=top_k,
        FORMULA=FORMULAS[act],
        NUM_TILES=num_tiles,
        GROUP=GROUP,
        BLOCK_M=block_rows,
        BLOCK_N=tile.cols,
        BLOCK_K=tile.depth,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@jit()
def _gate_up_experts_kernel(
    x,
    x_stride,
    w13,
    order,
    offsets,
    blocks,
    out,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    FORMULA: tl.constexpr,
    NUM_TILES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block, tile = locate_tile(NUM_TILES, GROUP)
    expert = tl.load(blocks + 2 * block)
    if expert >= 0:
        row = tl.load(blocks + 2 * block + 1) + tl.arange(0, BLOCK_M)
        real = row < tl.load(offsets + expert + 1)
        # Rows and columns past the end repeat one inside: loads need no mask, and what comes of it isn't stored.
        token = tl.load(order + row, mask=real, other=0) // TOP_K
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        col = expert.to(tl.int64) * (2 * SIZE) + tl.minimum(n, SIZE - 1)
        k = tl.arange(0, BLOCK_K)
        xs = x + token.to(tl.int64)[:, None] * x_stride + k[None, :]
        gates = w13 + col[None, :] * HIDDEN + k[:, None]
        ups = w13 + (col + SIZE)[None, :] * HIDDEN + k[:, None]
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, HIDDEN, BLOCK_K):
            if HIDDEN % BLOCK_K == 0:
                inputs = tl.load(xs + start)
                gate_weights = tl.load(gates + start)
                up_weights = tl.load(ups + start)
            else:
                inside = k < HIDDEN - start
                inputs = tl.load(xs + start, mask=inside[None, :], other=0.0)
                gate_weights = tl.load(gates + start, mask=inside[:, None], other=0.0)
                up_weights = tl.load(ups + start, mask=inside[:, None], other=0.0)
            gate = tl.dot(inputs, gate_weights, gate, input_precision="ieee")
            up = tl.dot(inputs, up_weights, up, input_precision="ieee")
        value = (activate(gate, FORMULA) * up).to(out.dtype.element_ty)
        target = out + row.to(tl.int64)[:, None] * SIZE + n[None, :]
        tl.store(target, value, mask=real[:, None] & (n < SIZE)[None, :])
