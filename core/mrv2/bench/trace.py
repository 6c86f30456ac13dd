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

import torch

from mrv2.bench.requests import random_prompts
from mrv2.bench.steps import prompt_steps
from mrv2.errors import CommandLineError
from mrv2.frontend.llm import LLM
from mrv2.runner.outputs import PendingOutput, RingOutput
from mrv2.sample.params import SamplingParams

STEP = "step"
LEAD, TAIL = 6, 3
"""Steps of decodes alone before and after those that are shown: the first ones follow prompts, and in the last ones
requests end."""


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
    """

    host: Sequence[Span]
    device: Sequence[Span]
    steps: int
    start: float
    end: float


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
        CommandLineError: the context is too short for so many tokens.
    """
    begin = prompt_steps(batch, prompt_tokens, llm.limits.max_num_tokens) + LEAD
    new = begin + steps + TAIL + 2  # the first requests may decode from the first step on
    if prompt_tokens + new > llm.limits.max_model_len:
        raise CommandLineError(
            f"{prompt_tokens + new} tokens of a request are needed, and the context has {llm.limits.max_model_len}",
            where="mrv2 trace",
            fix="lower --prompt-tokens or --steps",
        )
    rng = random.Random(0)
    params = SamplingParams(temperature=temperature, max_tokens=new, ignore_eos=True)

    def run() -> None:
        llm.generate(random_prompts([prompt_tokens] * batch, llm.limits.vocab_size, rng), params)

    run()  # what is compiled, captured and allocated once
    with DeviceRecorder(llm.limits.device) as device, recording(llm) as host:
        run()
    loop = sorted((s for s in host.spans if s.name == STEP), key=lambda s: s.start)
    shown = loop[:steps] if prompts else loop[begin : begin + steps]
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
