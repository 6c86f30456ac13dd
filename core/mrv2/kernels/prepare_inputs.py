"""The model's common inputs, gathered from the request table."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
from torch import Tensor

from mrv2.kernels.registry import jit, kernel, tl

_BLOCK = 256


def prepare_inputs_ref(
    *,
    rows: Tensor,
    query_start_loc: Tensor,
    num_computed: Tensor,
    all_token_ids: Tensor,
    active: Tensor,
    seq_lens: Tensor,
    logits_indices: Tensor,
    token_to_i: Tensor,
    positions: Tensor,
    input_ids: Tensor,
) -> None:
    """Torch twin of `prepare_inputs`."""
    num_reqs, max_len = rows.shape[0], all_token_ids.shape[1]
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    row = rows.clamp(min=0).long()
    live = (rows >= 0) & active[row]
    computed = torch.where(live, num_computed[row], 0)
    query_lens = ends - starts
    torch.add(computed, query_lens, out=seq_lens)
    logits_indices.copy_(torch.where(query_lens > 0, ends - 1, 0))

    token = torch.arange(token_to_i.shape[0], dtype=torch.int32, device=rows.device)
    owner = torch.searchsorted(ends, token, right=True)  # num_reqs: past the last real token
    real = owner < num_reqs
    owner.clamp_(max=num_reqs - 1)
    position = computed[owner] + token - starts[owner]
    known = real & live[owner] & (position < max_len)
    token_id = all_token_ids[row[owner], position.clamp(max=max_len - 1).long()]
    token_to_i.copy_(torch.where(real, owner, -1))
    positions.copy_(torch.where(real, position, 0))
    input_ids.copy_(torch.where(known, token_id, 0))


@kernel(twin=prepare_inputs_ref)
def prepare_inputs(
    *,
    rows: Tensor,
    query_start_loc: Tensor,
    num_computed: Tensor,
    all_token_ids: Tensor,
    active: Tensor,
    seq_lens: Tensor,
    logits_indices: Tensor,
    token_to_i: Tensor,
    positions: Tensor,
    input_ids: Tensor,
) -> None:
    """Fill lengths, positions and token ids of one step, padding included, in one launch.

    A request of an inactive row counts as one with nothing computed and token ids 0. Padded tokens get
    batch position -1, position 0 and id 0; padded requests length 0 and logits index 0.

    Args:
        rows: [num_reqs] int32, at least one; -1 for padding.
        query_start_loc: [num_reqs + 1] int32.
        num_computed: [max_rows] int32.
        all_token_ids: [max_rows, max_model_len] int32.
        active: [max_rows] bool.
        seq_lens: out, [num_reqs] int32: computed + query length.
        logits_indices: out, [num_reqs] int64: token index of the last token.
        token_to_i: out, [num_tokens] int32: batch position.
        positions: out, [num_tokens] int64.
        input_ids: out, [num_tokens] int32.
    """
    num_reqs = rows.shape[0]
    _prepare_inputs_kernel[(num_reqs + 1,)](
        rows,
        query_start_loc,
        num_computed,
        all_token_ids,
        all_token_ids.stride(0),
        all_token_ids.shape[1],
        active.view(torch.uint8),
        seq_lens,
        logits_indices,
        token_to_i,
        positions,
        input_ids,
        num_reqs,
        token_to_i.shape[0],
        BLOCK=_BLOCK,
    )


@jit(do_not_specialize=["num_reqs", "num_tokens"])
def _prepare_inputs_kernel(
    rows,
    query_start_loc,
    num_computed,
    all_token_ids,
    ids_stride,
    max_len,
    active,
    seq_lens,
    logits_indices,
    token_to_i,
    positions,
    input_ids,
    num_reqs,
    num_tokens,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if i == num_reqs:  # the one program that fills the padded tokens
        for start in range(tl.load(query_start_loc + num_reqs), num_tokens, BLOCK):
            token = start + lane
            inside = token < num_tokens
            tl.store(token_to_i + token, -1, mask=inside)
            tl.store(positions + token, 0, mask=inside)
            tl.store(input_ids + token, 0, mask=inside)
    else:
        first = tl.load(query_start_loc + i)
        query_len = tl.load(query_start_loc + i + 1) - first
        row = tl.load(rows + i)
        live = row >= 0
        live = live & (tl.load(active + row, mask=live, other=0) != 0)
        computed = tl.load(num_computed + row, mask=live, other=0)
        tl.store(seq_lens + i, computed + query_len)
        tl.store(logits_indices + i, tl.where(query_len > 0, first + query_len - 1, 0))
        known = tl.where(live, max_len, 0)
        ids = all_token_ids + row.to(tl.int64) * ids_stride
        for start in range(0, query_len, BLOCK):
            k = start + lane
            inside = (k < query_len) & (first + k < num_tokens)
            position = computed + k
            token_id = tl.load(ids + position, mask=inside & (position < known), other=0)
            tl.store(token_to_i + first + k, i, mask=inside)
            tl.store(positions + first + k, position, mask=inside)
            tl.store(input_ids + first + k, token_id, mask=inside)
