"""Block tables of the batch, and the cache slot of each new token, for all KV groups at once.

`tables` is [num_groups, max_rows, width] int32. Block 0 is scratch, and so is slot 0.
"""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
from torch import Tensor

from mrv2.kernels.registry import jit, kernel, tl, triton

_BLOCK = 256


def gather_block_tables_ref(*, tables: Tensor, rows: Tensor, active: Tensor, num_cols: int, out: Tensor) -> None:
    """Torch twin of `gather_block_tables`."""
    row = rows.clamp(min=0).long()
    live = (rows >= 0) & active[row]
    out[:, :, :num_cols] = tables[:, row, :num_cols] * live[None, :, None]


@kernel(twin=gather_block_tables_ref)
def gather_block_tables(*, tables: Tensor, rows: Tensor, active: Tensor, num_cols: int, out: Tensor) -> None:
    """Copy each request's block ids from its row to its place in the batch.

    Padding and inactive rows get zeros, the scratch block.

    Args:
        tables: [num_groups, max_rows, width] int32.
        rows: [num_reqs] int32; -1 for padding.
        active: [max_rows] bool.
        num_cols: columns that this step can reach; those after are left as they are.
        out: out, [num_groups, num_reqs, width] int32.
    """
    grid = (rows.shape[0], tables.shape[0])
    _gather_block_tables_kernel[grid](
        tables,
        tables.stride(0),
        tables.stride(1),
        rows,
        active.view(torch.uint8),
        num_cols,
        out,
        out.stride(0),
        out.stride(1),
        BLOCK=_BLOCK,
    )


@jit(do_not_specialize=["num_cols"])
def _gather_block_tables_kernel(
    tables,
    tables_group_stride,
    tables_row_stride,
    rows,
    active,
    num_cols,
    out,
    out_group_stride,
    out_row_stride,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + i).to(tl.int64)
    live = row >= 0
    live = live & (tl.load(active + row, mask=live, other=0) != 0)
    source = tables + group * tables_group_stride + row * tables_row_stride
    target = out + group * out_group_stride + i * out_row_stride
    known = tl.where(live, num_cols, 0)
    for start in range(0, num_cols, BLOCK):
        col = start + tl.arange(0, BLOCK)
        tl.store(target + col, tl.load(source + col, mask=col < known, other=0), mask=col < num_cols)


def compute_slot_mappings_ref(
    *,
    tables: Tensor,
    block_sizes: Tensor,
    rows: Tensor,
    active: Tensor,
    token_to_i: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """Torch twin of `compute_slot_mappings`."""
    row = rows[token_to_i.clamp(min=0).long()]
    live = (token_to_i >= 0) & (row >= 0)
    row = row.clamp(min=0).long()
    live = live & active[row]
    sizes = block_sizes[:, None].long()
    col = positions[None] // sizes
    live = live[None] & (col < tables.shape[2])
    group = torch.arange(tables.shape[0], device=tables.device)[:, None]
    block = tables[group, row[None], col.clamp(max=tables.shape[2] - 1)].long()
    slots.copy_(torch.where(live, block * sizes + positions[None] % sizes, -1))


@kernel(twin=compute_slot_mappings_ref)
def compute_slot_mappings(
    *,
    tables: Tensor,
    block_sizes: Tensor,
    rows: Tensor,
    active: Tensor,
    token_to_i: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """The flat cache slot of each new token: `block_id * block_size + position % block_size`.

    Padding, inactive rows, and positions past the table get -1.

    Args:
        tables: [num_groups, max_rows, width] int32.
        block_sizes: [num_groups] int32, tokens per block.
        rows: [num_reqs] int32; -1 for padding.
        active: [max_rows] bool.
        token_to_i: [num_tokens] int32, batch position; -1 for padding.
        positions: [num_tokens] int64.
        slots: out, [num_groups, num_tokens] int64.
    """
    num_tokens = token_to_i.shape[0]
    grid = (triton.cdiv(num_tokens, _BLOCK), tables.shape[0])
    _compute_slot_mappings_kernel[grid](
        tables,
        tables.stride(0),
        tables.stride(1),
        tables.shape[2],
        block_sizes,
        rows,
        active.view(torch.uint8),
        token_to_i,
        positions,
        slots,
        slots.stride(0),
        num_tokens,
        BLOCK=_BLOCK,
    )


@jit(do_not_specialize=["num_tokens"])
def _compute_slot_mappings_kernel(
    tables,
    tables_group_stride,
    tables_row_stride,
    width,
    block_sizes,
    rows,
    active,
    token_to_i,
    positions,
    slots,
    slots_stride,
    num_tokens,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    i = tl.load(token_to_i + token, mask=inside, other=-1)
    row = tl.load(rows + i, mask=i >= 0, other=-1).to(tl.int64)
    live = row >= 0
    live = live & (tl.load(active + row, mask=live, other=0) != 0)
    position = tl.load(positions + token, mask=inside, other=0)
    size = tl.load(block_sizes + group).to(tl.int64)
    col = position // size
    live = live & (col < width)
    # Widened before it multiplies: a cache holds more than 2**31 slots' worth of elements.
    entry = tables + group * tables_group_stride + row * tables_row_stride + col
    block = tl.load(entry, mask=live, other=0).to(tl.int64)
    slot = tl.where(live, block * size + position % size, -1)
    tl.store(slots + group * slots_stride + token, slot, mask=inside)
