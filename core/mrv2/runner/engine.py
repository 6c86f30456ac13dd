"""The step loop: plan ahead, run, take outputs in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from mrv2.runner.outputs import Pending, StepEvents, StepOutput
from mrv2.runner.request import FinishReason, Request
from mrv2.runner.runner import Runner
from mrv2.runner.scheduler import Scheduler
from mrv2.runner.sync import SyncRunner
from mrv2.state.plan import StepPlan


class _Ready:
    """An output that is there already."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def wait(self) -> StepOutput:
        return self._output


class Engine:
    """Scheduler and runner, with up to `depth` steps in flight. Not thread-safe: one thread drives it.

    Args:
        scheduler: decides.
        runner: runs; the synchronous twin allows depth 1 only.
        depth: steps in flight before the host waits for the oldest.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner | SyncRunner, *, depth: int = 1) -> None:
        assert depth == 1 or isinstance(runner, Runner)
        self.scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._in_flight: deque[tuple[StepPlan, Pending]] = deque()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._in_flight) or self.scheduler.has_work

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests in this order."""
        for request in requests:
            self.scheduler.add(request)

    def end(self, req_id: str, reason: FinishReason) -> Request | None:
        """End a request from outside; None when it has ended already."""
        return self.scheduler.end(req_id, reason)

    def step(self) -> StepEvents | None:
        """Launch what can be launched, then take the oldest output. None when nothing was in flight."""
        while len(self._in_flight) < self._depth:
            plan = self.scheduler.plan()
            if plan is None:
                break
            self._in_flight.append((plan, self._launch(plan)))
        if not self._in_flight:
            assert not self.scheduler.has_work, "requests wait, and no step can run"
            return None
        plan, pending = self._in_flight.popleft()
        return self.scheduler.update(plan, pending.wait())

    def use_idle_time(self) -> bool:
        """Do a bit of what will be needed later, such as capturing a graph; False: there is nothing of the kind."""
        if self.scheduler.release_drained(1):
            return True
        graphs = self._runner.graphs if isinstance(self._runner, Runner) else None
        return graphs is not None and graphs.capture_next()

    def _launch(self, plan: StepPlan) -> Pending:
        if isinstance(self._runner, SyncRunner):
            return _Ready(self._runner.step(plan))
        return self._runner.finish(self._runner.begin(plan))
