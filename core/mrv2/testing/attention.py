"""Ragged batches for paged attention in a hostile cache, and what the answer is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrv2.attn.backend import AttentionArgs
from mrv2.state.view import CacheMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """One layer's arguments for `AttentionBackend.attend`, and all there is to know about its requests."""

    args: AttentionArgs
    meta: CacheMeta
    cache: Tensor  # [num_blocks, 2, block_size, num_kv_heads, head_dim], without the step's own tokens
    q: Tensor  # [num_tokens, num_heads, head_dim]
    k: Tensor  # [num_tokens, num_kv_heads, head_dim]
    v: Tensor  # as `k`
    history: Sequence[tuple[Tensor, Tensor]]  # keys and values of each request, [len, num_kv_heads, head_dim]

    def to(self, to: torch.dtype | torch.device) -> PagedBatch:
        """Values in another dtype, rounded, or everything on another device; strides of the cache are kept."""
        cache = torch.empty_strided(
            self.cache.shape,
            self.cache.stride(),
            dtype=to if isinstance(to, torch.dtype) else self.cache.dtype,
            device=to if isinstance(to, torch.device) else self.cache.device,
        ).copy_(self.cache)
        meta = self.meta
        if isinstance(to, torch.device):
            meta = dataclasses.replace(
                meta,
                query_start_loc=meta.query_start_loc.to(to),
                seq_lens=meta.seq_lens.to(to),
                slot_mapping=meta.slot_mapping.to(to),
                block_table=meta.block_table.to(to),
            )
        return PagedBatch(
            args=self.args,
            meta=meta,
            cache=cache,
            q=self.q.to(to),
            k=self.k.to(to),
            v=self.v.to(to),
            history=[(k.to(to), v.to(to)) for k, v in self.history],
        )


def make_paged_batch(
    *,
    lens: Sequence[tuple[int, int]],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    window: int | None = None,
    soft_cap: float | None = None,
    block_size: int = 4,
    padding: tuple[int, int] = (0, 0),
    page: tuple[int, int] = (0, 0),
    seed: int = 0,
) -> PagedBatch:
    """A float32 batch on the CPU. Slots that no request can see hold NaN.

    Those are scratch, unowned blocks, tails of blocks, and what lies before the window. Columns of a table
    that aren't in use name somebody else's block.

    Args:
        lens: (computed tokens, query length) of each request; single tokens first, to count as decodes.
        num_heads: query heads.
        num_kv_heads: key heads, which divide them.
        head_dim: any.
        window: as in `AttentionArgs`.
        soft_cap: as in `AttentionArgs`.
        block_size: any.
        padding: requests, and tokens, past the real ones.
        page: elements of padding in the cache after a block's keys, and after its values.
        seed: of everything random.
    """
    g = torch.Generator().manual_seed(seed)
    counts = [-(-(c + n) // block_size) for c, n in lens]
    order = (torch.randperm(sum(counts), generator=g) + 1).tolist()
    num_blocks = len(order) + 2
    cache = _nan_cache(num_blocks, block_size, num_kv_heads, head_dim, page)
    table = torch.full((len(lens) + padding[0], max(counts) + 1), num_blocks - 1, dtype=torch.int32)
    table[len(lens) :] = 0
    history, slots = [], []
    for i, (computed, n) in enumerate(lens):
        blocks, order = torch.tensor(order[: counts[i]]), order[counts[i] :]
        table[i, : len(blocks)] = blocks
        k, v = torch.randn(2, computed + n, num_kv_heads, head_dim, generator=g)
        history.append((k, v))
        first = 0 if window is None else max(0, computed - window + 1)
        p = torch.arange(first, computed)
        cache[blocks[p // block_size], :, p % block_size] = torch.stack((k[p], v[p]), 1)
        table[i, : first // block_size] = 0  # such blocks are given back
        p = torch.arange(computed, computed + n)
        slots.append(blocks[p // block_size] * block_size + p % block_size)
    slots.append(torch.full((padding[1],), -1))
    queries = [n for _, n in lens]
    slot_mapping = torch.cat(slots)
    pad = torch.full((padding[1], num_kv_heads, head_dim), float("nan"))
    new = [torch.cat([*(h[kv][c:] for h, (c, _) in zip(history, lens, strict=True)), pad]) for kv in (0, 1)]
    return PagedBatch(
        args=AttentionArgs(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            scale=head_dim**-0.5,
            soft_cap=soft_cap,
        ),
        meta=CacheMeta(
            num_reqs=len(table),
            num_tokens=len(slot_mapping),
            max_query_len=max(queries) + 1,
            max_seq_len=max(c + n for c, n in lens) + 3,
            num_decodes=sum(n == 1 for n in queries),
            query_start_loc=torch.tensor([0, *queries] + [0] * padding[0]).cumsum(0).int(),
            seq_lens=torch.tensor([c + n for c, n in lens] + [0] * padding[0], dtype=torch.int32),
            slot_mapping=slot_mapping,
            block_table=table,
            block_size=block_size,
        ),
        cache=cache,
        q=torch.randn(len(slot_mapping), num_heads, head_dim, generator=g),
        k=new[0],
        v=new[1],
        history=history,
    )


def _nan_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, page: tuple[int, int]) -> Tensor:
    kv_stride = block_size * num_kv_heads * head_dim + page[0]
    memory = torch.full((num_blocks, 2 * kv_stride + page[1]), float("nan"))
    return memory.as_strided(
        (num_blocks, 2, block_size, num_kv_heads, head_dim),
        (memory.stride(0), kv_stride, num_kv_heads * head_dim, head_dim, 1),
    )


def attend_naive(batch: PagedBatch) -> Tensor:
    """[num_tokens, num_heads, head_dim] float64: softmax over each request's own keys, no cache involved."""
    args = batch.args
    out = torch.zeros(batch.q.shape, dtype=torch.float64, device=batch.q.device)
    start = 0
    lens = (batch.meta.query_start_loc[1:] - batch.meta.query_start_loc[:-1]).tolist()
    for (k, v), n in zip(batch.history, lens, strict=False):
        keys, values = (x.double().repeat_interleave(args.num_heads // args.num_kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", batch.q[start : start + n].double(), keys) * args.scale
        if args.soft_cap is not None:
            scores = args.soft_cap * torch.tanh(scores / args.soft_cap)
        k_pos = torch.arange(len(k), device=k.device)
        ahead = k_pos - k_pos[len(k) - n :, None]  # [queries, keys]
        hidden = ahead > 0 if args.window is None else (ahead > 0) | (ahead <= -args.window)
        scores.masked_fill_(hidden, float("-inf"))
        out[start : start + n] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        start += n
    return out
