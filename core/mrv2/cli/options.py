"""Options that several commands share."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
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


def _resolved(adapters: list[str] | None) -> list[str] | None:
    """What each `--adapter` means, by the rules of `mrv2 check`."""
    if not adapters:
        return adapters
    from mrv2.frontend.adapters import adapter_argument

    return [adapter_argument(adapter) for adapter in adapters]


def complete_codes(incomplete: str) -> list[str]:
    """Error codes that start with `incomplete`."""
    from mrv2.errors import all_error_classes

    return [c.code for c in all_error_classes() if c.code.startswith(incomplete.upper())]


@contextlib.contextmanager
def model_folder(model: str | None, config: Path | None) -> Iterator[tuple[str, bool]]:
    """What to load, and whether its weights are random: either a model, or a config alone.

    Raises:
        CommandLineError: both or none of them is given, or there is no such config.
    """
    from mrv2.errors import CommandLineError

    if (model is None) == (config is None):
        raise CommandLineError("one model is needed", where="command line", fix="give either MODEL or --config")
    if model is not None:
        yield model, False
        return
    assert config is not None
    file = config / "config.json" if config.is_dir() else config
    if not file.is_file():
        raise CommandLineError(f"there is no file {file}", where="--config", fix="give a config.json, or its folder")
    if file.name == "config.json":
        yield str(file.parent), True
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(file, Path(folder) / "config.json")
        yield folder, True


Model = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="Folder, GGUF file, hub id, or a bundled name: smollm2.")
]
RandomConfig = Annotated[
    Path | None, typer.Option("--config", help="Instead of MODEL: a config.json, run with random weights.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="PATH|NAME",
        help="Also use this package folder, project folder or file, or prefer this installed adapter. Can be repeated.",
        callback=_resolved,
        autocompletion=complete_names,
    ),
]
_NAME_HELP = "Adapter's or distribution's name."
Name = Annotated[str, typer.Argument(metavar="NAME", help=_NAME_HELP, autocompletion=complete_names)]
OptionalName = Annotated[str | None, typer.Argument(metavar="NAME", help=_NAME_HELP, autocompletion=complete_names)]
