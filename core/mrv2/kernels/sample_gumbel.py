"""Draw one token per request by adding Gumbel noise and taking the largest: no softmax is needed."""

# Triton infers the types of a kernel's arguments.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
from torch import Tensor

from mrv2.kernels.gumbel import gumbel_noise
from mrv2.kernels.gumbel_tile import gumbel_of_bits
from mrv2.kernels.registry import jit, kernel, tl, triton

_COUNTERS = 512
"""Philox counters per program; each gives the noise of four tokens."""


def sample_gumbel_ref(
    *,
    logits: Tensor,
    rows: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    positions: Tensor,
    stream: int,
    scaled: bool,
    drawn: bool,
    out: Tensor,
) -> None:
    """Torch twin of `sample_gumbel`."""
    row = rows.clamp(min=0).long()
    scores = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    warm = ((rows >= 0) & (temperature[row] > 0)).nonzero().flatten()
    if drawn and warm.numel():
        if not scaled:
            scores[warm] /= temperature[row[warm]][:, None]
        scores.index_add_(0, warm, gumbel_noise(seeds[row[warm]], positions[warm], stream, logits.shape[1]))
    if scores.is_cpu:  # NumPy's search is several times quicker, and takes the first of several maxima too
        out.copy_(torch.from_numpy(scores.numpy().argmax(1)))
    else:
        torch.argmax(scores, 1, out=out)  # documented to return the first of several maxima


@kernel(twin=sample_gumbel_ref)
def sample_gumbel(
    *,
    logits: Tensor,
    rows: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    positions: Tensor,
    stream: int,
    scaled: bool,
    drawn: bool,
    out: Tensor,
) -> None:
    """One token per request: argmax of logits plus noise, or of the logits alone where temperature is 0.

    Ties go to the lowest id. NaN counts as -inf, +inf wins, and a row without any finite logit gives id 0
    (or its lowest +inf), so ids are always in range.

    Args:
        logits: [num_reqs, vocab], float32 or half precision; filtered tokens at -inf.
        rows: [num_reqs] int32; -1 for padding, which is treated as greedy.
        seeds: [max_rows] int64.
        temperature: [max_rows] float32.
        positions: [num_reqs] int64: absolute position that the token will have.
        stream: which of the independent draws at that position.
        scaled: whether logits are divided by the temperature already; if not, that is done here, in float32.
        drawn: whether any row may have a temperature; False: all count as greedy, and the kernel has no noise in it.
        out: out, [num_reqs] int64.
    """
    num_reqs, vocab = logits.shape
    num_tiles = triton.cdiv(vocab, _COUNTERS * 4)
    # Longest axis first: a vocabulary is spread over many programs, since decode batches may be tiny.
    best = torch.empty(num_reqs, num_tiles, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(num_reqs, num_tiles, dtype=torch.int32, device=logits.device)
    _sample_gumbel_kernel[(num_tiles, num_reqs)](
        logits,
        logits.stride(0),
        vocab,
        rows,
        seeds,
        temperature,
        positions,
        stream,
        best,
        best_id,
        num_tiles,
        SCALED=scaled,
        DRAWN=drawn,
        COUNTERS=_COUNTERS,
    )
    _reduce_tiles_kernel[(num_reqs,)](best, best_id, num_tiles, out, TILES=triton.next_power_of_2(num_tiles))


@jit(do_not_specialize=["stream"])
def _sample_gumbel_kernel(
    logits,
    logits_stride,
    vocab,
    rows,
    seeds,
    temperature,
    positions,
    stream,
    best,
    best_id,
    num_tiles,
    SCALED: tl.constexpr,
    DRAWN: tl.constexpr,
    COUNTERS: tl.constexpr,
):
    tile = tl.program_id(0)
    i = tl.program_id(1).to(tl.int64)
    token = tile * COUNTERS * 4 + tl.arange(0, COUNTERS * 4)
    score = tl.load(logits + i * logits_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    score = tl.where(score == score, score, float("-inf"))
    if DRAWN:
        row = tl.load(rows + i).to(tl.int64)
        heat = tl.load(temperature + row, mask=row >= 0, other=0.0)
        if heat > 0:
            if not SCALED:
                score = tl.div_rn(score, heat)  # as exact as torch's: tokens must not depend on who divides
            counter = tile * COUNTERS + tl.arange(0, COUNTERS)
            zero = tl.zeros_like(counter)
            position = zero + tl.load(positions + i).to(tl.int32)
            r0, r1, r2, r3 = tl.philox(tl.load(seeds + row), counter, position, zero + stream, zero)
            bits = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
            score += gumbel_of_bits(bits)
    top = tl.max(score, 0)
    tl.store(best + i * num_tiles + tile, top)
    tl.store(best_id + i * num_tiles + tile, tl.min(tl.where(score == top, token, 0x7FFFFFFF), 0))


@jit()
def _reduce_tiles_kernel(best, best_id, num_tiles, out, TILES: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    score = tl.load(best + i * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    token = tl.load(best_id + i * num_tiles + tile, mask=tile < num_tiles, other=0x7FFFFFFF)
    winner = tl.min(tl.where(score == tl.max(score, 0), token, 0x7FFFFFFF), 0)
    tl.store(out + i, winner.to(tl.int64))
