"""Tokens grouped by the expert they go to, in blocks of rows that each belong to one expert.

Sizes on the device alone decide how many blocks there are; the host knows an upper bound, which the shapes give.
"""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
from torch import Tensor

from mrv2.kernels.registry import jit, kernel, tl, triton


def max_blocks(num_assignments: int, num_experts: int, block_rows: int) -> int:
    """Most blocks that `num_assignments` rows can fill: each expert that has any may leave its last one unfilled."""
    busy = min(num_assignments, num_experts)
    return (num_assignments + busy * (block_rows - 1)) // block_rows


def group_by_expert_ref(*, experts: Tensor, block_rows: int, order: Tensor, offsets: Tensor, blocks: Tensor) -> None:
    """Torch twin of `group_by_expert`."""
    num_experts, device = len(offsets) - 1, experts.device
    keys = experts.flatten().long()
    keys = torch.where(keys < 0, num_experts, keys)
    order.copy_(keys.argsort(stable=True))
    counts = keys.bincount(minlength=num_experts + 1)[:num_experts]
    offsets[0] = 0
    offsets[1:] = counts.cumsum(0)
    per_expert = (counts + block_rows - 1) // block_rows
    expert = torch.arange(num_experts, device=device).repeat_interleave(per_expert)
    inner = torch.arange(len(expert), device=device) - (per_expert.cumsum(0) - per_expert)[expert]
    blocks[:] = -1
    blocks[: len(expert), 0] = expert.int()
    blocks[: len(expert), 1] = (offsets[expert] + inner * block_rows).int()


@kernel(twin=group_by_expert_ref)
def group_by_expert(*, experts: Tensor, block_rows: int, order: Tensor, offsets: Tensor, blocks: Tensor) -> None:
    """Sort assignments, of which token t has [t * top_k, (t + 1) * top_k), by their expert. The order is stable.

    Args:
        experts: [num_tokens, top_k] int32, contiguous; a negative one is left out.
        block_rows: rows of a block.
        order: out, [num_tokens * top_k] int32: row r of the sorted assignments is assignment order[r]. Those left
            out come last.
        offsets: out, [num_experts + 1] int32: expert e has rows offsets[e] to offsets[e + 1].
        blocks: out, [max_blocks(…), 2] int32: expert and first row of each block, experts in order; (-1, -1) after
            the last one.
    """
    num_experts = len(offsets) - 1
    assert experts.is_contiguous()
    assert len(order) == experts.numel()
    assert len(blocks) == max_blocks(len(order), num_experts, block_rows)
    # One program for each expert, and one for what is left out. Each counts all assignments: they are few, and
    # reading them again costs less than a second launch.
    _group_by_expert_kernel[(num_experts + 1,)](
        experts,
        order,
        offsets,
        blocks,
        len(order),
        len(blocks),
        NUM_EXPERTS=num_experts,
        BLOCK_ROWS=block_rows,
        BINS=max(32, triton.next_power_of_2(num_experts)),
        CHUNK=256 if len(order) <= 256 else 1024,
        num_warps=4,
    )


@jit(do_not_specialize=["num_assignments", "num_blocks"])
def _group_by_expert_kernel(
    experts,
    order,
    offsets,
    blocks,
    num_assignments,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    own = tl.program_id(0)
    bins = tl.arange(0, BINS)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_assignments, CHUNK):
        i = start + lane
        expert = tl.load(experts + i, mask=i < num_assignments, other=-1)
        counts += tl.histogram(tl.maximum(expert, 0), BINS, mask=expert >= 0)
    before = bins < own
    first = tl.sum(tl.where(before, counts, 0), 0)
    block = tl.sum(tl.where(before, (counts + BLOCK_ROWS - 1) // BLOCK_ROWS, 0), 0)
    tl.store(offsets + own, first)
    named = own < NUM_EXPERTS
    wanted = tl.where(named, own, -1)
    count = tl.where(named, tl.sum(tl.where(bins == own, counts, 0), 0), num_assignments - first)
    end = tl.where(named, block + (count + BLOCK_ROWS - 1) // BLOCK_ROWS, num_blocks)
    for start in range(block, end, CHUNK):
        b = start + lane
        tl.store(blocks + 2 * b, tl.where(named, own, -1), mask=b < end)
        tl.store(blocks + 2 * b + 1, tl.where(named, first + (b - block) * BLOCK_ROWS, -1), mask=b < end)
    if count > 0:
        row = first
        for start in range(0, num_assignments, CHUNK):
            i = start + lane
            expert = tl.load(experts + i, mask=i < num_assignments, other=-1)
            hit = (tl.maximum(expert, -1) == wanted) & (i < num_assignments)
            rank = tl.cumsum(hit.to(tl.int32), 0)
            tl.store(order + row + rank - 1, i, mask=hit)
            row += tl.sum(hit.to(tl.int32), 0)
