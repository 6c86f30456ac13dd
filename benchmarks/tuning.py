"""What the tuners share: variants to time, each checked against its twin first, and a report that is saved as it grows.

A variant is captured in a CUDA graph that runs it over enough copies of its weights, or of its cache, that none is left
in the L2 cache from the time before; microseconds per launch, the gap to the next one included.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mrv2.kernels import dependent

BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
COLD = 160 * 2**20
"""Bytes that a graph runs through before it meets the same ones again: three times the L2 cache."""

MOST_LAUNCHES = 64
WRONG = 2e-2
"""Relative error, in norm, from which on a result is wrong: that of bf16 operands is a fifth of it."""


@dataclass
class Prepared:
    """What to launch with a copy's number, and what says by how much its result is off."""

    launch: Callable[[int], Any]
    error: Callable[[], float] | None = None


@dataclass
class Case:
    """One thing to time: variant `key` of `group`."""

    group: dict[str, Any]
    key: str
    num_bytes: int
    make: Callable[[int], Prepared]
    dependent: bool = False  # launches are, see mrv2.kernels.dependent
    compiled: str = ""  # cases of the same here launch the same compiled kernel

    def copies(self) -> int:
        return max(2, min(MOST_LAUNCHES, -(-COLD // self.num_bytes)))


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, **BF16) * scale


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in norm; infinite where something is NaN, which outputs are filled with before."""
    got, want = got.double(), want.double()
    error = float((got - want).norm() / want.norm())
    return error if error == error else float("inf")


@contextmanager
def launches(dependent_launch: bool) -> Iterator[None]:
    """Dependent launches for any number of tokens, or none."""
    before = dependent.DEPENDENT_TOKENS
    dependent.DEPENDENT_TOKENS = 1 << 30 if dependent_launch else 0
    try:
        yield
    finally:
        dependent.DEPENDENT_TOKENS = before


def graph_time(run: Callable[[], Any], replays: int = 12) -> float:
    """Microseconds of a replay of what `run` launches. Median."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for first, last in marks:
        first.record()
        graph.replay()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in marks) * 1e3


def time_case(case: Case) -> float:
    """Microseconds per launch, of a variant that is right.

    Raises:
        ValueError: it isn't.
    """
    copies = case.copies()
    rounds = max(1, 24 // copies)
    with launches(case.dependent):
        prepared = case.make(copies)
        prepared.launch(0)
        if prepared.error is not None and (error := prepared.error()) > WRONG:
            raise ValueError(f"relative error {error:.2g}")

        def run() -> None:
            for i in range(copies * rounds):
                prepared.launch(i % copies)

        return graph_time(run) / (copies * rounds)


def compile_share(cases: list[Case], part: int, parts: int) -> None:
    """Launch each case once with one copy. Variants that can't be launched are left to say so when they are timed."""
    different = list({(case.compiled or case.key, case.dependent): case for case in cases}.values())
    for case in different[part::parts]:
        try:
            with launches(case.dependent):
                case.make(1).launch(0)
        except Exception as error:
            print(f"{case.group} {case.key}: {type(error).__name__}: {error}"[:300], file=sys.stderr, flush=True)
    torch.cuda.synchronize()


class Report:
    """A JSON document, written after every result: what a run that is cut short knew is kept."""

    def __init__(self, head: dict[str, Any], path: Path | None, seconds: float) -> None:
        self.document = head
        self._path = path
        self._start = time.monotonic()
        self._seconds = seconds
        self.share = 1.0  # of the time, at the end of which it is late

    def late(self) -> bool:
        return time.monotonic() > self._start + self.share * self._seconds

    def note(self, section: str, value: Any, *, append: bool = True) -> None:
        if append:
            self.document.setdefault(section, []).append(value)
        else:
            self.document[section] = value
        self.document["seconds"] = round(time.monotonic() - self._start, 1)
        print(section, json.dumps(value), file=sys.stderr, flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps(self.document, indent=1) + "\n")


def measure(cases: Iterable[Case], section: str, copy: float, report: Report) -> None:
    """Time them group by group, quickest first; one that fails says why and is left out."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(json.dumps(case.group), []).append(case)
    for members in groups.values():
        if report.late():
            report.note("not reached", members[0].group)
            continue
        timed: dict[str, float] = {}
        failed: dict[str, str] = {}
        for case in members:
            try:
                timed[case.key] = round(time_case(case), 2)
            except Exception as error:
                failed[case.key] = f"{type(error).__name__}: {error}"[:160]
        floor = round(members[0].num_bytes / copy * 1e6, 2)
        ranked = dict(sorted(timed.items(), key=lambda item: item[1]))
        report.note(
            section, members[0].group | {"floor_us": floor, "us": ranked} | ({"failed": failed} if failed else {})
        )
