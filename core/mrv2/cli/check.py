"""`mrv2 check`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mrv2.cli.options import Json, complete_names
from mrv2.cli.output import indent, print_json, require_writable, write_text
from mrv2.errors import CommandLineError

if TYPE_CHECKING:
    from mrv2.testing.check import Report
    from mrv2.testing.results import Level, Result

LEVELS = ("L0", "L1", "L2", "L3")

Adapter = Annotated[
    str,
    typer.Argument(
        metavar="NAME|PATH|FILE",
        help="Installed adapter, package folder, project folder, or one Python file.",
        autocompletion=complete_names,
    ),
]
Require = Annotated[
    str | None,
    typer.Option(
        "--require",
        metavar="LEVEL",
        help="Exit with 1 unless all levels up to this one passed. Default: those of --level, else L1.",
    ),
]
LevelsOption = Annotated[
    list[str] | None, typer.Option("--level", metavar="LEVEL", help="Run this level only. Can be repeated.")
]
Suites = Annotated[list[str] | None, typer.Option("--suite", help="Run this suite only. Can be repeated.")]
Junit = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a report as one HTML file.")]
Record = Annotated[
    bool, typer.Option("--record", help="Write conformance.json into the package: what passed, where, for which files.")
]


def command(
    adapter: Adapter,
    require: Require = None,
    level: LevelsOption = None,
    suite: Suites = None,
    junit: Junit = None,
    html: Html = None,
    record: Record = False,
    json: Json = False,
) -> int:
    """Check one adapter; exit code 1 when something fails, or a required level didn't run."""
    _among("--require", [require] if require else [], LEVELS)
    _among("--level", level or [], LEVELS)
    require_writable(junit, option="mrv2 check --junit")
    require_writable(html, option="mrv2 check --html")
    if junit is not None and html is not None and junit.absolute() == html.absolute():
        raise CommandLineError(f"both write {html}", where="mrv2 check --junit, --html", fix="give two files")

    from mrv2.loading import stdout_to_stderr
    from mrv2.testing.record import write_record
    from mrv2.testing.results import Level, up_to
    from mrv2.testing.subject import Subject
    from mrv2.testing.suites import SUITES

    names = [name.replace("_", "-") for name in SUITES]
    _among("--suite", suite or [], names)
    if record and suite:
        raise CommandLineError("--record and --suite", where="mrv2 check", fix="record what all suites say, or don't")
    levels = [Level(name) for name in level or LEVELS]
    wanted = up_to(require or "L1") if require or not level else tuple(levels)
    subject = Subject(adapter)
    if subject.entry.error is not None:
        raise subject.entry.error
    with stdout_to_stderr():
        report = _run(subject, levels, suite, quiet=json)
    if suite and not require:  # such levels as these suites have
        wanted = tuple(one for one in wanted if any(result.level is one for result in report.results))
    if json:
        from mrv2.testing.reports import to_dict

        print_json(to_dict(report) | {"required": [str(one) for one in wanted], "passes": report.passes(wanted)})
    else:
        _print(report, wanted)
    sys.stdout.flush()  # whatever comes of the files
    _write(report, junit, html)
    if record:
        what = "nothing recorded, since something failed"
        if not report.failures:
            what = f"recorded in {write_record(subject.entry, report)}"
        print(what, file=sys.stderr if json else sys.stdout)
    return 0 if report.passes(wanted) else 1


def _among(option: str, values: Sequence[str], known: Sequence[str]) -> None:
    for value in values:
        if value not in known:
            raise CommandLineError(
                f"{value!r} is none of {', '.join(known)}", where=f"mrv2 check {option}", fix="give one of these"
            )


def _run(subject: Any, levels: list[Level], suites: list[str] | None, *, quiet: bool) -> Report:
    from transformers.utils import logging as transformers_logging

    from mrv2.testing.check import jobs, run_checks

    transformers_logging.disable_progress_bar()  # ours is enough
    total = sum(1 for _ in jobs(subject, levels, suites))
    with _progress(total, quiet) as on_result:
        return run_checks(subject, levels=levels, suites=suites, on_result=on_result)


@contextlib.contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[Result], None]]:
    """A bar on a terminal, nothing in a pipe."""
    if quiet or not sys.stderr.isatty():
        yield lambda result: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda result: bar.update(task, advance=1, description=f"{result.suite:<12} {result.config:<12}")


def _write(report: Report, junit: Path | None, html: Path | None) -> None:
    from mrv2.testing import reports

    if junit is not None:
        write_text(junit, reports.to_junit(report), option="mrv2 check --junit")
    if html is not None:
        write_text(html, reports.to_html(report), option="mrv2 check --html")


def _count(failures: int, causes: int) -> str:
    if causes == 1:
        return f"{failures} failures, all of the same error"
    each = f", {causes} of them different" if causes < failures else ""
    return f"{failures} failures{each}; begin with the first, it may explain the others"


def _print(report: Report, wanted: Collection[Level]) -> None:
    configs = list(dict.fromkeys(r.config for r in report.results if r.config))
    print(f"{report.adapter} {report.version}; configs: {', '.join(configs) or 'none'}; reference: {report.reference}")
    causes = report.causes
    if len(report.failures) > 1:
        print(f"\n{_count(len(report.failures), len(causes))}")
    for result, *same in causes:
        print(f"\n{result.suite}: {result.title} [{result.config or 'adapter'}, {result.level}]")
        print(indent(result.message))
        if same:
            print(indent(f"the same in {len(same)} more: {', '.join(r.label for r in same)}"))
    print()
    for summary in report.levels:
        print(summary)
    missing = [s.level.value for s in report.levels if s.level in wanted and not s.passed]
    if missing and not report.failures:
        print(f"{', '.join(missing)} didn't pass in full, and had to")
        if not configs:
            print("fix: add the hook `mrv2_test_target` (docs/hooks.md), or a test class (README.md, Prove it)")
