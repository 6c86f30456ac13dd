"""Paged attention of requests with one query token: keys are split among programs, flash-decoding style.

The program that finishes a request's last split combines them all, so one launch does everything.
"""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrv2.kernels.attention_tile import attend_tile, score_factors
from mrv2.kernels.decode_splits import DecodeWorkspace, choose_splits, choose_tile
from mrv2.kernels.dependent import await_previous, dependent_options
from mrv2.kernels.paged_attention_ref import attend_paged_ref
from mrv2.kernels.ready_heads import ready_heads
from mrv2.kernels.registry import jit, kernel, tl, triton


def decode_attention_ref(
    *,
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    num_decodes: int,
    max_seq_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    workspace: DecodeWorkspace,
    out: Tensor,
) -> None:
    """Torch twin of `decode_attention`."""
    starts = torch.arange(num_decodes, device=q.device)
    out[:num_decodes] = attend_paged_ref(
        q=q[:num_decodes],
        cache=cache,
        block_table=block_table[:num_decodes],
        seq_lens=seq_lens[:num_decodes],
        starts=starts,
        query_lens=torch.ones_like(starts),
        max_query_len=1,
        max_seq_len=max_seq_len,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )


@kernel(twin=decode_attention_ref)
def decode_attention(
    *,
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    num_decodes: int,
    max_seq_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    workspace: DecodeWorkspace,
    out: Tensor,
) -> None:
    """Attention of the first `num_decodes` requests, whose query tokens are the first `num_decodes` tokens.

    Reads nothing on the host. What a request's table and length don't name, and what lies before its window,
    isn't loaded. Softmax is computed in float32, products in the cache's dtype with float32 sums.

    Args:
        q: [num_tokens, num_heads, head_dim]; a head is contiguous.
        cache: [num_blocks, 2, block_size, num_kv_heads, head_dim], keys then values, the step's own included;
            the last three axes are contiguous.
        block_table: [num_reqs, max_blocks] int32.
        seq_lens: [num_reqs] int32, length after this step; 0 gives zeros.
        num_decodes: at least one.
        max_seq_len: upper bound of `seq_lens`; what the number of splits is chosen from.
        scale: of the scores.
        window: tokens in reach, the current one included; None: all.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap); None: they stay.
        workspace: for partial results.
        out: out, [num_tokens, num_heads, head_dim], contiguous; the first `num_decodes` tokens are written.
    """
    launch_decode(
        q,
        None,
        cache=cache,
        block_table=block_table,
        seq_lens=seq_lens,
        num_decodes=num_decodes,
        max_seq_len=max_seq_len,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        workspace=workspace,
        out=out,
    )


@dataclass(frozen=True, slots=True)
class Fresh:
    """What makes queries, keys and values of a projection; see `attend_projected`."""

    q_weight: Tensor | None
    k_weight: Tensor | None
    q_eps: float
    k_eps: float
    cos: Tensor
    sin: Tensor
    slot_mapping: Tensor


