"""Settings against each other: every arm in turn, so often that what changes on the machine meets all of them."""

from __future__ import annotations

import gc
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from mrv2.bench.environment import environment
from mrv2.bench.requests import measure_arrivals, measure_prompt, timed_batch
from mrv2.bench.room import require_alone, require_together
from mrv2.bench.steps import NEEDS_CUDA, measure_steps, start_decoding, stop, tokens_needed
from mrv2.errors import CommandLineError, Mrv2Error
from mrv2.frontend.build import EngineParts, LoadedModel, assemble, load
from mrv2.frontend.engine_config import EngineConfig
from mrv2.frontend.llm import LLM
from mrv2.runner.device import choose_device, on_device
from mrv2.sample.params import SamplingParams

_PARTS = ("host_us", "device_us", "idle_us")

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
    load_s: float = 0.0  # seconds until the weights were there, which arms may share
    assemble_s: list[float] = field(default_factory=list)  # seconds from there to the first possible step
    throughput: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    steps: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    arrivals: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[int, str] = field(default_factory=dict)  # batches without steps, and why
    graphs: dict[str, Any] | None = None

    def keep(self, rounds: int) -> None:
        """Forget what a round that wasn't finished has left."""
        del self.assemble_s[rounds:]
        for runs in (self.arrivals, *self.throughput.values(), *self.steps.values()):
            del runs[rounds:]


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
    """`[NAME:]name=value,…`; without a name, the settings are it.

    Raises:
        CommandLineError: there is no name, no setting, no such field, or no value.
    """
    where = f"--arm {text}"
    name, named, given = text.partition(":")
    name, given = (name, given) if named and "=" not in name else (text, text)
    settings = parse_settings(given, where=where)
    if not name.strip() or not settings:
        raise CommandLineError("an arm has a name and settings", where=where, fix="give NAME:SETTING=VALUE")
    return Arm(name.strip(), settings)


def run_arms(
    model: str,
    arms: Sequence[Arm],
    base: Mapping[str, Any],
    workload: Workload,
    *,
    repeat: int,
    adapters: Sequence[str] = (),
    title: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], Mrv2Error | KeyboardInterrupt | None]:
    """Measure all arms `repeat` times, taking turns, each time with an engine of its own.

    If it is stopped, by Ctrl-C or by an error of an arm, when a round is finished, that is what is reported.

    Args:
        model: as for `LLM`.
        arms: at least one.
        base: settings of all arms; an arm's own go before them.
        workload: what is measured.
        repeat: rounds.
        adapters: as for `LLM`.
        title: the model's name in the report; None: its own.
        progress: is told what is done now.

    Returns:
        The report, which JSON can hold. `repeat` are the rounds in it, `load_s` and `assemble_s` the two parts of an
        arm's way from a name to a possible step. And what stopped it before all rounds were finished.

    Raises:
        Mrv2Error: settings or workload are wrong, which is seen before anything is loaded; or an arm can't do it, which
            is seen in the first round.
        KeyboardInterrupt: before the first round was finished.
    """
    configs = _checked(arms, base, workload)
    loaded: dict[tuple[Any, ...], tuple[LoadedModel, float]] = {}
    rate, rounds = workload.rate, 0
    stopped: Mrv2Error | KeyboardInterrupt | None = None
    try:
        for turn in range(repeat):
            for arm, config in list(zip(arms, configs, strict=True))[:: 1 if turn % 2 == 0 else -1]:
                key = config.dtype, config.device, config.weights
                if key not in loaded:
                    progress(f"loading {title or model}")
                    loaded[key] = _load(model, config, adapters)
                progress(f"round {turn + 1} of {repeat}: {arm.name}")
                found, arm.load_s = loaded[key]
                rate = _Visit(arm, found, config, workload, turn).run(rate)
                gc.collect()
                if choose_device(config.device).type == "cuda":
                    torch.cuda.empty_cache()
            rounds += 1
    except (Mrv2Error, KeyboardInterrupt) as error:
        if not rounds:
            raise
        stopped = error
    for arm in arms:
        arm.keep(rounds)
    first, _ = next(iter(loaded.values()))
    report = {
        "benchmark": "bench",
        **environment(choose_device(configs[0].device)),
        "model": title or first.name,
        "architecture": first.config.architecture,
        "adapter": first.adapter,
        "repeat": rounds,
        "interrupted": stopped is not None,
        "settings": dict(base),
        "workload": asdict(workload),
        "arms": [_report(arm, workload) for arm in arms],
    }
    return report, stopped


def _checked(arms: Sequence[Arm], base: Mapping[str, Any], work: Workload) -> list[EngineConfig]:
    """Each arm's settings, if all that can be known to be wrong without a model is right."""
    names = [arm.name for arm in arms]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CommandLineError(
            f"two arms are named {twice[0]!r}", where="--arm", fix="give names of their own: NAME:SETTING=VALUE"
        )
    if work.rate is not None and not 0 < work.rate < math.inf:
        raise CommandLineError(f"--rate {work.rate:g}", where="mrv2 bench", fix="give a finite number above 0")
    if "arrivals" in work.measures and work.rate is None and "throughput" not in work.measures:
        raise CommandLineError("arrivals need a rate", where="mrv2 bench", fix="give --rate, or measure throughput too")
    SamplingParams(temperature=work.temperature, max_tokens=work.new_tokens)
    configs = [EngineConfig(**{**base, **arm.settings}) for arm in arms]
    for config in configs:
        choose_device(config.device)
    return configs


