"""The runner in debug mode: late streams, poison, canaries and guarded views, to find what breaks the contract.

Everything that a correct model and a correct runner don't notice is made worse, and tokens stay the same. Errors
that a step causes are found on the device and raised when its output is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mrv2.attn.groups import KVGroup
from mrv2.debug.canaries import Canaries, WatchedPool, send
from mrv2.debug.guard import GuardedView, StepScope, guard_meta, guard_view
from mrv2.errors import PoisonReadError
from mrv2.runner.forward import ForwardPass
from mrv2.runner.outputs import Pending, StepOutput
from mrv2.runner.runner import PendingStep, Runner
from mrv2.state.plan import StepPlan
from mrv2.state.staging import StagingRing
from mrv2.state.view import AttnMetadata, StepView

DELAY = 2_000_000
"""Clock cycles, about a millisecond: several times what the host needs for a step of a small model."""

PADDED_REQS, PADDED_TOKENS = 2, 5
"""Padding of every step, as far as the limits allow: a graph pads too."""

POISON = 2**30 - 1
"""In integers that nobody may read any more: out of range as an index, and far from overflowing when added to."""


class PoisonedRing(StagingRing):
    """A ring whose buffers are overwritten as soon as they are free: a copy that still reads one sends that."""

    def take(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """See `StagingRing.take`."""
        buffer_np = super().take(nbytes)
        buffer_np.fill(0xA5)
        return buffer_np


class GuardedForward(ForwardPass):
    """Metadata can be read within its step only."""

    def metadata(self, view: StepView) -> AttnMetadata:
        """See `ForwardPass.metadata`."""
        assert isinstance(view, GuardedView)
        return {name: guard_meta(meta, view.scope) for name, meta in super().metadata(view).items()}


class DebugRunner(Runner):
    """`Runner`, hostile. Steps are begun and finished in turn.

    - On a GPU the compute stream, the copies to the host, or both run about a millisecond late: what the host reuses
      too early is then read too late.
    - Steps are padded. Staging buffers, per-request columns of rows without an owner, and a step's own tensors after
      it hold poison, released cache blocks NaN.
    - Nothing is replayed: each step has a view of its own, and may be late.
    - A write to a cache block without an entry of the step, NaN in the hidden state of a request, and a view or
      metadata read after the step raise typed errors.

    Args:
        forward: as in `Runner`; its pages have one block more than `pool`.
        groups: KV groups of the model.
        pool: the scheduler's.
    """

    def __init__(self, forward: GuardedForward, groups: tuple[KVGroup, ...], pool: WatchedPool) -> None:
        super().__init__(forward, groups)
        self._groups = groups
        self._canaries = Canaries(forward.pages, groups, pool)
        self._req_ids: dict[int, str] = {}  # of rows with an owner
        for ring in _rings([vars(self)], set()):
            ring.__class__ = PoisonedRing  # made where nobody knows of debugging
        with torch.inference_mode():
            self._poison_rows(range(forward.state.limits.max_rows))

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> PendingStep | Pending:
        """See `Runner.begin`."""
        self._delay(plan.step_id, copies=False)
        self._poison_rows([row for row, _ in plan.removed])
        self._req_ids |= {row: request.req_id for row, request in plan.added}
        self._canaries.begin(plan)
        return super().begin(plan)

    def _prepare(self, plan: StepPlan) -> GuardedView:
        limits = self._state.limits
        view = self._buffers.prepare(
            plan,
            self._requests,
            self._tables,
            num_reqs=min(plan.num_reqs + PADDED_REQS, limits.max_rows),
            num_tokens=min(plan.num_tokens + PADDED_TOKENS, limits.max_num_tokens),
        )
        return guard_view(view, StepScope(plan.step_id))

    @torch.inference_mode()
    def finish(self, step: PendingStep | Pending) -> Pending:
        """See `Runner.finish`."""
        assert isinstance(step, PendingStep), "no graphs: each step has a guarded view of its own"
        view = step.view
        assert isinstance(view, GuardedView)
        self._delay(step.plan.step_id, copies=False)
        poisoned = self._find_nan(step)  # before sampling, which makes rows inactive
        self._delay(step.plan.step_id, copies=True)
        pending = super().finish(step)
        report = torch.cat((self._canaries.check(view), poisoned))
        _spoil(view, self._groups, self._canaries.never_owned)
        view.scope.over = True
        return _Checked(pending, self._copies.start([report])[0], self._copies.record(), step.plan, self)

    def _delay(self, step_id: int, *, copies: bool) -> None:
        """Hold up one of the streams, or in every third step both: a race may need the other one to be early."""
        if self._copies.stream is None or step_id % 3 == (1 if copies else 0):
            return
        with torch.cuda.stream(self._copies.stream if copies else None):
            torch.cuda._sleep(DELAY)  # type: ignore[no-untyped-call]

    def _poison_rows(self, rows: Sequence[int]) -> None:
        """All that is kept of these rows on the device, except that they are inactive."""
        at = send(np.array(rows, np.int64), self._state.limits.device)
        requests, sampling = self._requests, self._sampling
        columns = [getattr(requests.table, f.name) for f in fields(requests.table) if f.name != "active"]
        columns += [requests.len_limit, requests.stop_token_ids]
        columns += [sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed]
        for column in columns:
            column.index_fill_(0, at, float("nan") if column.is_floating_point() else POISON)
        self._tables.by_row.index_fill_(1, at, self._canaries.never_owned)

    def _find_nan(self, step: PendingStep) -> Tensor:
        """[2] int64: how many tokens of active requests have NaN in their hidden state, and the first of them."""
        view = step.view
        live = (view.rows >= 0) & self._requests.active[view.rows.clamp(min=0).long()]
        real = (view.token_to_i >= 0) & live[view.token_to_i.clamp(min=0).long()]
        wrong = real & step.hidden.flatten(1).isnan().any(1)
        return torch.stack((wrong.sum(), wrong.int().argmax()))

    def raise_if(self, report: Sequence[int], plan: StepPlan) -> None:
        """Raise for what a step's checks found; see `Canaries.check` and `_find_nan` for the four numbers.

        Raises:
            CacheWriteError: the step wrote where it must not.
            PoisonReadError: NaN has come out.
        """
        self._canaries.raise_if(report[0], report[1], plan.step_id)
        if not report[2]:
            return
        i = int(np.searchsorted(np.cumsum(plan.query_lens_np), report[3], side="right"))
        raise PoisonReadError(
            f"step {plan.step_id}: {report[2]} tokens have NaN in their hidden state, the first of request "
            f"{self._req_ids[int(plan.rows_np[i])]}",
            where="the model's forward",
            fix="find the kernel or the input part that reads more than it should",
        )


class _Checked:
    """An output that raises what its step's checks have found."""

    def __init__(
        self, pending: Pending, report: Tensor, done: torch.cuda.Event | None, plan: StepPlan, runner: DebugRunner
    ) -> None:
        self._pending, self._report, self._done = pending, report, done
        self._plan, self._runner = plan, runner

    def wait(self) -> StepOutput:
        """The output."""
        output = self._pending.wait()
        if self._done is not None:
            self._done.synchronize()
        self._runner.raise_if(self._report.tolist(), self._plan)
        return output


def _spoil(view: StepView, groups: Sequence[KVGroup], block: int) -> None:
    """Overwrite a step's own tensors: block ids with `block`, which exists, everything else with `POISON`."""
    own = [getattr(view, f.name) for f in fields(view) if f.name != "table"]
    slots = [s for s, group in zip(view.slot_mappings, groups, strict=True) if not group.states]
    for tensor in (*(t for t in own if isinstance(t, Tensor)), *slots):
        tensor.fill_(POISON)
    for table in view.block_tables:
        table.fill_(block)


def _rings(things: Sequence[Any], seen: set[int]) -> Iterator[StagingRing]:
    """All staging rings in `things` and what hangs on them, models left out."""
    for thing in things:
        if id(thing) in seen or isinstance(thing, (nn.Module, Tensor)):
            continue
        seen.add(id(thing))
        if isinstance(thing, StagingRing):
            yield thing
        elif isinstance(thing, (list, tuple)):
            yield from _rings(thing, seen)
        elif isinstance(thing, dict):
            yield from _rings(list(thing.values()), seen)
        elif not isinstance(thing, type) and hasattr(thing, "__dict__"):
            yield from _rings(list(vars(thing).values()), seen)
