"""The largest step that can occur, run once before the KV cache is allocated: what it needs is not the cache's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from mrv2.api import RequestData
from mrv2.attn.groups import KVGroup
from mrv2.errors import UnsupportedError
from mrv2.runner.runner import Runner
from mrv2.sample.params import MAX_LOGPROBS, SamplingParams
from mrv2.state.plan import BlockWrites, StepPlan
from mrv2.state.view import Limits


def measure_step(make_runner: Callable[[], Runner], limits: Limits, groups: tuple[KVGroup, ...]) -> int:
    """Bytes of device memory that a runner and its largest step take at their peak. CUDA only.

    Compiles what the step launches. The runner is dropped again.

    Args:
        make_runner: builds one, with a pool of the scratch block alone.
        limits: of the runner.
        groups: KV groups of the model.

    Raises:
        UnsupportedError: it doesn't fit.
    """
    try:
        with _peak(limits.device) as step:
            runner = make_runner()
            runner.finish(runner.begin(largest_plan(limits, groups))).wait()
        with _peak(limits.device) as graphs:  # they have their own memory, the same for all
            runner.rehearse_graphs()
    except torch.OutOfMemoryError as error:
        raise UnsupportedError(
            f"max_num_tokens={limits.max_num_tokens} and max_num_seqs={limits.max_rows}: a step of this size doesn't "
            f"fit into the memory that is free on {limits.device}",
            where="engine settings",
            fix="lower one of the two",
        ) from error
    del runner
    torch.cuda.empty_cache()
    return step.nbytes + graphs.nbytes


@dataclass
class _Peak:
    nbytes: int = 0


@contextlib.contextmanager
def _peak(device: torch.device) -> Iterator[_Peak]:
    """Bytes that are allocated within at most, beyond those that were before."""
    peak, before = _Peak(), torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield peak
    peak.nbytes = torch.cuda.max_memory_allocated(device) - before


def largest_plan(limits: Limits, groups: tuple[KVGroup, ...]) -> StepPlan:
    """A step with all rows and tokens that `limits` allow, every filter of the sampler, and the longest lists of
    log-probabilities. First requests of one token, then long ones; all of them live in the scratch block.
    """
    takes_np, left = np.ones(limits.max_rows, np.int32), limits.max_num_tokens - limits.max_rows
    for i in reversed(range(limits.max_rows)):
        more = min(left, limits.max_model_len - 2)
        takes_np[i] += more
        left -= more
    sampling = SamplingParams(
        top_k=max(1, limits.vocab_size // 2), top_p=0.5, min_p=0.01, logprobs=min(MAX_LOGPROBS, limits.vocab_size)
    )
    nothing = np.empty(0, np.int32)
    no_writes = BlockWrites(rows=nothing, starts=nothing, cu_lens=np.zeros(1, np.int32), block_ids=nothing)
    return StepPlan(
        step_id=0,
        removed=(),
        added=tuple((row, _request(row, int(take), sampling)) for row, take in enumerate(takes_np)),
        rows_np=np.arange(limits.max_rows, dtype=np.int32),
        query_lens_np=takes_np,
        block_writes=(no_writes,) * len(groups),
        num_decodes=int((takes_np == 1).sum()),
        num_tokens=int(takes_np.sum()),
        max_query_len=int(takes_np.max()),
        max_seq_len=limits.max_model_len,
    )


def _request(row: int, length: int, sampling: SamplingParams) -> RequestData:
    tokens_np = np.zeros(length, np.int32)
    return RequestData(
        req_id=f"trial {row}",
        prompt_token_ids=tokens_np,
        prefill_token_ids=tokens_np,
        num_computed_tokens=0,
        sampling=sampling,
        seed=0,
        len_limit=length + 1,
        stop_token_ids=(),
    )
