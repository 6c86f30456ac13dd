"""Paged attention on the CPU, where reading a tensor on the host costs nothing.

Keys and values of a request are gathered token by token into contiguous scratch and handed to PyTorch's
flash kernel. Requests with one query token run as one batch, or a few where lengths differ much; the others
one by one. Indices and masks are made once per step (`cpu_plan`) and shared by all layers of one shape.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mrv2.attn.backend import AttentionArgs, StepMemo
from mrv2.attn.cpu_plan import DecodeBatch, Layout, Plan, Prefill, Scratch, causal_mask, make_plan
from mrv2.state.view import CacheMeta


class CpuAttention:
    """`AttentionBackend` for tensors in host memory. Keeps the caches it has seen: use one per runner."""

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._layouts: dict[Layout, Layout] = {}  # one object for equal layouts
        self._views: dict[int, tuple[Tensor, Layout, Tensor]] = {}  # cache id to cache, layout, rows

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        cache: Tensor,
        meta: CacheMeta,
        args: AttentionArgs,
        memo: StepMemo,
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        flat, plan = self._plan(cache, meta, args.window, memo, num_tokens=q.shape[0], dtype=q.dtype)
        unit = flat.shape[1]
        if k is not None and v is not None:
            flat.index_copy_(0, plan.key_rows, k.reshape(-1, unit))
            flat.index_copy_(0, plan.value_rows, v.reshape(-1, unit))

        if plan.complete and len(plan.decodes) == 1 and not plan.prefills:
            return _decode(q, flat, plan.decodes[0], args)
        out = torch.empty_like(q) if plan.complete else torch.zeros_like(q)
        for batch in plan.decodes:
            if batch.i is None:
                out[: batch.n] = _decode(q[: batch.n], flat, batch, args)
            else:
                out.index_copy_(0, batch.i, _decode(q.index_select(0, batch.i), flat, batch, args))
        for request in plan.prefills:
            out[request.start : request.end] = _prefill(q[request.start : request.end], flat, request, args)
        return out

    def attend_one(
        self,
        q: Tensor,
        kv_np: NDArray[np.float32],
        *,
        cache: Tensor,
        meta: CacheMeta,
        args: AttentionArgs,
        memo: StepMemo,
    ) -> Tensor:
        """`attend` for one token in float32, [1, num_heads * head_dim].

        Args:
            q: [1, num_kv_heads, query heads of each, head_dim].
            kv_np: [2, num_kv_heads * head_dim] its keys and values.
            cache: as in `attend`.
            meta: as in `attend`.
            args: as in `attend`.
            memo: as in `attend`.
        """
        flat, plan = self._plan(cache, meta, args.window, memo, num_tokens=1, dtype=torch.float32)
        one = plan.one
        if one is None:  # no request's, or the only one of its prompt
            k, v = torch.from_numpy(kv_np).view(2, 1, args.num_kv_heads, args.head_dim)
            q = q.view(1, args.num_heads, args.head_dim)
            return self.attend(q, k, v, cache=cache, meta=meta, args=args, memo=memo).view(1, -1)
        flat_np = flat.numpy()
        flat_np[one.new_rows_np] = kv_np.reshape(-1, flat_np.shape[1])
        flat_np.take(one.rows_np, 0, one.scratch_np, "clip")
        return _attend(q, one.k, one.v, mask=None, causal=False, args=args).view(1, -1)

    def _plan(
        self, cache: Tensor, meta: CacheMeta, window: int | None, memo: StepMemo, *, num_tokens: int, dtype: torch.dtype
    ) -> tuple[Tensor, Plan]:
        """The cache's rows, and what this step does with caches of this shape."""
        _, layout, flat = self._views.get(id(cache)) or self._see(cache)
        key = (id(meta), window, id(layout))
        plan: Plan | None = memo.get(key)
        if plan is None:
            plan = make_plan(layout, meta, window, num_tokens=num_tokens, dtype=dtype, scratch=self._scratch)
            memo[key] = plan
        return flat, plan

    def _see(self, cache: Tensor) -> tuple[Tensor, Layout, Tensor]:
        """The cache's layout and rows. Keeping `cache` keeps its id from being given to another tensor."""
        layout = Layout.of(cache)
        layout = self._layouts.setdefault(layout, layout)
        seen = self._views[id(cache)] = (cache, layout, layout.view(cache))
        return seen


def _decode(q: Tensor, flat: Tensor, batch: DecodeBatch, args: AttentionArgs) -> Tensor:
    """[n, heads, head_dim] for q of the same shape. Query heads of one key head are rows of one product."""
    torch.index_select(flat, 0, batch.rows, out=batch.scratch)
    q = q.view(batch.n, args.num_kv_heads, -1, args.head_dim)
    out = _attend(q, batch.k, batch.v, mask=batch.mask, causal=False, args=args).flatten(1, 2)
    return out if batch.empty is None else out.masked_fill(batch.empty[:, None, None], 0.0)


def _prefill(q: Tensor, flat: Tensor, request: Prefill, args: AttentionArgs) -> Tensor:
    """[query_len, heads, head_dim] for q of the same shape. Key heads take the batch axis."""
    torch.index_select(flat, 0, request.rows, out=request.scratch)
    groups = args.num_heads // args.num_kv_heads
    q = q.view(-1, args.num_kv_heads, groups, args.head_dim).permute(1, 2, 0, 3)
    k, v = request.k.expand(-1, groups, -1, -1), request.v.expand(-1, groups, -1, -1)
    out = _attend(q, k, v, mask=request.mask, causal=request.mask is None, args=args)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, args: AttentionArgs) -> Tensor:
    """Softmax attention over the last two axes, [..., queries, head_dim]."""
    if args.soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=args.scale)
    scores = torch.matmul(q, k.transpose(-1, -2)).float().mul_(args.scale / args.soft_cap).tanh_().mul_(args.soft_cap)
    if causal:
        mask = causal_mask(q.shape[-2], k.shape[-2], None, scores.dtype)
    if mask is not None:
        scores += mask
    return torch.matmul(scores.softmax(-1).to(v.dtype), v)
