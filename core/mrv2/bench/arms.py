"""Settings against each other: every arm in turn, so often that what changes on the machine meets all of them."""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from mrv2.bench.environment import environment
from mrv2.bench.requests import measure_arrivals, measure_prompt, timed_batch
from mrv2.bench.steps import NEEDS_CUDA, measure_steps, start_decoding, stop, tokens_needed
from mrv2.errors import CommandLineError
from mrv2.frontend.build import EngineConfig, EngineParts, LoadedModel, assemble, load
from mrv2.frontend.llm import LLM
from mrv2.runner.device import choose_device, on_device

LOAD = 0.7
"""Arrivals a second, as a share of what the first arm's largest batch has shown it can do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What every arm does."""

    measures: Sequence[str]  # of throughput, steps, arrivals
    batches: Sequence[int]
    prompt_tokens: int
    new_tokens: int
    temperature: float
    steps: int  # measured of each batch
    requests: int  # that arrive one after the other
    rate: float | None  # arrivals a second; None: LOAD


@dataclass(slots=True)
class Arm:
    """One set of settings, and what was measured with it, an entry a round."""

    name: str
    settings: Mapping[str, Any]
    ready_s: list[float] = field(default_factory=list)
    throughput: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    steps: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    arrivals: list[dict[str, Any]] = field(default_factory=list)
    graphs: dict[str, Any] | None = None


def parse_settings(text: str, *, where: str) -> dict[str, Any]:
    """`name=value,name=value`, fields of `EngineConfig`; values as in JSON, or plain words.

    Raises:
        CommandLineError: no such field, or no value.
    """
    settings: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, given, value = part.partition("=")
        if not given or name not in EngineConfig.__dataclass_fields__:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise CommandLineError(f"{part!r} sets nothing", where=where, fix=f"give NAME=VALUE; names are {known}")
        try:
            settings[name] = json.loads(value.lower() if value.lower() in ("true", "false") else value)
        except ValueError:
            settings[name] = None if value.lower() == "none" else value
    return settings


def parse_arm(text: str) -> Arm:
    """`[NAME:]name=value,…`; without a name, the settings are it."""
    name, named, settings = text.partition(":")
    name, settings = (name, settings) if named and "=" not in name else (text, text)
    return Arm(name, parse_settings(settings, where=f"--arm {text}"))


