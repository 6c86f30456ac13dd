"""vLLM's requests as adapters see them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2.api import RequestData
from mrv2.sample.params import SamplingParams


def request_data(new: Any, *, max_model_len: int) -> RequestData:
    """A `NewRequestData` of vLLM as ours.

    Options that only vLLM's sampler reads (penalties, masks, strings that stop) aren't shown: no adapter needs them.
    """
    prompt = np.asarray(new.prompt_token_ids or [], np.int32)
    prefill = prompt if new.prefill_token_ids is None else np.asarray(new.prefill_token_ids, np.int32)
    params = new.sampling_params
    sampling = sampling_params(params)
    limit = max_model_len if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
    return RequestData(
        req_id=new.req_id,
        prompt_token_ids=prompt,
        prefill_token_ids=prefill,
        num_computed_tokens=new.num_computed_tokens,
        sampling=sampling,
        seed=sampling.seed or 0,
        len_limit=min(limit, max_model_len),
        stop_token_ids=tuple(sorted(getattr(params, "all_stop_token_ids", None) or ())),
    )


def sampling_params(params: Any) -> SamplingParams:
    """Sampling parameters of vLLM as ours; None, of a request that samples nothing, gives the defaults."""
    if params is None:
        return SamplingParams()
    seed = params.seed
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=float(params.temperature),
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed if seed is not None and seed >= 0 else None,
        ignore_eos=params.ignore_eos,
        extra_args=dict(params.extra_args or {}),
    )
