"""How commands print: JSON, a rich table on a terminal, plain aligned text in a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: rich on a terminal, aligned columns otherwise. The last column is never padded or cut."""
    if sys.stdout.isatty():
        _print_rich(headers, rows)
        return
    widths = [max(len(line[i]) for line in (headers, *rows)) for i in range(len(headers) - 1)]
    for line in (headers, *rows):
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        print("  ".join([*cells, line[-1]]).rstrip())


def _print_rich(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headers, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    Console().print(table)


def indent(text: str) -> str:
    """Text under a heading."""
    return "\n".join(f"  {line}" for line in text.splitlines())
