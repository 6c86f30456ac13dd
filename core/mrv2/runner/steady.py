"""A batch of decodes that stays as it is: its steps are planned and taken without a look at the requests in it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mrv2.runner.outputs import StepEvents, StepOutput
from mrv2.runner.row_columns import RowColumns
from mrv2.state.plan import BlockWrites, StepPlan

_NOBODY = np.empty(0, np.int64)
_NO_TOKENS = StepEvents(numbers_np=_NOBODY, tokens_np=_NOBODY, logprobs=None, ended=())


class SteadyBatch:
    """Running requests, all past their prompts, for as long as none of them joins or leaves.

    Their columns are kept exact: a step adds one to some counts of each, which takes no index. What may happen to one
    of them is foreseen for all, as a number of steps, or, as a stop token, seen by one comparison; whoever uses this
    does the step in full then.

    Args:
        columns: of the scheduler; changed here.
        rows_np: [num_reqs], of the requests. A plan whose rows are this very array is one of this batch.
        no_writes: a step's writes to the block tables, if it has none.
    """

    def __init__(
        self, columns: RowColumns, rows_np: NDArray[np.int32], no_writes: tuple[BlockWrites, ...], max_seq_len: int
    ) -> None:
        self.rows_np = rows_np
        self.steps_left = 0  # that can be planned before a block or a limit is reached
        self._columns = columns
        self._no_writes = no_writes
        self._max_seq_len = max_seq_len
        self._ones_np = np.ones(len(rows_np), np.int32)
        self._at_np = rows_np.astype(np.intp)
        self._member_np = np.zeros(len(columns.open_np), np.int32)  # over the whole table: 1 for each request
        self._member_np[self._at_np] = 1
        numbers_np = columns.watched_np[self._at_np]
        self._watched_np = np.flatnonzero(numbers_np >= 0)
        self._numbers_np = numbers_np[self._watched_np]
        self._stop_ids_np = columns.stop_ids_of(self._at_np)
        self._places_np: NDArray[np.intp] | None = None  # of the next tokens in the table of tokens; None: to be found
        self._tokens_left = 0  # until the first request is at its limit

    def go_on(self, room_np: NDArray[np.int32], max_seq_len: int) -> None:
        """Note how far the next steps can go.

        Args:
            room_np: [num_reqs], tokens that each request has blocks for.
            max_seq_len: of the step planned last.
        """
        columns, at_np = self._columns, self._at_np
        left_np = np.minimum(
            room_np - columns.scheduled_ub_np[at_np], columns.len_limit_np[at_np] - columns.total_ub_np[at_np]
        )
        self.steps_left, self._max_seq_len = int(left_np.min()), max_seq_len

    def plan(self, step_id: int) -> StepPlan:
        """One more step like the last one."""
        columns, n = self._columns, len(self.rows_np)
        columns.scheduled_ub_np += self._member_np
        columns.total_ub_np += self._member_np
        columns.in_flight_np += self._member_np
        self.steps_left -= 1
        self._max_seq_len += 1
        return StepPlan(
            step_id=step_id,
            removed=(),
            added=(),
            rows_np=self.rows_np,
            query_lens_np=self._ones_np,
            block_writes=self._no_writes,
            num_decodes=n,
            num_tokens=n,
            max_query_len=1,
            max_seq_len=self._max_seq_len,
            max_decode_len=self._max_seq_len,
        )

    def take(self, output: StepOutput) -> StepEvents | None:
        """Take a step's output, if each request has gained one token and none has come to its end; else nothing."""
        columns, tokens_np = self._columns, output.tokens_np[:, 0]
        if self._places_np is None:
            known_np = columns.known_np[self._at_np]
            self._places_np = self._at_np * columns.tokens_np.shape[1] + known_np
            self._tokens_left = int((columns.len_limit_np[self._at_np] - known_np).min())
        if self._tokens_left < 2 or output.tokens_np.shape[1] > 1 or not output.num_sampled_np.all():
            return None
        if (self._stop_ids_np == tokens_np).any():
            return None
        columns.tokens_np.reshape(-1)[self._places_np] = tokens_np
        self._places_np += 1
        self._tokens_left -= 1
        columns.known_np += self._member_np
        columns.computed_np += self._member_np
        columns.in_flight_np -= self._member_np
        if not len(self._watched_np):
            return _NO_TOKENS
        return StepEvents(
            numbers_np=self._numbers_np,
            tokens_np=tokens_np[self._watched_np],
            logprobs=None if output.logprobs is None else output.logprobs.select(self._watched_np),
            ended=(),
        )

    def lose_place(self) -> None:
        """Note that an output has been taken by other means."""
        self._places_np = None
