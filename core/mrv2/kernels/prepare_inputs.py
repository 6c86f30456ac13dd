"""All inputs of a step, gathered from the request table and the block tables in one launch."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mrv2.kernels.registry import jit, kernel, on_host, tl

_BLOCK = 512


@on_host
def prepare_inputs_ref(
    *,
    num_computed: Tensor,
    all_token_ids: Tensor,
    active: Tensor,
    tables: Tensor,
    block_sizes: Tensor,
    num_cols: int,
    batch: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    logits_indices: Tensor,
    token_to_i: Tensor,
    positions: Tensor,
    input_ids: Tensor,
    block_tables: Tensor,
    slots: Tensor,
) -> None:
    """Twin of `prepare_inputs`, in NumPy."""
    batch_np, tables_np, ids_np = batch.numpy(), tables.numpy(), all_token_ids.numpy()
    n, max_len = rows.shape[0], ids_np.shape[1]
    row, starts, ends = batch_np[0, :n], batch_np[1, :n], batch_np[1, 1 : n + 1]
    live = (row >= 0) & active.numpy()[row]
    computed, lens = np.where(live, num_computed.numpy()[row], 0), ends - starts
    rows.numpy()[:] = row
    query_start_loc.numpy()[:] = batch_np[1, : n + 1]
    seq_lens.numpy()[:] = computed + lens
    logits_indices.numpy()[:] = np.where(lens > 0, ends - 1, 0)
    block_tables.numpy()[:, :, :num_cols] = tables_np[:, row, :num_cols] * live[:, None]

    owner = np.repeat(np.arange(n), lens)
    num_real, token_row, token_live = len(owner), row[owner], live[owner]
    position = (computed - starts)[owner] + np.arange(num_real)
    ids = ids_np[token_row, np.minimum(position, max_len - 1)] * (token_live & (position < max_len))
    for out, values, neutral in ((token_to_i, owner, -1), (positions, position, 0), (input_ids, ids, 0)):
        out_np = out.numpy()
        out_np[:num_real], out_np[num_real:] = values, neutral
    slots_np, sizes_np, width = slots.numpy(), block_sizes.numpy(), tables_np.shape[2]
    slots_np[:, num_real:] = -1
    for group, slots_of_group in enumerate(slots_np):
        col, offset = np.divmod(position, sizes_np[group])
        slot = tables_np[group][token_row, np.minimum(col, width - 1)].astype(np.int64) * sizes_np[group] + offset
        slots_of_group[:num_real] = np.where(token_live & (col < width), slot, -1)


@kernel(twin=prepare_inputs_ref)
def prepare_inputs(
    *,
    num_computed: Tensor,
    all_token_ids: Tensor,
    active: Tensor,
    tables: Tensor,
    block_sizes: Tensor,
    num_cols: int,
    batch: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    logits_indices: Tensor,
    token_to_i: Tensor,
    positions: Tensor,
    input_ids: Tensor,
    block_tables: Tensor,
    slots: Tensor,
) -> None:
    """Fill what the model and attention read of one step, padding included.

    `batch` may lie in pinned host memory, which the GPU reads over the bus: one launch then takes the place of a
    copy and a launch, and a copy of more than a kilobyte alone takes longer. It may also be where `rows` and
    `query_start_loc` are views of: a graph reads from one address.

    A request of an inactive row counts as one with nothing computed, token ids 0, blocks 0 and slots -1. Padded
    tokens get batch position -1, position 0, id 0 and slots -1; padded requests length 0, logits index 0 and
    blocks 0. Positions past a table have slot -1, those past `max_model_len` id 0.

    Args:
        num_computed: [max_rows] int32.
        all_token_ids: [max_rows, max_model_len] int32.
        active: [max_rows] bool.
        tables: [num_groups, max_rows, width] int32, block ids by row; block 0 is scratch.
        block_sizes: [num_groups] int32, tokens per block.
        num_cols: columns of `tables` that this step can reach; those after are left as they are.
        batch: [2, at least num_reqs + 1] int32: rows, -1 for padding; where queries start, the last entry where
            they end, at most num_tokens.
        rows: out, [num_reqs] int32, at least one; copied from `batch`.
        query_start_loc: out, [num_reqs + 1] int32; copied from `batch`.
        seq_lens: out, [num_reqs] int32: computed + query length.
        logits_indices: out, [num_reqs] int64: token index of the last token.
        token_to_i: out, [num_tokens] int32: batch position.
        positions: out, [num_tokens] int64.
        input_ids: out, [num_tokens] int32.
        block_tables: out, [num_groups, num_reqs, width] int32.
        slots: out, [num_paged, num_tokens] int64: `block_id * block_size + position % block_size` in each of the
            first num_paged groups; those after hold states and have none.
    """
    num_reqs = rows.shape[0]
    _prepare_inputs_kernel[(num_reqs + 1, tables.shape[0] + 1)](
        num_computed,
        all_token_ids,
        all_token_ids.stride(0),
        all_token_ids.shape[1],
        active.view(torch.uint8),
        tables,
        tables.stride(0),
        tables.stride(1),
        tables.shape[2],
        block_sizes,
        num_cols,
        batch,
        batch.stride(0),
        rows,
        query_start_loc,
        seq_lens,
        logits_indices,
        token_to_i,
        positions,
        input_ids,
        block_tables,
        block_tables.stride(0),
        block_tables.stride(1),
        slots,
        slots.stride(0),
        slots.shape[0],
        num_reqs,
        input_ids.shape[0],
        BLOCK=_BLOCK,
    )


@jit(do_not_specialize=["num_cols", "num_paged", "num_reqs", "num_tokens"])
def _prepare_inputs_kernel(
    num_computed,
    all_token_ids,
    ids_stride,
    max_len,
    active,
    tables,
    tables_group_stride,
    tables_row_stride,
    width,
    block_sizes,
    num_cols,
    batch,
    batch_stride,
    rows,
    query_start_loc,
    seq_lens,
    logits_indices,
    token_to_i,
    positions,
    input_ids,
    block_tables,
    out_group_stride,
    out_row_stride,
    slots,
    slots_stride,
    num_paged,
    num_reqs,
    num_tokens,
    BLOCK: tl.constexpr,
):
    # One program per request and group, one more per request for what concerns no group, and one row of programs
    # for the padded tokens.
    i = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64) - 1
    lane = tl.arange(0, BLOCK)
    first = tl.load(batch + batch_stride + i)
    if i == num_reqs:
        if group < 0:
            tl.store(query_start_loc + i, first)
        for start in range(first, num_tokens, BLOCK):
            token = start + lane
            inside = token < num_tokens
            if group < 0:
                tl.store(token_to_i + token, -1, mask=inside)
                tl.store(positions + token, 0, mask=inside)
                tl.store(input_ids + token, 0, mask=inside)
            elif group < num_paged:
                tl.store(slots + group * slots_stride + token, -1, mask=inside)
    else:
        query_len = tl.load(batch + batch_stride + i + 1) - first
        row = tl.load(batch + i).to(tl.int64)
        live = row >= 0
        live = live & (tl.load(active + row, mask=live, other=0) != 0)
        computed = tl.load(num_computed + row, mask=live, other=0)
        if group < 0:
            tl.store(rows + i, row.to(tl.int32))
            tl.store(query_start_loc + i, first)
            tl.store(seq_lens + i, computed + query_len)
            tl.store(logits_indices + i, tl.where(query_len > 0, first + query_len - 1, 0))
            ids = all_token_ids + row * ids_stride
            known = tl.where(live, max_len, 0)
            for start in range(0, query_len, BLOCK):
                k = start + lane
                inside = k < query_len
                position = computed + k
                token_id = tl.load(ids + position, mask=inside & (position < known), other=0)
                tl.store(token_to_i + first + k, i, mask=inside)
                tl.store(positions + first + k, position, mask=inside)
                tl.store(input_ids + first + k, token_id, mask=inside)
        else:
            table = tables + group * tables_group_stride + row * tables_row_stride
            out = block_tables + group * out_group_stride + i.to(tl.int64) * out_row_stride
            known = tl.where(live, num_cols, 0)
            for start in range(0, num_cols, BLOCK):
                col = start + lane
                tl.store(out + col, tl.load(table + col, mask=col < known, other=0), mask=col < num_cols)
            if group < num_paged:
                size = tl.load(block_sizes + group)
                known = tl.where(live, width, 0)
                for start in range(0, query_len, BLOCK):
                    k = start + lane
                    inside = k < query_len
                    col = (computed + k) // size
                    # Widened before it multiplies: a cache holds more than 2**31 slots' worth of elements.
                    block = tl.load(table + col, mask=inside & (col < known), other=0).to(tl.int64)
                    slot = tl.where(col < known, block * size + (computed + k) % size, -1)
                    tl.store(slots + group * slots_stride + first + k, slot, mask=inside)