def _load(model: str, config: EngineConfig, adapters: Sequence[str]) -> tuple[LoadedModel, float]:
    start = time.perf_counter()
    found = load(model, config, adapters)
    _wait_for(choose_device(config.device))
    return found, round(time.perf_counter() - start, 3)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Visit:
    """One arm's turn."""

    def __init__(self, arm: Arm, model: LoadedModel, config: EngineConfig, workload: Workload, turn: int) -> None:
        self.arm, self.model, self.config, self.work, self.turn = arm, model, config, workload, turn

    def _rng(self, measure: str, batch: int) -> random.Random:
        """Of a measurement's own: what one arm skips changes nothing for it in the others."""
        return random.Random(f"{self.turn}-{measure}-{batch}")

    def run(self, rate: float | None) -> float | None:
        """Measure; the rate of arrivals that the next ones shall use too."""
        with on_device(choose_device(self.config.device)):
            return self._run(rate)

    def _run(self, rate: float | None) -> float | None:
        work, start = self.work, time.perf_counter()
        parts = assemble(self.model, self.config)
        _wait_for(parts.limits.device)
        self.arm.assemble_s.append(round(time.perf_counter() - start, 3))
        self._check_room(parts)
        if "steps" in work.measures:
            for batch in self._steppable(parts):
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

    def _steppable(self, parts: EngineParts) -> list[int]:
        """Batches for whose requests there are rows; of the others it is noted why not."""
        most = parts.limits.max_rows
        self.arm.skipped = {b: f"unavailable: max_num_seqs={most}" for b in self.work.batches if b > most}
        return [batch for batch in self.work.batches if batch <= most]

    def _check_room(self, parts: EngineParts) -> None:
        """Before anything is measured, see that all of it can be."""
        work, scheduler, name = self.work, parts.engine.scheduler, self.arm.name
        if {"throughput", "arrivals"} & set(work.measures):  # their requests may wait for each other
            tokens = work.prompt_tokens + work.new_tokens
            require_alone(scheduler, tokens, name=name, fix="--prompt-tokens or --new-tokens")
        for batch in self._steppable(parts) if "steps" in work.measures else ():
            require_together(
                scheduler,
                batch,
                prompt_len=work.prompt_tokens,
                tokens=tokens_needed(scheduler, batch, prompt_len=work.prompt_tokens, steps=work.steps),
                name=name,
                fix="--prompt-tokens or --steps",
            )

    def _steps(self, parts: EngineParts, batch: int) -> None:
        work, rng = self.work, self._rng("steps", batch)
        start_decoding(parts, batch, prompt_len=work.prompt_tokens, steps=work.steps, rng=rng)
        self.arm.steps.setdefault(batch, []).append(measure_steps(parts, work.steps))
        stop(parts, batch)

    def _throughput(self, llm: LLM, batch: int) -> None:
        work = self.work
        lens, new, rng = [work.prompt_tokens] * batch, [work.new_tokens] * batch, self._rng("throughput", batch)
        timed_batch(llm, lens, [min(4, work.new_tokens)] * batch, temperature=work.temperature, rng=rng)
        seconds = timed_batch(llm, lens, new, temperature=work.temperature, rng=rng)
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
            rate = LOAD * self.arm.throughput[batch][-1]["tokens_per_second"] / work.new_tokens
        prompt_ms = measure_prompt(parts, prompt_len=work.prompt_tokens)
        result = measure_arrivals(
            parts,
            rate=rate,
            count=work.requests,
            prompt_len=work.prompt_tokens,
            new=work.new_tokens,
            seed=self._rng("arrivals", 0).randrange(2**31),
        )
        self.arm.arrivals.append(result | {"one_prompt_ms": round(prompt_ms, 3)})
        return rate


def _report(arm: Arm, work: Workload) -> dict[str, Any]:
    tokens = {"prompt_tokens": work.prompt_tokens, "new_tokens": work.new_tokens, "temperature": work.temperature}
    steps = [{"batch": batch, **medians(runs), "runs": runs} for batch, runs in arm.steps.items()]
    for entry in steps:
        for name in _PARTS:
            entry.setdefault(name, NEEDS_CUDA if "host_us" not in entry["runs"][0] else "unavailable: no graphs")
    names = ("step_us", "step_us_p99", *_PARTS)
    steps += [{"batch": batch, **dict.fromkeys(names, why), "runs": []} for batch, why in arm.skipped.items()]
    return {
        "name": arm.name,
        "settings": dict(arm.settings),
        "load_s": arm.load_s,
        "assemble_s": _median(arm.assemble_s),
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
            result[name] = _median(values)
        else:
            result[name] = first
    return result


def _median(values: Sequence[float]) -> float:
    """Rounded as what it is of; a count if all are counts and it is one."""
    middle = statistics.median(values)
    if all(isinstance(value, int) for value in values) and middle == int(middle):
        return int(middle)
    return round(middle, 4)
