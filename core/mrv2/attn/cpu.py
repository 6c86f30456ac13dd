"""Paged attention on the CPU, where reading a tensor on the host costs nothing.

Keys and values of a request are gathered token by token into contiguous scratch and handed to PyTorch's
flash kernel. Requests with one query token run as one batch, or a few where lengths differ much; the others
one by one. Indices and masks are made once per step and shared by all layers of one shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mrv2.attn.backend import AttentionArgs, StepMemo
from mrv2.state.view import CacheMeta

BATCH_COST = 32768
"""What one more decode batch costs, in cache elements gathered and attended: measured, about 40 µs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """A layer's cache seen as rows of `unit` elements, so that one index reaches keys and values of any token."""

    num_rows: int
    unit: int
    per_token: int  # rows of one token's keys
    per_block: int  # rows from one block to the next
    values: int  # rows from a token's keys to its values

    @classmethod
    def of(cls, cache: Tensor) -> _Layout:
        num_blocks, _, block_size, num_kv_heads, head_dim = cache.shape
        width, (block_stride, kv_stride) = num_kv_heads * head_dim, cache.stride()[:2]
        unit = math.gcd(width, block_stride, kv_stride)
        extent = (num_blocks - 1) * block_stride + kv_stride + block_size * width
        return cls(
            num_rows=extent // unit,
            unit=unit,
            per_token=width // unit,
            per_block=block_stride // unit,
            values=kv_stride // unit,
        )

    def view(self, cache: Tensor) -> Tensor:
        return cache.as_strided((self.num_rows, self.unit), (self.unit, 1))

    def key_rows(self, block: Tensor, offset: Tensor) -> Tensor:
        """Rows of the keys at these places, int64, flat."""
        rows = block.long() * self.per_block + offset * self.per_token
        if self.per_token > 1:
            rows = rows[..., None] + torch.arange(self.per_token)
        return rows.flatten()

    def both_rows(self, block: Tensor, offset: Tensor) -> Tensor:
        """Rows of all keys, then of all values."""
        rows = self.key_rows(block, offset)
        return torch.cat((rows, rows + self.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeBatch:
    """Requests with one query token, padded to the longest reach among them."""

    i: Tensor | None  # [n] batch positions, which are token positions too; None: the first n
    n: int
    max_len: int
    rows: Tensor  # [2 * n * max_len * per_token] cache rows
    mask: Tensor | None  # [n, 1, 1, max_len] added to scores; None: all have the same reach
    empty: Tensor | None  # [n] bool: requests of length 0; None: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefill:
    """One request with any number of query tokens."""

    start: int  # first token in the batch
    end: int
    length: int  # keys in reach of any of them
    rows: Tensor  # [2 * length * per_token] cache rows
    mask: Tensor | None  # [end - start, length] added to scores; None: plain causal


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What one step needs for all layers of one KV group, window and cache layout."""

    layout: _Layout
    key_rows: Tensor  # where this step's keys go
    value_rows: Tensor
    decodes: tuple[_DecodeBatch, ...]
    prefills: tuple[_Prefill, ...]
    complete: bool  # every token of the step belongs to one of them


class CpuAttention:
    """`AttentionBackend` for tensors in host memory."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0)  # gathered keys and values; grows, and is reused by every layer

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
        """See `AttentionBackend.attend`."""
        key = (id(meta), args.window, cache.shape, cache.stride())
        plan: _Plan | None = memo.get(key)
        if plan is None:
            plan = memo[key] = _make_plan(cache, meta, args.window, q.shape[0])
        flat = plan.layout.view(cache)
        unit = plan.layout.unit
        flat.index_copy_(0, plan.key_rows, k.reshape(-1, unit))
        flat.index_copy_(0, plan.value_rows, v.reshape(-1, unit))

        if plan.complete and len(plan.decodes) == 1 and not plan.prefills:
            return self._decode(q, flat, plan.decodes[0], args)
        out = torch.empty_like(q) if plan.complete else torch.zeros_like(q)
        for batch in plan.decodes:
            if batch.i is None:
                out[: batch.n] = self._decode(q[: batch.n], flat, batch, args)
            else:
                out.index_copy_(0, batch.i, self._decode(q.index_select(0, batch.i), flat, batch, args))
        for request in plan.prefills:
            out[request.start : request.end] = self._prefill(q[request.start : request.end], flat, request, args)
        return out

    def _decode(self, q: Tensor, flat: Tensor, batch: _DecodeBatch, args: AttentionArgs) -> Tensor:
        """[n, heads, head_dim] for q of the same shape. Query heads of one key head are rows of one product."""
        kv = self._gather(flat, batch.rows).view(2, batch.n, batch.max_len, args.num_kv_heads, args.head_dim)
        k, v = kv.transpose(2, 3).unbind()
        out = _attend(
            q.view(batch.n, args.num_kv_heads, -1, args.head_dim), k, v, mask=batch.mask, causal=False, args=args
        )
        out = out.flatten(1, 2)
        return out if batch.empty is None else out.masked_fill(batch.empty[:, None, None], 0.0)

    def _prefill(self, q: Tensor, flat: Tensor, request: _Prefill, args: AttentionArgs) -> Tensor:
        """[query_len, heads, head_dim] for q of the same shape. Key heads take the batch axis."""
        kv = self._gather(flat, request.rows).view(2, request.length, args.num_kv_heads, 1, args.head_dim)
        groups = args.num_heads // args.num_kv_heads
        k, v = kv.permute(0, 2, 3, 1, 4).expand(-1, -1, groups, -1, -1).unbind()
        q = q.view(-1, args.num_kv_heads, groups, args.head_dim).permute(1, 2, 0, 3)
        out = _attend(q, k, v, mask=request.mask, causal=request.mask is None, args=args)
        return out.permute(2, 0, 1, 3).flatten(1, 2)

    def _gather(self, flat: Tensor, rows: Tensor) -> Tensor:
        size = rows.numel() * flat.shape[1]
        if self._scratch.numel() < size or self._scratch.dtype != flat.dtype:
            with torch.inference_mode(False):  # else it could only ever be written to in inference mode
                self._scratch = torch.empty(size, dtype=flat.dtype)
        out = self._scratch[:size].view(-1, flat.shape[1])
        return torch.index_select(flat, 0, rows, out=out)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, args: AttentionArgs) -> Tensor:
    """Softmax attention over the last two axes, [..., queries, head_dim]."""
    if args.soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=args.scale)
    scores = torch.matmul(q, k.transpose(-1, -2)).float().mul_(args.scale / args.soft_cap).tanh_().mul_(args.soft_cap)
    if causal:
        mask = _causal_mask(q.shape[-2], k.shape[-2], None, scores.dtype)
    if mask is not None:
        scores += mask
    return torch.matmul(scores.softmax(-1).to(v.dtype), v)


