"""Draw one token per request from the most likely ones: top-k, top-p and the Gumbel-max draw in one pass."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
from torch import Tensor

from mrv2.kernels.gumbel import gumbel_noise
from mrv2.kernels.gumbel_tile import gumbel_of_tokens
from mrv2.kernels.registry import jit, kernel, tl

_TILE = 1024
"""Ranks summed at a time. Fixed: how many ranks there are must not change how a row's mass is rounded."""

_NO_ID = 0x7FFFFFFF


def sample_ranked_ref(
    *,
    ranked: Tensor,
    ids: Tensor,
    rows: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    positions: Tensor,
    stream: int,
    out: Tensor,
) -> None:
    """Torch twin of `sample_ranked`."""
    row = rows.clamp(min=0).long()
    hot = ((rows >= 0) & (temperature[row] > 0))[:, None]
    k, p = top_k[row][:, None], top_p[row][:, None]
    rank = torch.arange(ranked.shape[1], device=ranked.device)
    allowed = (rank < k) | (k <= 0)
    top = ranked[:, :1]
    # Equal ones apart: the difference of infinities has no value.
    weight = torch.where(ranked == top, 1.0, (ranked - top).exp()).double() * allowed
    before = weight.cumsum(1) - weight
    kept = allowed & ((before < p.double() * weight.sum(1, keepdim=True)) | (p >= 1))
    kept = (kept & hot) | (rank == 0)
    width = int(kept.sum(1).max())  # what is kept is a prefix
    ids, kept = ids[:, :width], kept[:, :width]
    noise = gumbel_noise(seeds[row], positions, stream, 0, token_ids=ids)
    score = torch.where(hot, ranked[:, :width] + noise, ranked[:, :width]).masked_fill(~kept, -torch.inf)
    out.copy_(torch.where(score == score.amax(1, keepdim=True), ids, _NO_ID).amin(1))


@kernel(twin=sample_ranked_ref)
def sample_ranked(
    *,
    ranked: Tensor,
    ids: Tensor,
    rows: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    positions: Tensor,
    stream: int,
    out: Tensor,
) -> None:
    """One token per request among its k most likely, and of those among the fewest whose mass reaches p.

    Filters and draw need the sorted scores only, so neither a filtered copy of the logits nor noise for tokens that
    are dropped is ever made: torch would take a dozen passes over memory for what is one read of the kept ranks.
    The result is that of `sample_gumbel` with all other tokens at -inf, whatever number of ranks is given, as long
    as it reaches each row's k.

    Args:
        ranked: [num_reqs, num_ranks] float32, scores divided by the temperature, highest first; no NaN.
        ids: [num_reqs, num_ranks] int64, their tokens; of equal scores the lowest id first.
        rows: [num_reqs] int32; -1 for padding, which is treated as greedy.
        seeds: [max_rows] int64.
        temperature: [max_rows] float32; 0 takes the first.
        top_k: [max_rows] int32, at most num_ranks; 0 keeps all.
        top_p: [max_rows] float32, above 0; 1 keeps all.
        positions: [num_reqs] int64: absolute position that the token will have.
        stream: which of the independent draws at that position.
        out: out, [num_reqs] int64.
    """
    num_reqs, num_ranks = ranked.shape
    _sample_ranked_kernel[(num_reqs,)](
        ranked,
        ranked.stride(0),
        ids,
        ids.stride(0),
        num_ranks,
        rows,
        seeds,
        temperature,
        top_k,
        top_p,
        positions,
        stream,
        out,
        TILE=_TILE,
    )


@jit(do_not_specialize=["ranked_stride", "ids_stride", "num_ranks", "stream"])
def _sample_ranked_kernel(
    ranked,
    ranked_stride,
    ids,
    ids_stride,
    num_ranks,
    rows,
    seeds,
    temperature,
    top_k,
    top_p,
    positions,
    stream,
    out,
    TILE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    row = tl.load(rows + i).to(tl.int64)
    hot = tl.load(temperature + row, mask=row >= 0, other=0.0) > 0
    ranked += i * ranked_stride
    ids += i * ids_stride
    top = tl.load(ranked)
    best = top
    best_id = tl.load(ids).to(tl.int32)
    if hot:
        k = tl.load(top_k + row)
        k = tl.where(k > 0, tl.minimum(k, num_ranks), num_ranks)
        p = tl.load(top_p + row)
        total = tl.full([], 0.0, tl.float64)
        for start in range(0, k, TILE):
            total += tl.sum(_weights(ranked, start + lane, k, top), 0)
        reach = tl.where(p < 1, p.to(tl.float64) * total, float("inf"))
        before = tl.full([], 0.0, tl.float64)
        best = tl.full([], float("-inf"), tl.float32)
        for start in range(0, k, TILE):
            if before < reach:
                rank = start + lane
                weight = _weights(ranked, rank, k, top)
                kept = (rank < k) & (before + tl.cumsum(weight, 0) - weight < reach)
                token = tl.load(ids + rank, mask=kept, other=0).to(tl.int32)
                noise = gumbel_of_tokens(token, tl.load(seeds + row), tl.load(positions + i).to(tl.int32), stream)
                score = tl.load(ranked + rank, mask=kept, other=float("-inf")) + noise
                highest = tl.max(score, 0)
                lowest_id = tl.min(tl.where((score == highest) & kept, token, 0x7FFFFFFF), 0)
                better = (highest > best) | ((highest == best) & (lowest_id < best_id))
                best = tl.where(better, highest, best)
                best_id = tl.where(better, lowest_id, best_id)
                before += tl.sum(weight, 0)
    tl.store(out + i, best_id.to(tl.int64))


@jit()
def _weights(ranked, rank, k, top):
    score = tl.load(ranked + rank, mask=rank < k, other=float("-inf"))
    # Equal ones apart: the difference of infinities has no value.
    weight = tl.where(score == top, 1.0, tl.exp(score - top))
    return tl.where(rank < k, weight, 0.0).to(tl.float64)
