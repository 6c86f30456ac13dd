"""The pytest plugin: runs `AdapterConformance` classes for every config and level, and sums up by level.

Loaded in every pytest run of an environment that has mrv2, so it imports nothing of it until such a class is there.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import pytest

Row = tuple[str, str, str, str, str, str]
"""Class, check, level, config, outcome, reason."""

LEVELS = ("L0", "L1", "L2", "L3")


_INFO = pytest.StashKey[tuple[str, str, str, str, str]]()
_ROW = "mrv2_row"
"""Attribute of a test report: its `Row`. Reports travel between processes, stashes don't."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of conformance tests."""
    group = parser.getgroup("mrv2", "conformance of mrv2 adapters")
    group.addoption(
        "--mrv2-levels", default=None, metavar="L0,L1", help="levels to run; others are shown as not run (default: all)"
    )
    group.addoption(
        "--mrv2-require", default=None, choices=LEVELS, help="fail unless all levels up to this one ran and passed"
    )


def pytest_configure(config: pytest.Config) -> None:
    """A place for results.

    Raises:
        pytest.UsageError: `--mrv2-levels` names what is no level: all tests would be left out.
    """
    odd = [level for level in _wanted(config) if level not in LEVELS]
    if odd:
        raise pytest.UsageError(f"--mrv2-levels: {odd[0]!r} is none of {', '.join(LEVELS)}")
    config.pluginmanager.register(_Summary(config), "mrv2-summary")


def _wanted(config: pytest.Config) -> tuple[str, ...]:
    given: str | None = config.getoption("--mrv2-levels")
    return LEVELS if given is None else tuple(level.strip() for level in given.split(","))


def _is_conformance(cls: type | None) -> bool:
    return bool(getattr(cls, "__mrv2_conformance__", False))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per config and level of a check."""
    if not _is_conformance(metafunc.cls) or "mrv2_job" not in metafunc.fixturenames:
        return
    one = getattr(metafunc.function, "__mrv2_test__", None)
    if one is None:
        return
    names = ("",) if one.whole else _names(metafunc.cls)
    jobs = [(name, level) for level in one.levels for name in names]
    metafunc.parametrize("mrv2_job", jobs, ids=[f"{name}-{level}" if name else str(level) for name, level in jobs])


def _names(cls: Any) -> tuple[str, ...]:
    """Names of a class's configs; asked at collection, so an error is kept for the tests."""
    try:
        names: tuple[str, ...] = cls.mrv2_subject().names
    except Exception:
        return ("",)
    return names or ("",)


def _class_of(item: pytest.Item) -> str:
    """File and class."""
    return item.nodeid.partition("[")[0].rpartition("::")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note what a test is, and leave out levels that aren't wanted."""
    cls: Any = getattr(item, "cls", None)
    if not _is_conformance(cls):
        return
    callspec = getattr(item, "callspec", None)
    job = callspec.params.get("mrv2_job") if callspec is not None else None
    reason = getattr(item.function, "__mrv2_override__", "")  # type: ignore[attr-defined]
    if job is None:
        if reason:
            standard = getattr(cls.__mro__[1], item.name.partition("[")[0], None)
            levels = getattr(getattr(standard, "__mrv2_test__", None), "levels", ("L1",))
            item.stash[_INFO] = (_class_of(item), item.name, str(levels[0]), "", reason)
        return
    config, level = job
    item.stash[_INFO] = (_class_of(item), item.name, str(level), config, "")
    if str(level) not in _wanted(item.config) or level not in cls.levels:
        pytest.skip(f"not run: level {level} isn't asked for")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Turn what a check raised into a test's outcome, and note it."""
    info = item.stash.get(_INFO, None)
    answer = None
    if info is not None and call.excinfo is not None:
        answer = _answer(call.excinfo.value)
        if answer:
            skipped = pytest.skip.Exception(answer)
            call.excinfo = pytest.ExceptionInfo.from_exc_info((type(skipped), skipped, call.excinfo.tb))
    outcome = yield
    if info is None:
        return
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        cls, check, level, config, reason = info
        setattr(report, _ROW, (cls, check, level, config, *_outcome(report, reason)))


def _outcome(report: pytest.TestReport, reason: str) -> tuple[str, str]:
    """Outcome and reason of a conformance test."""
    if reason and report.outcome == "passed":
        return "overridden", reason
    if report.outcome != "skipped":
        return report.outcome, ""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    text = text.removeprefix("Skipped: ")
    kind, _, why = text.partition(": ")
    return (kind, why) if kind in ("not run", "not applicable") else ("not run", text)


def _answer(error: BaseException) -> str:
    """The text of a skip for a check that couldn't run, or had nothing to look at."""
    kind = {"NotRun": "not run", "NotApplicable": "not applicable"}.get(type(error).__name__)
    ours = type(error).__module__ == "mrv2.testing.results"
    return f"{kind}: {error}" if kind and ours else ""


def _summaries(rows: Iterable[Row]) -> dict[str, Any]:
    from mrv2.testing.results import Level, Outcome, Result, summarize

    by_class: dict[str, list[Any]] = {}
    for cls, check, level, config, outcome, reason in rows:
        result = Result(
            check=check, suite="", title="", level=Level(level), config=config, outcome=Outcome(outcome), message=reason
        )
        by_class.setdefault(cls, []).append(result)
    return {cls: (summarize(results), results) for cls, results in by_class.items()}


class _Summary:
    """What has come of conformance tests, in this process or in its workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._rows: list[Row] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a test's row."""
        if (row := getattr(report, _ROW, None)) is not None:
            self._rows.append(tuple(row))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """With `--mrv2-require`, missing levels are a failure."""
        require = self._config.getoption("--mrv2-require")
        if not require or self._config.getoption("collectonly") or hasattr(self._config, "workerinput"):
            return
        levels = [s for found, _ in _summaries(self._rows).values() for s in found if s.level <= require]
        if session.exitstatus == 0 and (not levels or not all(s.passed for s in levels)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """A line per class and level. What hasn't run is never shown as passed."""
        if not self._rows:
            return
        terminalreporter.section("mrv2 conformance")
        for cls, (levels, results) in _summaries(self._rows).items():
            terminalreporter.line(cls)
            for summary in levels:
                terminalreporter.line(f"  {summary}")
            for result in results:
                if result.outcome == "overridden":
                    terminalreporter.line(f"  overridden: {result.check}: {result.message}")
