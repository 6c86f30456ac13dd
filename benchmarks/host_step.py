"""Host time of one decode step by number of running requests, with a model that does nothing; and of a request's
beginning and end, where all of them begin and end together.

Everything but the model runs as always: planning, staging, a step's launch, and taking its output. Decodes are replayed
as on a GPU, with graphs that do nothing, or with --eager launched one by one: input preparation, sampling of a tiny
vocabulary and write-back are then the CPU's. Calls of Python and C functions are counted too: unlike times, they are
the same on every machine, however busy. Prints one JSON document.

    python benchmarks/host_step.py [--requests 1 32 256 1024] [--steps 200] [--eager]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from mrv2.frontend.build import EngineParts
from mrv2.sample.params import SamplingParams
from mrv2.testing.null_model import null_engine, null_replays

WARM, COUNTED = 20, 32  # steps before the clock starts, and steps whose calls are counted


def decoding(num_reqs: int, steps: int, eager: bool) -> EngineParts:
    """An engine whose `num_reqs` requests are all past their prompts, and have `steps` steps to go, or a few more."""
    make, room = null_engine if eager else null_replays, steps + WARM + COUNTED + 60
    parts = make(max_num_seqs=num_reqs, max_model_len=64 + room)
    params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True)
    # Prompts of different lengths, so that rows reach the edge of a block in different steps, as they would.
    parts.engine.add(parts.intake.request(str(i), [1] * (1 + i % 50), params) for i in range(num_reqs))
    while parts.engine.scheduler.stats.generated_tokens < num_reqs:
        parts.engine.step()
    for _ in range(WARM):
        parts.engine.step()
    return parts


def step_times(parts: EngineParts, steps: int) -> list[float]:
    """Microseconds of each step."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        parts.engine.step()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def ends(num_reqs: int, new: int = 256, repeats: int = 5) -> dict[str, float]:
    """Microseconds per request of the step that takes all of them in, of the one in which all end with `new` tokens,
    and of giving back what they held, which nobody waits for. The least of some repeats.
    """
    parts = null_replays(max_num_seqs=num_reqs, max_model_len=64 + new, max_num_tokens=32 * num_reqs)
    params, least = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True), dict[str, float]()
    for k in range(repeats):
        prompts = ([(i + j * k) % 8 for j in range(32)] for i in range(num_reqs))
        parts.engine.add(parts.intake.request(f"{k}-{i}", prompt, params) for i, prompt in enumerate(prompts))
        began, *_, ended = timed_steps(parts)
        start = time.perf_counter()
        while parts.engine.scheduler.release_drained(1):
            pass
        given_back = (time.perf_counter() - start) * 1e6
        for name, us in (("begin", began), ("end", ended), ("give_back", given_back)):
            least[f"{name}_us"] = round(min(us / num_reqs, least.get(f"{name}_us", us)), 1)
    return least


def timed_steps(parts: EngineParts) -> list[float]:
    """Microseconds of each step, until all requests have ended."""
    times = []
    while parts.engine.has_work:
        times += step_times(parts, 1)
    return times


def step_calls(parts: EngineParts) -> dict[str, float]:
    """Function calls per step."""
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    for _ in range(COUNTED):
        parts.engine.step()
    sys.setprofile(None)
    return {"python_calls": round(calls["call"] / COUNTED, 1), "c_calls": round(calls["c_call"] / COUNTED, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for num_reqs in args.requests:
        parts = decoding(num_reqs, args.steps, args.eager)
        times = step_times(parts, args.steps)
        assert parts.engine.scheduler.num_running == num_reqs
        results.append(
            {
                "requests": num_reqs,
                "median_us": round(statistics.median(times), 1),
                "p90_us": round(statistics.quantiles(times, n=10)[-1], 1),
                **step_calls(parts),
                "per_request": ends(num_reqs),
            }
        )
    requests = " ".join(map(str, args.requests))
    report = {
        "benchmark": "host_step",
        "command": f"python benchmarks/host_step.py --requests {requests} --steps {args.steps}"
        + " --eager" * args.eager,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "results": results,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
