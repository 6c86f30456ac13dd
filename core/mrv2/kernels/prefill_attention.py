"""Paged attention of requests with any number of query tokens: chunks of prompts, and drafts to verify."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrv2.kernels.attention_tile import attend_tile, score_factors
from mrv2.kernels.paged_attention_ref import attend_paged_ref
from mrv2.kernels.registry import jit, kernel, tl, triton


def prefill_attention_ref(
    *,
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_decodes: int,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    out: Tensor,
) -> None:
    """Torch twin of `prefill_attention`."""
    every = attend_paged_ref(
        q=q,
        cache=cache,
        block_table=block_table,
        seq_lens=seq_lens,
        starts=query_start_loc[:-1],
        query_lens=query_start_loc[1:] - query_start_loc[:-1],
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )
    out[num_decodes:] = every[num_decodes:]


@kernel(twin=prefill_attention_ref)
def prefill_attention(
    *,
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_decodes: int,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    out: Tensor,
) -> None:
    """Causal attention of all requests but the first `num_decodes`, whose query tokens are the last ones.

    Query j of a request sits at position seq_len - query_len + j. Reads nothing on the host; what a request
    can't see isn't loaded. Softmax is computed in float32, products in the cache's dtype with float32 sums.

    Args:
        q: [num_tokens, num_heads, head_dim], more than `num_decodes` tokens; a head is contiguous.
        cache: [num_blocks, 2, block_size, num_kv_heads, head_dim], keys then values, the step's own included;
            the last three axes are contiguous.
        block_table: [num_reqs, max_blocks] int32.
        query_start_loc: [num_reqs + 1] int32.
        seq_lens: [num_reqs] int32, length after this step; 0 gives zeros.
        num_decodes: requests left out, each with one token.
        max_query_len: upper bound; only the twin needs it.
        max_seq_len: upper bound; only the twin needs it.
        scale: of the scores.
        window: tokens in reach, the current one included; None: all.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap); None: they stay.
        out: out, [num_tokens, num_heads, head_dim], contiguous; all but the first `num_decodes` tokens are
            written, zeros where no request owns them.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_reqs = seq_lens.shape[0]
    block_size, kv_heads = cache.shape[2:4]
    group = num_heads // kv_heads
    tile = choose_tile(head_dim, cache.dtype, num_rows=(num_tokens - num_decodes) * num_heads)
    queries = max(1, tile.rows // group)
    # Each request fills all its tiles but one; so does the padding, the last "request".
    num_tiles = (num_tokens - num_decodes) // queries + num_reqs - num_decodes + 1
    factor, cap = score_factors(scale, soft_cap)
    _prefill_attention_kernel[(num_tiles, kv_heads)](
        q,
        cache,
        block_table,
        query_start_loc,
        seq_lens,
        out,
        q.stride(0),
        q.stride(1),
        cache.stride(0),
        cache.stride(1),
        block_table.stride(0),
        factor,
        cap,
        num_tokens,
        num_reqs,
        num_decodes,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        SOFT_CAP=soft_cap is not None,
        QUERIES=queries,
        BLOCK_M=max(tile.rows, triton.next_power_of_2(group)),
        BLOCK_N=tile.keys,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@dataclass(frozen=True, slots=True)
class Tile:
    """How one program works: query rows (tokens times query heads of one key head), keys per iteration, and
    what the compiler is told.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def choose_tile(head_dim: int, dtype: torch.dtype, *, num_rows: int) -> Tile:
    """By dtype, head size, and query rows there are in the step: each kernel is compiled at most twice."""
    wide = triton.next_power_of_2(head_dim)
    if dtype == torch.float32:  # no matrix units at this precision: small, to stay in registers
        if wide <= 64:
            return Tile(rows=32, keys=32, num_warps=4, num_stages=2)
        return Tile(rows=16, keys=16, num_warps=8, num_stages=2)
    if wide <= 128:
        # Measured on an H200 at head_dim 128. 4096 tokens, 16 heads: 276 TFLOP/s, and 221 with twice the keys,
        # which leave room for one program on a processor. 512 tokens, 7680 before them: 167, and 211, since
        # there is one program for each processor at most.
        if num_rows <= 64 * 132:
            return Tile(rows=64, keys=128, num_warps=4, num_stages=3)
        return Tile(rows=64, keys=64, num_warps=4, num_stages=2)
    return Tile(rows=64, keys=32, num_warps=4, num_stages=2)


@jit()
def _find_request(tile, query_start_loc, num_reqs, num_decodes, QUERIES: tl.constexpr):
    # The last request whose tiles start at or before `tile`. Request num_reqs is the padding. A request's
    # first tile is far enough from its predecessor's that the predecessor's queries fit between.
    low = num_decodes
    high = num_reqs
    while low < high:
        middle = (low + high + 1) // 2
        begin = tl.maximum(tl.load(query_start_loc + middle), num_decodes)
        if (begin - num_decodes) // QUERIES + middle - num_decodes <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@jit(do_not_specialize=["table_stride", "num_tokens", "num_reqs", "num_decodes"])
def _prefill_attention_kernel(
    q,
    cache,
    block_table,
    query_start_loc,
    seq_lens,
    out,
    q_token_stride,
    q_head_stride,
    block_stride,
    kv_stride,
    table_stride,
    scale,
    cap,
    num_tokens,
    num_reqs,
    num_decodes,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a request's last tile sees most keys: start it first
    kv_head = tl.program_id(1)
    i = _find_request(tile, query_start_loc, num_reqs, num_decodes, QUERIES)
    begin = tl.maximum(tl.load(query_start_loc + i), num_decodes)
    padding = i == num_reqs
    query_len = tl.load(query_start_loc + i + 1, mask=i < num_reqs, other=0) - begin
    query_len = tl.where(padding, num_tokens - begin, query_len)
    seq_len = tl.load(seq_lens + i, mask=i < num_reqs, other=0)
    first = (tile - (begin - num_decodes) // QUERIES - (i - num_decodes)) * QUERIES
    if first < query_len:
        row = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        j = first + row // GROUP
        real = ((row < QUERIES * GROUP) & (j < query_len))[:, None] & (d < HEAD_DIM)[None, :]
        token = (begin + j).to(tl.int64)
        head = kv_head * GROUP + row % GROUP
        queries = tl.load(
            q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + d[None, :], mask=real, other=0.0
        )
        q_pos = seq_len - query_len + j
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        first_pos = seq_len - query_len + first
        hi = tl.minimum(first_pos + QUERIES, seq_len)
        lo = 0
        if WINDOW > 0:
            lo = tl.maximum(first_pos - WINDOW + 1, 0)
        begin_n = lo // BLOCK_N * BLOCK_N
        # Up to here every query sees every key, unless windows end in between.
        middle = tl.maximum((first_pos + 1) // BLOCK_N * BLOCK_N, begin_n)
        table = block_table + i.to(tl.int64) * table_stride
        for start in range(begin_n, middle, BLOCK_N):
            acc, top, total = attend_tile(
                queries,
                q_pos,
                acc,
                top,
                total,
                start,
                lo,
                hi,
                cache + kv_head * HEAD_DIM,
                block_stride,
                kv_stride,
                table,
                scale,
                cap,
                KV_HEADS=KV_HEADS,
                HEAD_DIM=HEAD_DIM,
                BLOCK_SIZE=BLOCK_SIZE,
                WINDOW=WINDOW,
                SOFT_CAP=SOFT_CAP,
                MASKED=WINDOW > 0,
                BLOCK_N=BLOCK_N,
                BLOCK_D=BLOCK_D,
            )
        for start in range(middle, hi, BLOCK_N):
            acc, top, total = attend_tile(
                queries,
                q_pos,
                acc,
                top,
                total,
                start,
                lo,
                hi,
                cache + kv_head * HEAD_DIM,
                block_stride,
                kv_stride,
                table,
                scale,
                cap,
                KV_HEADS=KV_HEADS,
                HEAD_DIM=HEAD_DIM,
                BLOCK_SIZE=BLOCK_SIZE,
                WINDOW=WINDOW,
                SOFT_CAP=SOFT_CAP,
                MASKED=True,
                BLOCK_N=BLOCK_N,
                BLOCK_D=BLOCK_D,
            )
        total = tl.where(total == 0.0, 1.0, total)  # nothing in sight: zeros
        o = out + token[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + head[:, None] * HEAD_DIM + d[None, :]
        tl.store(o, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
