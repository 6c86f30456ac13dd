"""Which distribution has an adapter for an architecture: data, from the core and from files a team lists.

An install hint comes from here or not at all. A guessed package name could be anybody's package.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mrv2.errors import CatalogError
from mrv2.manifest import Identifier, ModelType, Name


class CatalogEntry(BaseModel):
    """One adapter that exists somewhere.

    Args:
        adapter: its short name.
        install: what to give to `pip install`.
        architectures: what it serves.
        model_types: what it serves, by the config's other name.
        models: well-known models, for people.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    adapter: Name
    install: Annotated[str, Field(min_length=1, pattern=r"^[^-\s].*$")]
    architectures: Annotated[tuple[Identifier, ...], Field(min_length=1)]
    model_types: tuple[ModelType, ...] = ()
    models: str = ""


class _CatalogFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    catalog: tuple[CatalogEntry, ...]


def read_catalogs(extra: Sequence[Path] = ()) -> tuple[CatalogEntry, ...]:
    """The core's catalogue, then those in `extra`.

    Raises:
        CatalogError: a file can't be read, or isn't a catalogue.
    """
    own = resources.files("mrv2").joinpath("catalog.json").read_text(encoding="utf-8")
    entries = list(_parse(own, "mrv2/catalog.json"))
    for path in extra:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CatalogError(
                f"it can't be read: {error}", where=f"MRV2_CATALOG={path}", fix="correct the path"
            ) from error
        entries.extend(_parse(text, f"MRV2_CATALOG={path}"))
    return tuple(entries)


def install_hint(entries: Sequence[CatalogEntry], *, architecture: str = "", model_type: str = "") -> str | None:
    """`pip install …` for what the catalogues know; None: they don't know it."""
    known = [e.install for e in entries if architecture in e.architectures or model_type in e.model_types]
    return " or ".join(f"pip install {name}" for name in dict.fromkeys(known)) or None


def _parse(text: str, where: str) -> tuple[CatalogEntry, ...]:
    try:
        return _CatalogFile.model_validate(json.loads(text)).catalog
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
        raise CatalogError(
            faults, where=where, fix='the form is {"catalog": [{"adapter": …, "install": …}]}'
        ) from error
    except (ValueError, RecursionError) as error:  # integers of thousands of digits and deep nesting, too
        raise CatalogError(f"not valid JSON: {error}", where=where, fix="correct the named line") from error
