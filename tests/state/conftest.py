"""Requests and plans for state tests."""

import numpy as np
import pytest

from mrv2.api import RequestData
from mrv2.sample.params import SamplingParams
from mrv2.state.plan import BlockWrites, StepPlan


@pytest.fixture
def make_request():
    def make(req_id="r", *, prompt=(5, 6, 7), generated=(), computed=0, stop=(), len_limit=20, **sampling):
        return RequestData(
            req_id=req_id,
            prompt_token_ids=np.array(prompt, dtype=np.int32),
            prefill_token_ids=np.array([*prompt, *generated], dtype=np.int32),
            num_computed_tokens=computed,
            sampling=SamplingParams(**sampling),
            seed=1,
            len_limit=len_limit,
            stop_token_ids=tuple(stop),
        )

    return make


@pytest.fixture
def make_writes():
    def make(*runs):
        """Runs of (row, start, block ids)."""
        lens = [len(blocks) for _, _, blocks in runs]
        return BlockWrites(
            rows=np.array([row for row, _, _ in runs], dtype=np.int32),
            starts=np.array([start for _, start, _ in runs], dtype=np.int32),
            cu_lens=np.array([0, *np.cumsum(lens)], dtype=np.int32),
            block_ids=np.array([block for _, _, blocks in runs for block in blocks], dtype=np.int32),
        )

    return make


@pytest.fixture
def make_plan():
    def make(rows, query_lens, *, max_seq_len=20):
        return StepPlan(
            step_id=0,
            removed=(),
            added=(),
            rows_np=np.array(rows, dtype=np.int32),
            query_lens_np=np.array(query_lens, dtype=np.int32),
            block_writes=(),
            num_decodes=0,
            num_tokens=sum(query_lens),
            max_query_len=max(query_lens),
            max_seq_len=max_seq_len,
        )

    return make
