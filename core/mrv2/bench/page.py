"""Pictures without anything from elsewhere: one HTML file with inline SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

COLOURS = ("#3b6fb6", "#d9822b", "#4a9b6e", "#b04a5a", "#7d62a8", "#7a7a7a", "#2f9aa8", "#a88a2f")

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #222; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
svg { max-width: 100%; height: auto; background: #fff; } svg text { font: 12px system-ui, sans-serif; fill: #222; }
table { border-collapse: collapse; } td, th { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: right; }
td:first-child, th:first-child { text-align: left; } .note { color: #666; }
"""


def page(title: str, body: Iterable[str]) -> str:
    """A whole document."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain text."""
    head = "".join(f"<th>{escape(h)}</th>" for h in headers)
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def bars(title: str, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> str:
    """Bars beside each other: one group after the other, a colour for each series; None leaves a gap.

    Args:
        title: with the unit.
        groups: names under the groups.
        series: values by the name of what is compared, one for each group.
    """
    most = max((v for values in series.values() for v in values if v is not None), default=0.0) or 1.0
    width, height, left, top, wide = 900, 260, 60, 16, 900 - 80
    parts = [f'<h2>{escape(title)}</h2><svg viewBox="0 0 {width} {height + 40}" role="img">']
    for k in range(5):
        y = top + (height - top) * (1 - k / 4)
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{short(most * k / 4)}</text>')
    slot = wide / max(len(groups), 1)
    bar = min(slot * 0.8 / max(len(series), 1), 60)
    for g, group in enumerate(groups):
        middle = left + slot * (g + 0.5)
        parts.append(f'<text x="{middle:.1f}" y="{height + 16}" text-anchor="middle">{escape(group)}</text>')
        for s, (name, values) in enumerate(series.items()):
            value = values[g]
            if value is None:
                continue
            tall = (height - top) * value / most
            x = middle + bar * (s - len(series) / 2)
            parts.append(
                rect(x, height - tall, bar * 0.92, tall, COLOURS[s % len(COLOURS)], f"{name}, {group}: {short(value)}")
            )
    parts.append("</svg>")
    return "".join(parts) + legend(list(series))


def rect(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    """A box that says what it is to whoever points at it."""
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )


def legend(names: Sequence[str]) -> str:
    """Which colour is what."""
    items = (f'<span style="color:{COLOURS[i % len(COLOURS)]}">■</span> {escape(name)}' for i, name in enumerate(names))
    return f'<p class="note">{" &nbsp; ".join(items)}</p>'


def short(value: float) -> str:
    """A number with three digits that mean something."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