def launch_decode(
    q: Tensor,
    fresh: Fresh | None,
    *,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    num_decodes: int,
    max_seq_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    workspace: DecodeWorkspace,
    out: Tensor,
) -> None:
    """The kernel, of `q` as `decode_attention` takes it, or with `fresh` of a projection [num_tokens, all heads]."""
    num_heads, head_dim = out.shape[1:]
    block_size, kv_heads = cache.shape[2:4]
    group = num_heads // kv_heads
    pairs, processors = num_decodes * kv_heads, workspace.processors(q.device)
    reach = max_seq_len if window is None else min(max_seq_len, window)
    tile = workspace.tile or choose_tile(head_dim, cache.dtype, pairs=pairs, reach=reach, processors=processors)
    num_splits, min_split = workspace.splits or choose_splits(pairs, reach, processors)
    partials = workspace.partials(q.device, group, head_dim)
    factor, cap = score_factors(scale, soft_cap)
    assert fresh is None or (fresh.cos.is_contiguous() and fresh.sin.is_contiguous())
    q_weight = None if fresh is None else fresh.q_weight
    k_weight = None if fresh is None else fresh.k_weight
    # Splits last: those that a request is too short for come after all that have work, which is then spread evenly.
    _decode_attention_kernel[(kv_heads, num_decodes, num_splits)](
        q,
        cache,
        block_table,
        seq_lens,
        out,
        partials.acc,
        partials.stats,
        partials.arrived,
        q.stride(0),
        head_dim if fresh is not None else q.stride(1),
        cache.stride(0),
        cache.stride(1),
        block_table.stride(0),
        factor,
        cap,
        num_splits,
        min_split,
        q if q_weight is None else q_weight,
        q if k_weight is None else k_weight,
        0.0 if fresh is None else fresh.q_eps,
        0.0 if fresh is None else fresh.k_eps,
        q if fresh is None else fresh.cos,
        q if fresh is None else fresh.sin,
        q if fresh is None else fresh.slot_mapping,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        SOFT_CAP=soft_cap is not None,
        FRESH=fresh is not None,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        ROTARY_DIM=0 if fresh is None else fresh.cos.shape[-1],
        BLOCK_N=tile.keys,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        COMBINE=32 if head_dim <= 128 else 16,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_options(q),
    )


