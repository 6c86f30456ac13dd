"""The scheduler's knowledge of running requests, one NumPy column per fact, indexed by row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mrv2.runner.request import Request
from mrv2.sample.params import MAX_STOP_TOKEN_IDS


class RowColumns:
    """Host-only columns. `_ub` counts include what is in flight; the others only what outputs confirmed."""

    def __init__(self, max_rows: int, max_model_len: int) -> None:
        self.tokens_np = np.zeros((max_rows, max_model_len), np.int32)  # prompt, then generated
        self.stop_ids_np = np.full((max_rows, MAX_STOP_TOKEN_IDS), -1, np.int64)
        for name in ("prompt_len", "prefill_len", "known", "computed", "scheduled_ub", "total_ub", "len_limit"):
            setattr(self, f"{name}_np", np.zeros(max_rows, np.int32))
        self._stop_width = 1  # most stop ids that any request had: the rest of the column is -1 everywhere
        self.in_flight_np = np.zeros(max_rows, np.int32)  # steps whose output has not come back
        self.open_np = np.zeros(max_rows, bool)  # output tokens still belong to the request
        self.watched_np = np.full(max_rows, -1, np.int64)  # the number of a watched request

    prompt_len_np: NDArray[np.int32]
    prefill_len_np: NDArray[np.int32]  # prompt, and what was generated before a preemption
    known_np: NDArray[np.int32]  # prompt and confirmed generated tokens
    computed_np: NDArray[np.int32]  # tokens whose cache entries are confirmed
    scheduled_ub_np: NDArray[np.int32]  # tokens whose computation was planned
    total_ub_np: NDArray[np.int32]  # known, and one per sampling step in flight
    len_limit_np: NDArray[np.int32]

    def open(self, row: int, request: Request, num_computed: int) -> None:
        """Set every column of a row: it may hold its predecessor's values."""
        known = len(request.tokens_np)
        self.tokens_np[row, :known] = request.tokens_np
        self.stop_ids_np[row] = -1
        self.stop_ids_np[row, : len(request.stop_token_ids)] = request.stop_token_ids
        self._stop_width = max(self._stop_width, len(request.stop_token_ids))
        self.prompt_len_np[row] = len(request.prompt_np)
        self.prefill_len_np[row] = self.known_np[row] = self.total_ub_np[row] = known
        self.computed_np[row] = self.scheduled_ub_np[row] = num_computed
        self.len_limit_np[row] = request.len_limit
        self.in_flight_np[row] = 0
        self.open_np[row] = True
        self.watched_np[row] = request.number if request.watched else -1

    def stop_ids_of(self, at_np: NDArray[np.intp]) -> NDArray[np.int64]:
        """The stop ids of these rows, [as many as any of them has, num_rows]; -1 where one has fewer."""
        ids_np = self.stop_ids_np[at_np, : self._stop_width]
        return np.ascontiguousarray(ids_np[:, (ids_np >= 0).any(0)].T)

    def schedule(self, rows_np: NDArray[np.int32], takes_np: NDArray[np.int32]) -> NDArray[np.int32]:
        """Count a step's tokens as planned; each row's length after the step, [num_rows]."""
        at_np = rows_np.astype(np.intp)  # what NumPy takes as an index
        self.scheduled_ub_np[at_np] = seq_lens_np = self.scheduled_ub_np[at_np] + takes_np
        total_np = self.total_ub_np[at_np]
        self.total_ub_np[at_np] = total_np + (seq_lens_np == total_np)  # it samples
        self.in_flight_np[at_np] += 1
        return seq_lens_np

    def known_tokens(self, row: int) -> NDArray[np.int32]:
        """A copy of the row's confirmed tokens, [known]."""
        return self.tokens_np[row, : self.known_np[row]].copy()

    def append(self, rows_np: NDArray[np.intp], tokens_np: NDArray[np.int64]) -> None:
        """Add one confirmed token to each row."""
        self.tokens_np[rows_np, self.known_np[rows_np]] = tokens_np
        self.known_np[rows_np] += 1

    def stopped(self, rows_np: NDArray[np.intp], tokens_np: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each row's newest token is one of its stop ids; the device applies the same rule."""
        stop_ids_np = self.stop_ids_np[rows_np, : self._stop_width]
        return np.asarray((stop_ids_np == tokens_np[:, None]).any(1))
