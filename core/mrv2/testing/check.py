"""Running the suites: each check once per config and level, and what came of it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrv2.errors import Mrv2Error
from mrv2.loading import describe, raised_at
from mrv2.testing.results import (
    Check,
    ConformanceFailure,
    Level,
    LevelSummary,
    NotApplicable,
    NotRun,
    Outcome,
    Result,
    label,
    summarize,
)
from mrv2.testing.subject import Subject
from mrv2.testing.suites import all_checks

NO_TARGET = "there is no config to test with (mrv2_test_target)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that a run found."""

    adapter: str
    version: str
    reference: str  # what answers were compared with
    results: tuple[Result, ...]

    @property
    def levels(self) -> tuple[LevelSummary, ...]:
        """Each level in numbers."""
        return summarize(self.results)

    @property
    def failures(self) -> tuple[Result, ...]:
        """In the order of the suites: the first explains the others."""
        return tuple(r for r in self.results if r.outcome is Outcome.FAILED)

    @property
    def causes(self) -> tuple[tuple[Result, ...], ...]:
        """The failures once more, those of the same error at the same place together, in the order of their first."""
        found: dict[str, list[Result]] = {}
        for failure in self.failures:
            found.setdefault(failure.cause or failure.label, []).append(failure)
        return tuple(tuple(same) for same in found.values())

    def passes(self, levels: Collection[Level]) -> bool:
        """Nothing failed, and each of `levels` ran and passed in full."""
        return not self.failures and all(s.passed for s in self.levels if s.level in levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One check to be run once."""

    check: Check
    level: Level
    config: str  # empty: the whole adapter

    @property
    def label(self) -> str:
        """Check, config and level, as those of its result."""
        return label(self.check.id, self.config, self.level)

    def missing(self) -> str:
        """Why it can't run here; empty: it can."""
        return unavailable(self.level)


def unavailable(level: Level) -> str:
    """Why a level can't run on this machine; empty: it can."""
    if level is Level.GPU:
        import torch

        return "" if torch.cuda.is_available() else "there is no GPU here"
    if level is Level.VLLM:
        return "" if importlib.util.find_spec("vllm") is not None else "vLLM isn't installed"
    return ""


def jobs(
    subject: Subject, levels: Iterable[Level] = tuple(Level), suites: Iterable[str] | None = None
) -> Iterator[Job]:
    """Everything to be run, suite by suite.

    Args:
        subject: the adapter.
        levels: those wanted.
        suites: those wanted; None: all.
    """
    wanted, some = set(levels), None if suites is None else set(suites)
    for one in all_checks():
        if some is not None and one.suite not in some:
            continue
        for level in one.levels:
            if level in wanted:
                for config in ("",) if one.whole else subject.names or ("",):
                    yield Job(check=one, level=level, config=config)


def run_job(subject: Subject, job: Job) -> Result:
    """Run one check and say what came of it; nothing that an adapter raises gets out but Ctrl-C."""
    start = time.perf_counter()
    outcome, found = _outcome(subject, job)
    return Result(
        check=job.check.id,
        suite=job.check.suite,
        title=job.check.title,
        level=job.level,
        config=job.config,
        outcome=outcome,
        message=found.message,
        cause=found.cause,
        seconds=time.perf_counter() - start,
        details=found.details,
    )


def call(subject: Subject, job: Job) -> Any:
    """The check itself, with what it raises.

    Raises:
        NotRun, NotApplicable, ConformanceFailure, Mrv2Error: see `check`.
        Exception: of the adapter's code.
    """
    if reason := job.missing():
        raise NotRun(reason)
    with _one_thread(subject):
        if job.check.whole:
            return job.check.function(subject)
        if not job.config:
            raise NotRun(NO_TARGET)
        case = subject.case(job.config, job.level)
        if job.check.runs:
            case.require_running(job.check.id)
        return job.check.function(case)


@contextlib.contextmanager
def _one_thread(subject: Subject) -> Iterator[None]:
    """One thread of torch, as OMP_NUM_THREADS=1: several spend their time waiting for each other on tensors as small as
    those of test configs, five times as much as the work takes. A checkpoint that was given may be large and keeps
    them, and who sets the variable knows better.
    """
    import torch

    threads = torch.get_num_threads()
    try:
        small = subject.given_checkpoint is None and "OMP_NUM_THREADS" not in os.environ
    except Mrv2Error:  # of the target, which the checks that need it report
        small = True
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if small:
            torch.set_num_threads(threads)


def _outcome(subject: Subject, job: Job) -> tuple[Outcome, Finding]:
    try:
        return Outcome.PASSED, Finding("", details=call(subject, job) or {})
    except NotRun as reason:
        return Outcome.NOT_RUN, Finding(str(reason))
    except NotApplicable as reason:
        return Outcome.NOT_APPLICABLE, Finding(str(reason))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Outcome.FAILED, finding(subject, job, error)


@dataclass(frozen=True, slots=True)
class Finding:
    """What is said of a check.

    Args:
        message: for a reader.
        cause: of a failure, equal for the same error at the same place; empty: there is no other like it.
        details: figures for the report.
    """

    message: str
    cause: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


def finding(subject: Subject, job: Job, error: BaseException) -> Finding:
    """What an exception that a check raised says."""
    if isinstance(error, ConformanceFailure):
        return Finding(f"{error}\n{job.check.advice}".strip(), error.cause, error.details)
    if isinstance(error, Mrv2Error):
        return Finding(str(error), str(error))
    text = f"{describe(error)}, {_raised_at(subject, error)}"  # of the adapter's code, or of what it calls
    return Finding(text, text)


def _raised_at(subject: Subject, error: BaseException) -> str:
    """The adapter's own line, which is to be looked at first, and where it led."""
    at = raised_at(error.__traceback__)
    path = Path(subject.entry.manifest_path or subject.entry.source)
    root = path if path.suffix == ".py" else path.parent
    own = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(root)]
    mine = f"{own[-1].filename}:{own[-1].lineno}" if own else at
    return f"raised at {mine}" + (f", within {at}" if mine != at else "")


def run_checks(
    subject: Subject,
    *,
    levels: Iterable[Level] = tuple(Level),
    suites: Iterable[str] | None = None,
    on_result: Callable[[Result], None] | None = None,
) -> Report:
    """Run the suites on an adapter.

    Args:
        subject: the adapter.
        levels: those wanted.
        suites: those wanted; None: all.
        on_result: called with each result; for progress.

    Raises:
        Mrv2Error: the adapter can't be found, or can't be imported at all.
    """
    results = []
    for job in jobs(subject, levels, suites):
        results.append(run_job(subject, job))
        if on_result is not None:
            on_result(results[-1])
    return Report(
        adapter=subject.entry.name,
        version=subject.entry.version,
        reference=_reference(subject),
        results=tuple(results),
    )


def _reference(subject: Subject) -> str:
    target = subject.target
    return (
        "none" if target.reference is None else getattr(target.reference, "__name__", type(target.reference).__name__)
    )