@jit(do_not_specialize=["table_stride", "num_splits", "min_split"])
def _decode_attention_kernel(
    q,
    cache,
    block_table,
    seq_lens,
    out,
    partial_acc,
    partial_stats,
    arrived,
    q_token_stride,
    q_head_stride,
    block_stride,
    kv_stride,
    table_stride,
    scale,
    cap,
    num_splits,
    min_split,
    q_weight,
    k_weight,
    q_eps,
    k_eps,
    cos,
    sin,
    slot_mapping,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FRESH: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    COMBINE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    await_previous(DEPENDENT)
    kv_head = tl.program_id(0)
    i = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens + i)
    lo = 0
    if WINDOW > 0:
        lo = tl.maximum(seq_len - WINDOW, 0)
    first = lo // BLOCK_N * BLOCK_N
    # A request's own length is split, not the bound: whatever the bound, all splits get the same work.
    size = tl.cdiv(tl.cdiv(seq_len - first, num_splits), BLOCK_N) * BLOCK_N
    size = tl.maximum(size, min_split)
    used = tl.cdiv(seq_len - first, size)
    begin = first + split * size
    if (split == 0) | (begin < seq_len):
        g = tl.arange(0, BLOCK_G)
        d = tl.arange(0, BLOCK_D)
        real = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
        head = kv_head * GROUP + g
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        top = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        at = q + i * q_token_stride
        cached = seq_len
        if FRESH:
            mine = g < GROUP
            queries = ready_heads(at, head, q_weight, q_eps, cos, sin, i, mine, HEAD_DIM, BLOCK_D, ROTARY_DIM, Q_NORM)
            cached = seq_len - 1
            if (begin < seq_len) & (begin + size >= seq_len):  # the step's own key and value are this program's
                own = tl.zeros([1], tl.int32) + (GROUP * KV_HEADS + kv_head)
                k = ready_heads(at, own, k_weight, k_eps, cos, sin, i, own >= 0, HEAD_DIM, BLOCK_D, ROTARY_DIM, K_NORM)
                values = at + (own + KV_HEADS)[:, None] * HEAD_DIM + d[None, :]
                v = tl.load(values, mask=(d < HEAD_DIM)[None, :], other=0.0)
                slot = tl.load(slot_mapping + i)
                target = cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (KV_HEADS * HEAD_DIM)
                target = target + kv_head * HEAD_DIM + d[None, :]
                kept = (d < tl.where(slot >= 0, HEAD_DIM, 0))[None, :]
                tl.store(target, k, mask=kept)
                tl.store(target + kv_stride, v, mask=kept)
                # A sum of this and nothing: rounded in every lane, before lanes add what others have. Plain products
                # would be fused into those sums, and lanes that hold the same row differ in its last bit.
                nothing = k.to(tl.float32) * 0.0
                top = tl.sum(tl.fma(queries.to(tl.float32), k.to(tl.float32), nothing), 1) * scale
                if SOFT_CAP:
                    top = cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * top)))
                total = tl.full([BLOCK_G], 1.0, tl.float32)
                acc = acc + v.to(tl.float32)
        else:
            queries = tl.load(at + head[:, None] * q_head_stride + d[None, :], mask=real, other=0.0)
        q_pos = tl.zeros([BLOCK_G], tl.int32) + (cached - 1)
        end = tl.minimum(begin + size, cached)
        for start in range(begin, end, BLOCK_N):
            acc, top, total = attend_tile(
                queries,
                q_pos,
                acc,
                top,
                total,
                start,
                lo,
                end,
                cache + kv_head * HEAD_DIM,
                block_stride,
                kv_stride,
                block_table + i * table_stride,
                scale,
                cap,
                KV_HEADS=KV_HEADS,
                HEAD_DIM=HEAD_DIM,
                BLOCK_SIZE=BLOCK_SIZE,
                WINDOW=WINDOW - FRESH if WINDOW > 0 else 0,  # one less is cached
                SOFT_CAP=SOFT_CAP,
                MASKED=True,
                BLOCK_N=BLOCK_N,
                BLOCK_D=BLOCK_D,
            )
        o = out + (i * KV_HEADS + kv_head) * (GROUP * HEAD_DIM) + g[:, None] * HEAD_DIM + d[None, :]
        if used <= 1:
            total = tl.where(total == 0.0, 1.0, total)  # an empty request: zeros
            tl.store(o, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
        else:
            pair = (i * KV_HEADS + kv_head).to(tl.int32)
            inner = g[:, None] * HEAD_DIM + d[None, :]
            slot = pair * num_splits + split
            tl.store(partial_acc + slot * (GROUP * HEAD_DIM) + inner, acc, mask=real)
            tl.store(partial_stats + slot * (GROUP * 2) + g * 2, top, mask=g < GROUP)
            tl.store(partial_stats + slot * (GROUP * 2) + g * 2 + 1, total, mask=g < GROUP)
            tl.debug_barrier()  # all threads' stores come before the one thread's release
            if tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu") == used - 1:
                tl.store(arrived + pair, 0)  # for the next launch, replays included
                s = tl.arange(0, COMBINE)
                for h in range(GROUP):
                    best = tl.full([], float("-inf"), tl.float32)
                    whole = tl.full([], 0.0, tl.float32)
                    mean = tl.zeros([BLOCK_D], tl.float32)
                    for first_split in range(0, used, COMBINE):
                        row = (pair * num_splits + first_split + s) * GROUP + h
                        there = first_split + s < used
                        # Past the first-level cache, which other programs' stores don't reach.
                        tops = tl.load(partial_stats + row * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
                        totals = tl.load(partial_stats + row * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
                        accs = tl.load(
                            partial_acc + row[:, None] * HEAD_DIM + d[None, :],
                            mask=there[:, None] & (d < HEAD_DIM)[None, :],
                            other=0.0,
                            cache_modifier=".cg",
                        )
                        new_best = tl.maximum(best, tl.max(tops, 0))
                        shrink, weights = tl.exp2(best - new_best), tl.exp2(tops - new_best)
                        mean = mean * shrink + tl.sum(accs * weights[:, None], 0)
                        whole = whole * shrink + tl.sum(totals * weights, 0)
                        best = new_best
                    target = out + (i * KV_HEADS + kv_head) * (GROUP * HEAD_DIM) + h * HEAD_DIM + d
                    tl.store(target, (mean / whole).to(out.dtype.element_ty), mask=d < HEAD_DIM)
