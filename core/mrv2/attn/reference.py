"""Paged attention in plain torch operations: any device, no host reads, padded to the largest request.

It is the twin of the fused kernels: what they are tested against, and what runs where there is none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrv2.attn.backend import AttentionArgs, StepMemo
from mrv2.state.view import CacheMeta


def write_cache_ref(k: Tensor, v: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Store `k` and `v` [num_tokens, num_kv_heads, head_dim] at their slots; negative slots go to scratch.

    Slot s is block `s // block_size`, offset `s % block_size`. Scratch keeps one of its writers' values.
    """
    slots = slot_mapping.clamp(min=0)
    block_size = cache.shape[2]
    block, offset = slots // block_size, slots % block_size
    cache[:, 0].index_put_((block, offset), k)
    cache[:, 1].index_put_((block, offset), v)


def paged_attention_ref(q: Tensor, cache: Tensor, meta: CacheMeta, args: AttentionArgs) -> Tensor:
    """Causal attention over the cache, after `write_cache_ref`; shapes as in `AttentionBackend.attend`.

    Scores and softmax are computed in float32. Memory: heads * num_reqs * max_query_len * max_seq_len.
    """
    k, v = _gather(cache, meta, args.window)  # [num_reqs, kv_heads, max_len, head_dim]
    starts = meta.query_start_loc[:-1].long()
    query_lens = meta.query_start_loc[1:].long() - starts
    j = torch.arange(meta.max_query_len, device=q.device)
    token = (starts[:, None] + j).clamp(max=q.shape[0] - 1)  # [num_reqs, max_query_len]

    groups = args.num_heads // args.num_kv_heads
    q_pad = (
        q[token].view(*token.shape, args.num_kv_heads, groups, -1).permute(0, 2, 3, 1, 4)
    )  # [R, kv_heads, groups, Q, D]
    scores = torch.matmul(q_pad.float(), k.float()[:, :, None].transpose(-1, -2)) * args.scale
    if args.soft_cap is not None:
        scores = args.soft_cap * torch.tanh(scores / args.soft_cap)
    q_pos = (meta.seq_lens.long() - query_lens)[:, None] + j  # [num_reqs, max_query_len]
    visible = _visible(q_pos, meta.seq_lens, k.shape[2], args.window)[:, None, None]
    # `where`, never a sum: what an inactive row reads from scratch may be NaN.
    probs = torch.where(visible, scores, float("-inf")).softmax(-1).nan_to_num(0.0).to(v.dtype)
    out_pad = torch.matmul(probs, v[:, :, None]).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [R, Q, heads, D]
    return _unpad(out_pad, meta, starts, query_lens, q.shape[0])


def _gather(cache: Tensor, meta: CacheMeta, window: int | None) -> tuple[Tensor, Tensor]:
    """Keys and values of every request, [num_reqs, kv_heads, max_len, head_dim].

    A position out of the request's reach repeats the nearest one within, so that no slot is read that isn't
    the request's own: a weight of zero wouldn't undo a NaN.
    """
    max_len = max(1, min(meta.max_seq_len, meta.block_table.shape[1] * meta.block_size))
    last = (meta.seq_lens.long() - 1).clamp(min=0)[:, None]
    position = torch.minimum(torch.arange(max_len, device=cache.device), last)
    if window is not None:
        position = torch.maximum(position, (meta.computed.long() - (window - 1)).clamp(min=0)[:, None])
    block = meta.block_table.long().gather(1, position // meta.block_size)
    offset = position % meta.block_size
    return cache[:, 0][block, offset].transpose(1, 2), cache[:, 1][block, offset].transpose(1, 2)


def _visible(q_pos: Tensor, seq_lens: Tensor, max_len: int, window: int | None) -> Tensor:
    """[num_reqs, max_query_len, max_len] bool: which key each query may see."""
    k_pos = torch.arange(max_len, device=q_pos.device)
    visible = (k_pos <= q_pos[..., None]) & (k_pos < seq_lens[:, None, None])
    if window is not None:
        visible &= k_pos > q_pos[..., None] - window
    return visible


def _unpad(out_pad: Tensor, meta: CacheMeta, starts: Tensor, query_lens: Tensor, num_tokens: int) -> Tensor:
    """[num_reqs, max_query_len, heads, head_dim] to [num_tokens, heads, head_dim], zeros for padding tokens."""
    token = torch.arange(num_tokens, device=out_pad.device)
    ends = meta.query_start_loc[1:].long()
    i = torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)  # request of each token
    j = token - starts[i]
    real = (j < query_lens[i]) & (meta.seq_lens[i] > 0)
    out = out_pad[i, j.clamp(0, out_pad.shape[1] - 1)]
    return torch.where(real[:, None, None], out, 0.0)


class ReferenceAttention:
    """`AttentionBackend` on any device, from the functions above."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cache: Tensor,
        meta: CacheMeta,
        args: AttentionArgs,
        memo: StepMemo,
    ) -> Tensor:
        """See `AttentionBackend.attend`. Derives everything anew in each layer; `memo` isn't used."""
        write_cache_ref(k, v, cache, meta.slot_mapping)
        return paged_attention_ref(q, cache, meta, args)
