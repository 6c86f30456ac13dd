"""A trace as a picture: lanes of host threads and device streams over the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from mrv2.bench.page import COLOURS, legend, page, rect, short, table
from mrv2.bench.trace import STEP, Span, Trace

WIDTH, LEFT, ROW = 1200, 110, 18
MAX_GAPS = 12


def draw(trace: Trace, title: str) -> str:
    """A self-contained HTML page."""
    names = list(dict.fromkeys(s.name for s in trace.host))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    wall, loop = trace.end - trace.start, [s for s in trace.host if s.name == STEP]
    marks = [" (with prompts)" if with_prompts else "" for with_prompts in trace.prompts]
    each = ", ".join(short((s.end - s.start) * 1e6) + mark for s, mark in zip(loop, marks, strict=True))
    note = f"{trace.steps} steps, {short(wall / trace.steps * 1e6)} us each on average: {each}."
    body = [f'<p class="note">{note}</p>', legend(names)]
    body.append("<h2>All steps</h2>" + _picture(trace, trace.start, trace.end, colours))
    one = len(loop) // 2
    body.append(
        f"<h2>Step {one + 1} of {len(loop)}{marks[one]}</h2>" + _picture(trace, loop[one].start, loop[one].end, colours)
    )
    body.append("<h2>Host, per step</h2>" + table(("what", "calls", "us"), _host_rows(trace)))
    if trace.device:
        body.append("<h2>Device</h2>" + _device_summary(trace))
    else:
        body.append('<h2>Device</h2><p class="note">Unavailable: there is no GPU, the host does its work.</p>')
    return page(title, body)


def _picture(trace: Trace, start: float, end: float, colours: dict[str, str]) -> str:
    host = [(lane, list(nested(_of(trace.host, lane)))) for lane in dict.fromkeys(s.lane for s in trace.host)]
    streams = dict.fromkeys(s.lane for s in trace.device)
    lanes = host + [(lane, [(s, 0) for s in _of(trace.device, lane)]) for lane in streams]
    scale, y, parts = (WIDTH - LEFT - 10) / max(end - start, 1e-9), 24, []
    for k in range(9):
        x = LEFT + (WIDTH - LEFT - 10) * k / 8
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="18" y2="__BOTTOM__" stroke="#e4e4e4"/>')
        anchor = "end" if k == 8 else "middle"
        parts.append(f'<text x="{x:.1f}" y="12" text-anchor="{anchor}">{short((end - start) * k / 8 * 1e6)} us</text>')
    for lane, spans in lanes:
        parts.append(f'<text x="4" y="{y + 13}">{escape(lane)}</text>')
        for span, depth in spans:
            if span.end < start or span.start > end:
                continue
            x = LEFT + (max(span.start, start) - start) * scale
            wide = max((min(span.end, end) - max(span.start, start)) * scale, 0.3)
            colour = colours.get(span.name, COLOURS[sum(map(ord, span.name)) % len(COLOURS)])
            note = f"{span.name}: {short((span.end - span.start) * 1e6)} us"
            parts.append(rect(x, y + depth * ROW, wide, ROW - 2, colour, note))
            if wide > 7 * len(span.name):
                parts.append(
                    f'<text x="{x + 3:.1f}" y="{y + depth * ROW + 12}" style="fill:#fff;pointer-events:none">'
                    f"{escape(span.name)}</text>"
                )
        y += ROW * (1 + max((depth for _, depth in spans), default=0)) + 8
    return f'<svg viewBox="0 0 {WIDTH} {y}" role="img">' + "".join(parts).replace("__BOTTOM__", str(y)) + "</svg>"


def _of(spans: Sequence[Span], lane: str) -> list[Span]:
    return [s for s in spans if s.lane == lane]


def nested(spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Spans of one thread, each with the number of those around it."""
    around: list[float] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        while around and around[-1] <= span.start:
            around.pop()
        yield span, len(around)
        around.append(span.end)


def _host_rows(trace: Trace) -> list[tuple[str, str, str]]:
    totals: dict[tuple[str, str], list[float]] = {}
    for s in trace.host:
        totals.setdefault((s.lane, s.name), []).append(s.end - s.start)
    return [
        (f"{lane}: {name}", short(len(times) / trace.steps), short(sum(times) / trace.steps * 1e6))
        for (lane, name), times in totals.items()
    ]


def _device_summary(trace: Trace) -> str:
    busy, until, last, gaps = 0.0, trace.start, "start", []
    for s in trace.device:  # all streams together, by start
        if s.start > until:
            gaps.append((s.start - until, last, s.name))
        if s.end > until:
            busy += s.end - max(until, s.start)
            until, last = s.end, s.name
    wall = trace.end - trace.start
    idle = sum(gap for gap, _, _ in gaps)
    longest = sorted(gaps, key=lambda gap: -gap[0])[:MAX_GAPS]
    head = (
        f"<p>Busy {short(busy / trace.steps * 1e6)} us a step in {len(trace.device) / trace.steps:.0f} kernels and "
        f"copies; {idle / wall:.1%} of the time between two of them nothing runs. What records them slows the host: it "
        "makes a launch of a graph some fifty times as long as <code>mrv2 bench --measures steps</code> finds it. The "
        "longest gaps:</p>"
    )
    rows = ((short(gap * 1e6), before[:80], after[:80]) for gap, before, after in longest)
    return head + table(("us", "after", "before"), rows)
