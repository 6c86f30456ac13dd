"""The report of `mrv2 bench` as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mrv2.bench.page import bars, page, short, table

HEADERS = ("arm", "batch", "tokens/s", "step us", "p99", "host us", "device us", "idle us", "idle share")


def rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Lines of the table: one for each arm and batch; "-" where something wasn't or can't be measured."""
    lines = []
    for arm in report["arms"]:
        rates = {entry["batch"]: entry for entry in arm["throughput"]}
        steps = {entry["batch"]: entry for entry in arm["steps"]}
        for batch in sorted({*rates, *steps}):
            step = steps.get(batch, {})
            cells = [rates.get(batch, {}).get("tokens_per_second")]
            cells += [step.get(name) for name in ("step_us", "step_us_p99", "host_us", "device_us", "idle_us")]
            share = step.get("idle_share")
            idle = f"{share:.1%}" if isinstance(share, float) else "-"
            lines.append([arm["name"], str(batch), *map(_cell, cells), idle])
    return lines


def reasons(report: Mapping[str, Any]) -> list[str]:
    """Why a "-" stands where a step was asked for, and where, if nothing was measured there."""
    where: dict[str, list[str]] = {}
    for arm in report["arms"]:
        for entry in arm["steps"]:
            for why in dict.fromkeys(value for value in entry.values() if isinstance(value, str)):
                where.setdefault(why, []).extend([] if entry["runs"] else [f"{arm['name']}, batch {entry['batch']}"])
    return [f"-: {why}" + (f" ({'; '.join(places)})" if places else "") for why, places in sorted(where.items())]


def arrival_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Lines of the table of arrivals."""
    lines = []
    for arm in report["arms"]:
        a = arm["arrivals"]
        if a is None:
            continue
        between, first = a["between_tokens_ms"] or {}, a["first_token_ms"]
        cells = [a["rate"], a["tokens_per_second"], first["p50"], first["p99"], between.get("p50"), between.get("p99")]
        lines.append([arm["name"], *map(_cell, [*cells, a["one_prompt_ms"]])])
    return lines


ARRIVAL_HEADERS = (
    "arm",
    "arrivals/s",
    "tokens/s",
    "first token ms p50",
    "p99",
    "between tokens ms p50",
    "p99",
    "one prompt alone ms",
)


def _cell(value: object) -> str:
    return short(value) if isinstance(value, int | float) else "-"


def draw(report: Mapping[str, Any]) -> str:
    """A self-contained HTML page."""
    arms, body = report["arms"], []
    head = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    body.append(f'<p class="note">{report["card"]}; {head}; {report["date"]}; medians of {report["repeat"]}.</p>')
    if report["interrupted"]:
        body.append("<p><strong>Interrupted: these are the rounds that were finished.</strong></p>")
    body.append(f'<p class="note">{escape(_asked(report))}</p>')
    for title, measure, value in (
        ("Output tokens per second, all requests at once", "throughput", "tokens_per_second"),
        ("Time of a decode step, in microseconds", "steps", "step_us"),
        ("Host time of a decode step, in microseconds", "steps", "host_us"),
        ("Device time of a decode step, in microseconds", "steps", "device_us"),
    ):
        batches = sorted({entry["batch"] for arm in arms for entry in arm[measure]})
        series = {arm["name"]: _values(arm[measure], batches, value) for arm in arms}
        if any(v is not None for values in series.values() for v in values):
            body.append(bars(title, [f"batch {b}" for b in batches], series))
    with_arrivals = [arm for arm in arms if arm["arrivals"] is not None]
    if with_arrivals:
        names = ["first token p50", "first token p99", "between p50", "between p99", "one prompt alone"]
        body.append(
            bars(
                "Latencies with requests that arrive at random, in milliseconds",
                names,
                {arm["name"]: _latencies(arm["arrivals"]) for arm in with_arrivals},
            )
        )
    body.append("<h2>Numbers</h2>" + table(HEADERS, rows(report)))
    body += [f'<p class="note">{escape(why)}</p>' for why in reasons(report)]
    if with_arrivals:
        body.append("<br>" + table(ARRIVAL_HEADERS, arrival_rows(report)))
    return page(f"mrv2 bench: {report['model']}", body)


def _asked(report: Mapping[str, Any]) -> str:
    """What was run, in one line."""
    work, settings = report["workload"], {**report["settings"], "adapter": report["adapter"]}
    given = ", ".join(f"{name}={value}" for name, value in settings.items())
    text = f"{work['prompt_tokens']} tokens in, {work['new_tokens']} out, temperature {work['temperature']:g}"
    if "arrivals" in work["measures"]:
        text += f", {work['requests']} requests that arrive"
    return f"{text}; {given}; {report['command']}"


def _values(entries: Sequence[Mapping[str, Any]], batches: Sequence[int], name: str) -> list[float | None]:
    found = {entry["batch"]: entry.get(name) for entry in entries}
    return [v if isinstance(v := found.get(batch), int | float) else None for batch in batches]


def _latencies(arrivals: Mapping[str, Any]) -> list[float | None]:
    first, between = arrivals["first_token_ms"], arrivals["between_tokens_ms"] or {}
    return [first["p50"], first["p99"], between.get("p50"), between.get("p99"), arrivals["one_prompt_ms"]]
