"""Write sampled tokens back to the request table and stop requests, without the host."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mrv2.kernels.registry import jit, kernel, on_host, tl, triton


@on_host
def update_after_sample_ref(
    *,
    rows: Tensor,
    seq_lens: Tensor,
    sampled: Tensor,
    num_candidates: Tensor,
    all_token_ids: Tensor,
    total_len: Tensor,
    num_computed: Tensor,
    active: Tensor,
    len_limit: Tensor,
    stop_token_ids: Tensor,
    num_sampled: Tensor,
) -> None:
    """Twin of `update_after_sample`, in NumPy."""
    rows_np, active_np, total_np, computed_np = rows.numpy(), active.numpy(), total_len.numpy(), num_computed.numpy()
    ids_np, gained_np = all_token_ids.numpy(), num_sampled.numpy()
    gained_np[:] = 0
    i = ((rows_np >= 0) & active_np[rows_np]).nonzero()[0]
    row = rows_np[i]
    seq_len, total = seq_lens.numpy()[i], total_np[row]
    complete = seq_len >= total  # else a prefill chunk: its sample predicts a token that is known
    limit = np.minimum(len_limit.numpy()[row], ids_np.shape[1])
    running = complete & (total < limit)
    tokens, candidates, stop_ids = sampled.numpy()[i], num_candidates.numpy()[i], stop_token_ids.numpy()[row]
    for s in range(tokens.shape[1]):
        took = running & (s < candidates)
        token = tokens[:, s]
        ids_np[row[took], total[took]] = token[took]
        total = total + took
        gained_np[i] += took
        stopped = (stop_ids == token[:, None]).any(1)
        running = running & ~(took & stopped) & (total < limit)
    total_np[row] = total
    computed_np[row] = np.where(complete, total - 1, seq_len)
    active_np[row] = running | ~complete


@kernel(twin=update_after_sample_ref)
def update_after_sample(
    *,
    rows: Tensor,
    seq_lens: Tensor,
    sampled: Tensor,
    num_candidates: Tensor,
    all_token_ids: Tensor,
    total_len: Tensor,
    num_computed: Tensor,
    active: Tensor,
    len_limit: Tensor,
    stop_token_ids: Tensor,
    num_sampled: Tensor,
) -> None:
    """Append what was sampled to each active row, up to a stop token or the row's length limit.

    A row whose known tokens are all computed by this step takes its candidates in order and ends with
    `num_computed = total_len - 1`; one in the middle of its prefill takes none and advances to `seq_lens`.
    Padding and inactive rows are left alone and gain nothing. A row that stops becomes inactive.

    Args:
        rows: [num_reqs] int32, each row at most once; -1 for padding.
        seq_lens: [num_reqs] int32, length after this step.
        sampled: [num_reqs, S] int64.
        num_candidates: [num_reqs] int32: how many of the S are meant, in order.
        all_token_ids: in and out, [max_rows, max_model_len] int32.
        total_len: in and out, [max_rows] int32.
        num_computed: in and out, [max_rows] int32.
        active: in and out, [max_rows] bool.
        len_limit: [max_rows] int32.
        stop_token_ids: [max_rows, max_stop_ids] int32; unused places hold -1.
        num_sampled: out, [num_reqs] int32: tokens gained.
    """
    max_stop_ids = stop_token_ids.shape[1]
    _update_after_sample_kernel[(rows.shape[0],)](
        rows,
        seq_lens,
        sampled,
        sampled.stride(0),
        sampled.shape[1],
        num_candidates,
        all_token_ids,
        all_token_ids.stride(0),
        all_token_ids.shape[1],
        total_len,
        num_computed,
        active.view(torch.uint8),
        len_limit,
        stop_token_ids,
        stop_token_ids.stride(0),
        max_stop_ids,
        num_sampled,
        STOP_BLOCK=triton.next_power_of_2(max(max_stop_ids, 1)),
    )


@jit(do_not_specialize=["num_slots"])
def _update_after_sample_kernel(
    rows,
    seq_lens,
    sampled,
    sampled_stride,
    num_slots,
    num_candidates,
    all_token_ids,
    ids_stride,
    max_len,
    total_len,
    num_computed,
    active,
    len_limit,
    stop_token_ids,
    stop_stride,
    max_stop_ids,
    num_sampled,
    STOP_BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i).to(tl.int64)
    live = row >= 0
    live = live & (tl.load(active + row, mask=live, other=0) != 0)
    gained = 0
    if live:
        seq_len = tl.load(seq_lens + i)
        total = tl.load(total_len + row)
        if seq_len < total:
            tl.store(num_computed + row, seq_len)
        else:
            limit = tl.minimum(tl.load(len_limit + row), max_len)
            lane = tl.arange(0, STOP_BLOCK)
            stop_ids = tl.load(stop_token_ids + row * stop_stride + lane, mask=lane < max_stop_ids, other=-1)
            running = total < limit
            for s in range(tl.minimum(tl.load(num_candidates + i), num_slots)):
                if running:
                    token = tl.load(sampled + i * sampled_stride + s)
                    tl.store(all_token_ids + row * ids_stride + total, token.to(tl.int32))
                    total += 1
                    gained += 1
                    stopped = tl.sum((stop_ids == token).to(tl.int32), 0) > 0
                    running = (total < limit) & (stopped == 0)
            tl.store(total_len + row, total)
            tl.store(num_computed + row, total - 1)
            tl.store(active + row, running.to(tl.uint8))
    tl.store(num_sampled + i, gained)
