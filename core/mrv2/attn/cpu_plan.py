"""What one step of paged attention on the CPU needs, made once for all layers of one shape.

Everything here reads tensors on the host, which is where they are.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrv2.state.view import CacheMeta

BATCH_COST = 32768
"""What one more decode batch costs, in cache elements gathered and attended: measured, about 40 µs."""


class Scratch:
    """Memory for gathered keys and values. Grows, and is reused by everything that runs one after the other."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, num_rows: int, unit: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, unit], valid until the next layer is run."""
        size = num_rows * unit
        if self._memory.numel() < size or self._memory.dtype != dtype:
            with torch.inference_mode(False):  # else it could only ever be written to in inference mode
                self._memory = torch.empty(size, dtype=dtype)
        return self._memory[:size].view(-1, unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A layer's cache seen as rows of `unit` elements, so that one index reaches keys and values of any token."""

    num_rows: int
    unit: int
    num_kv_heads: int
    head_dim: int
    per_token: int  # rows of one token's keys
    per_block: int  # rows from one block to the next
    values: int  # rows from a token's keys to its values

    @classmethod
    def of(cls, cache: Tensor) -> Layout:
        """Layout of [num_blocks, 2, block_size, num_kv_heads, head_dim], its last three axes contiguous."""
        num_blocks, _, block_size, num_kv_heads, head_dim = cache.shape
        width, (block_stride, kv_stride) = num_kv_heads * head_dim, cache.stride()[:2]
        unit = math.gcd(width, block_stride, kv_stride)
        extent = (num_blocks - 1) * block_stride + kv_stride + block_size * width
        return cls(
            num_rows=extent // unit,
            unit=unit,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            per_token=width // unit,
            per_block=block_stride // unit,
            values=kv_stride // unit,
        )

    def view(self, cache: Tensor) -> Tensor:
        """The cache as [num_rows, unit]; with padded pages, rows of padding lie between."""
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
class DecodeBatch:
    """Requests with one query token, padded to the longest reach among them."""

    i: Tensor | None  # [n] batch positions, which are token positions too; None: the first n
    n: int
    rows: Tensor  # [2 * n * max_len * per_token] cache rows
    scratch: Tensor  # [len(rows), unit] where they are gathered
    k: Tensor  # [n, kv_heads, max_len, head_dim] the same memory
    v: Tensor
    mask: Tensor | None  # [n, 1, 1, max_len] added to scores; None: all have the same reach
    empty: Tensor | None  # [n] bool: requests of length 0; None: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One request with any number of query tokens."""

    start: int  # first token in the batch
    end: int
    rows: Tensor  # [2 * length * per_token] cache rows of the keys in reach of any query
    scratch: Tensor  # [len(rows), unit] where they are gathered
    k: Tensor  # [kv_heads, 1, length, head_dim] the same memory
    v: Tensor
    mask: Tensor | None  # [end - start, length] added to scores; None: plain causal


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDecode:
    """A step that is one request's one token, for NumPy; the same memory as its `DecodeBatch`."""

    new_rows_np: NDArray[np.int64]  # [2 * per_token] where its keys and values go
    rows_np: NDArray[np.int64]
    scratch_np: NDArray[np.float32]
    k: Tensor
    v: Tensor


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one step needs for all layers of one KV group, window and cache layout."""

    key_rows: Tensor  # where this step's keys go
    value_rows: Tensor
    decodes: tuple[DecodeBatch, ...]
    prefills: tuple[Prefill, ...]
    complete: bool  # every token of the step belongs to one of them

    @functools.cached_property
    def one(self) -> OneDecode | None:
        """The step, if it is one request's one token in float32."""
        if not self.complete or self.prefills or len(self.decodes) != 1:
            return None
        batch = self.decodes[0]
        if batch.n != 1 or batch.empty is not None or batch.scratch.dtype is not torch.float32:
            return None
        return OneDecode(
            new_rows_np=torch.cat((self.key_rows, self.value_rows)).numpy(),
            rows_np=batch.rows.numpy(),
            scratch_np=batch.scratch.numpy(),
            k=batch.k,
            v=batch.v,
        )


def make_plan(
    layout: Layout, meta: CacheMeta, window: int | None, *, num_tokens: int, dtype: torch.dtype, scratch: Scratch
) -> Plan:
    """Indices, masks and scratch of one step, for layers with this cache layout and window."""
    slots = meta.slot_mapping.clamp(min=0)  # negative: scratch, never the last slot
    key_rows = layout.key_rows(slots // meta.block_size, slots % meta.block_size)
    prefills = tuple(_prefills(layout, meta, window, dtype, scratch))
    num_decodes = meta.num_decodes
    covered = num_decodes + sum(p.end - p.start for p in prefills)
    return Plan(
        key_rows=key_rows,
        value_rows=key_rows + layout.values,
        decodes=tuple(_decodes(layout, meta, window, dtype, scratch)),
        prefills=prefills,
        complete=covered == num_tokens,
    )


def _decodes(
    layout: Layout, meta: CacheMeta, window: int | None, dtype: torch.dtype, scratch: Scratch
) -> list[DecodeBatch]:
    """The first `num_decodes` requests, in batches of similar reach."""
    if meta.num_decodes == 0:
        return []
    lens_np = meta.seq_lens[: meta.num_decodes].numpy()
    reach_np = lens_np if window is None else np.minimum(lens_np, window)
    order_np = np.argsort(-reach_np, kind="stable")
    element_cost = layout.per_token * layout.unit
    splits = _split(reach_np[order_np], 0, meta.num_decodes, max(1, BATCH_COST // element_cost))
    if len(splits) == 1:
        return [_decode_batch(layout, meta, None, reach_np, dtype, scratch)]
    return [
        _decode_batch(layout, meta, torch.from_numpy(order_np[a:b]), reach_np[order_np[a:b]], dtype, scratch)
        for a, b in splits
    ]


def _split(reach_np: NDArray[np.int32], start: int, stop: int, cost: int) -> list[tuple[int, int]]:
    """Cut descending lengths [start, stop) where that saves most padding, as long as it saves over `cost` tokens."""
    saved_np = (reach_np[start] - reach_np[start:stop].astype(np.int64)) * np.arange(stop - start, 0, -1)
    cut = start + int(saved_np.argmax())
    if saved_np[cut - start] <= cost:
        return [(start, stop)]
    return _split(reach_np, start, cut, cost) + _split(reach_np, cut, stop, cost)


def _decode_batch(
    layout: Layout,
    meta: CacheMeta,
    i: Tensor | None,
    reach_np: NDArray[np.int32],
    dtype: torch.dtype,
    scratch: Scratch,
) -> DecodeBatch:
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
    space = scratch.take(len(rows), layout.unit, dtype)
    k, v = space.view(2, n, max_len, layout.num_kv_heads, layout.head_dim).transpose(2, 3).unbind()
    empty = reach[:, 0] == 0 if min_len == 0 else None
    return DecodeBatch(i=i, n=n, rows=rows, scratch=space, k=k, v=v, mask=mask, empty=empty)


def _prefills(
    layout: Layout, meta: CacheMeta, window: int | None, dtype: torch.dtype, scratch: Scratch
) -> list[Prefill]:
    """All requests after the first `num_decodes` that have query tokens."""
    if meta.num_decodes == meta.num_reqs:
        return []
    starts, lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    found: list[Prefill] = []
    for i in range(meta.num_decodes, meta.num_reqs):
        query_len, seq_len = starts[i + 1] - starts[i], lens[i]
        if query_len == 0:
            continue
        first = 0 if window is None else max(0, seq_len - query_len - (window - 1))
        length = seq_len - first
        position = torch.arange(first, seq_len)
        rows = layout.both_rows(meta.block_table[i][position // meta.block_size], position % meta.block_size)
        plain = query_len == seq_len and (window is None or window >= seq_len)
        mask = None if plain else causal_mask(query_len, length, window, dtype)
        space = scratch.take(len(rows), layout.unit, dtype)
        k, v = space.view(2, length, layout.num_kv_heads, 1, layout.head_dim).permute(0, 2, 3, 1, 4).unbind()
        found.append(Prefill(start=starts[i], end=starts[i + 1], rows=rows, scratch=space, k=k, v=v, mask=mask))
    return found


def causal_mask(query_len: int, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[query_len, length]; the last query is at the last key."""
    distance = torch.arange(length - query_len, length)[:, None] - torch.arange(length)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(query_len, length, dtype=dtype).masked_fill_(hidden, float("-inf"))
