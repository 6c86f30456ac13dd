"""Host time of one decode step by number of running requests, with a model that does nothing.

Everything but the model runs as always: planning, staging, input preparation, sampling of a tiny vocabulary,
write-back, and taking the output. Prints one JSON document.

    python benchmarks/host_step.py [--requests 32 256 1024] [--steps 200]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from mrv2.sample.params import SamplingParams
from mrv2.testing.null_model import null_engine


def step_times(num_reqs: int, steps: int) -> list[float]:
    """Milliseconds of each decode step at `num_reqs` running requests."""
    parts = null_engine(max_num_seqs=num_reqs, max_model_len=64 + steps + 64)
    params = SamplingParams(temperature=0, max_tokens=steps + 60, ignore_eos=True)
    # Prompts of different lengths, so that rows reach the edge of a block in different steps, as they would.
    parts.engine.add(parts.intake.request(str(i), [1] * (1 + i % 50), params) for i in range(num_reqs))
    scheduler = parts.engine.scheduler
    while scheduler.stats.generated_tokens < num_reqs:
        parts.engine.step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        parts.engine.step()
        times.append((time.perf_counter() - start) * 1e3)
    assert scheduler.num_running == num_reqs
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for num_reqs in args.requests:
        times = step_times(num_reqs, args.steps)
        results.append(
            {
                "requests": num_reqs,
                "median_ms": round(statistics.median(times), 3),
                "p90_ms": round(statistics.quantiles(times, n=10)[-1], 3),
            }
        )
    base = results[0]["median_ms"]
    for r in results:
        r["over_first"] = round(r["median_ms"] / base, 2)
    requests = " ".join(map(str, args.requests))
    report = {
        "benchmark": "host_step",
        "command": f"python benchmarks/host_step.py --requests {requests} --steps {args.steps}",
        "machine": platform.machine(),
        "torch": torch.__version__,
        "results": results,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
