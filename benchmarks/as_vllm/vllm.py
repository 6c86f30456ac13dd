"""mrv2 under the few names that a benchmark of vLLM uses, so that the same script measures both.

Put first on PYTHONPATH by `compare_vllm.py`, for mrv2's own arms only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import mrv2
from mrv2.frontend.results import RequestOutput
from mrv2.version import __version__

__all__ = ["LLM", "SamplingParams", "__version__"]


def SamplingParams(*, detokenize: bool, **params: Any) -> mrv2.SamplingParams:
    """mrv2's; there is no text without a tokenizer, so nothing has to be left out."""
    assert not detokenize
    return mrv2.SamplingParams(**params)


class LLM:
    """Random weights at the config in `model`. Settings that only vLLM has are those of a fair comparison there."""

    def __init__(
        self,
        *,
        model: str,
        load_format: str,
        skip_tokenizer_init: bool,
        max_model_len: int,
        max_num_seqs: int,
        enable_prefix_caching: bool,
        seed: int,
        **_: Any,
    ) -> None:
        assert load_format == "dummy"
        assert skip_tokenizer_init
        self._llm = mrv2.LLM(
            model,
            weights="random",
            device=os.environ.get("BENCH_DEVICE", "auto"),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_tokens=max(8192, max_num_seqs),
            prefix_caching=None if enable_prefix_caching else False,
            seed=seed,
        )

    def generate(
        self, prompts: Sequence[Mapping[str, list[int]]], params: Sequence[mrv2.SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        """All prompts as one batch; every request has all the tokens that it was to have."""
        results = self._llm.generate([prompt["prompt_token_ids"] for prompt in prompts], params)
        assert [len(r.outputs[0].token_ids) for r in results] == [p.max_tokens for p in params]
        return results
