"""How the GPU benchmarks time what they run, and what they say about where they ran."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from mrv2.bench.environment import environment

__all__ = ["copy_bandwidth", "eager_us", "environment", "graph_us", "host_us", "kernels_us"]

QUEUED = 3
"""Calls enqueued at a time: fewer than a staging ring has buffers, so that the host never waits between them."""

Run = Callable[[], Any]


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy of 4 GiB, read and written bytes counted."""
    from triton.testing import do_bench

    source = torch.randint(-(2**62), 2**62, (2**29,), device="cuda")
    target = torch.empty_like(source)
    # Not from a graph, whose copies are slower: it hands them to the copy engine.
    ms = do_bench(lambda: target.copy_(source), warmup=1000, rep=500, return_mode="median")
    return 2 * source.nbytes / (float(ms) * 1e-3)


def graph_us(run: Run) -> float:
    """Microseconds of a captured graph's replays: what the host takes to launch is another matter.

    Median; the L2 cache is emptied before each replay.
    """
    from triton.testing import do_bench

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return float(do_bench(graph.replay, warmup=50, rep=200, return_mode="median")) * 1e3


def eager_us(run: Run, rounds: int = 30) -> float:
    """Microseconds between events around launches that are queued already, gaps between kernels included. Median."""
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(QUEUED)]
        torch.cuda._sleep(20_000_000)  # some ten milliseconds, in which the host fills the queue
        for first, last in marks:
            first.record()
            run()
            last.record()
        torch.cuda.synchronize()
        times += [first.elapsed_time(last) * 1e3 for first, last in marks]
    return statistics.median(times)


def kernels_us(run: Run, repeats: int = 20) -> dict[str, float]:
    """Microseconds that each kernel and copy takes per run, and their sum."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    times = {e.key[:72]: round(e.self_device_time_total / repeats, 2) for e in profile.key_averages()}
    times = {name: t for name, t in times.items() if t > 0}
    return times | {"sum": round(sum(times.values()), 2)}


def host_us(run: Run, repeats: int = 200) -> float:
    """Microseconds of the host per run."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    elapsed = (time.perf_counter() - start) / repeats * 1e6
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return elapsed
