"""What host and device did in a few steps: spans by thread and by stream, on one clock.

The host's spans come from hooks that are set on an engine's methods for the time of the recording, and are gone after
it: the code that is measured knows nothing of them, and without a recording they cost nothing.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mrv2.bench.requests import random_prompts
from mrv2.bench.room import prompt_steps, require_rows, require_together
from mrv2.errors import CommandLineError
from mrv2.frontend.llm import LLM
from mrv2.runner.outputs import PendingOutput, RingOutput, StepEvents, StepOutput
from mrv2.runner.scheduler import Scheduler
from mrv2.sample.params import SamplingParams
from mrv2.state.plan import StepPlan

STEP = "step"
LEAD, TAIL = 6, 3
"""Steps in which all requests decode before and after those that are shown: the first ones follow prompts, and in the
last ones requests end."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time. Seconds of `time.perf_counter`."""

    lane: str
    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Trace:
    """What was recorded between `start` and `end`.

    Args:
        host: spans of threads; those of one lane nest.
        device: spans of streams; empty where there is no GPU.
        steps: how many.
        start: seconds, as the spans'.
        end: seconds.
        prompts: for each step, whether outputs of prompts came back in it.
    """

    host: Sequence[Span]
    device: Sequence[Span]
    steps: int
    start: float
    end: float
    prompts: Sequence[bool]


@dataclass(slots=True)
class HostRecorder:
    """Sets hooks, and takes them away."""

    spans: list[Span] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def hook(self, owner: Any, method: str, name: str) -> None:
        """Record calls of `owner.method`, of an object or a class, as `name`."""
        original, own = getattr(owner, method), method in vars(owner)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.spans.append(Span(threading.current_thread().name, name, start, time.perf_counter()))

        setattr(owner, method, timed)
        self._undo.append(lambda: setattr(owner, method, original) if own else delattr(owner, method))

    def release(self) -> None:
        """Take all hooks away."""
        while self._undo:
            self._undo.pop()()


@contextmanager
def recording(llm: LLM) -> Iterator[HostRecorder]:
    """Hooks on the loop, the scheduler, the runner and the delivery of `llm`."""
    driver, recorder = llm._driver, HostRecorder()
    engine = driver._engine
    runner = engine._runner
    hooks: list[tuple[Any, str, str]] = [
        (engine, "step", STEP),
        (engine.scheduler, "plan", "schedule"),
        (engine, "_launch", "launch"),
        (runner, "_replay", "replay"),
        (runner, "_begin", "prepare and forward"),
        (runner, "finish", "sample and write back"),
        (runner, "step", "run"),  # of the plain twin
        (PendingOutput, "wait", "wait"),
        (RingOutput, "wait", "wait"),
        (torch.cuda.CUDAGraph, "replay", "graph launch"),
        (engine.scheduler, "update", "process tokens"),
        (driver._events, "put", "hand over"),
        (driver._outputs, "process", "deliver"),
    ]
    hooks += [(getattr(runner, part, None), "flush", "stage") for part in ("_requests", "_tables", "_sampling")]
    hooks.append((getattr(runner, "_buffers", None), "send", "send inputs"))
    try:
        for owner, method, name in hooks:
            if hasattr(owner, method):
                recorder.hook(owner, method, name)
        yield recorder
    finally:
        recorder.release()


class DeviceRecorder:
    """Kernels and copies of a GPU, by torch's profiler; its clock is brought to the host's by a mark on both."""

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"

    def __enter__(self) -> DeviceRecorder:
        if not self._on:
            return self
        kinds = torch.profiler.ProfilerActivity
        # Operations of the host are recorded in this thread only, which does nothing: the engine's isn't slowed down.
        self._profile = torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])
        self._profile.start()
        for _ in range(3):  # the first is slow
            self._marked = time.perf_counter()
            with torch.profiler.record_function("mrv2.clock"):
                pass
        return self

    def __exit__(self, *error: object) -> None:
        if self._on:
            torch.cuda.synchronize()
            self._profile.stop()

    def spans(self) -> list[Span]:
        """All that ran, by stream."""
        if not self._on:
            return []
        events: list[Any] = list(self._profile.events() or ())  # type: ignore[no-untyped-call]
        marks = [e.time_range.start for e in events if e.name == "mrv2.clock" and not _on_device(e)]
        offset = self._marked - max(marks) * 1e-6
        return [
            Span(
                f"stream {getattr(e, 'device_resource_id', 0)}",
                e.name,
                offset + e.time_range.start * 1e-6,
                offset + e.time_range.end * 1e-6,
            )
            for e in events
            if _on_device(e) and e.name != "mrv2.clock"
        ]


def _on_device(event: Any) -> bool:
    return str(event.device_type).endswith("CUDA")


