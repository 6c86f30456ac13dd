"""First come, first served: chunked prefill, prefix hits, preemption by recompute. No loop over decoding rows.

A row and its blocks stay with their request until the last step that can write them has come back
(*draining*), so an output in flight never meets another owner's row. They are freed by the next `plan`, or earlier
when there is nothing else to do, and what has ended is reported before that. `plan` may be called again before earlier
steps have returned; `update` takes their outputs in order.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mrv2.runner.batch import Batch
from mrv2.runner.kv_cache import KVCacheManager, extend_hashes
from mrv2.runner.outputs import StepEvents, StepOutput
from mrv2.runner.request import FinishReason, Request, Status
from mrv2.runner.row_columns import RowColumns
from mrv2.runner.steady import SteadyBatch
from mrv2.state.plan import StepPlan
from mrv2.state.rows import RowAllocator

Rows = NDArray[np.int32]


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    steps: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    peak_running: int = 0


class Scheduler:
    """Decides each step's batch and keeps every request's host state.

    Args:
        kv: block tables of the rows.
        max_rows: most requests running at once.
        max_num_tokens: most tokens computed in one step.
        max_model_len: most tokens of one request.
        max_chunk: most prompt tokens of one request in one step; None: only `max_num_tokens` limits.
        chunked_prefill: whether a prompt may be cut at all.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_rows: int,
        max_num_tokens: int,
        max_model_len: int,
        max_chunk: int | None = None,
        chunked_prefill: bool = True,
    ) -> None:
        self.kv = kv
        self.columns = RowColumns(max_rows, max_model_len)
        self.stats = SchedulerStats()
        self.max_num_tokens = max_num_tokens
        self.max_chunk = max_chunk or max_num_tokens
        self.chunked_prefill = chunked_prefill
        self._rows = RowAllocator(max_rows)
        self._requests: dict[str, Request] = {}
        self._by_row: list[Request | None] = [None] * max_rows
        self._waiting: deque[Request] = deque()
        self._running: list[int] = []  # rows, in order of arrival
        self._running_np: Rows | None = None  # the same as an array; None after a change
        self._steady: SteadyBatch | None = None  # of those in steps; None after a change, or if some prefill
        self._draining: set[int] = set()  # rows that left `_running` and aren't free yet
        self._removed: list[tuple[int, str]] = []
        self._step_id = 0

    # -- arrival and departure -----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running, or a row has steps in flight."""
        return bool(self._waiting or self._running) or any(self.columns.in_flight_np[r] for r in self._draining)

    @property
    def num_waiting(self) -> int:
        """Requests without a row, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that own a row and take part in steps."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a request. Its limits have been checked at the front door."""
        assert request.req_id not in self._requests
        assert len(request.tokens_np) < request.len_limit <= self.kv.capacity
        self._hash(request, request.tokens_np)
        self._requests[request.req_id] = request
        self._waiting.append(request)

    def end(self, req_id: str, reason: FinishReason) -> Request | None:
        """End a request from outside: abort, or a stop string. Its tokens in flight are dropped.

        Returns it, or None when it is unknown or has ended already.
        """
        request = self._requests.get(req_id)
        if request is None:
            return None
        self._end(request, reason)
        return request

    def _end(self, request: Request, reason: FinishReason) -> None:
        was_running = request.status is Status.RUNNING
        if not was_running:
            self._waiting.remove(request)
        request.status, request.finish_reason, request.ended = Status.ENDED, reason, time.monotonic()
        del self._requests[request.req_id]
        if request.row is not None:
            request.tokens_np = self.columns.known_tokens(request.row)
            self.columns.open_np[request.row] = False
            if was_running:
                self._leave(request.row)

    def _preempt(self, row: int) -> None:
        request = self._request_at(row)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.stats.preemptions += 1
        self._waiting.appendleft(request)
        self._leave(row)
        self.release_drained()

    def _leave(self, row: int) -> None:
        """Take `row` out of the running set."""
        self._running.remove(row)
        self._running_np = self._steady = None
        self._removed.append((row, self._request_at(row).req_id))
        self._draining.add(row)

    def release_drained(self, most: int | None = None) -> bool:
        """Free rows whose last step has come back, all or so many of them; whether there were any."""
        rows = [row for row in self._draining if not self.columns.in_flight_np[row]][:most]
        for row in rows:
            self._release(row)
        return bool(rows)

    def _release(self, row: int) -> None:
        request, columns = self._request_at(row), self.columns
        if columns.open_np[row]:  # preempted: it goes on from what was confirmed
            request.tokens_np = columns.known_tokens(row)
        computed = int(columns.computed_np[row])
        self._hash(request, columns.tokens_np[row, :computed])
        self.kv.commit(row, request.hashes, computed)
        if columns.scheduled_ub_np[row] == computed:
            self.kv.commit_last(row, request.hashes, computed)
        self.kv.release_row(row)
        self._rows.release(row)
        columns.open_np[row] = False
        request.row, self._by_row[row] = None, None
        self._draining.discard(row)

    def _hash(self, request: Request, tokens_np: Rows) -> None:
        if self.kv.prefix_caching:
            extend_hashes(request.hashes, request.hash_root, tokens_np, self.kv.block_size)

    def _request_at(self, row: int) -> Request:
        request = self._by_row[row]
        assert request is not None, f"row {row} has no owner"
        return request

    # -- planning ------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run before an output comes back."""
        if self._draining:
            self.release_drained()
        steady = self._steady
        if steady is not None and steady.steps_left and not (self._waiting and self._rows.num_free):
            self._step_id += 1
            self.stats.steps += 1
            return steady.plan(self._step_id)
        batch = Batch(self.max_num_tokens)
        columns = self.columns
        if self._running_np is None:
            self._running_np = np.array(self._running, np.int32)
        rows_np = self._running_np
        self.kv.trim_windows(rows_np, columns.computed_np[rows_np])
        # A row at its limit only waits for its output; the device stops it by the same rule.
        total_np = columns.total_ub_np[rows_np]
        remaining_np = (total_np - columns.scheduled_ub_np[rows_np]) * (total_np < columns.len_limit_np[rows_np])
        decodes_np = remaining_np == 1
        self._plan_decodes(batch, rows_np if decodes_np.all() else rows_np[decodes_np])
        for row in rows_np[remaining_np > 1].tolist():
            self._plan_chunk(batch, row)
        while self._waiting and batch.budget > 0 and not batch.preempted and self._admit(batch):
            pass
        return self._finish_plan(batch)

    def _plan_decodes(self, batch: Batch, rows_np: Rows) -> None:
        if len(rows_np) > batch.budget:
            rows_np = rows_np[: batch.budget]
        while True:
            missing_np = self.kv.missing_np(rows_np, self.columns.scheduled_ub_np[rows_np] + 1)
            short = int(missing_np.sum()) * self.kv.num_paged - self.kv.pool.num_free
            if short <= 0:
                break
            batch.short = True
            if self.kv.states.drop_pending():
                continue
            if self._draining:  # their blocks come back; preempting more now would be for nothing
                rows_np, missing_np = rows_np[missing_np == 0], missing_np[missing_np == 0]
                break
            victim = self._running[-1]
            self._preempt(victim)
            batch.preempted = True
            rows_np = rows_np[rows_np != victim]
        if missing_np.any() and not batch.short:
            columns = self.columns
            lens_np = columns.scheduled_ub_np[rows_np] + 1
            missing_np = self.kv.missing_soon_np(rows_np, lens_np, columns.len_limit_np[rows_np])
        self.kv.grow(rows_np, missing_np)
        batch.add_decodes(rows_np)

    def _plan_chunk(self, batch: Batch, row: int) -> None:
        if batch.budget <= 0 or row not in self._running:
            return
        columns = self.columns
        start = int(columns.scheduled_ub_np[row])
        take = self._chunk(start, int(columns.total_ub_np[row]), batch.budget)
        need = self.kv.blocks_for(start + take) - int(self.kv.num_cols_np[row]) * self.kv.num_paged
        while need > self.kv.pool.num_free:
            if self.kv.states.drop_pending():
                continue
            # Decodes go first and may have taken the last blocks: only what came later and is idle gives way.
            victim = self._running[-1]
            if self._draining or victim == row or batch.holds(victim):
                return
            self._preempt(victim)
            batch.preempted = True
        self.kv.grow_row(row, start + take)
        batch.add_prompt(row, take)

    def _chunk(self, start: int, total: int, budget: int) -> int:
        """Tokens of a prompt of `total` to compute from `start` on. Where states are kept, a chunk ends at a block
        edge if it can: at the last one that a hit could use, or where the budget ends.
        """
        end = min(total, start + min(budget, self.max_chunk))
        if self.kv.keeps_states and self.chunked_prefill:
            size = self.kv.block_size
            edge = min(end, (total - 1) // size * size) // size * size
            end = edge if edge > start else end
        return end - start

    def _admit(self, batch: Batch) -> bool:
        request = self._waiting[0]
        if request.row is not None or not self._rows.num_free:  # still draining, or the table is full
            return False
        total = len(request.tokens_np)
        hit = self.kv.find_prefix(request.hashes, (total - 1) // self.kv.block_size)
        shared = [block for blocks in hit.blocks for block in blocks if block]
        need = self.kv.blocks_for(total) - self.kv.blocks_for(hit.num_tokens) + len(self.kv.states)
        # Room for the next growth of what runs already, or the newcomer would soon be preempted again.
        need += min(len(self._running) * self.kv.num_paged, self.kv.pool.num_usable // 20)
        if need > self.kv.pool.num_free - self.kv.pool.num_free_of(shared):
            return False
        if not self.chunked_prefill and total - hit.num_tokens > batch.budget:
            return False
        self._waiting.popleft()
        row = self._rows.allocate()
        request.row, request.status, self._by_row[row] = row, Status.RUNNING, request
        self._running.append(row)
        self._running_np = self._steady = None
        self.kv.open_row(row, hit)
        self.columns.open(row, request, hit.num_tokens)
        if not request.num_preemptions:
            request.num_cached_tokens = hit.num_tokens
            self.stats.cached_tokens += hit.num_tokens
        batch.added.append((row, request.data(hit.num_tokens)))
        take = self._chunk(hit.num_tokens, total, batch.budget)
        self.kv.grow_row(row, hit.num_tokens + take)
        batch.add_prompt(row, take)
        return True

    def _finish_plan(self, batch: Batch) -> StepPlan | None:
        rows_np, takes_np = batch.in_order()
        if not len(rows_np):
            return None
        columns = self.columns
        self._keep_states(rows_np)
        seq_lens_np, num_decodes = columns.schedule(rows_np, takes_np), int((takes_np == 1).sum())
        self._step_id += 1
        self.stats.steps += 1
        self.stats.peak_running = max(self.stats.peak_running, len(self._running))
        plan = StepPlan(
            step_id=self._step_id,
            removed=tuple(self._removed),
            added=tuple(batch.added),
            rows_np=rows_np,
            query_lens_np=takes_np,
            block_writes=self.kv.take_writes(),
            num_decodes=num_decodes,
            num_tokens=int(takes_np.sum()),
            max_query_len=int(takes_np.max()),
            max_seq_len=int(seq_lens_np.max()),
            max_decode_len=int(seq_lens_np[:num_decodes].max(initial=0)) or None,
            copies=self.kv.states.take_copies(),
        )
        self._removed.clear()
        self._note_steady(batch, plan)
        return plan

    def _note_steady(self, batch: Batch, plan: StepPlan) -> None:
        """See whether the next steps will be like this one."""
        rows_np, columns, steady = plan.rows_np, self.columns, self._steady
        alike = not (batch.prompts or batch.short or self.kv.keeps_states)
        if not alike or (columns.scheduled_ub_np[rows_np] <= columns.prefill_len_np[rows_np]).any():
            # A steady batch that follows gets an array of its own, so that no step before it is taken for one of its.
            self._steady = self._running_np = None
            return
        if steady is None or steady.rows_np is not rows_np:
            steady = self._steady = SteadyBatch(columns, rows_np, self.kv.no_writes, plan.max_seq_len)
        steady.go_on(self.kv.num_cols_np[rows_np] * self.kv.block_size, plan.max_seq_len)

    def _keep_states(self, rows_np: Rows) -> None:
        """Keep the states of rows whose next step starts at a block edge."""
        if not self.kv.keeps_states:
            return
        blocks_np, rest_np = np.divmod(self.columns.scheduled_ub_np[rows_np], self.kv.block_size)
        for i in np.nonzero((rest_np == 0) & (blocks_np > 0))[0]:
            row = int(rows_np[i])
            confirmed = int(self.columns.computed_np[row]) // self.kv.block_size
            self.kv.states.keep(row, int(blocks_np[i]), self._request_at(row).hashes, confirmed)

    # -- outputs -------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, output: StepOutput) -> StepEvents:
        """Take the output of the oldest step in flight."""
        steady = self._steady
        if steady is not None:
            events = steady.take(output) if plan.rows_np is steady.rows_np else None
            if events is not None:
                self.stats.generated_tokens += plan.num_reqs
                return events
            steady.lose_place()
        columns, rows_np = self.columns, plan.rows_np.astype(np.intp)  # what NumPy takes as an index
        columns.in_flight_np[rows_np] -= 1
        before_np = columns.computed_np[rows_np]
        gained_np = output.num_sampled_np * columns.open_np[rows_np]
        ended_np = self._take_tokens(rows_np, output, gained_np)
        # The newest token is never computed. A row that the device stopped computed nothing in later steps, and one
        # whose tokens are dropped computed some that the host doesn't know: neither may reach the prefix cache.
        computed_np = np.minimum(before_np + plan.query_lens_np, columns.known_np[rows_np] - 1)
        columns.computed_np[rows_np] = computed_np
        prefilling_np = before_np < columns.prefill_len_np[rows_np]
        self.stats.prefill_tokens += int(plan.query_lens_np[prefilling_np].sum())
        self.stats.generated_tokens += int(gained_np.sum())
        for row in rows_np[prefilling_np].tolist():
            if columns.open_np[row]:
                self.kv.commit(row, self._request_at(row).hashes, int(columns.computed_np[row]))
        numbers_np = columns.watched_np[rows_np]
        at_np, of_np = np.nonzero(
            (numbers_np >= 0)[:, None] & (np.arange(output.tokens_np.shape[1]) < gained_np[:, None])
        )
        ended = tuple(self._request_at(row) for row in ended_np.tolist())
        newest_np = columns.tokens_np[ended_np, columns.known_np[ended_np] - 1].astype(np.int64)
        for request, stopped in zip(ended, columns.stopped(ended_np, newest_np).tolist(), strict=True):
            self._end(request, FinishReason.STOP if stopped else FinishReason.LENGTH)
        return StepEvents(
            numbers_np=numbers_np[at_np],
            tokens_np=output.tokens_np[at_np, of_np],
            logprobs=None if output.logprobs is None else output.logprobs.select(at_np),
            ended=ended,
        )

    def _take_tokens(self, rows_np: NDArray[np.intp], output: StepOutput, gained_np: Rows) -> NDArray[np.intp]:
        """Append the new tokens; return the rows that are at their end."""
        columns = self.columns
        ended: list[NDArray[np.intp]] = []
        for s in range(output.tokens_np.shape[1]):
            live_np = gained_np > s
            live_rows_np, tokens_np = rows_np[live_np], output.tokens_np[live_np, s]
            columns.append(live_rows_np, tokens_np)
            first_np = columns.known_np[live_rows_np] == columns.prompt_len_np[live_rows_np] + 1
            for row in live_rows_np[first_np].tolist():
                self._request_at(row).first_token = time.monotonic()
            full_np = columns.known_np[live_rows_np] >= columns.len_limit_np[live_rows_np]
            ended.append(live_rows_np[full_np | columns.stopped(live_rows_np, tokens_np)])
        return np.concatenate(ended)
