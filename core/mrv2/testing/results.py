"""What a conformance check is, and what may come of it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Level(StrEnum):
    """What a check needs to run."""

    STATIC = "L0"
    CPU = "L1"
    GPU = "L2"
    VLLM = "L3"

    @property
    def meaning(self) -> str:
        """In a word."""
        return {"L0": "static", "L1": "CPU", "L2": "GPU", "L3": "vLLM"}[self.value]


def up_to(level: Level | str) -> tuple[Level, ...]:
    """All levels up to this one."""
    return tuple(one for one in Level if one <= level)


class Outcome(StrEnum):
    """What came of one check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"  # it should have run: something that it needs isn't here
    NOT_APPLICABLE = "not applicable"  # there is nothing to check: the adapter has no such thing
    OVERRIDDEN = "overridden"  # the author's own test ran in its place


class NotRun(Exception):
    """Raised by a check that can't run here; the text says what is missing."""


class NotApplicable(Exception):
    """Raised by a check that has nothing to look at; the text says why."""


class ConformanceFailure(AssertionError):
    """A check's finding.

    Args:
        compared: what was compared with what, or which rule was checked.
        first: the first difference, by request, position, layer and tensor, as far as known.
        causes: likely ones, likeliest first.
        details: figures for the report (`layers` and `errors` are drawn).
        cause: what went wrong, in words that are the same wherever it is met; empty: this finding is like no other.
    """

    def __init__(
        self,
        compared: str,
        first: str,
        causes: Sequence[str] = (),
        details: Mapping[str, Any] | None = None,
        *,
        cause: str = "",
    ) -> None:
        self.compared, self.first, self.causes, self.cause = compared, first, tuple(causes), cause
        self.details = dict(details or {})
        super().__init__(compared)

    def __str__(self) -> str:
        lines = [f"compared: {self.compared}", f"first difference: {self.first}"]
        if self.causes:
            lines.append("likely causes, in this order:")
            lines += [f"  {n}. {cause}" for n, cause in enumerate(self.causes, 1)]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class CheckInfo:
    """What `check` notes of a function."""

    levels: tuple[Level, ...]
    whole: bool
    runs: bool


def check(*levels: Level, whole: bool = False, runs: bool = False) -> Callable[[F], F]:
    """Mark a function of a suite as a check: it gets a `Case`, returns figures for the report or None, and raises
    `ConformanceFailure`, an `Mrv2Error`, `NotRun` or `NotApplicable`. Its docstring says what is checked (first line)
    and what to do when it fails (the rest).

    Args:
        levels: at each of them it runs once per config.
        whole: it concerns the adapter and not a config: it gets the `Subject` and runs once.
        runs: it feeds the model, so of one that doesn't run at all it has nothing to say.
    """

    def mark(function: F) -> F:
        function.__mrv2_check__ = CheckInfo(levels, whole, runs)  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a suite."""

    suite: str
    name: str
    levels: tuple[Level, ...]
    whole: bool
    runs: bool = False
    function: Callable[[Any], Mapping[str, Any] | None]

    @property
    def id(self) -> str:
        """As tests are called: `test_<suite>_<name>` without the prefix."""
        return f"{self.suite}_{self.name}".replace("-", "_")

    @property
    def title(self) -> str:
        """What is checked."""
        return (self.function.__doc__ or self.name).strip().split("\n")[0].rstrip(".")

    @property
    def advice(self) -> str:
        """What to do when it fails."""
        text = (self.function.__doc__ or "").strip().partition("\n")[2]
        return " ".join(text.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One check, run once."""

    check: str  # id
    suite: str
    title: str
    level: Level
    config: str  # its name; empty: of the whole adapter
    outcome: Outcome
    message: str = ""  # of a failure, or the reason
    cause: str = ""  # of a failure: the same text for what is shown once
    seconds: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Check, config and level."""
        return label(self.check, self.config, self.level)


def label(check: str, config: str, level: Level) -> str:
    """What one run of a check is called."""
    return f"{check}[{config}-{level}]" if config else f"{check}[{level}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSummary:
    """One level in numbers."""

    level: Level
    counts: Mapping[Outcome, int]
    reasons: tuple[str, ...]  # why something wasn't run, each once
    notes: tuple[str, ...]  # what doesn't apply that a reader would expect

    @property
    def state(self) -> str:
        """`passed` only if all that applies ran and passed."""
        if self.counts[Outcome.FAILED]:
            return "failed"
        if not (self.counts[Outcome.PASSED] or self.counts[Outcome.OVERRIDDEN]):
            return "not run"
        return "incomplete" if self.counts[Outcome.NOT_RUN] else "passed"

    @property
    def passed(self) -> bool:
        """Nothing failed and nothing is missing."""
        return self.state == "passed"

    def __str__(self) -> str:
        order = (Outcome.FAILED, Outcome.PASSED, Outcome.OVERRIDDEN, Outcome.NOT_RUN)
        parts = [f"{self.counts[o]} {o}" for o in order if self.counts[o]]
        text = f"{self.level} {self.level.meaning:<7} {self.state:<11} {', '.join(parts)}".rstrip()
        why = (*self.reasons, *self.notes)
        return f"{text} ({'; '.join(why)})" if why else text


NO_REFERENCE = "there is no reference"
"""Reason of checks that need one. The level may pass without them, and says so."""

TOKEN_BY_TOKEN = "the same prompt token by token"
"""What streams are compared with where the reference has none to show (`against` of the details)."""


def summarize(results: Iterable[Result]) -> tuple[LevelSummary, ...]:
    """All four levels, run or not."""
    results = tuple(results)
    found = []
    for level in Level:
        own = [r for r in results if r.level is level]
        counts = {outcome: sum(r.outcome is outcome for r in own) for outcome in Outcome}
        reasons = tuple(dict.fromkeys(r.message for r in own if r.outcome is Outcome.NOT_RUN))
        bare = any(r.outcome is Outcome.NOT_APPLICABLE and r.message.startswith(NO_REFERENCE) for r in own)
        notes: tuple[str, ...] = ("without a reference: invariances carry the proof",) if bare else ()
        notes += tuple(
            f"declared, and proven by no suite: {r.details['unproven']}" for r in own if "unproven" in r.details
        )
        if len(reasons) > 3:
            reasons = (*reasons[:3], f"{len(reasons) - 3} more reasons")
        found.append(LevelSummary(level=level, counts=counts, reasons=reasons, notes=notes))
    return tuple(found)
