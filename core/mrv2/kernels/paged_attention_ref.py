"""Paged attention in plain torch operations, which the twins of the attention kernels share.

Any device, no host reads, padded to the largest request.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend_paged_ref(
    *,
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    starts: Tensor,
    query_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Causal attention of ragged requests over the cache.

    Scores and softmax are computed in float32. Memory: heads * num_reqs * max_query_len * max_seq_len.

    Args:
        q: [num_tokens, num_heads, head_dim].
        cache: [num_blocks, 2, block_size, num_kv_heads, head_dim].
        block_table: [num_reqs, max_blocks] int32.
        seq_lens: [num_reqs] int32, length after this step.
        starts: [num_reqs], each request's first token, in rising order.
        query_lens: [num_reqs].
        max_query_len: upper bound.
        max_seq_len: upper bound.
        scale: of the scores.
        window: tokens in reach, the current one included; None: all.
        soft_cap: see `AttentionArgs`.

    Returns:
        [num_tokens, num_heads, head_dim], zeros for tokens of no request and for requests of length 0.
    """
    starts, query_lens, seq_lens = starts.long(), query_lens.long(), seq_lens.long()
    computed = seq_lens - query_lens
    first = torch.zeros_like(computed) if window is None else (computed - (window - 1)).clamp(min=0)
    k, v = _gather(cache, block_table, seq_lens, first, max_seq_len)  # [num_reqs, kv_heads, max_len, head_dim]
    j = torch.arange(max_query_len, device=q.device)
    token = (starts[:, None] + j).clamp(max=q.shape[0] - 1)  # [num_reqs, max_query_len]

    kv_heads, groups = cache.shape[3], q.shape[1] // cache.shape[3]
    q_pad = q[token].view(*token.shape, kv_heads, groups, -1).permute(0, 2, 3, 1, 4)  # [R, kv_heads, groups, Q, D]
    scores = torch.matmul(q_pad.float(), k.float()[:, :, None].transpose(-1, -2)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    visible = _visible(computed[:, None] + j, seq_lens, k.shape[2], window)[:, None, None]
    # `where`, never a sum: what an inactive row reads from scratch may be NaN.
    probs = torch.where(visible, scores, float("-inf")).softmax(-1).nan_to_num(0.0).to(v.dtype)
    out_pad = torch.matmul(probs, v[:, :, None]).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [R, Q, heads, D]
    return _unpad(out_pad, starts, query_lens.where(seq_lens > 0, 0), q.shape[0])


def _gather(
    cache: Tensor, block_table: Tensor, seq_lens: Tensor, first: Tensor, max_seq_len: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of every request, [num_reqs, kv_heads, max_len, head_dim].

    A position out of the request's reach repeats the nearest one within, so that no slot is read that isn't
    the request's own: a weight of zero wouldn't undo a NaN.
    """
    block_size = cache.shape[2]
    max_len = max(1, min(max_seq_len, block_table.shape[1] * block_size))
    position = torch.minimum(torch.arange(max_len, device=cache.device), (seq_lens - 1).clamp(min=0)[:, None])
    position = torch.maximum(position, first[:, None])
    block = block_table.long().gather(1, position // block_size)
    offset = position % block_size
    return cache[:, 0][block, offset].transpose(1, 2), cache[:, 1][block, offset].transpose(1, 2)


def _visible(q_pos: Tensor, seq_lens: Tensor, max_len: int, window: int | None) -> Tensor:
    """[num_reqs, max_query_len, max_len] bool: which key each query may see."""
    k_pos = torch.arange(max_len, device=q_pos.device)
    visible = (k_pos <= q_pos[..., None]) & (k_pos < seq_lens[:, None, None])
    if window is not None:
        visible &= k_pos > q_pos[..., None] - window
    return visible


def _unpad(out_pad: Tensor, starts: Tensor, query_lens: Tensor, num_tokens: int) -> Tensor:
    """[num_reqs, max_query_len, heads, head_dim] to [num_tokens, heads, head_dim], zeros for other tokens."""
    token = torch.arange(num_tokens, device=out_pad.device)
    i = torch.searchsorted(starts, token, right=True) - 1  # the last request that starts at or before each token
    j = token - starts[i.clamp(min=0)]
    real = (i >= 0) & (j < query_lens[i])
    out = out_pad[i, j.clamp(0, out_pad.shape[1] - 1)]
    return torch.where(real[:, None, None], out, 0.0)
