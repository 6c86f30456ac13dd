"""A decode step's time: the whole, the host's share, and the device's between events around each replay."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mrv2.bench.room import IN_FLIGHT, prompt_steps, require_rows, require_together
from mrv2.errors import CommandLineError
from mrv2.frontend.build import EngineParts
from mrv2.runner.outputs import PendingOutput, RingOutput
from mrv2.runner.request import FinishReason, Request
from mrv2.runner.scheduler import Scheduler
from mrv2.sample.params import SamplingParams

WARM = 16
"""Tokens that each request has, at least, before its steps are measured."""

NEEDS_CUDA = "unavailable: on a CPU, host and device are one, and there are no events around replays"


class Replays:
    """Events around every graph replay within."""

    def __init__(self) -> None:
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> Replays:
        self._replay = replay = torch.cuda.CUDAGraph.replay

        def marked(graph: torch.cuda.CUDAGraph) -> None:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            replay(graph)
            last.record()
            self.marks.append((first, last))

        torch.cuda.CUDAGraph.replay = marked  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.CUDAGraph.replay = self._replay  # type: ignore[method-assign]

    def report(self) -> dict[str, Any]:
        """Microseconds of a replay, and between two."""
        torch.cuda.synchronize()
        if not self.marks:
            return {"replays": 0}
        device = [first.elapsed_time(last) * 1e3 for first, last in self.marks]
        pairs = zip(self.marks, self.marks[1:], strict=False)
        idle = [last.elapsed_time(first) * 1e3 for (_, last), (first, _) in pairs] or [0.0]
        return {
            "replays": len(device),
            "device_us": round(statistics.median(device), 1),
            "device_us_worst": round(max(device), 1),
            "idle_us": round(statistics.median(idle), 1),
            "idle_share": round(sum(idle) / (sum(idle) + sum(device)), 4),
        }


@contextmanager
def timed(*methods: tuple[Any, str]) -> Iterator[list[float]]:
    """Seconds of each call of these methods, given as class and name, within."""
    seconds: list[float] = []
    originals = {(kind, name): getattr(kind, name) for kind, name in methods}

    def timing(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                seconds.append(time.perf_counter() - start)

        return timed_call

    for (kind, name), call in originals.items():
        setattr(kind, name, timing(call))
    try:
        yield seconds
    finally:
        for (kind, name), call in originals.items():
            setattr(kind, name, call)


def tokens_needed(scheduler: Scheduler, batch: int, *, prompt_len: int, steps: int) -> int:
    """Context that a request of `start_decoding` needs for `measure_steps`, its prompt included: the first one decodes
    until the last one's prompt is done, and all of them may have steps in flight.
    """
    return prompt_len + prompt_steps(scheduler, batch, prompt_len) + WARM + 4 * steps + 2 * IN_FLIGHT


def start_decoding(parts: EngineParts, batch: int, *, prompt_len: int, steps: int, rng: random.Random) -> None:
    """Bring `batch` requests past their prompts and `WARM` tokens further, with enough to go for `measure_steps`.

    Args:
        parts: idle, and made for requests as long as `tokens_needed`.
        batch: requests.
        prompt_len: tokens of each prompt; random ones.
        steps: that will be measured.
        rng: of the prompts.

    Raises:
        CommandLineError: they can't decode together, for want of rows, context or cache.
    """
    scheduler = parts.engine.scheduler
    require_rows(scheduler, batch, name="the engine")
    length = tokens_needed(scheduler, batch, prompt_len=prompt_len, steps=steps)
    require_together(
        scheduler, batch, prompt_len=prompt_len, tokens=length, name="the engine", fix="--prompt-tokens or --steps"
    )
    params = SamplingParams(temperature=0, max_tokens=length - prompt_len, ignore_eos=True)
    requests = []
    for i in range(batch):
        ids = [rng.randrange(parts.limits.vocab_size) for _ in range(prompt_len)]
        requests.append(parts.intake.request(f"step-{i}", ids, params))
    parts.engine.add(requests)
    for _ in range(length - prompt_len - 4 * steps):
        if _all_decode(scheduler, requests):
            return
        parts.engine.step()
    stop(parts, batch)
    raise _not_decodes(batch, "not all of them were past their prompts before the first was at its end")


def _all_decode(scheduler: Scheduler, requests: Sequence[Request]) -> bool:
    if scheduler.num_waiting or scheduler.num_running != len(requests):
        return False
    rows_np, columns = np.array([request.row for request in requests]), scheduler.columns
    known_np = columns.known_np[rows_np]
    warm_np = known_np >= columns.prompt_len_np[rows_np] + WARM
    return bool((warm_np & (known_np > columns.prefill_len_np[rows_np])).all())


@contextmanager
def decodes_only(scheduler: Scheduler, steps: int) -> Iterator[None]:
    """See that within, `steps` steps each decode all requests that run at its start, and nothing else.

    A step gives each request a token at most: so if there are as many as there could be, every step was whole.

    Raises:
        CommandLineError: some didn't: a request was preempted, ended or joined.
    """
    stats, batch = scheduler.stats, scheduler.num_running
    tokens, preemptions = stats.generated_tokens, stats.preemptions
    yield
    tokens, preemptions = stats.generated_tokens - tokens, stats.preemptions - preemptions
    if preemptions or scheduler.num_waiting:
        raise _not_decodes(batch, f"{preemptions} times one of them was preempted, {scheduler.num_waiting} wait")
    if not batch or scheduler.num_running != batch or tokens != batch * steps:
        raise _not_decodes(batch, f"{steps} steps gave {tokens} tokens, and {scheduler.num_running} still run")


def _not_decodes(batch: int, why: str) -> CommandLineError:
    return CommandLineError(
        f"not all steps were decodes of {batch} requests: {why}",
        where="measurement of decode steps",
        fix="raise num_blocks, kv_memory or max_num_tokens, or lower the batch, --prompt-tokens or --steps",
    )


def stop(parts: EngineParts, batch: int) -> None:
    """End what `start_decoding` began."""
    for i in range(batch):
        parts.engine.end(f"step-{i}", FinishReason.ABORT)
    while parts.engine.has_work:
        parts.engine.step()


def measure_steps(parts: EngineParts, steps: int) -> dict[str, Any]:
    """Microseconds of a step, of the host's work in it, and of the device's, while requests decode.

    Host time is all but the wait for an output, of the median step; the mean has what else the machine did, and steps
    in which all requests get blocks. A part of it is the launch of a graph, a call of the driver. Events delay the
    device a little, so device and wall time are measured one after the other.

    Args:
        parts: all its requests decode, as after `start_decoding`.
        steps: timed by events; three times as many by the clock.

    Raises:
        CommandLineError: some steps weren't decodes of all of them.
    """
    graphs = parts.graphs is not None
    with decodes_only(parts.engine.scheduler, (3 + graphs) * steps):
        return _measure_steps(parts, steps)


def _measure_steps(parts: EngineParts, steps: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if parts.graphs is not None:
        with Replays() as replays:
            for _ in range(steps):
                parts.engine.step()
        result |= replays.report()
    on_gpu = parts.limits.device.type == "cuda"
    launches = [(torch.cuda.CUDAGraph, "replay")] if on_gpu else []
    times, host = [], []
    with timed((PendingOutput, "wait"), (RingOutput, "wait")) as waited, timed(*launches) as launched:
        for _ in range(3 * steps):
            start = time.perf_counter()
            parts.engine.step()
            times.append(time.perf_counter() - start)
            host.append(times[-1] - sum(waited))
            waited.clear()
    result["step_us"] = round(sum(times) / len(times) * 1e6, 1)
    result["step_us_p99"] = round(statistics.quantiles(times, n=100, method="inclusive")[-1] * 1e6, 1)
    if on_gpu:
        result["host_us"] = round(statistics.median(host) * 1e6, 1)
        result["host_us_mean"] = round(statistics.mean(host) * 1e6, 1)
    if launched:
        result["launch_us"] = round(statistics.median(launched) * 1e6, 1)
    return result


def profile_steps(parts: EngineParts, steps: int = 5) -> dict[str, Any]:
    """Microseconds of the kernels of a step on a GPU. From then on, launching a graph takes this process ten times as
    long: host times are to be measured before.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            parts.engine.step()
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if e.self_device_time_total > 0]
    kernels = sorted(events, key=lambda e: -e.self_device_time_total)
    return {
        "device_us": round(sum(e.self_device_time_total for e in kernels) / steps, 1),
        "launches": round(sum(e.count for e in kernels) / steps, 1),
        "kernels": [
            {
                "name": e.key[:100],
                "us": round(e.self_device_time_total / steps, 1),
                "count": round(e.count / steps, 1),
                "us_each": round(e.self_device_time_total / e.count, 2),
            }
            for e in kernels[:30]
        ],
    }
