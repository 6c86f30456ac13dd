"""What the scheduler decides for one step: columnar, host only, frozen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mrv2.api import RequestData


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWrites:
    """Block ids appended (or replaced) in one KV group's table since the last step.

    Run k writes `block_ids[cu_lens[k]:cu_lens[k + 1]]` to the table of `rows[k]` from column `starts[k]`.
    """

    rows: NDArray[np.int32]  # [num_writes]
    starts: NDArray[np.int32]  # [num_writes]
    cu_lens: NDArray[np.int32]  # [num_writes + 1]
    block_ids: NDArray[np.int32]  # [cu_lens[-1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopies:
    """Whole blocks to copy before anything else of the step: states to and from the prefix cache.

    No block is in both lists, and no target is named twice, so the order doesn't matter.
    """

    sources: NDArray[np.int32]  # [num_copies]
    targets: NDArray[np.int32]  # [num_copies]


_NO_COPIES = BlockCopies(sources=np.empty(0, np.int32), targets=np.empty(0, np.int32))


def _no_copies() -> BlockCopies:
    return _NO_COPIES


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. Requests with one query token come first, so that decode attention is one batch."""

    step_id: int  # counts up from 1
    removed: tuple[tuple[int, str], ...]  # (row, req_id) of requests that left since the last plan
    added: tuple[tuple[int, RequestData], ...]  # (row, request), new or resumed
    rows_np: NDArray[np.int32]  # [num_reqs]
    query_lens_np: NDArray[np.int32]  # [num_reqs] tokens computed in this step
    block_writes: tuple[BlockWrites, ...]  # one per KV group
    num_decodes: int  # the first num_decodes requests have query length 1
    num_tokens: int  # of all requests together
    max_query_len: int  # exact
    max_seq_len: int  # upper bound over the batch, this step included
    copies: BlockCopies = field(default_factory=_no_copies)  # before all else
    max_decode_len: int | None = None  # upper bound over the first num_decodes; None: max_seq_len

    @property
    def num_reqs(self) -> int:
        """Requests in this step."""
        return len(self.rows_np)

    def part(self, start: int, stop: int) -> StepPlan:
        """Requests [start, stop), to be run by themselves: without what is staged, which is the whole step's."""
        takes_np = self.query_lens_np[start:stop]
        return replace(
            self,
            removed=(),
            added=(),
            copies=_NO_COPIES,
            rows_np=self.rows_np[start:stop],
            query_lens_np=takes_np,
            max_seq_len=(self.max_decode_len or self.max_seq_len) if stop <= self.num_decodes else self.max_seq_len,
            num_decodes=min(max(self.num_decodes - start, 0), len(takes_np)),
            num_tokens=int(takes_np.sum()),
            max_query_len=int(takes_np.max()),
        )