def _make_plan(cache: Tensor, meta: CacheMeta, window: int | None, num_tokens: int) -> _Plan:
    layout = _Layout.of(cache)
    slots = meta.slot_mapping.clamp(min=0)  # negative: scratch, never the last slot
    key_rows = layout.key_rows(slots // meta.block_size, slots % meta.block_size)
    prefills = tuple(_prefills(layout, meta, window, cache.dtype))
    num_decodes = meta.num_decodes
    covered = num_decodes + sum(p.end - p.start for p in prefills)
    return _Plan(
        layout=layout,
        key_rows=key_rows,
        value_rows=key_rows + layout.values,
        decodes=tuple(_decodes(layout, meta, window, cache.dtype)),
        prefills=prefills,
        complete=covered == num_tokens,
    )


def _decodes(layout: _Layout, meta: CacheMeta, window: int | None, dtype: torch.dtype) -> list[_DecodeBatch]:
    """The first `num_decodes` requests, in batches of similar reach."""
    if meta.num_decodes == 0:
        return []
    lens_np = meta.seq_lens[: meta.num_decodes].numpy()
    reach_np = lens_np if window is None else np.minimum(lens_np, window)
    order_np = np.argsort(-reach_np, kind="stable")
    element_cost = layout.per_token * layout.unit
    splits = _split(reach_np[order_np], 0, meta.num_decodes, max(1, BATCH_COST // element_cost))
    if len(splits) == 1:
        return [_decode_batch(layout, meta, None, reach_np, dtype)]
    return [
        _decode_batch(layout, meta, torch.from_numpy(order_np[a:b]), reach_np[order_np[a:b]], dtype) for a, b in splits
    ]


def _split(reach_np: NDArray[np.int32], start: int, stop: int, cost: int) -> list[tuple[int, int]]:
    """Cut descending lengths [start, stop) where that saves most padding, as long as it saves over `cost` tokens."""
    saved_np = (reach_np[start] - reach_np[start:stop].astype(np.int64)) * np.arange(stop - start, 0, -1)
    cut = start + int(saved_np.argmax())
    if saved_np[cut - start] <= cost:
        return [(start, stop)]
    return _split(reach_np, start, cut, cost) + _split(reach_np, cut, stop, cost)


def _decode_batch(
    layout: _Layout, meta: CacheMeta, i: Tensor | None, reach_np: NDArray[np.int32], dtype: torch.dtype
) -> _DecodeBatch:
    n, max_len, min_len = len(reach_np), max(1, int(reach_np.max())), int(reach_np.min())
    table, lens = (meta.block_table[:n], meta.seq_lens[:n]) if i is None else (meta.block_table[i], meta.seq_lens[i])
    reach = torch.from_numpy(reach_np).long()[:, None]
    j = torch.arange(max_len)
    # Past its end a request repeats its last token: what lies there isn't its own and may be NaN, which no mask undoes.
    position = (lens.long()[:, None] - reach + torch.minimum(j, reach - 1)).clamp_(min=0)
    rows = layout.both_rows(table.gather(1, position // meta.block_size), position % meta.block_size)
    mask = None
    if min_len < max_len:
        # One key stays visible to a request of length 0; its row is zeroed afterwards.
        hidden = j >= reach.clamp(min=1)
        mask = torch.zeros(n, max_len, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None, None]
    return _DecodeBatch(
        i=i, n=n, max_len=max_len, rows=rows, mask=mask, empty=reach[:, 0] == 0 if min_len == 0 else None
    )


def _prefills(layout: _Layout, meta: CacheMeta, window: int | None, dtype: torch.dtype) -> list[_Prefill]:
    """All requests after the first `num_decodes` that have query tokens."""
    if meta.num_decodes == meta.num_reqs:
        return []
    starts, lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    found: list[_Prefill] = []
    for i in range(meta.num_decodes, meta.num_reqs):
        query_len, seq_len = starts[i + 1] - starts[i], lens[i]
        if query_len == 0:
            continue
        first = 0 if window is None else max(0, seq_len - query_len - (window - 1))
        length = seq_len - first
        position = torch.arange(first, seq_len)
        rows = layout.both_rows(meta.block_table[i][position // meta.block_size], position % meta.block_size)
        plain = query_len == seq_len and (window is None or window >= seq_len)
        mask = None if plain else _causal_mask(query_len, length, window, dtype)
        found.append(_Prefill(start=starts[i], end=starts[i + 1], length=length, rows=rows, mask=mask))
    return found


def _causal_mask(query_len: int, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[query_len, length]; the last query is at the last key."""
    distance = torch.arange(length - query_len, length)[:, None] - torch.arange(length)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(query_len, length, dtype=dtype).masked_fill_(hidden, float("-inf"))
