"""From logits to tokens, in one documented order: temperature, min-p, top-k, top-p, Gumbel-max draw.

Given equal logits a token depends on its own request's parameters and position only: every operation works
row by row, and ties always go to the lowest token id.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mrv2.kernels.sample_gumbel import sample_gumbel
from mrv2.kernels.sample_ranked import sample_ranked
from mrv2.sample.states import SamplerNeeds, SamplingStates

DRAW_STREAM = 0
"""Noise stream of the target model's draws; drafting, acceptance and recovery have their own."""

MAX_SELECTED = 1024
"""Ranks up to which selecting them is taken to be quicker than sorting the vocabulary."""


class Logprobs(NamedTuple):
    """Log-probabilities under the model's own distribution. Column 0 is the sampled token."""

    token_ids: Tensor  # [num_reqs, 1 + k] int64
    logprobs: Tensor  # [num_reqs, 1 + k] float32
    ranks: Tensor  # [num_reqs] int64, of the sampled token; 1 is the most likely


class SamplerOutput(NamedTuple):
    """One token per request."""

    token_ids: Tensor  # [num_reqs] int64
    logprobs: Logprobs | None


class Sampler:
    """Draws one token per request.

    Args:
        states: parameter columns of the request table.
    """

    def __init__(self, states: SamplingStates) -> None:
        self.states = states

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor, needs: SamplerNeeds) -> SamplerOutput:
        """Sample.

        Args:
            logits: [num_reqs, vocab], float32 or half precision, which is widened where it is read: a copy in float32
                would take longer than the draw. Not changed.
            rows: [num_reqs] int32; padding may hold -1, its tokens mean nothing.
            positions: [num_reqs] int64, the position that each new token will have.
            needs: what the batch asks for.
        """
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        draw: dict[str, Any] = {
            "rows": rows,
            "seeds": self.states.seed,
            "temperature": self.states.temperature,
            "positions": positions,
            "stream": DRAW_STREAM,
            "out": token_ids,
        }
        if needs.top_k or needs.top_p:
            ranked, ids = rank(self._scaled(logits, rows, needs), needs.num_ranks)
            sample_ranked(ranked=ranked, ids=ids, top_k=self.states.top_k, top_p=self.states.top_p, **draw)
        elif needs.min_p:
            sample_gumbel(logits=self._scaled(logits, rows, needs), scaled=True, drawn=True, **draw)
        else:
            sample_gumbel(logits=logits, scaled=False, drawn=needs.random, **draw)
        if needs.num_logprobs is None:
            return SamplerOutput(token_ids, None)
        return SamplerOutput(token_ids, top_logprobs(logits.float(), token_ids, needs.num_logprobs))

    def _scaled(self, logits: Tensor, rows: Tensor, needs: SamplerNeeds) -> Tensor:
        """Logits over the temperature in float32, those that min-p drops at -inf."""
        at = rows.clamp(min=0).long()
        temperature = self.states.temperature[at]
        # The divisor has an axis, so half precision is widened before the division.
        scores = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
        scores = scores.masked_fill_(scores.isnan(), float("-inf"))  # NaN would rank first and take every place
        return apply_min_p(scores, self.states.min_p[at]) if needs.min_p else scores


def apply_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens less likely than `min_p` times the most likely one (Nguyen et al., 2024).

    On scores: p < min_p * p_max is s < s_max + log(min_p), so nothing has to be normalised.

    Args:
        scores: [num_reqs, vocab] float32.
        min_p: [num_reqs] float32; 0 keeps all.
    """
    floor = scores.amax(-1, keepdim=True) + min_p.log()[:, None]
    return scores.masked_fill(scores < floor, float("-inf"))


def rank(scores: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """The highest scores and their token ids, highest first, equal ones by id.

    Args:
        scores: [num_reqs, vocab] float32; no NaN.
        num_ranks: how many are needed; 0: all.

    Returns:
        [num_reqs, n] float32 and [num_reqs, n] int64, n being `num_ranks`, or the vocabulary's size.
    """
    if 0 < num_ranks <= min(MAX_SELECTED, scores.shape[-1]):
        ids = top_ids(scores, num_ranks)
        return scores.gather(-1, ids), ids
    return torch.sort(scores, dim=-1, descending=True, stable=True)


def top_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> Logprobs:
    """The sampled token's log-probability and the k highest; only those are normalised.

    Args:
        logits: [num_reqs, vocab] float32.
        token_ids: [num_reqs] int64, the sampled tokens.
        k: number of highest ones.
    """
    norm = logits.logsumexp(-1, keepdim=True)
    sampled = logits.gather(-1, token_ids[:, None])
    ranks = (logits > sampled).sum(-1) + 1
    ids = top_ids(logits, min(k, logits.shape[-1]))
    values = torch.cat([sampled, logits.gather(-1, ids)], -1)
    return Logprobs(torch.cat([token_ids[:, None], ids], -1), values - norm, ranks)


def top_ids(logits: Tensor, k: int) -> Tensor:
    """Ids of the k highest logits, [num_reqs, k] int64; equal ones by id, which `topk` alone doesn't promise.

    float32 bits, read as sign and magnitude, order like the numbers; the id goes below them in one int64.

    Args:
        logits: [num_reqs, vocab] float32; NaN counts as -inf.
        k: at most the vocabulary's size.
    """
    vocab = logits.shape[-1]
    bits = logits.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")).view(torch.int32).long()
    order = torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))
    key = order * 2**24 + (vocab - 1 - torch.arange(vocab, device=logits.device))
    return key.topk(k, dim=-1).indices
