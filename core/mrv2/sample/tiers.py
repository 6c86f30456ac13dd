"""Sampler tiers: the few sets of operations that a captured step has, each of which serves every batch that needs less.

An operation that a batch doesn't need changes nothing for it: temperature 0 is greedy, min-p 0 and top-p 1 keep all,
and how many ranks are looked at doesn't matter as long as they reach each row's k. So a batch's tokens don't depend on
the tier that it is put into.
"""

from __future__ import annotations

from mrv2.sample.states import SamplerNeeds

GREEDY = SamplerNeeds(random=False, min_p=False, top_k=False, top_p=False, num_ranks=0, num_logprobs=None)
RANDOM = SamplerNeeds(random=True, min_p=False, top_k=False, top_p=False, num_ranks=0, num_logprobs=None)
MIN_P = SamplerNeeds(random=True, min_p=True, top_k=False, top_p=False, num_ranks=0, num_logprobs=None)
FEW_RANKS = SamplerNeeds(random=True, min_p=True, top_k=True, top_p=True, num_ranks=64, num_logprobs=None)
MANY_RANKS = SamplerNeeds(random=True, min_p=True, top_k=True, top_p=True, num_ranks=1024, num_logprobs=None)

TIERS = (GREEDY, RANDOM, MIN_P, FEW_RANKS, MANY_RANKS)
"""From the cheapest to the dearest."""


def tier_of(needs: SamplerNeeds) -> SamplerNeeds | None:
    """The cheapest tier with all that `needs` asks for. None: there is none, since log-probabilities are wanted, or
    the whole vocabulary has to be sorted.
    """
    if needs.num_logprobs is not None:
        return None
    if not needs.random:
        return GREEDY
    if not (needs.top_k or needs.top_p):
        return MIN_P if needs.min_p else RANDOM
    return next((t for t in (FEW_RANKS, MANY_RANKS) if 0 < needs.num_ranks <= t.num_ranks), None)
