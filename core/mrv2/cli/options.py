"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer


def complete_names(incomplete: str) -> list[str]:
    """Names of installed adapters that start with `incomplete`."""
    from mrv2.errors import Mrv2Error
    from mrv2.registry import Registry

    try:
        entries = Registry.discover().entries
    except Mrv2Error:
        return []  # a completion has nowhere to print; the command itself will say what is wrong
    return sorted({e.name for e in entries if e.name.startswith(incomplete)})


def complete_codes(incomplete: str) -> list[str]:
    """Error codes that start with `incomplete`."""
    from mrv2.errors import all_error_classes

    return [c.code for c in all_error_classes() if c.code.startswith(incomplete.upper())]


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="PATH|NAME",
        help="Also use this local adapter, or prefer this installed one. Can be repeated.",
        autocompletion=complete_names,
    ),
]
_NAME_HELP = "Adapter's or distribution's name."
Name = Annotated[str, typer.Argument(metavar="NAME", help=_NAME_HELP, autocompletion=complete_names)]
OptionalName = Annotated[str | None, typer.Argument(metavar="NAME", help=_NAME_HELP, autocompletion=complete_names)]
