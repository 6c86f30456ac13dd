"""`mrv2 new-adapter`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mrv2.cli.options import Json

if TYPE_CHECKING:
    from mrv2.scaffold.from_config import Found


def _complete(question: str, incomplete: str) -> list[str]:
    from mrv2.scaffold.answers import choices

    return [value for value in choices(question) if value.startswith(incomplete)]


def complete_kinds(incomplete: str) -> list[str]:
    """Kinds that start with `incomplete`."""
    return _complete("kind", incomplete)


def complete_ci(incomplete: str) -> list[str]:
    """Values of `--ci`."""
    return _complete("ci", incomplete)


def complete_licenses(incomplete: str) -> list[str]:
    """Values of `--license`."""
    return _complete("license", incomplete)


NewName = Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits, single hyphens: acme-moe.")]
Kind = Annotated[
    str,
    typer.Option(
        "--kind",
        metavar="KIND",
        help="What the model is: decoder, moe (experts), or hybrid (attention beside your own mixer with a state).",
        autocompletion=complete_kinds,
    ),
]
FromConfig = Annotated[
    Path | None,
    typer.Option(
        "--from-config", metavar="FILE", help="Take names and sizes from this config.json; say what is missing."
    ),
]
Ci = Annotated[str, typer.Option("--ci", metavar="CI", help="github, gitlab, or none.", autocompletion=complete_ci)]
License = Annotated[
    str,
    typer.Option(
        "--license", metavar="LICENSE", help="proprietary, apache-2.0, or mit.", autocompletion=complete_licenses
    ),
]


def command(
    name: NewName,
    kind: Kind,
    from_config: FromConfig = None,
    ci: Ci = "github",
    license: License = "proprietary",
    json: Json = False,
) -> None:
    """Write a project to the current folder."""
    from mrv2.scaffold import answers
    from mrv2.scaffold.from_config import read_config
    from mrv2.scaffold.render import write_project

    given: dict[str, Any] = {"name": name, "kind": kind, "ci": ci, "license": license}
    answers.check_name(name)
    for option in ("kind", "ci", "license"):
        answers.check_choice(option, given[option])
    owners = _check_free(name)
    found = read_config(from_config, kind) if from_config is not None else None
    given |= _names(name, found, owners)
    context = answers.complete(given)
    folder, files = write_project(context, _here())
    notes = list(context["_from_config"]["open"])
    if json:
        from mrv2.cli.output import print_json

        print_json({"folder": str(folder), "files": sorted(files), "open": notes})
        return
    print(f"{folder.name}: {len(files)} files")
    if notes:
        print("\nWhat config.json says, and the generated code doesn't do yet (also in README.md):")
        print("\n".join(f"- {note}" for note in notes))
    print(f'\nNext:\n  cd {folder.name}\n  pip install -e ".[dev]"\n  pytest\n  mrv2 check {name}')


def _here() -> Path:
    from mrv2.errors import ScaffoldError

    try:
        return Path.cwd()
    except OSError as error:
        raise ScaffoldError(
            f"the current folder can't be used: {error.strerror}", where="mrv2 new-adapter", fix="go to another folder"
        ) from error


def _check_free(name: str) -> dict[str, str]:
    """Refuse a taken name; returns who serves each architecture here."""
    from mrv2.catalog import read_catalogs
    from mrv2.registry import Registry
    from mrv2.scaffold.answers import check_free
    from mrv2.settings import Settings

    entries = Registry.discover().entries
    known = {e.adapter: e.install for e in read_catalogs(Settings.from_env().catalogs)}
    check_free(name, {e.name: e.where for e in entries}, known)
    return {architecture: e.name for e in entries for architecture in e.architectures}


def _names(name: str, found: Found | None, owners: dict[str, str]) -> dict[str, Any]:
    """What the template is told beyond the options."""
    from mrv2.scaffold.answers import known_to_transformers

    model_type = (found.model_type if found is not None else "") or name.replace("-", "_")
    notes = list(found.open) if found is not None else []
    given: dict[str, Any] = {"model_type": model_type}
    if known_to_transformers(model_type):
        # Every host takes transformers' class for it, so ours needs a type of its own, or its tests would test theirs.
        given["model_type"] = f"{name.replace('-', '_')}_adapter"
        notes.append(
            f"transformers has a config class for model type `{model_type}`, and checkpoints with it get that one: "
            f"`model.py` has to read its names. `config.py` is for the tests, as `{given['model_type']}`"
        )
    if found is not None and found.architecture:
        given["architecture"] = found.architecture
        if found.architecture in owners:
            owner = owners[found.architecture]
            notes.append(
                f"the installed adapter `{owner}` serves `{found.architecture}` too: "
                f"choose with MRV2_PREFER={found.architecture}={name}"
            )
    return given | {"_from_config": {"sizes": dict(found.sizes) if found is not None else {}, "open": notes}}