def run_arms(
    model: str,
    arms: Sequence[Arm],
    base: Mapping[str, Any],
    workload: Workload,
    *,
    repeat: int,
    adapters: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure all arms `repeat` times, taking turns, each time with an engine of its own.

    Args:
        model: as for `LLM`.
        arms: at least one.
        base: settings of all arms; an arm's own go before them.
        workload: what is measured.
        repeat: rounds.
        adapters: as for `LLM`.
        progress: is told what is done now.

    Returns:
        The report, which JSON can hold.
    """
    loaded: dict[tuple[Any, ...], LoadedModel] = {}
    rate = workload.rate
    for turn in range(repeat):
        for arm in arms if turn % 2 == 0 else reversed(arms):
            config = EngineConfig(**{**base, **arm.settings})
            key = config.dtype, config.device, config.weights
            if key not in loaded:
                progress(f"loading {model}")
                loaded[key] = load(model, config, adapters)
            progress(f"round {turn + 1} of {repeat}: {arm.name}")
            rate = _Visit(arm, loaded[key], config, workload, random.Random(turn)).run(rate)
            gc.collect()
            if choose_device(config.device).type == "cuda":
                torch.cuda.empty_cache()
    device = choose_device(EngineConfig(**{**base, **arms[0].settings}).device)
    return {
        "benchmark": "bench",
        **environment(device),
        "model": next(iter(loaded.values())).name,
        "architecture": next(iter(loaded.values())).config.architecture,
        "adapter": next(iter(loaded.values())).adapter,
        "repeat": repeat,
        "settings": dict(base),
        "workload": asdict(workload),
        "arms": [_report(arm, workload) for arm in arms],
    }


class _Visit:
    """One arm's turn."""

    def __init__(
        self, arm: Arm, model: LoadedModel, config: EngineConfig, workload: Workload, rng: random.Random
    ) -> None:
        self.arm, self.model, self.config, self.work, self.rng = arm, model, config, workload, rng

    def run(self, rate: float | None) -> float | None:
        """Measure; the rate of arrivals that the next ones shall use too."""
        with on_device(choose_device(self.config.device)):
            return self._run(rate)

    def _run(self, rate: float | None) -> float | None:
        work, start = self.work, time.perf_counter()
        parts = assemble(self.model, self.config)
        if parts.limits.device.type == "cuda":
            torch.cuda.synchronize()
        self.arm.ready_s.append(round(time.perf_counter() - start, 3))
        self._check_context(parts)
        if "steps" in work.measures:
            for batch in work.batches:
                self._steps(parts, batch)
        if "throughput" in work.measures:
            with LLM.from_parts(self.model, self.config, parts) as llm:
                for batch in work.batches:
                    self._throughput(llm, batch)
        if "arrivals" in work.measures:
            rate = self._arrivals(parts, rate)
        if parts.graphs is not None:
            graphs = parts.graphs
            names = ("captures", "replays", "prompts", "prompts_eager")
            self.arm.graphs = {**{name: getattr(graphs, name) for name in names}, "eager": dict(graphs.eager)}
        return rate

    def _check_context(self, parts: EngineParts) -> None:
        work = self.work
        needed = work.prompt_tokens + work.new_tokens
        if "steps" in work.measures:
            needed = max(needed, self._needed(parts, max(work.batches)))
        if needed > parts.limits.max_model_len:
            raise CommandLineError(
                f"{needed} tokens of a request are needed, and {self.arm.name} has {parts.limits.max_model_len}",
                where="mrv2 bench",
                fix="lower --prompt-tokens, --new-tokens or --steps, or raise max_model_len",
            )

    def _needed(self, parts: EngineParts, batch: int) -> int:
        work, limits = self.work, parts.limits
        return tokens_needed(
            batch, prompt_len=work.prompt_tokens, steps=work.steps, max_num_tokens=limits.max_num_tokens
        )

    def _steps(self, parts: EngineParts, batch: int) -> None:
        if batch > parts.limits.max_rows:
            return
        start_decoding(parts, batch, prompt_len=self.work.prompt_tokens, steps=self.work.steps, rng=self.rng)
        self.arm.steps.setdefault(batch, []).append(measure_steps(parts, self.work.steps))
        stop(parts, batch)

    def _throughput(self, llm: LLM, batch: int) -> None:
        work = self.work
        lens, new = [work.prompt_tokens] * batch, [work.new_tokens] * batch
        timed_batch(llm, lens, [min(4, work.new_tokens)] * batch, temperature=work.temperature, rng=self.rng)
        seconds = timed_batch(llm, lens, new, temperature=work.temperature, rng=self.rng)
        self.arm.throughput.setdefault(batch, []).append(
            {
                "seconds": round(seconds, 4),
                "tokens_per_second": round(sum(new) / seconds, 1),
                "ms_per_token": round(seconds / work.new_tokens * 1e3, 3),
            }
        )

    def _arrivals(self, parts: EngineParts, rate: float | None) -> float:
        work = self.work
        if rate is None:
            batch = max(work.batches)
            if batch not in self.arm.throughput:
                raise CommandLineError(
                    "arrivals need a rate", where="mrv2 bench", fix="give --rate, or measure throughput too"
                )
            rate = LOAD * self.arm.throughput[batch][-1]["tokens_per_second"] / work.new_tokens
        prompt_ms = measure_prompt(parts, prompt_len=work.prompt_tokens)
        result = measure_arrivals(
            parts,
            rate=rate,
            count=work.requests,
            prompt_len=work.prompt_tokens,
            new=work.new_tokens,
            seed=self.rng.randrange(2**31),
        )
        self.arm.arrivals.append(result | {"one_prompt_ms": round(prompt_ms, 3)})
        return rate


def _report(arm: Arm, work: Workload) -> dict[str, Any]:
    tokens = {"prompt_tokens": work.prompt_tokens, "new_tokens": work.new_tokens, "temperature": work.temperature}
    steps = [{"batch": batch, **medians(runs), "runs": runs} for batch, runs in arm.steps.items()]
    for entry in steps:
        for name in ("host_us", "device_us", "idle_us"):
            entry.setdefault(name, NEEDS_CUDA if "host_us" not in entry["runs"][0] else "unavailable: no graphs")
    return {
        "name": arm.name,
        "settings": dict(arm.settings),
        "ready_s": statistics.median(arm.ready_s),
        "throughput": [{"batch": b, **tokens, **medians(r), "runs": r} for b, r in arm.throughput.items()],
        "steps": steps,
        "arrivals": {**medians(arm.arrivals), "runs": arm.arrivals} if arm.arrivals else None,
        "graphs": arm.graphs,
    }


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each number in dictionaries that are alike, the median."""
    result: dict[str, Any] = {}
    for name, first in runs[0].items():
        values = [run[name] for run in runs]
        if isinstance(first, Mapping):
            result[name] = medians(values)
        elif isinstance(first, int | float):
            result[name] = statistics.median(values)
        else:
            result[name] = first
    return result
