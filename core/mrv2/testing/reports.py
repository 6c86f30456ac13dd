"""A report as JSON, as JUnit XML, and as one HTML file that needs nothing else."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from mrv2.templates import template_folder
from mrv2.testing.check import Report
from mrv2.testing.record import environment
from mrv2.testing.results import TOKEN_BY_TOKEN, Level, Outcome, Result
from mrv2.version import __version__

ANSWERS = ("weights_one_token", "attention_answer")
"""Checks that compare with the reference."""


def to_dict(report: Report) -> dict[str, Any]:
    """For `--json`."""
    same_as = {r.label: same[0].label for same in report.causes for r in same[1:]}
    return {
        "adapter": report.adapter,
        "version": report.version,
        "mrv2": __version__,
        "reference": report.reference,
        "levels": {
            s.level.value: {
                "state": s.state,
                "counts": {o.value: n for o, n in s.counts.items()},
                "reasons": [*s.reasons, *s.notes],
            }
            for s in report.levels
        },
        "results": [
            {
                "check": r.check,
                "suite": r.suite,
                "title": r.title,
                "level": r.level.value,
                "config": r.config or None,
                "outcome": r.outcome.value,
                "message": r.message,
                "same_as": same_as.get(r.label),
                "seconds": round(r.seconds, 3),
                "details": dict(r.details),
            }
            for r in report.results
        ],
    }


def to_junit(report: Report) -> str:
    """One test suite per level. What didn't run is skipped, with its reason."""
    root = ElementTree.Element("testsuites", name=f"mrv2 check {report.adapter}")
    for summary in report.levels:
        results = [r for r in report.results if r.level is summary.level]
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=f"{summary.level} {summary.level.meaning}",
            tests=str(len(results)),
            failures=str(summary.counts[Outcome.FAILED]),
            skipped=str(summary.counts[Outcome.NOT_RUN] + summary.counts[Outcome.NOT_APPLICABLE]),
            time=f"{sum(r.seconds for r in results):.3f}",
        )
        for result in results:
            _add_case(suite, report, result)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_case(suite: ElementTree.Element, report: Report, result: Result) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=f"{report.adapter}.{result.suite}",
        name=result.label,
        time=f"{result.seconds:.3f}",
    )
    if result.outcome is Outcome.FAILED:
        failure = ElementTree.SubElement(case, "failure", message=result.title)
        failure.text = _printable(result.message)
    elif result.outcome in (Outcome.NOT_RUN, Outcome.NOT_APPLICABLE):
        ElementTree.SubElement(case, "skipped", message=_printable(f"{result.outcome}: {result.message}"))


def _printable(text: str) -> str:
    """Without characters that XML doesn't have."""
    return "".join(c if c in "\n\t" or c >= " " else "?" for c in text)


def to_html(report: Report) -> str:
    """One file: styles and pictures are in it."""
    wrong = {(r.config, r.level) for r in report.failures if r.check in ANSWERS}
    pictures = [
        {
            "config": r.config,
            "level": r.level.value,
            "against": r.details["against"],
            "invariant": r.details["against"] == TOKEN_BY_TOKEN,
            "wrong": (r.config, r.level) in wrong,
            "svg": picture(**_points(r.details)),
        }
        for r in report.results
        if {"layers", "errors", "bound", "against"} <= set(r.details)
    ]
    suites: dict[str, list[Result]] = {}
    for result in report.results:
        suites.setdefault(result.suite, []).append(result)
    return render("report.html.jinja", report=report, suites=suites, pictures=pictures)


def render(template: str, **values: Any) -> str:
    """A page of ours, with where and when it was made."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(template_folder())
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return jinja.get_template(template).render(
        **values,
        version=__version__,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        environment=environment(Level.GPU),
    )


def _points(details: Mapping[str, Any]) -> dict[str, Any]:
    return {name: details[name] for name in ("layers", "errors", "bound")}


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 220, 64, 16, 12, 40


def picture(layers: Sequence[str], errors: Sequence[float], bound: float) -> str:
    """The error after each layer on a logarithmic scale, as inline SVG, with the bound as a line.

    Args:
        layers: names, in order.
        errors: of each; NaN and infinity are drawn at the top.
        bound: allowed.
    """
    known = [max(e, 1e-9) for e in [*errors, bound] if math.isfinite(e)]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)) + 0.01)
    if len(known) <= len(errors):
        high += 1

    def x(i: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (i + 0.5) / len(layers)

    def y(e: float) -> float:
        exponent = math.log10(max(e, 1e-9)) if math.isfinite(e) else high
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - exponent) / max(high - low, 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="error after each layer">']
    for exponent in range(low, high + 1):
        at = y(10.0**exponent)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">1e{exponent}</text>')
    points = " ".join(f"{x(i):.1f},{y(e):.1f}" for i, e in enumerate(errors))
    parts.append(f'<polyline class="error" points="{points}"/>')
    at = y(bound)
    parts.append(f'<line class="bound" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
    every = max(1, len(layers) // 12)
    for i, (name, error) in enumerate(zip(layers, errors, strict=True)):
        kind = "good" if error <= bound else "bad"
        title = f"<title>{name}: {error:.3g}</title>"
        parts.append(f'<circle class="{kind}" cx="{x(i):.1f}" cy="{y(error):.1f}" r="4">{title}</circle>')
        if i % every == 0:
            number = name.rpartition(".")[2]
            parts.append(f'<text x="{x(i):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{number}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">layer</text></svg>')
    return "".join(parts)
