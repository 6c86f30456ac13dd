"""Whole requests: batches that start together, and requests that arrive one after the other."""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from mrv2.frontend.build import EngineParts
from mrv2.frontend.llm import LLM
from mrv2.sample.params import SamplingParams

MOST_WARM = 32
"""Requests that arrive before those that are measured, at most."""

LONGEST_SLEEP = 60.0
"""Seconds."""


def random_prompts(lengths: Sequence[int], vocab_size: int, rng: random.Random) -> list[list[int]]:
    """Prompts of these lengths."""
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]


def timed_batch(
    llm: LLM, prompt_lens: Sequence[int], new: Sequence[int], *, temperature: float, rng: random.Random
) -> float:
    """Seconds until all of these requests, which start together, have all their tokens."""
    prompts = random_prompts(prompt_lens, llm.limits.vocab_size, rng)
    params = [SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True) for n in new]
    start = time.perf_counter()
    results = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    assert [len(r.outputs[0].token_ids) for r in results] == list(new)
    return seconds


def measure_arrivals(
    parts: EngineParts, *, rate: float, count: int, prompt_len: int, new: int, seed: int = 0
) -> dict[str, Any]:
    """Latencies of requests that arrive at random times, as a Poisson process: what a busy server's users see.

    Times are those at which the engine has a token; threads that make text of it come after. Some requests that arrive
    in the same way, with other prompts, go before and aren't counted.

    Args:
        parts: idle.
        rate: requests a second, on average.
        count: requests.
        prompt_len: tokens of each prompt.
        new: tokens that each request generates.
        seed: of arrivals and prompts.
    """
    arrive = functools.partial(_arrive, parts, rate=rate, prompt_len=prompt_len, new=new)
    # What is compiled, captured and allocated once is a matter of the start, not of a request's latency.
    arrive(name=f"warm-{seed}", count=min(count, MOST_WARM))
    use_idle_time(parts)
    latencies = _latencies(*arrive(name=f"arrival-{seed}", count=count))
    return {"rate": round(rate, 3), "requests": count} | latencies


def use_idle_time(parts: EngineParts) -> None:
    """Do all that an engine does in advance when it has nothing else to do."""
    while parts.engine.use_idle_time():
        pass


def _arrive(
    parts: EngineParts, *, name: str, rate: float, count: int, prompt_len: int, new: int
) -> tuple[dict[int, float], list[tuple[float, Any]], float]:
    """When each request arrived, by number; times, with the numbers of requests that gained a token then; seconds."""
    engine, rng = parts.engine, random.Random(name)
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    due, waiting = 0.0, deque[tuple[float, list[int]]]()
    for prompt in random_prompts([prompt_len] * count, parts.limits.vocab_size, rng):
        waiting.append((due, prompt))
        due += rng.expovariate(rate)
    arrived: dict[int, float] = {}
    seen: list[tuple[float, Any]] = []
    start = time.perf_counter()
    while waiting or engine.has_work:
        now = time.perf_counter() - start
        while waiting and waiting[0][0] <= now:
            at, prompt = waiting.popleft()
            request = parts.intake.request(f"{name}-{len(arrived)}", prompt, params, watched=True)
            arrived[request.number] = at
            engine.add([request])
        if not engine.has_work:
            if not engine.use_idle_time():  # as the thread that drives it does
                time.sleep(min(waiting[0][0] - now, LONGEST_SLEEP))
            continue
        events = engine.step()
        if events is not None and len(events.numbers_np):
            seen.append((time.perf_counter() - start, events.numbers_np))
    return arrived, seen, time.perf_counter() - start


def _latencies(arrived: dict[int, float], seen: list[tuple[float, Any]], seconds: float) -> dict[str, Any]:
    numbers_np = np.concatenate([numbers for _, numbers in seen])
    times_np = np.concatenate([np.full(len(numbers), at) for at, numbers in seen])
    order_np = np.argsort(numbers_np, kind="stable")
    numbers_np, times_np = numbers_np[order_np], times_np[order_np]
    first_np = np.diff(numbers_np, prepend=-1) != 0
    first_ms = (times_np[first_np] - np.array([arrived[n] for n in numbers_np[first_np].tolist()])) * 1e3
    gaps_ms = np.diff(times_np)[~first_np[1:]] * 1e3
    return {
        "tokens_per_second": round(len(numbers_np) / seconds, 1),
        "first_token_ms": _percentiles(first_ms),
        "between_tokens_ms": _percentiles(gaps_ms) if len(gaps_ms) else None,
    }


def _percentiles(values_np: Any) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(values_np, p)), 3) for p in (50, 99)}


def measure_prompt(parts: EngineParts, *, prompt_len: int, repeat: int = 5) -> float:
    """Milliseconds of one prompt alone, up to its first token; median."""
    rng, times = random.Random(1), []
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for i, prompt in enumerate(random_prompts([prompt_len] * (1 + repeat), parts.limits.vocab_size, rng)):
        parts.engine.add([parts.intake.request(f"prompt-{i}", prompt, params)])
        start = time.perf_counter()
        while parts.engine.has_work:
            parts.engine.step()
        times.append((time.perf_counter() - start) * 1e3)
        use_idle_time(parts)
    return statistics.median(times[1:])  # the first one compiles
