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


class _Found:
    """What has come of conformance tests so far."""

    def __init__(self) -> None:
        self.rows: list[Row] = []


_FOUND = pytest.StashKey[_Found]()
_INFO = pytest.StashKey[tuple[str, str, str, str, str]]()


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
    """A place for results."""
    config.stash[_FOUND] = _Found()


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
            item.stash[_INFO] = (cls.__name__, item.name, str(levels[0]), "", reason)
        return
    config, level = job
    item.stash[_INFO] = (cls.__name__, item.name, str(level), config, "")
    wanted = item.config.getoption("--mrv2-levels")
    if str(level) not in (wanted.split(",") if wanted else LEVELS) or level not in cls.levels:
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
        rows = item.config.stash[_FOUND].rows
        if reason and report.outcome == "passed":
            rows.append((cls, check, level, config, "overridden", reason))
        elif report.outcome == "skipped":
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            text = text.removeprefix("Skipped: ")
            kind, _, why = text.partition(": ")
            kind = kind if kind in ("not run", "not applicable") else "not run"
            rows.append((cls, check, level, config, kind, why or text))
        else:
            rows.append((cls, check, level, config, report.outcome, ""))


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


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With `--mrv2-require`, missing levels are a failure."""
    require = session.config.getoption("--mrv2-require")
    rows = session.config.stash[_FOUND].rows
    if not require or session.config.getoption("collectonly"):
        return
    short = [s for levels, _ in _summaries(rows).values() for s in levels if s.level <= require and not s.passed]
    if (short or not rows) and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A line per class and level. What hasn't run is never shown as passed."""
    rows = config.stash[_FOUND].rows
    if not rows:
        return
    terminalreporter.section("mrv2 conformance")
    for cls, (levels, results) in _summaries(rows).items():
        terminalreporter.line(cls)
        for summary in levels:
            terminalreporter.line(f"  {summary}")
        for result in results:
            if result.outcome == "overridden":
                terminalreporter.line(f"  overridden: {result.check}: {result.message}")
