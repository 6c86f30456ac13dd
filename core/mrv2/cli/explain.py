"""`mrv2 explain`."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from mrv2.cli.options import Json, complete_codes
from mrv2.errors import CommandLineError, Mrv2Error, all_error_classes

Code = Annotated[str | None, typer.Argument(metavar="CODE", help="MRV2-101, or 101.", autocompletion=complete_codes)]


def command(code: Code = None, json: Json = False) -> None:
    """Print what an error class documents."""
    from mrv2.cli.output import print_json, print_table

    if code is None:
        listed = list(all_error_classes())
        if json:
            print_json({"errors": [_describe(c) for c in listed]})
        else:
            print_table(("code", "error"), [(c.code, c.title) for c in listed])
        return
    found = find(code)
    if json:
        print_json(_describe(found))
    else:
        print(f"{found.code} {found.title} (exit code {found.exit_code})\n\n{inspect.getdoc(found)}")


def find(code: str) -> type[Mrv2Error]:
    """The error class of a code, with or without its prefix.

    Raises:
        CommandLineError: there is none.
    """
    wanted = code.upper().removeprefix("MRV2-")
    for cls in all_error_classes():
        if cls.code == f"MRV2-{wanted}":
            return cls
    raise CommandLineError(f"there is no error {code!r}", where="mrv2 explain", fix="`mrv2 explain` lists all codes")


def _describe(cls: type[Mrv2Error]) -> dict[str, object]:
    return {"code": cls.code, "title": cls.title, "exit_code": cls.exit_code, "text": inspect.getdoc(cls)}
