"""How commands print: JSON, a rich table on a terminal, plain aligned text in a pipe."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mrv2.errors import CommandLineError


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


def require_writable(path: Path | None, *, option: str) -> None:
    """Refuse a file that can't be written before the work for it begins.

    Args:
        path: given by the user; None: none.
        option: that it was given with.

    Raises:
        CommandLineError: its folder isn't there, or the system refuses to write.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise _unwritable(path, "it is a folder", option)
    if not folder.is_dir():
        raise _unwritable(path, f"{folder} is no folder", option)
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise _unwritable(path, "permission denied", option)


def require_two_files(first: Path | None, second: Path | None, *, option: str) -> None:
    """Refuse one file for two outputs: the second would replace the first.

    Args:
        first: given by the user; None: none.
        second: as `first`.
        option: that they were given with.

    Raises:
        CommandLineError: they are the same.
    """
    if first is None or second is None:
        return
    there = first.exists() and second.exists()
    if first.resolve() == second.resolve() or (there and first.samefile(second)):
        raise CommandLineError(f"{first} would be written twice", where=option, fix="give two files")


def write_text(path: Path, text: str, *, option: str) -> None:
    """Write a file that the user named; characters that UTF-8 doesn't have are escaped.

    Raises:
        CommandLineError: the system refuses.
    """
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise _unwritable(path, str(error.strerror), option) from error


def _unwritable(path: Path, why: str, option: str) -> CommandLineError:
    return CommandLineError(f"{path} can't be written: {why}", where=option, fix="give another file")