def record(
    llm: LLM, *, batch: int, prompt_tokens: int, steps: int, temperature: float = 0.0, prompts: bool = False
) -> Trace:
    """Let `batch` requests run, and record some steps.

    Args:
        llm: idle.
        batch: requests, which start together.
        prompt_tokens: of each.
        steps: that are kept.
        temperature: 0: greedy.
        prompts: keep the first steps, with the prompts; else such in which all requests decode.

    Raises:
        CommandLineError: rows, context or cache don't suffice for so many requests and tokens, or there were no steps
            in which all of them decoded.
    """
    engine = llm._driver._engine
    scheduler, ahead = engine.scheduler, engine._depth - 1
    require_rows(scheduler, batch, name="the engine")
    begin = prompt_steps(scheduler, batch, prompt_tokens) + LEAD
    new = begin + steps + ahead + TAIL + 2  # the first requests may decode from the first step on
    require_together(
        scheduler,
        batch,
        prompt_len=prompt_tokens,
        tokens=prompt_tokens + new,
        name="the engine",
        fix="--prompt-tokens or --steps",
    )
    rng = random.Random(0)
    params = SamplingParams(temperature=temperature, max_tokens=new, ignore_eos=True)

    def run() -> None:
        llm.generate(random_prompts([prompt_tokens] * batch, llm.limits.vocab_size, rng), params)

    run()  # what is compiled, captured and allocated once
    with DeviceRecorder(llm.limits.device) as device, noting(scheduler) as taken, recording(llm) as host:
        run()
    loop = sorted((s for s in host.spans if s.name == STEP), key=lambda s: s.start)
    found = [next((t for t in taken if s.start <= t.at <= s.end), None) for s in loop]
    first = 0 if prompts else _first_decodes(found, batch, steps, ahead)
    shown = loop[first : first + steps]
    start, end = shown[0].start, shown[-1].end
    return Trace(
        host=[s for s in sorted(host.spans, key=lambda s: (s.start, -s.end)) if start <= s.start and s.end <= end],
        device=[
            replace(s, start=max(s.start, start), end=min(s.end, end))
            for s in sorted(device.spans(), key=lambda s: s.start)
            if s.end > start and s.start < end
        ],
        steps=len(shown),
        start=start,
        end=end,
        prompts=[t is not None and t.prompts for t in found[first : first + steps]],
    )


@dataclass(frozen=True, slots=True)
class _Taken:
    """A step whose output came back."""

    at: float  # second
    plan: StepPlan
    prompts: bool  # it computed tokens of prompts


@contextmanager
def noting(scheduler: Scheduler) -> Iterator[list[_Taken]]:
    """Which steps' outputs come back within."""
    taken: list[_Taken] = []
    update, columns = scheduler.update, scheduler.columns

    def noted(plan: StepPlan, output: StepOutput) -> StepEvents:
        if taken and plan.rows_np is taken[-1].plan.rows_np and not taken[-1].prompts:  # those that decoded just now
            prompts = False  # and it takes no time to see it
        else:
            rows_np = plan.rows_np.astype(np.intp)
            prompts = bool((columns.computed_np[rows_np] < columns.prefill_len_np[rows_np]).any())
        taken.append(_Taken(time.perf_counter(), plan, prompts))
        return update(plan, output)

    scheduler.update = noted  # type: ignore[method-assign]
    try:
        yield taken
    finally:
        del scheduler.update


def _first_decodes(found: Sequence[_Taken | None], batch: int, steps: int, ahead: int) -> int:
    """The first of `steps` steps to show: in them, in `LEAD` before, and in `ahead` that are launched meanwhile, all
    requests decode.
    """
    in_a_row = 0
    for i, taken in enumerate(found):
        whole = taken is not None and not taken.prompts and taken.plan.num_decodes == taken.plan.num_reqs == batch
        in_a_row = in_a_row + 1 if whole else 0
        if in_a_row == LEAD + steps + ahead:
            return i + 1 - steps - ahead
    raise CommandLineError(
        f"there were no {LEAD + steps + ahead} steps in a row in which all {batch} requests decoded",
        where="mrv2 trace",
        fix="raise max_num_tokens, num_blocks or kv_memory, or lower --batch, --prompt-tokens or --steps",
    )


def chrome_events(trace: Trace) -> dict[str, Any]:
    """The trace in the format that Perfetto and chrome://tracing read: microseconds from its start."""
    events: list[dict[str, Any]] = []
    for pid, (process, spans) in enumerate((("host", trace.host), ("device", trace.device)), start=1):
        lanes = list(dict.fromkeys(s.lane for s in spans))
        if lanes:
            events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}})
        for tid, lane in enumerate(lanes, start=1):
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
        for s in spans:
            times = {"ts": round((s.start - trace.start) * 1e6, 3), "dur": round((s.end - s.start) * 1e6, 3)}
            events.append(
                {"ph": "X", "name": s.name, "cat": process, "pid": pid, "tid": 1 + lanes.index(s.lane), **times}
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
